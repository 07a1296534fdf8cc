"""conv_skip: a causal convolution that ends in the residual, ``residual + (x ∗ W + b)``, as one implicit GEMM.

x is [B, T, H, W, C], W [N, kt, kh, kw, C], b [N], residual and result [B, T, H', W', N]. All are packed and have one
dtype (fp32, fp16, bf16). The kt − 1 frames before x are zeros or the end of the previous chunk. x begins with them, or
they are a separate tensor, front, so that nothing has to be copied in front of x. Height and width are padded with
zeros. The sums are in fp32 and rounded once. No gradient: under autograd the reference runs.

    upsample     every pixel of x stands for 2×2 pixels: H' = 2H, W' = 2W. Output pixels have four phases: even and odd
                 rows and columns. All pixels of a phase read x at the same offsets, so a tile has pixels of one phase.
                 In bf16 the doubling is folded into the weight (conv_fold.py).
    interleave   with 2, W has the rows for two frames, one after the other. Result frame 2t + i comes from rows i.
    residual     of an upsampled result it may have half the frames, rows or columns. Each of these is then read twice.

The portable kernel is in conv_portable.py. For sm_90 conv_sm90.py has a kernel that takes most sizes, and
conv_rows_sm90.py one for 96 channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from .. import reference
from ..choice.measured import why_torch
from ..choice.registry import GLUON, PORTABLE, REFERENCE, Kernel, Op, Spec, spec_of, why_not_ours, why_not_reference
from ..dispatch import is_sm90, kernels_op
from . import conv_portable, conv_rows_sm90, conv_sm90
from .conv_fold import fold_input, fold_weight, folds
from .conv_pytorch import convolve
from .conv_rows_sm90 import ROWS_ONCE
from .conv_tiles import residual_repeats
from .conv_weight import pack_weight

CONVOLUTION = "PyTorch convolution"


@dataclass(frozen=True, kw_only=True)
class ConvSpec(Spec):
    """The shapes of x [B, T, H, W, C], without the frames before it, and of the weight; the options of `conv_skip`.

    in_model: True if PyTorch's convolution may run instead.
    """

    shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    upsample: bool = False
    interleave: int = 1
    in_model: bool = False


def conv_skip(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    *,
    front: torch.Tensor | None = None,
    upsample: bool = False,
    interleave: int = 1,
    implementation: str = "auto",
) -> torch.Tensor:
    """Return ``residual + (x ∗ W + b)``, [B, T · interleave, H', W', N] in x's dtype.

    x: [B, T, H, W, C] with a front, [B, T + kt − 1, H, W, C] without.
    weight: [N · interleave, kt, kh, kw, C] with kt 1 or 3 and kh = kw 1 or 3, as
        ``Conv3d.weight.permute(0, 2, 3, 4, 1)``. bias: [N · interleave] or None.
    residual: shaped like the result, or None. With upsample and interleave 1 it may also have half the rows, columns or
        (rounded up) frames; each then counts twice. If the result has an odd number of frames, the residual's first
        frame counts once.
    front: the frames before x, [B, kt − 1, H, W, C]. None: x begins with them.
    upsample: True to double x in height and width first by repeating pixels (H' = 2H, W' = 2W; else H, W). Needs kt 1
        and kh 3.
    interleave: 1, or 2 if the weight has the rows of two result frames per frame of x.
    implementation: "auto", "triton" or "torch" (see dispatch.py).

    Tensors that are not packed are copied. Differentiable, through the reference. Raises ValueError for other kernel
    sizes, and for shapes, dtypes or devices that do not fit together.
    """
    tensors = (x, weight, bias, residual, front)
    _check(*tensors, upsample, interleave)
    B, T, H, W, C = x.shape
    shape = result_shape(x, weight, front, upsample, interleave)
    if 0 in shape:
        return x.new_empty(shape)  # PyTorch's convolution refuses it
    spec = spec_of(
        implementation,
        *tensors,
        kind=ConvSpec,
        shape=(B, T if front is not None else T - weight.shape[1] + 1, H, W, C),
        weight_shape=tuple(weight.shape),
        upsample=upsample,
        interleave=interleave,
    )
    return CONV_SKIP.pick(spec).launch(*tensors, upsample, interleave)


def result_shape(
    x: torch.Tensor, weight: torch.Tensor, front: torch.Tensor | None, upsample: bool, interleave: int
) -> tuple[int, ...]:
    """Return the shape of `conv_skip`'s result."""
    B, frames, H, W, _ = x.shape
    T = frames if front is not None else frames - weight.shape[1] + 1
    scale = 2 if upsample else 1
    return B, T * interleave, H * scale, W * scale, weight.shape[0] // interleave


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    front: torch.Tensor | None,
    upsample: bool,
    interleave: int,
) -> None:
    if x.dim() != 5 or weight.dim() != 5 or x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"conv_skip: x has shape {list(x.shape)} and weight {list(weight.shape)}; they must be "
            "[B, frames, H, W, C] and [N, kt, kh, kw, C]: a convolution's weight.permute(0, 2, 3, 4, 1)."
        )
    if weight.numel() == 0:
        raise ValueError(f"conv_skip: weight {list(weight.shape)} has no elements.")
    kt, kh, kw = window = weight.shape[1:4]
    if kt not in (1, 3) or kh not in (1, 3) or kh != kw:
        raise ValueError(f"conv_skip: the window is {list(window)}; accepted are kt 1 or 3 and kh = kw 1 or 3.")
    if upsample and (kt, kh) != (1, 3):
        raise ValueError(f"conv_skip: upsample=True with the window {list(window)}; it goes with [1, 3, 3] only.")
    if interleave not in (1, 2) or weight.shape[0] % interleave:
        raise ValueError(
            f"conv_skip: interleave={interleave} with {weight.shape[0]} rows of weight; accepted are 1, and 2 with an "
            "even number of rows."
        )
    before = (x.shape[0], kt - 1, *x.shape[2:])
    if front is not None and front.shape != before:
        raise ValueError(f"conv_skip: front has shape {list(front.shape)}; it must be {list(before)}.")
    if front is None and x.shape[1] < kt - 1:
        raise ValueError(f"conv_skip: x has {x.shape[1]} frames; a window of {kt} needs {kt - 1} before the first.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"conv_skip: bias has shape {list(bias.shape)}; it must be [{weight.shape[0]}].")
    expected = result_shape(x, weight, front, upsample, interleave)
    repeats = (1, 1, 1) if residual is None else residual_repeats(residual.shape, expected)
    if repeats is None or (repeats != (1, 1, 1) and (not upsample or interleave > 1)):
        raise ValueError(f"conv_skip: residual has shape {list(residual.shape)} but the result has {list(expected)}.")
    dtypes = sorted({str(tensor.dtype) for tensor in (x, weight, bias, residual, front) if tensor is not None})
    if len(dtypes) > 1:
        raise ValueError(f"conv_skip: the tensors have the dtypes {', '.join(dtypes)}; cast them to one.")


@kernels_op("conv_skip")
def _conv_skip(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    front: torch.Tensor | None,
    upsample: bool,
    interleave: int,
) -> torch.Tensor:
    return x.new_empty(result_shape(x, weight, front, upsample, interleave))


def _launch_gluon(launch: Callable, x, weight, bias, residual, front, upsample, interleave):
    """Launch a kernel for sm_90, or the portable one if operands are not aligned.

    launch: the launcher of the kernel for sm_90. The rest are `_conv_skip`'s arguments.
    """
    out, x, front, weight, bias, residual = _packed(x, weight, bias, residual, front, upsample, interleave)
    if conv_sm90.fits_tma(x, front, weight, residual):
        launch(x, front, weight, bias, residual, out, upsample, interleave)
    else:
        conv_portable.launch(x, front, weight, bias, residual, out, upsample, interleave)
    return out


def _launch_portable(x, weight, bias, residual, front, upsample, interleave):
    out = x.new_empty(result_shape(x, weight, front, upsample, interleave))
    if out.numel() > 0:
        out, *operands = _packed(x, weight, bias, residual, front, upsample, interleave)
        conv_portable.launch(*operands, out, upsample, interleave)
    return out


def _packed(x, weight, bias, residual, front, upsample, interleave):
    """Return an uninitialised out, and x, front, weight, bias and residual as the kernels take them, packed."""
    out = x.new_empty(result_shape(x, weight, front, upsample, interleave))
    front = None if front is None or weight.shape[1] == 1 else front.contiguous()  # it may have no frames
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    if folds(x.dtype, upsample):
        return out, fold_input(x), front, fold_weight(weight), bias, residual
    return out, x.contiguous(), front, pack_weight(weight), bias, residual


def why_not_fused(spec: ConvSpec) -> str | None:
    """Return the reason why no kernel of ours runs for a spec, or None if one can. On sm_90 the measurements are of the
    kernel for sm_90, so that one must be able to run."""
    reason = why_not_ours(spec)
    if reason is None and spec.in_model and spec.implementation == "auto" and spec.device.type == "cuda":
        reason = why_torch("conv_skip", spec.device, spec.dtype)
        if reason is None and is_sm90(spec.device):
            return conv_sm90.why_not_on(spec.device, spec.dtype)
    return reason


def _why_not_gluon(spec: ConvSpec) -> str | None:
    sizes = (spec.shape, spec.weight_shape, spec.upsample, spec.interleave)
    return why_not_fused(spec) or conv_sm90.why_not(spec.device, spec.dtype, *sizes)


def _why_not_rows(spec: ConvSpec) -> str | None:
    sizes = (spec.shape, spec.weight_shape, spec.upsample, spec.interleave)
    return _why_not_gluon(spec) or conv_rows_sm90.why_not(spec.device, *sizes)


def _why_not_pytorch(spec: ConvSpec) -> str | None:
    return why_not_reference(spec) if spec.in_model else "not for an op that is called by itself"


CONV_SKIP = Op(
    "conv_skip",
    (
        Kernel(ROWS_ONCE, _why_not_rows, _conv_skip.launch(ROWS_ONCE, partial(_launch_gluon, conv_rows_sm90.launch))),
        Kernel(GLUON, _why_not_gluon, _conv_skip.launch(GLUON, partial(_launch_gluon, conv_sm90.launch))),
        Kernel(PORTABLE, why_not_fused, _conv_skip.launch(PORTABLE, _launch_portable)),
        Kernel(CONVOLUTION, _why_not_pytorch, convolve, is_fused=False),
        Kernel(REFERENCE, why_not_reference, reference.conv_skip, is_fused=False),
    ),
)
