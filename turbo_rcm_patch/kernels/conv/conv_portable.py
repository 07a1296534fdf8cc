"""The portable kernel of conv_skip for sm_80 to sm_120: an implicit GEMM, ``residual + (x ∗ W + b)``.

A tile of the result is a box of pixels of one frame. For each position in W's window the same box of x, shifted, is
multiplied. If the result has few channels, the positions are columns of one product instead (`_launch_narrow`). On
sm_90 and newer, TMA reads the boxes and gives zeros outside the image. On older GPUs, and if a pixel's channels are not
a multiple of 16 bytes, pointers and masks do the same. Operands of 8 bits (conv_8bit.py) are summed in int32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..dispatch import device_properties
from ..launch import launch_kernel, register_options
from ..linear.gemm_portable import epilogue_in_parts, locate_tile
from ..sizes import cdiv, next_power_of_2
from ..tma import TMA_CAPABILITY, descriptor_of
from .conv_tiles import ConvTiles, choose_conv_tiles, find_shift, locate_box, repeated_image, residual_repeats

ALIGNED = 16  # columns of a window's products are a multiple of this
VALUES = 1024  # of the result, per program that adds the products of a window: more would spill registers
FP32_BYTES = 4


def launch(
    x: torch.Tensor, front: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor | None, out: torch.Tensor, upsample: bool, interleave: int,
    factor: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write ``residual + (factor · (x ∗ W) + b)`` to out. All tensors are packed.

    factor: [N] fp32 for x, front and weight in int8, or None. With a factor, images of x and front have one more pixel
    on each side.
    """
    if interleave == 1 and not upsample and factor is None and _is_narrow(weight):
        _launch_narrow(x, front, weight, bias, residual, out)
    else:
        _launch_boxes(x, front, weight, bias, residual, out, upsample, interleave, factor=factor)


def _is_narrow(weight: torch.Tensor) -> bool:
    """True if all positions of a window in the image may be columns of one product.

    The fp32 products of a pixel then take no more memory than the pixel itself.
    """
    N, _, kh, kw, C = weight.shape
    return kh > 1 and _columns(N, kh, kw) * FP32_BYTES <= C * weight.itemsize


def _columns(N: int, kh: int, kw: int) -> int:
    return cdiv(N * kh * kw, ALIGNED) * ALIGNED


def _launch_narrow(
    x: torch.Tensor, front: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor | None, out: torch.Tensor,
) -> None:  # fmt: skip
    """Write the result to out in two steps.

    The first multiplies each pixel by all positions of the window in the image at once. So x is read once for each of
    the window's frames, not for each position. The second adds the products that belong to a pixel of the result.
    """
    N, kt, kh, kw, C = weight.shape
    # Rows of zeros at the end, so that threads store several values at a time.
    columns = weight.new_zeros(_columns(N, kh, kw), kt, 1, 1, C)
    columns[: kh * kw * N].view(kh, kw, N, kt, C).copy_(weight.permute(2, 3, 0, 1, 4))
    products = x.new_empty(*out.shape[:4], columns.shape[0], dtype=torch.float32)
    _launch_boxes(x, front, columns, None, None, products, False, 1)
    pixels = out.numel() // N
    arguments = products, bias, residual, out, pixels, *out.shape[2:4], N, columns.shape[0]
    width = next_power_of_2(N)
    part = VALUES // width
    launch_kernel(_add_window_kernel, (cdiv(pixels, part),), *arguments, KH=kh, COLUMNS=width, PIXELS=part, num_warps=4)


def _launch_boxes(
    x: torch.Tensor, front: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor | None, out: torch.Tensor, upsample: bool, interleave: int,
    factor: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Do what `launch` does, with a tile's box in one frame of x's windows. out may be fp32 while x is not."""
    B, _, *edges, C = x.shape
    H, W = edges if factor is None else (edge - 2 for edge in edges)
    N, kt, kh, kw, _ = weight.shape
    kt, windows = (1, kt) if upsample else (kt, 1)  # a folded weight has its phases there
    if kh == 1:
        H, W = edges = 1, H * W  # no pixel reads another
    capability, _ = device_properties(x.device)
    present = [tensor for tensor in (x, front, weight) if tensor is not None]
    descriptors = capability >= TMA_CAPABILITY and all(map(_fits_tma, present))
    tiles = choose_conv_tiles(capability, x.dtype, descriptors, H, W, C, N)
    T, phases = out.shape[1] // interleave, 4 if upsample else 1
    repeats = (1, 1, 1) if residual is None else residual_repeats(residual.shape, out.shape)
    boxes = B * T * phases * cdiv(H, tiles.box_height) * cdiv(W, tiles.box_width)
    images = [None if frames is None else frames.view(-1, *edges, C) for frames in (x, front)]
    weights = weight.view(N, windows * kt * kh * kw, C).transpose(0, 1)
    operands = (*images, weights, None)
    if descriptors:
        box = [1, tiles.box_height, tiles.box_width, tiles.depth]
        operands = (
            *(None if frames is None else _descriptor(frames, box) for frames in images),
            _descriptor(weights, [1, tiles.columns, tiles.depth]),
            _descriptor(weights, [1, tiles.tail, tiles.depth]) if tiles.tail else None,
        )
    launch_kernel(
        _conv_skip_kernel,
        (boxes * cdiv(N, tiles.columns + tiles.tail),),
        *operands,
        *(factor, bias, residual, out),
        *(boxes, T, H, W, N),
        C=C,
        KT=kt,
        KH=kh,
        FRONT=0 if front is None else front.shape[1],
        UPSAMPLE=upsample,
        INTERLEAVE=interleave,
        REPEATS=repeats,
        DESCRIPTORS=descriptors,
        **_tile_options(tiles),
        **register_options(capability, (10, 12)),
    )


def _descriptor(tensor: torch.Tensor, box: list[int]) -> TensorDescriptor:
    return descriptor_of(TensorDescriptor, tensor, tensor.shape, tensor.stride(), block_shape=box)


def _fits_tma(tensor: torch.Tensor) -> bool:
    """True if TMA should read a packed tensor [..., C]. fp32 is excluded: it has no tensor-core product."""
    aligned = tensor.shape[-1] * tensor.element_size() % 16 == 0 and tensor.data_ptr() % 16 == 0
    return aligned and tensor.element_size() <= 2


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
    x, front, weight, weight_tail, factor, bias, residual, out, boxes, T, H, W, N,
    C: tl.constexpr, KT: tl.constexpr, KH: tl.constexpr, FRONT: tl.constexpr,
    UPSAMPLE: tl.constexpr, INTERLEAVE: tl.constexpr, REPEATS: tl.constexpr, DESCRIPTORS: tl.constexpr,
    BOX_H: tl.constexpr, BOX_W: tl.constexpr, COLUMNS: tl.constexpr, TAIL: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One program computes one tile.

    x: [B · (T + KT − 1 − FRONT), H, W, C]. front: [B · FRONT, H, W, C]. With a factor both are two pixels
    higher and wider.
    weight: [KT · KH · KH, N, C], a view of a packed [N, KT · KH · KH, C]. N counts the rows for all interleaved frames.
    A window of 2×2 that upsamples has [4 · KH · KH, N, C], for the phases of the result (conv_fold.py).
    weight_tail: the weight's descriptor for the tail columns of a tile, past a power of two.
    boxes: the number of boxes in all frames and phases.
    REPEATS: how often the residual's frames, rows and columns count.
    """
    ROWS: tl.constexpr = BOX_H * BOX_W
    TAPS: tl.constexpr = KT * KH * KH
    CHUNKS: tl.constexpr = (C + DEPTH - 1) // DEPTH
    BORDER: tl.constexpr = 0 if factor is None else 1
    SUM: tl.constexpr = tl.float32 if factor is None else tl.int32
    BYTES: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8 if factor is None else 1
    column_tiles = tl.cdiv(N, COLUMNS + TAIL)
    tile = tl.program_id(0)
    _, box, column_tile = locate_tile(tile, boxes, column_tiles, ROWS * C * BYTES, (COLUMNS + TAIL) * TAPS * C * BYTES)
    sample, frame, top, left, phase_y, phase_x = locate_box(box, T, H, W, UPSAMPLE, BOX_H, BOX_W)
    column = column_tile * (COLUMNS + TAIL)
    begin = frame - FRONT  # of the window, counted in the sample's frames of x
    WINDOWS: tl.constexpr = 4 if UPSAMPLE and KH == 2 else 1
    of_phase = (2 * phase_y + phase_x) * TAPS if WINDOWS > 1 else 0
    place = (top + BORDER, left + BORDER, phase_y, phase_x, column, of_phase)
    edges = (H + 2 * BORDER, W + 2 * BORDER)
    weights = (weight, weight_tail if DESCRIPTORS else weight)
    acc = tl.zeros((ROWS, COLUMNS), SUM)
    acc_tail = acc  # not used without a tail
    if TAIL:
        acc_tail = tl.zeros((ROWS, TAIL), SUM)
    # Steps over front and over x are separate loops: in one loop, choosing between them would stop loads from running
    # ahead.
    steps_in_front = 0
    if FRONT:
        steps_in_front = tl.maximum(-begin, 0) * (KH * KH * CHUNKS)
        acc, acc_tail = _add_steps(
            acc, acc_tail, 0, steps_in_front, front, sample * FRONT + frame, weights, place, *edges, N,
            C, KH, WINDOWS * TAPS, CHUNKS, UPSAMPLE, DESCRIPTORS, BOX_H, BOX_W, COLUMNS, TAIL, DEPTH,
        )  # fmt: skip
    acc, acc_tail = _add_steps(
        acc, acc_tail, steps_in_front, TAPS * CHUNKS, x, sample * (T + KT - 1 - FRONT) + begin, weights,
        place, *edges, N, C, KH, WINDOWS * TAPS, CHUNKS, UPSAMPLE, DESCRIPTORS, BOX_H, BOX_W, COLUMNS, TAIL, DEPTH,
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
    arguments = (factor, bias, residual, out, of_residual, pixels, inside, pixels_of_frame, N // INTERLEAVE)
    unscaled = (None, None)
    epilogue_in_parts(acc, unscaled, 0, 0, column, ROWS, N, _store, arguments, None, ROWS, COLUMNS)
    if TAIL:
        epilogue_in_parts(acc_tail, unscaled, 0, 0, column + COLUMNS, ROWS, N, _store, arguments, None, ROWS, TAIL)


@triton.jit
def _add_steps(
    acc, acc_tail, first, last, x, image, weights, place, H, W, N,
    C: tl.constexpr, KH: tl.constexpr, ROW: tl.constexpr, CHUNKS: tl.constexpr, UPSAMPLE: tl.constexpr,
    DESCRIPTORS: tl.constexpr, BOX_H: tl.constexpr, BOX_W: tl.constexpr, COLUMNS: tl.constexpr, TAIL: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Return a tile's sums with the products of the steps from first to last added.

    x: the source of these steps, front or x itself. image: the index in it of the window's first frame, which may lie
    before its beginning. weights: those for the columns and for the tail. ROW: the positions in a row of the weight.
    """
    top, left, phase_y, phase_x, column, of_phase = place
    for step in range(first, last):
        tap = step // CHUNKS
        c = step % CHUNKS * DEPTH
        shift_y = find_shift(tap // KH % KH, phase_y, KH, UPSAMPLE)
        shift_x = find_shift(tap % KH, phase_x, KH, UPSAMPLE)
        source = (image + tap // (KH * KH), top + shift_y, left + shift_x)
        a_tile = _load_box(x, source, c, H, W, C, DESCRIPTORS, BOX_H, BOX_W, DEPTH)
        w_tile = _load_weight(weights[0], of_phase + tap, column, c, N, C, ROW, DESCRIPTORS, COLUMNS, DEPTH)
        acc = tl.dot(a_tile, w_tile.T, acc, input_precision="ieee", out_dtype=acc.dtype)
        if TAIL:
            w_tail = _load_weight(weights[1], of_phase + tap, column + COLUMNS, c, N, C, ROW, DESCRIPTORS, TAIL, DEPTH)
            acc_tail = tl.dot(a_tile, w_tail.T, acc_tail, input_precision="ieee", out_dtype=acc.dtype)
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
        return tl.load(x + offsets[:, None] + channels[None, :], mask=mask, other=0)


@triton.jit
def _load_weight(
    weight, tap, column, c, N, C: tl.constexpr, ROW: tl.constexpr, DESCRIPTORS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Load channels c..c+DEPTH of the weight's rows at a position in its window, [COLUMNS, DEPTH], with zeros past the
    last."""
    if DESCRIPTORS:
        return weight.load([tap, column, c]).reshape(COLUMNS, DEPTH)
    else:
        rows = column + tl.arange(0, COLUMNS)
        channels = c + tl.arange(0, DEPTH)
        offsets = rows.to(tl.int64) * (ROW * C) + tap * C
        mask = (rows < N)[:, None] & (channels < C)[None, :]
        return tl.load(weight + offsets[:, None] + channels[None, :], mask=mask, other=0)


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
    """Apply the factor, add bias and residual, and store. N: the rows of the weight, `channels` for each interleaved
    frame."""
    factor, bias, residual, out, of_residual, pixels, inside, pixels_of_frame, channels = arguments
    column_mask = columns < N
    if factor is not None:
        acc = acc.to(tl.float32) * tl.load(factor + columns, mask=column_mask, other=0.0)[None, :]
    mask = inside[:, None] & column_mask[None, :]
    places = (columns // channels).to(tl.int64) * pixels_of_frame * channels + columns % channels
    if bias is not None:
        acc += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        offsets = (of_residual * channels)[:, None] + places[None, :]
        acc += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    offsets = (pixels * channels)[:, None] + places[None, :]
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("pixels", "H", "W"))
def _add_window_kernel(
    products, bias, residual, out, pixels, H, W, N, row,
    KH: tl.constexpr, COLUMNS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """products: [pixels, row], fp32, of which the first KH · KH · N count. pixels: of all images [H, W]. A neighbour
    outside the image is zero."""
    pixel = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    channels = tl.arange(0, COLUMNS)
    y, column = pixel // W % H, pixel % W
    mask = (pixel < pixels)[:, None] & (channels < N)[None, :]
    acc = tl.zeros((PIXELS, COLUMNS), tl.float32)
    for tap in tl.static_range(KH * KH):
        below, right = tap // KH - KH // 2, tap % KH - KH // 2
        inside = (y + below >= 0) & (y + below < H) & (column + right >= 0) & (column + right < W)
        places = (pixel + below * W + right) * row + tap * N
        acc += tl.load(products + places[:, None] + channels[None, :], mask=mask & inside[:, None], other=0.0)
    if bias is not None:
        acc += tl.load(bias + channels, mask=channels < N, other=0.0).to(tl.float32)[None, :]
    places = pixel[:, None] * N + channels[None, :]
    if residual is not None:
        acc += tl.load(residual + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=mask)
