"""conv_skip in 8 bits: ``residual + (x ∗ W + b)`` for x and W in int8, with sums in int32.

    x ≈ (q − zero) · step · divisor       q [B, T, H + 2, W + 2, C], from rows/rms_norm_silu_8bit.py
    W · divisor ≈ values · scale          one scale for each channel of the result
    x ∗ W ≈ step · scale · (q ∗ values) − step · scale · zero · total

The total is the sum of a channel's values, so that the last term is one number for each channel. What a channel's sums
are multiplied by and what is added, b included, come from rows/rms_norm_silu_8bit.py. x is stored with a pixel of zero
around each image, so that this holds at the edges too. residual and the result have the model's dtype. The kernels are
those of conv_skip.

e4m3 errs more than twice as much, is summed with 14 bits on sm_90, and needs sm_89 (docs/designs.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..choice.registry import GLUON, PORTABLE, REFERENCE, Kernel, Op, why_not_ours, why_not_reference
from ..dispatch import kernels_op
from ..quantized import INT8, quantize_reference
from . import conv_portable, conv_sm90
from .conv_skip import ConvSpec

ALIGNED = 16  # channels that TMA and vectors of 16 bytes need
VALUES = 1 << 22  # of a weight that are quantised at a time, in about 60 MiB.


class Weight8bit(NamedTuple):
    """A convolution's weight in 8 bits.

    values: [N, kt, kh, kw, C] int8. scale: [N] fp32. total: [N] int32, the sum of each row's values.
    """

    values: torch.Tensor
    scale: torch.Tensor
    total: torch.Tensor


def channel_divisor(weight: torch.Tensor) -> torch.Tensor:
    """Return the divisor [C], fp32, of the channels that a norm with this weight [C] gives: √|weight|.

    So channels with a large gain take less of the range that all share, and their part of the weight takes more.
    """
    gain = weight.float().abs()
    return gain.clamp_min(gain.amax() / 256).clamp_min(1e-12).sqrt()


def quantize_conv_weight(weight: torch.Tensor, divisor: torch.Tensor) -> Weight8bit:
    """Quantise a weight [N, kt, kh, kw, C] with any strides, multiplied by a divisor [C]."""
    values = weight.new_empty(weight.shape, dtype=INT8)
    scales, totals, rows_at_once = [], [], max(1, VALUES // weight[0].numel())
    for rows, out in zip(weight.split(rows_at_once), values.split(rows_at_once), strict=True):
        quantized = quantize_reference((rows.float() * divisor).flatten(1), INT8)
        out.copy_(quantized.values.view(out.shape))
        scales.append(quantized.scale)
        totals.append(quantized.values.sum(1, dtype=torch.int32))
    return Weight8bit(values, torch.cat(scales), torch.cat(totals))


def convolve_reference(
    x: torch.Tensor, combined: torch.Tensor, values: torch.Tensor, dtype: torch.dtype,
    residual: torch.Tensor | None, front: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """``residual + factor · (x ∗ values) + offset`` in plain torch, with exact sums."""
    x = x if front is None else torch.cat((front, x), 1)
    sums = F.conv3d(*(part.permute(0, 4, 1, 2, 3).double() for part in (x, values))).permute(0, 2, 3, 4, 1)
    factor, offset = combined.double()
    y = factor * sums + offset
    return (y if residual is None else residual.double() + y).to(dtype)


@kernels_op("conv_8bit")
def _conv_8bit(
    x: torch.Tensor,
    combined: torch.Tensor,
    values: torch.Tensor,
    dtype: torch.dtype,
    residual: torch.Tensor | None,
    front: torch.Tensor | None,
) -> torch.Tensor:
    B, T, H, W, _ = x.shape
    T = T if front is not None else T - values.shape[1] + 1
    return x.new_empty(B, T, H - 2, W - 2, len(values), dtype=dtype)


def _launch_gluon(x, combined, values, dtype, residual, front):
    """Launch the kernel for sm_90, or the portable one if operands are not aligned. Takes `_conv_8bit`'s arguments."""
    return _launch(conv_sm90.launch, x, combined, values, dtype, residual, front)


def _launch_portable(x, combined, values, dtype, residual, front):
    return _launch(conv_portable.launch, x, combined, values, dtype, residual, front)


def _launch(launch, x, combined, values, dtype, residual, front):
    B, T, H, W, _ = x.shape
    N, kt, *_ = values.shape
    out = x.new_empty((B, T if front is not None else T - kt + 1, H - 2, W - 2, N), dtype=dtype)
    x, values = x.contiguous(), values.contiguous()
    front, residual = (None if tensor is None else tensor.contiguous() for tensor in (front, residual))
    if launch is conv_sm90.launch and not conv_sm90.fits_tma(x, front, values, residual):
        launch = conv_portable.launch
    factor, offset = combined.unbind()
    launch(x, front, values, offset, residual, out, False, 1, factor)
    return out


def _why_not(spec: ConvSpec) -> str | None:
    reason = why_not_ours(spec)
    if reason is None and spec.shape[-1] % ALIGNED:
        return f"channels that are no multiple of {ALIGNED}"
    return reason


def _why_not_gluon(spec: ConvSpec) -> str | None:
    return _why_not(spec) or conv_sm90.why_not(spec.device, spec.dtype, spec.shape, spec.weight_shape)


# The spec's dtype is the result's, and its shape x's without the frames before it and without the pixels around images.
# Arguments: x, the factor and the addend of each channel [2, N] fp32, the weight's values, the result's dtype, residual
# or None, front or None, as of conv_skip.
CONV_8BIT = Op(
    "conv_8bit",
    (
        Kernel(GLUON, _why_not_gluon, _conv_8bit.launch(GLUON, _launch_gluon)),
        Kernel(PORTABLE, _why_not, _conv_8bit.launch(PORTABLE, _launch_portable)),
        Kernel(REFERENCE, why_not_reference, convolve_reference, is_fused=False),
    ),
)
