"""conv_skip: a causal convolution that ends in the residual, ``residual + (x ∗ W + b)``, as one implicit GEMM.

x [B, T, H, W, C], W [N, kt, kh, kw, C], b [N], residual and result [B, T, H', W', N]; all are packed and have one dtype
(fp32, fp16, bf16). The kt − 1 frames before x are zeros or the end of the previous chunk. They may be a separate
tensor, front, so that nothing has to be copied in front of x; or x begins with them. Height and width are padded with
zeros. The sums are in fp32 and rounded once. No gradient: under autograd the reference runs.

    upsample     every pixel of x stands for 2×2 pixels: H' = 2H, W' = 2W. Output pixels have four phases: even and odd
                 rows and columns. All pixels of a phase read x at the same offsets, so a tile has pixels of one phase.
    interleave   with 2, W has the rows for two frames, one after the other. Result frame 2t + i comes from rows i.
    residual     beside an upsampled result it may have half the frames, rows or columns; each is then read twice.

A tile of the result is a box of pixels of one frame, or of a few frames if one has too few channels to fill the tile's
columns (`_launch_together`). For each position in W's window the same box of x, shifted, is multiplied. On sm_90 and
newer, TMA reads the boxes and gives zeros outside the image. On older GPUs, and if a pixel's channels are not a
multiple of 16 bytes, pointers and masks do the same. For sm_90 itself conv_sm90.py has a kernel that takes most sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import reference
from ..choice.measured import why_torch
from ..choice.registry import GLUON, PORTABLE, REFERENCE, Kernel, Op, Spec, spec_of, why_not_ours, why_not_reference
from ..dispatch import device_properties, is_sm90, kernels_op
from ..launch import launch_kernel, register_options
from ..linear.gemm_portable import epilogue_in_parts, locate_tile
from ..sizes import cdiv
from ..tma import TMA_CAPABILITY
from . import conv_sm90
from .conv_pytorch import convolve
from .conv_tiles import ConvTiles, choose_conv_tiles, find_shift, locate_box, repeated_image
from .conv_weight import pack_weight

NARROW, TOGETHER = 16, 4  # with up to 16 channels, 4 frames of a result share a tile of up to 64 columns

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


def residual_repeats(shape: tuple[int, ...], result: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Return how often (1 or 2) each frame, row and column of a residual counts in a result, or None if the shapes do
    not fit."""
    if len(shape) != 5 or (shape[0], shape[4]) != (result[0], result[4]):
        return None
    sizes = list(zip(shape[1:4], result[1:4], strict=True))
    fits = all(small == large or small == cdiv(large, 2) for small, large in sizes)
    return tuple(1 if small == large else 2 for small, large in sizes) if fits else None


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


def _launch_gluon(x, weight, bias, residual, front, upsample, interleave):
    """Launch the kernel for sm_90, or the portable one if operands are not aligned. Takes `_conv_skip`'s arguments."""
    out, x, front, weight, bias, residual = _packed(x, weight, bias, residual, front, upsample, interleave)
    if conv_sm90.fits_tma(x, front, weight, residual):
        conv_sm90.launch(x, front, weight, bias, residual, out, upsample, interleave)
    else:
        _write(x, front, weight, bias, residual, out, upsample, interleave)
    return out


def _launch_portable(x, weight, bias, residual, front, upsample, interleave):
    out = x.new_empty(result_shape(x, weight, front, upsample, interleave))
    if out.numel() > 0:
        out, *operands = _packed(x, weight, bias, residual, front, upsample, interleave)
        _write(*operands, out, upsample, interleave)
    return out


def _packed(x, weight, bias, residual, front, upsample, interleave):
    """Return an uninitialised out, and x, front, weight, bias and residual, packed."""
    out = x.new_empty(result_shape(x, weight, front, upsample, interleave))
    if weight.shape[1] == 1:
        front = None  # it has no frames
    front, bias, residual = (None if tensor is None else tensor.contiguous() for tensor in (front, bias, residual))
    return out, x.contiguous(), front, pack_weight(weight), bias, residual


def _write(x, front, weight, bias, residual, out, upsample, interleave) -> None:
    """Write the result to out with the portable kernel. All tensors are packed."""
    if interleave == 1 and not upsample and has_frames_together(weight.shape, out.shape[1]):
        _launch_together(x, front, weight, bias, residual, out)
    else:
        _launch(x, front, weight, bias, residual, out, upsample, interleave)


def _why_not_fused(spec: ConvSpec) -> str | None:
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
    return _why_not_fused(spec) or conv_sm90.why_not(spec.device, spec.dtype, *sizes)


def _why_not_pytorch(spec: ConvSpec) -> str | None:
    return why_not_reference(spec) if spec.in_model else "not for an op that is called by itself"


CONV_SKIP = Op(
    "conv_skip",
    (
        Kernel(GLUON, _why_not_gluon, _conv_skip.launch(GLUON, _launch_gluon)),
        Kernel(PORTABLE, _why_not_fused, _conv_skip.launch(PORTABLE, _launch_portable)),
        Kernel(CONVOLUTION, _why_not_pytorch, convolve, is_fused=False),
        Kernel(REFERENCE, why_not_reference, reference.conv_skip, is_fused=False),
    ),
)


def has_frames_together(weight_shape: tuple[int, ...], frames: int) -> bool:
    """True if a tile holds TOGETHER frames of the result, because it has few channels and enough frames."""
    N, kt = weight_shape[:2]
    return kt > 1 and N <= NARROW and frames >= TOGETHER


def _launch_together(
    x: torch.Tensor, front: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor | None, out: torch.Tensor,
) -> None:  # fmt: skip
    """Write the result to out with TOGETHER of its frames in a tile, side by side as columns. All tensors are packed.

    The windows of four consecutive frames span six frames. So half as many boxes of x are read per frame as for frames
    alone. Frames outside a window are multiplied by zero.
    """
    kt, T = weight.shape[1], out.shape[1]
    whole = T - T % TOGETHER
    parts = [(0, whole, TOGETHER)] + ([(whole, T, 1)] if whole < T else [])
    # With several samples, a part of the frames is not packed.
    samples = [slice(None)] if whole == T else [slice(sample, sample + 1) for sample in range(len(x))]
    wide = _repeat_in_time(weight, TOGETHER), None if bias is None else bias.repeat(TOGETHER)
    in_front = 0 if front is None else kt - 1
    for sample, (first, last, count) in product(samples, parts):
        rows = (weight, bias) if count == 1 else wide
        old = None if residual is None else residual[sample, first:last]
        before = front[sample] if in_front and first == 0 else None
        window = x[sample, max(first - in_front, 0) : last + kt - 1 - in_front]
        _launch(window, before, *rows, old, out[sample, first:last], False, count, stride=count)


def _repeat_in_time(weight: torch.Tensor, frames: int) -> torch.Tensor:
    """Return the weight repeated for several frames, each with its window shifted in time:
    [frames · N, kt + frames - 1, ...]."""
    N, kt, *window = weight.shape
    wide = weight.new_zeros(frames, N, kt + frames - 1, *window)
    for frame in range(frames):
        wide[frame, :, frame : frame + kt] = weight
    return wide.flatten(0, 1)


def _launch(
    x: torch.Tensor, front: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor | None, out: torch.Tensor, upsample: bool, interleave: int, stride: int = 1,
) -> None:  # fmt: skip
    """Write the result to out with the portable kernel. All tensors are packed. stride: the frames of x between
    windows."""
    B, _, H, W, C = x.shape
    N, kt, kh, kw, _ = weight.shape
    if kh == 1:
        H, W = 1, H * W  # no pixel reads another
    capability, _ = device_properties(x.device)
    present = [tensor for tensor in (x, front, weight) if tensor is not None]
    descriptors = capability >= TMA_CAPABILITY and all(map(_fits_tma, present))
    tiles = choose_conv_tiles(capability, x.dtype, descriptors, H, W, C, N)
    T, phases = out.shape[1] // interleave, 4 if upsample else 1
    repeats = (1, 1, 1) if residual is None else residual_repeats(residual.shape, out.shape)
    boxes = B * T * phases * cdiv(H, tiles.box_height) * cdiv(W, tiles.box_width)
    images = [None if frames is None else frames.view(-1, H, W, C) for frames in (x, front)]
    weights = weight.view(N, kt * kh * kw, C).transpose(0, 1)
    operands = (*images, weights, None)
    if descriptors:
        box = [1, tiles.box_height, tiles.box_width, tiles.depth]
        operands = (
            *(None if frames is None else TensorDescriptor.from_tensor(frames, box) for frames in images),
            TensorDescriptor.from_tensor(weights, [1, tiles.columns, tiles.depth]),
            TensorDescriptor.from_tensor(weights, [1, tiles.tail, tiles.depth]) if tiles.tail else None,
        )
    launch_kernel(
        _conv_skip_kernel,
        (boxes * cdiv(N, tiles.columns + tiles.tail),),
        *operands,
        *(bias, residual, out),
        *(boxes, T, H, W, N),
        C=C,
        KT=kt,
        KH=kh,
        STRIDE=stride,
        FRONT=0 if front is None else front.shape[1],
        UPSAMPLE=upsample,
        INTERLEAVE=interleave,
        REPEATS=repeats,
        DESCRIPTORS=descriptors,
        **_tile_options(tiles),
        **register_options(capability, (10, 12)),
    )


def _fits_tma(tensor: torch.Tensor) -> bool:
    """True if TMA should read a packed tensor [..., C]. fp32 is excluded: it has no tensor-core product."""
    aligned = tensor.shape[-1] * tensor.element_size() % 16 == 0 and tensor.data_ptr() % 16 == 0
    return aligned and tensor.element_size() == 2


def _tile_options(tiles: ConvTiles) -> dict[str, object]:
    return {
        "BOX_H": tiles.box_height,
        "BOX_W": tiles.box_width,
        "COLUMNS": tiles.columns,
        "TAIL": tiles.tail,
        "DEPTH": tiles.depth,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


@triton.jit(do_not_specialize=("boxes", "T", "H", "W"))
def _conv_skip_kernel(
    x, front, weight, weight_tail, bias, residual, out, boxes, T, H, W, N,
    C: tl.constexpr, KT: tl.constexpr, KH: tl.constexpr, STRIDE: tl.constexpr, FRONT: tl.constexpr,
    UPSAMPLE: tl.constexpr, INTERLEAVE: tl.constexpr, REPEATS: tl.constexpr, DESCRIPTORS: tl.constexpr,
    BOX_H: tl.constexpr, BOX_W: tl.constexpr, COLUMNS: tl.constexpr, TAIL: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One program computes one tile.

    x: [B · (STRIDE · (T − 1) + KT − FRONT), H, W, C]. front: [B · FRONT, H, W, C]. weight: [KT · KH · KH, N, C], a view
    of a packed [N, KT · KH · KH, C]. weight_tail: its descriptor for the tail columns of a tile, past a power of two.
    boxes: their number over all frames and phases. N: the rows of the weight, for all interleaved frames. REPEATS: how
    often the residual's frames, rows and columns count.
    """
    ROWS: tl.constexpr = BOX_H * BOX_W
    TAPS: tl.constexpr = KT * KH * KH
    CHUNKS: tl.constexpr = (C + DEPTH - 1) // DEPTH
    BYTES: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    column_tiles = tl.cdiv(N, COLUMNS + TAIL)
    tile = tl.program_id(0)
    _, box, column_tile = locate_tile(tile, boxes, column_tiles, ROWS * C * BYTES, (COLUMNS + TAIL) * TAPS * C * BYTES)
    sample, frame, top, left, phase_y, phase_x = locate_box(box, T, H, W, UPSAMPLE, BOX_H, BOX_W)
    column = column_tile * (COLUMNS + TAIL)
    begin = STRIDE * frame - FRONT  # of the window, counted in the sample's frames of x
    place = (top, left, phase_y, phase_x, column)
    weights = (weight, weight_tail if DESCRIPTORS else weight)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    acc_tail = acc  # not used without a tail
    if TAIL:
        acc_tail = tl.zeros((ROWS, TAIL), tl.float32)
    # Steps over front and over x are separate loops: in one loop, choosing between them would stop loads from running
    # ahead.
    steps_in_front = 0
    if FRONT:
        steps_in_front = tl.maximum(-begin, 0) * (KH * KH * CHUNKS)
        acc, acc_tail = _add_steps(
            acc, acc_tail, 0, steps_in_front, front, sample * FRONT + STRIDE * frame, weights, place, H, W, N,
            C, KH, TAPS, CHUNKS, UPSAMPLE, DESCRIPTORS, BOX_H, BOX_W, COLUMNS, TAIL, DEPTH,
        )  # fmt: skip
    acc, acc_tail = _add_steps(
        acc, acc_tail, steps_in_front, TAPS * CHUNKS, x, sample * (STRIDE * (T - 1) + KT - FRONT) + begin, weights,
        place, H, W, N, C, KH, TAPS, CHUNKS, UPSAMPLE, DESCRIPTORS, BOX_H, BOX_W, COLUMNS, TAIL, DEPTH,
    )  # fmt: skip
    SCALE: tl.constexpr = 2 if UPSAMPLE else 1
    pixels_of_frame = SCALE * H * SCALE * W
    pixels, inside = _locate_pixels(top, left, phase_y, phase_x, H, W, SCALE, SCALE, BOX_H, BOX_W)
    pixels += (sample * T + frame).to(tl.int64) * INTERLEAVE * pixels_of_frame
    of_residual = pixels
    if REPEATS[0] * REPEATS[1] * REPEATS[2] > 1:
        SCALE_Y: tl.constexpr = SCALE // REPEATS[1]
        SCALE_X: tl.constexpr = SCALE // REPEATS[2]
        of_residual, _ = _locate_pixels(top, left, phase_y, phase_x, H, W, SCALE_Y, SCALE_X, BOX_H, BOX_W)
        image = repeated_image(sample, frame, T, REPEATS[0])
        of_residual += image.to(tl.int64) * (SCALE_Y * H * SCALE_X * W)
    arguments = (bias, residual, out, of_residual, pixels, inside, pixels_of_frame, N // INTERLEAVE)
    unscaled = (None, None)
    epilogue_in_parts(acc, unscaled, 0, 0, column, ROWS, N, _store, arguments, None, ROWS, COLUMNS)
    if TAIL:
        epilogue_in_parts(acc_tail, unscaled, 0, 0, column + COLUMNS, ROWS, N, _store, arguments, None, ROWS, TAIL)


@triton.jit
def _add_steps(
    acc, acc_tail, first, last, x, image, weights, place, H, W, N,
    C: tl.constexpr, KH: tl.constexpr, TAPS: tl.constexpr, CHUNKS: tl.constexpr, UPSAMPLE: tl.constexpr,
    DESCRIPTORS: tl.constexpr, BOX_H: tl.constexpr, BOX_W: tl.constexpr, COLUMNS: tl.constexpr, TAIL: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Return a tile's sums with the products of the steps from first to last added.

    x: the source of these steps, front or x itself. image: the index in it of the window's first frame, which may lie
    before its beginning. weights: those for the columns and for the tail.
    """
    top, left, phase_y, phase_x, column = place
    for step in range(first, last):
        tap = step // CHUNKS
        c = step % CHUNKS * DEPTH
        shift_y = find_shift(tap // KH % KH, phase_y, KH, UPSAMPLE)
        shift_x = find_shift(tap % KH, phase_x, KH, UPSAMPLE)
        source = (image + tap // (KH * KH), top + shift_y, left + shift_x)
        a_tile = _load_box(x, source, c, H, W, C, DESCRIPTORS, BOX_H, BOX_W, DEPTH)
        w_tile = _load_weight(weights[0], tap, column, c, N, C, TAPS, DESCRIPTORS, COLUMNS, DEPTH)
        acc = tl.dot(a_tile, w_tile.T, acc, input_precision="ieee")
        if TAIL:
            w_tail = _load_weight(weights[1], tap, column + COLUMNS, c, N, C, TAPS, DESCRIPTORS, TAIL, DEPTH)
            acc_tail = tl.dot(a_tile, w_tail.T, acc_tail, input_precision="ieee")
    return acc, acc_tail


@triton.jit
def _load_box(
    x, source, c, H, W, C: tl.constexpr, DESCRIPTORS: tl.constexpr,
    BOX_H: tl.constexpr, BOX_W: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Load channels c..c+DEPTH of a box of an image, [BOX_H · BOX_W, DEPTH], with zeros outside the image."""
    image, top, left = source
    if DESCRIPTORS:
        return x.load([image, top, left, c]).reshape(BOX_H * BOX_W, DEPTH)
    else:
        pixels = tl.arange(0, BOX_H * BOX_W)
        y = top + pixels // BOX_W
        column = left + pixels % BOX_W
        channels = c + tl.arange(0, DEPTH)
        inside = (y >= 0) & (y < H) & (column >= 0) & (column < W)
        offsets = ((image.to(tl.int64) * H + y) * W + column) * C
        mask = inside[:, None] & (channels < C)[None, :]
        return tl.load(x + offsets[:, None] + channels[None, :], mask=mask, other=0.0)


@triton.jit
def _load_weight(
    weight, tap, column, c, N, C: tl.constexpr, TAPS: tl.constexpr, DESCRIPTORS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Load channels c..c+DEPTH of the weight's rows at a position in its window, [COLUMNS, DEPTH], with zeros past the
    last."""
    if DESCRIPTORS:
        return weight.load([tap, column, c]).reshape(COLUMNS, DEPTH)
    else:
        rows = column + tl.arange(0, COLUMNS)
        channels = c + tl.arange(0, DEPTH)
        offsets = rows.to(tl.int64) * (TAPS * C) + tap * C
        mask = (rows < N)[:, None] & (channels < C)[None, :]
        return tl.load(weight + offsets[:, None] + channels[None, :], mask=mask, other=0.0)


@triton.jit
def _locate_pixels(
    top, left, phase_y, phase_x, H, W, SCALE_Y: tl.constexpr, SCALE_X: tl.constexpr, BOX_H: tl.constexpr,
    BOX_W: tl.constexpr,
):  # fmt: skip
    """Return the indices of a box's pixels in a frame SCALE_Y times as high and SCALE_X times as wide as x, and a mask
    of the pixels that exist."""
    pixels = tl.arange(0, BOX_H * BOX_W)
    y = top + pixels // BOX_W
    column = left + pixels % BOX_W
    inside = (y < H) & (column < W)
    if SCALE_Y > 1:
        y = SCALE_Y * y + phase_y
    if SCALE_X > 1:
        column = SCALE_X * column + phase_x
    return (y * (SCALE_X * W) + column).to(tl.int64), inside


@triton.jit
def _store(acc, sample, rows, columns, M, N, arguments, KINDS: tl.constexpr):
    """Add bias and residual, and store. N: the rows of the weight, `channels` for each interleaved frame."""
    bias, residual, out, of_residual, pixels, inside, pixels_of_frame, channels = arguments
    column_mask = columns < N
    mask = inside[:, None] & column_mask[None, :]
    places = (columns // channels).to(tl.int64) * pixels_of_frame * channels + columns % channels
    if bias is not None:
        acc += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        offsets = (of_residual * channels)[:, None] + places[None, :]
        acc += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    offsets = (pixels * channels)[:, None] + places[None, :]
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=mask)
