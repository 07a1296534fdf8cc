"""quantize_rows: quantise a tensor to 8 bits with one scale per row, when the kernel that produces it cannot.

x is [..., K] in fp32, fp16 or bf16. The result is a `quantized.Quantized`: values [..., K] in int8 or e4m3, scale [...]
and, if asked for, norm [...] in fp32. One pass: a row stays in registers between finding its largest magnitude and
rounding. No gradient: under autograd the reference runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..choice.registry import spec_of, triton_or_reference
from ..dispatch import kernel_op
from ..launch import launch_kernel
from ..quantized import FP8, INT8, LARGEST, Quantized, check_format, quantize_reference
from ..quantized import TINY as _TINY
from ..sizes import next_power_of_2
from .row_tiles import row_grid, row_tile

TINY = tl.constexpr(_TINY)
LARGEST_INT8 = tl.constexpr(LARGEST[INT8])
LARGEST_FP8 = tl.constexpr(LARGEST[FP8])
ROUNDING = tl.constexpr(1.5 * 2**23)  # added to a number below 2**22, leaves the nearest integer in the low bits


def quantize_rows(
    x: torch.Tensor,
    format: torch.dtype,
    with_norm: bool = False,
    implementation: str = "auto",
    *,
    in_parts: bool = False,
) -> Quantized:
    """Return x [..., K] as a Quantized in a format, INT8 or FP8. A row's scale maps its largest magnitude to the
    format's.

    with_norm: True to also return the L2 norm of each row.
    implementation: "auto", "triton" or "torch" (see dispatch.py).
    in_parts: True for x [..., P, K/P], whose rows consist of P parts. The parts of a row may lie anywhere.
    Raises ValueError for another format.
    """
    check_format("quantize_rows", format)
    launch = QUANTIZE_ROWS.pick(spec_of(implementation, x, result=format)).launch
    values, scale, norm = launch(x, format, with_norm, in_parts)
    return Quantized(values, scale, norm if with_norm else None)


def new_quantized(
    x: torch.Tensor, format: torch.dtype, with_norm: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return uninitialised, contiguous values, scale and norm for x [..., K]. Without with_norm the norm has no
    elements."""
    return _new_quantized(x, x.shape, format, with_norm)


def _new_quantized(x, shape, format, with_norm):
    values = x.new_empty(shape, dtype=format)
    scale, norm = (x.new_empty(size, dtype=torch.float32) for size in (shape[:-1], shape[:-1] if with_norm else 0))
    return values, scale, norm


def _shape_of_rows(x: torch.Tensor, in_parts: bool) -> torch.Size | tuple[int, ...]:
    return (*x.shape[:-2], x.shape[-2] * x.shape[-1]) if in_parts else x.shape


@kernel_op("quantize_rows")
def _quantize_rows(
    x: torch.Tensor, format: torch.dtype, with_norm: bool, in_parts: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values, scale, norm = _new_quantized(x, _shape_of_rows(x, in_parts), format, with_norm)
    if values.numel() == 0:
        scale.fill_(_TINY), norm.zero_()
        return values, scale, norm
    parts = x.reshape(-1, *x.shape[-2:]) if in_parts else x.reshape(-1, 1, x.shape[-1])
    if parts.stride(2) != 1:
        parts = parts.contiguous()
    (rows, count, width), K = parts.shape, values.shape[-1]
    block = next_power_of_2(K)
    tile = row_tile(block, block * x.element_size())
    grid = row_grid(x.device, tile["ROWS"], rows, 1)
    stride, part_stride, _ = parts.stride()
    tile["PART"] = 0 if count == 1 or part_stride == width else width
    arguments = (parts, values, scale, norm if with_norm else None, rows, K, stride, part_stride)
    launch_kernel(_quantize_rows_kernel, grid, *arguments, BLOCK=block, **tile)
    return values, scale, norm


@_quantize_rows.register_fake
def _(x, format, with_norm, in_parts=False):
    return _new_quantized(x, _shape_of_rows(x, in_parts), format, with_norm)


def _reference(x, format, with_norm, in_parts=False):
    return quantize_reference(x.flatten(-2) if in_parts else x, format, with_norm)


QUANTIZE_ROWS = triton_or_reference("quantize_rows", _quantize_rows, _reference)


@triton.jit
def _quantize_rows_kernel(
    x,
    values,
    scale,
    norm,
    rows,
    K,
    stride,
    part_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PART: tl.constexpr,
):
    """PART: the columns of a part of a row, or 0 if a row's columns lie side by side."""
    columns = tl.arange(0, BLOCK)
    places = columns
    if PART > 0:
        places = (columns // PART).to(tl.int64) * part_stride + columns % PART
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        chosen = first + tl.arange(0, ROWS)
        mask = (chosen < rows)[:, None] & (columns < K)[None, :]
        tile = tl.load(x + chosen.to(tl.int64)[:, None] * stride + places[None, :], mask=mask, other=0.0)
        store_quantized(tile.to(tl.float32), chosen, columns, mask, values, scale, norm, rows, K)


@triton.jit
def store_quantized(tile, rows, columns, mask, values, scale, norm, end, K):
    """Quantise a tile of whole rows and store its values [.., K], scales and norms up to the row `end`.

    The tile is fp32 and 0 where the mask is false. norm may be None.
    """
    row_mask = rows < end
    largest = largest_magnitude(tile, 1)
    WHOLE: tl.constexpr = values.dtype.element_ty == tl.int8
    LIMIT: tl.constexpr = LARGEST_INT8 if WHOLE else LARGEST_FP8
    row_scale = tl.maximum(largest / LIMIT, TINY, propagate_nan=tl.PropagateNan.ALL)
    scaled = tile * (1 / row_scale)[:, None]
    if WHOLE:
        shifted = scaled + ROUNDING
        low = shifted.to(tl.int32, bitcast=True).to(tl.int8)
    else:
        low = scaled.to(tl.float8e4nv)
    places = values + rows.to(tl.int64)[:, None] * K + columns[None, :]
    tl.store(places, low, mask=mask)
    tl.store(scale + rows, row_scale, mask=row_mask)
    if norm is not None:
        rounded = shifted - ROUNDING if WHOLE else low.to(tl.float32)
        tl.store(norm + rows, tl.sqrt(tl.sum(rounded * rounded, 1)) * row_scale, mask=row_mask)


@triton.jit
def largest_magnitude(x, axis: tl.constexpr):
    """Return the largest |x| of fp32 along an axis, or of all elements for None. NaN in x gives NaN, so that the scale
    shows it.

    The bits of magnitudes, read as integers, have the same order, and NaN is above all. tl.max of floats may drop NaN.
    """
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(magnitude, axis).to(tl.float32, bitcast=True)
