"""RMSNorm and SiLU in 8 bits, as input of a convolution (conv_8bit.py): measure the range, then write int8.

    v = silu(√C · weight · x / ‖x‖) / divisor        [B, T, H, W, C]
    q = round(v / step + zero), int8                 step and zero as in range_8bit.py

One range holds for all frames and channels, and grows from chunk to chunk of a video. The divisor, one for each
channel, makes channels alike, and the convolution's weight is multiplied by it. Images are stored with one more pixel
on each side, which stands for zero: [B, T, H + 2, W + 2, C]. So the convolution needs no correction at the edges.

The kernel that writes int8 also moves the frames before the chunk to the new range, and prepares the convolution's
result. So a convolution is three launches, because small ones take the host longer than the GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import range_8bit
from ..choice.registry import triton_or_reference
from ..dispatch import kernel_op
from ..launch import launch_kernel
from .quantize_rows import ROUNDING
from .rms_norm_silu import PROGRAMS, normalize, rows_of, silu, tile_of
from .row_tiles import row_grid

ELEMENTS = tl.constexpr(4096)  # that a program rounds anew at a time
CHANNELS = tl.constexpr(128)  # of the convolution's result that a program prepares at a time
NEGATED = tl.constexpr(-(1 << 31))  # the bit that changes a float's sign


@kernel_op("measure_norm_silu", mutates_args=("bounds",))
def _measure(x: torch.Tensor, weight: torch.Tensor, divisor: torch.Tensor, bounds: torch.Tensor) -> None:
    rows, S, *strides = rows_of(x)
    B, C = x.shape[0], x.shape[-1]
    tile = tile_of(C, x.dtype)
    grid = row_grid(x.device, tile["ROWS"], S, B, PROGRAMS)
    operands = rows, weight.contiguous(), divisor, bounds.view(torch.int32)
    launch_kernel(_measure_kernel, grid, *operands, S, C, *strides, C**0.5, **tile)


@_measure.register_fake
def _(x, weight, divisor, bounds):
    return None


@kernel_op("quantize_norm_silu", mutates_args=("front",))
def _quantize(
    x: torch.Tensor, weight: torch.Tensor, divisor: torch.Tensor,
    before: torch.Tensor, bounds: torch.Tensor, front: torch.Tensor | None,
    scale: torch.Tensor, total: torch.Tensor, bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    B, T, H, W, C = x.shape
    out = x.new_empty((B, T, H + 2, W + 2, C), dtype=torch.int8)
    N = scale.shape[0]
    combined = scale.new_empty((2, N))
    rows, _, *strides = rows_of(x)
    tile, S = tile_of(C, x.dtype), T * (H + 2) * (W + 2)
    grid = row_grid(x.device, tile["ROWS"], S, B, PROGRAMS)
    operands = rows, weight.contiguous(), divisor, bounds, out, S, C, H, W, *strides, C**0.5
    moved = before, front, 0 if front is None else front.numel()
    of_result = scale, total, bias.contiguous(), combined, N
    launch_kernel(_quantize_kernel, grid, *operands, *moved, *of_result, **tile)
    return out, combined


@_quantize.register_fake
def _(x, weight, divisor, before, bounds, front, scale, total, bias):
    B, T, H, W, C = x.shape
    return x.new_empty(B, T, H + 2, W + 2, C, dtype=torch.int8), scale.new_empty(2, len(scale))


# (x [B, T, H, W, C], weight [C], divisor [C] fp32, range [2] fp32), which is widened in place so that it also holds v.
MEASURE_NORM_SILU = triton_or_reference("measure_norm_silu", _measure, range_8bit.measure_norm_silu)
# (x, weight, divisor, range of the frames before, range that holds it and x's, frames before [B, 2, H + 2, W + 2, C] or
# None, scale and total of a Weight8bit, bias [N]) -> q [B, T, H + 2, W + 2, C] int8, contiguous, and the two rows of
# range_8bit.combined [2, N] fp32. The frames before are int8 and contiguous, and move to the new range in place.
QUANTIZE_NORM_SILU = triton_or_reference("quantize_norm_silu", _quantize, range_8bit.quantize_for_convolution)


@triton.jit(do_not_specialize=("S",))
def _measure_kernel(
    x, weight, divisor, bounds, S, C, x_stride_b, x_stride_s, scale,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """bounds: [2], the fp32 bits of the largest v and of the smallest, negated. Both start at 0 or above, so that their
    bits have the order of integers. NaN is above all.

    Each place of a tile keeps its own extremes until the end. Reductions between threads in every tile took 138 ms of a
    decode in place of 36 (H200)."""
    x += tl.program_id(1).to(tl.int64) * x_stride_b
    columns = tl.arange(0, BLOCK)
    column_mask = columns < C
    gain = scale * tl.load(weight + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    inverse = 1 / tl.load(divisor + columns, mask=column_mask, other=1.0)[None, :]
    above = tl.zeros((ROWS, BLOCK), tl.int32)
    below = tl.zeros((ROWS, BLOCK), tl.int32)
    for first in tl.range(tl.program_id(0) * ROWS, S, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        mask = (rows < S)[:, None] & column_mask[None, :]
        places = rows.to(tl.int64)[:, None] * x_stride_s + columns[None, :]
        y = normalize(tl.load(x + places, mask=mask, other=0.0).to(tl.float32), gain)
        bits = (silu(y) * inverse).to(tl.int32, bitcast=True)
        above = tl.maximum(above, bits)  # a value below 0 is an integer below 0
        below = tl.maximum(below, bits ^ NEGATED)
    tl.atomic_max(bounds, tl.max(above))
    tl.atomic_max(bounds + 1, tl.max(below))


@triton.jit(do_not_specialize=("S", "H", "W", "front_count"))
def _quantize_kernel(
    x, weight, divisor, bounds, out, S, C, H, W, x_stride_b, x_stride_s, scale,
    before, front, front_count, weight_scale, total, bias, combined, N,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """S: the rows of a sample of out, T · (H + 2) · (W + 2). front_count: the values of front."""
    sample = tl.program_id(1).to(tl.int64)
    x += sample * x_stride_b
    out += sample * S * C
    columns = tl.arange(0, BLOCK)
    column_mask = columns < C
    gain = scale * tl.load(weight + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    step, zero = range_8bit.step_and_zero(tl.load(bounds), tl.load(bounds + 1))
    factor = 1 / step / tl.load(divisor + columns, mask=column_mask, other=1.0)[None, :]
    for first in tl.range(tl.program_id(0) * ROWS, S, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        top = rows // (W + 2) % (H + 2) - 1
        left = rows % (W + 2) - 1
        inside = (top >= 0) & (top < H) & (left >= 0) & (left < W) & (rows < S)
        source = (rows // ((W + 2) * (H + 2)) * H + top).to(tl.int64) * W + left
        mask = inside[:, None] & column_mask[None, :]
        places = source[:, None] * x_stride_s + columns[None, :]
        y = normalize(tl.load(x + places, mask=mask, other=0.0).to(tl.float32), gain)
        q = _round(silu(y) * factor + zero)
        mask = (rows < S)[:, None] & column_mask[None, :]
        tl.store(out + rows.to(tl.int64)[:, None] * C + columns[None, :], q, mask=mask)
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    if front is not None:
        _requantize(front, before, bounds, front_count, program)
    if program == 0:
        _combine(bounds, weight_scale, total, bias, combined, N)


@triton.jit
def _requantize(values, old, new, count, program):
    """Move values of a range to another that holds it, all programs together."""
    largest, below = tl.load(old), tl.load(old + 1)
    new_largest, new_below = tl.load(new), tl.load(new + 1)
    if (largest != new_largest) | (below != new_below):  # most chunks of a video do not exceed the range
        step, zero = range_8bit.step_and_zero(largest, below)
        new_step, new_zero = range_8bit.step_and_zero(new_largest, new_below)
        programs = tl.num_programs(0) * tl.num_programs(1)
        for block in range(program, tl.cdiv(count, ELEMENTS), programs):
            places = tl.cast(block, tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
            mask = places < count
            v = tl.load(values + places, mask=mask, other=0).to(tl.float32) - zero
            tl.store(values + places, _round(v * (step / new_step) + new_zero), mask=mask)


@triton.jit
def _combine(bounds, scale, total, bias, combined, N):
    """Write the factor and the addend of each channel of the convolution's result."""
    step, zero = range_8bit.step_and_zero(tl.load(bounds), tl.load(bounds + 1))
    for first in range(0, N, CHANNELS):
        channels = first + tl.arange(0, CHANNELS)
        mask = channels < N
        factor = step * tl.load(scale + channels, mask=mask, other=0.0)
        added = tl.load(bias + channels, mask=mask, other=0.0).to(tl.float32)
        tl.store(combined + channels, factor, mask=mask)
        sums = tl.load(total + channels, mask=mask, other=0)
        tl.store(combined + N + channels, added - zero * factor * sums, mask=mask)


@triton.jit
def _round(scaled):
    """Return the nearest int8."""
    bounded = tl.minimum(tl.maximum(scaled, -128.0), 127.0)
    return (bounded + ROUNDING).to(tl.int32, bitcast=True).to(tl.int8)
