"""rms_norm_silu: RMSNorm over channels, then SiLU, in one pass: ``silu(√C · weight · x / max(‖x‖, 1e-12))``.

x [B, T, ..., C], weight [C]; out [B, T, ..., C]. Arithmetic is fp32 and rounded once to x's dtype. RMSNorm: Zhang and
Sennrich 2019, eq. 4, as F.normalize; SiLU: Elfwing et al. 2018, eq. 5. No gradient: under autograd the reference runs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

import torch
import triton
import triton.language as tl

from .. import reference
from ..choice.registry import spec_of, triton_or_reference
from ..dispatch import kernel_op
from ..launch import launch_kernel
from ..sizes import next_power_of_2
from .row_tiles import row_grid, row_tile

PROGRAMS = 8  # of a multiprocessor: 2 to 9 % faster than 4 (H200, 96 and 192 channels)
MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)


def rms_norm_silu(
    x: torch.Tensor, weight: torch.Tensor, *, silu: bool = True, implementation: str = "auto"
) -> torch.Tensor:
    """Return RMSNorm of x over its last dimension and then SiLU, in x's shape and dtype, contiguous.

    x: [B, T, ..., C] with any strides. weight: [C]. silu: False to leave SiLU out. implementation: "auto", "triton" or
    "torch" (see dispatch.py). Raises ValueError for shapes or devices that do not fit together.
    """
    if x.dim() < 3:
        raise ValueError(f"rms_norm_silu: x has shape {list(x.shape)}, not [B, T, ..., C].")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm_silu: weight has shape {list(weight.shape)}, not [C={x.shape[-1]}].")
    return RMS_NORM_SILU.pick(spec_of(implementation, x, weight)).launch(x, weight, silu)


@kernel_op("rms_norm_silu")
def _rms_norm_silu(x: torch.Tensor, weight: torch.Tensor, silu: bool) -> torch.Tensor:
    out = x.new_empty(x.shape)
    if x.numel() == 0:
        return out
    rows, S, *strides = rows_of(x)
    B, C = x.shape[0], x.shape[-1]
    tile = tile_of(C, x.dtype)
    grid = row_grid(x.device, tile["ROWS"], S, B, PROGRAMS)
    operands = (rows, weight.contiguous(), out, S, C, *strides, C**0.5)
    launch_kernel(_rms_norm_silu_kernel, grid, *operands, SILU=silu, **tile)
    return out


def rows_of(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """Return x [B, T, ..., C] with adjacent channels, the number of rows in a sample, and the strides of samples and
    rows."""
    if x.is_contiguous():
        size, C = x.numel() // x.shape[0], x.shape[-1]
        return x, size // C, size, C
    rows = x.flatten(1, -2)  # a copy if the rows are not evenly spaced
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    return rows, rows.shape[1], rows.stride(0), rows.stride(1)


@functools.cache
def tile_of(C: int, dtype: torch.dtype) -> Mapping[str, int]:
    """Return BLOCK, and what `row_tile` returns, for rows of C channels."""
    block = next_power_of_2(C)
    return MappingProxyType({"BLOCK": block, **row_tile(block, block * dtype.itemsize)})


@_rms_norm_silu.register_fake
def _(x, weight, silu):
    return x.new_empty(x.shape)


RMS_NORM_SILU = triton_or_reference("rms_norm_silu", _rms_norm_silu, reference.rms_norm_silu)


@triton.jit(do_not_specialize=("S",))  # S differs between chunks of a video
def _rms_norm_silu_kernel(
    x, weight, out, S, C, x_stride_b, x_stride_s, scale,
    SILU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(1).to(tl.int64)
    x += sample * x_stride_b
    out += sample * S * C
    columns = tl.arange(0, BLOCK)
    column_mask = columns < C
    gain = scale * tl.load(weight + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    for first in tl.range(tl.program_id(0) * ROWS, S, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        mask = (rows < S)[:, None] & column_mask[None, :]
        rows = rows.to(tl.int64)[:, None]
        values = tl.load(x + rows * x_stride_s + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        y = normalize(values, gain)
        if SILU:
            y = silu(y)
        tl.store(out + rows * C + columns[None, :], y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def normalize(rows, gain):
    """Return fp32 rows [.., C], each divided by its norm and multiplied by the gain of each channel."""
    norm = tl.sqrt(tl.sum(rows * rows, 1))
    return rows * (1.0 / tl.maximum(norm, 1e-12))[:, None] * gain


@triton.jit
def silu(y):
    """Return y / (1 + exp(−y)) of fp32 values: the divisor's root is fewer instructions than a division."""
    root = tl.rsqrt(1 + tl.exp2(y * MINUS_LOG2_E))
    return y * root * root
