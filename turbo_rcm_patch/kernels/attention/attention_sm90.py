"""The attention forward on sm_90: the inputs it takes, the split of the work, and the launch.

    F = softmax(scale · q kᵀ) v        q, F [B, S, H, D] and k, v [B, Skv, H, D] in bf16 or fp16, D 64 or 128

The kernel is in attention_sm90_kernel.py. At most one program per multiprocessor runs, and walks tiles of queries. The
tiles left after the last full round of programs are also split along the keys, so that all programs have work until the
end. A second kernel joins the parts (Flash-Decoding, Dao et al. 2023).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..coefficient import kind_and_strides, load_coefficient
from ..dispatch import device_properties, why_not_sm90
from ..launch import launch_kernel
from ..quantized import FP8
from ..sizes import cdiv
from ..tma import descriptor_of, head_strides, heads_fit_tma
from .attention_tiles import LOG2_E, readable

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .attention_sm90_kernel import CONSUMERS, KEYS, QUERIES, attention_kernel
except (ImportError, AttributeError) as error:
    GLUON_ERROR = str(error)
else:
    GLUON_ERROR = None
    TILE_QUERIES, TILE_KEYS = CONSUMERS.value * QUERIES.value, KEYS.value
    GLUON_TYPES = {torch.int8: gl.int8, FP8: gl.float8e4nv, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}

HEAD_DIMS = (64, 128)
MAX_PARTS = 16
# Costs in units of the time for one tile of keys: the fixed cost of an item, and the cost of joining parts.
ITEM_COST = 4
JOIN_COST = 8
JOIN_ROWS = 16


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return the reason why the kernel cannot take tensors of this kind, or None if it can."""
    reason = why_not_sm90(device, dtype, GLUON_ERROR)
    return f"head_dim {head_dim}" if reason is None and head_dim not in HEAD_DIMS else reason


def fits_tma(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """True if TMA can read q [B, S, H, D] and k, v [B, Skv, H, D]: rows are packed and at multiples of 16 bytes."""
    return all(heads_fit_tma(x) for x in (q, k, v))


def attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Write softmax(scale · q kᵀ) v to out, and the logsumexp in base 2 to lse if it is given.

    q: [B, S, H, D]. k, v: [B, Skv, H, D]. `why_not` and `fits_tma` accept them. scale: positive.
    out: [B, S, H, D] in q's dtype or e4m3, packed. lse: [B, H, S] fp32, packed.
    """
    batch, tokens, heads, head_dim = q.shape
    kv_tokens = k.shape[1]
    tiles = batch * heads * cdiv(tokens, TILE_QUERIES)
    multiprocessors = device_properties(q.device)[1]
    schedule = make_schedule(tiles, cdiv(kv_tokens, TILE_KEYS), multiprocessors)
    partial_out = partial_lse = None
    if schedule.parts > 1:
        parts = schedule.items - schedule.whole
        partial_out = torch.empty((parts, TILE_QUERIES, head_dim), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty((parts, TILE_QUERIES), dtype=torch.float32, device=q.device)
    launch_kernel(
        attention_kernel,
        (min(schedule.items, multiprocessors),),
        _descriptor(q, QUERIES.value),
        _descriptor(k, TILE_KEYS),
        _descriptor(v, TILE_KEYS),
        _descriptor(out, QUERIES.value),
        lse,
        partial_out,
        partial_lse,
        tokens,
        kv_tokens,
        heads,
        schedule.items,
        schedule.whole,
        schedule.parts,
        scale * LOG2_E,
        num_warps=4,
    )
    if schedule.parts > 1:
        join_parts(partial_out, partial_lse, out, lse, schedule)


# ---------------------------------------------------------------------------------------------------------------------
# Work
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """The items of work. The first ``whole`` items are tiles of queries with all keys. Each remaining tile is split
    along the keys into ``parts`` items. ``items`` is their total number."""

    items: int
    whole: int
    parts: int

    def time(self, key_tiles: int, multiprocessors: int) -> int:
        """Return the estimated time of all items and of joining their parts, in units of the time for one tile of
        keys."""
        time = cdiv(self.whole, multiprocessors) * (key_tiles + ITEM_COST)
        if self.parts > 1:
            rounds = cdiv(self.items - self.whole, multiprocessors)
            time += rounds * (cdiv(key_tiles, self.parts) + ITEM_COST) + JOIN_COST
        return time


@functools.lru_cache
def make_schedule(tiles: int, key_tiles: int, multiprocessors: int) -> Schedule:
    """Return the schedule whose last program ends earliest, by splitting tiles of queries along the keys."""
    whole = tiles // multiprocessors * multiprocessors
    schedules = [Schedule(tiles, tiles, 1)]
    for parts in range(2, min(MAX_PARTS, key_tiles) + 1):
        schedules.append(Schedule(whole + (tiles - whole) * parts, whole, parts))
    # min() takes the fewest parts among equally fast ones. So no part is empty: leaving it out would be as fast.
    return min(schedules, key=lambda schedule: schedule.time(key_tiles, multiprocessors))


@triton.jit(do_not_specialize=["tokens", "whole", "parts"])
def _join_kernel(
    partial_out, partial_lse, out, lse, scalar, least, tokens, heads, whole, parts,
    residual, residual_stride_b, residual_stride_s, residual_stride_h,
    c_skip, c_skip_stride_b, c_skip_stride_s, c_skip_stride_c, c_out, c_out_stride_b, c_out_stride_s, c_out_stride_c,
    SKIP_KIND: tl.constexpr, OUT_KIND: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program joins BLOCK queries of one tile: it weights the parts' outputs, each a softmax of its own, by their
    sums. With a residual it adds the skip. It does nothing if a scalar is given and is below ``least``."""
    if scalar is not None and tl.load(scalar) < least:
        return
    first_part = tl.program_id(0).to(tl.int64) * parts
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, HEAD_DIM)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for part in range(0, parts):
        largest = tl.maximum(largest, tl.load(partial_lse + (first_part + part) * ROWS + rows))
    output = tl.zeros((BLOCK, HEAD_DIM), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(0, parts):
        part_rows = (first_part + part) * ROWS + rows
        weight = tl.exp2(tl.load(partial_lse + part_rows) - largest)
        output += weight[:, None] * tl.load(partial_out + part_rows[:, None] * HEAD_DIM + columns[None, :])
        total += weight
    output /= total[:, None]

    tile = whole + tl.program_id(0)
    row_tiles = tl.cdiv(tokens, ROWS)
    sample_head = (tile // row_tiles).to(tl.int64)
    queries = tile % row_tiles * ROWS + rows
    mask = queries < tokens
    sample, head = sample_head // heads, sample_head % heads
    if residual is not None:
        channels = head * HEAD_DIM + columns
        kept = residual + sample * residual_stride_b + head * residual_stride_h
        kept += queries.to(tl.int64)[:, None] * residual_stride_s + columns[None, :]
        kept = tl.load(kept, mask=mask[:, None], other=0.0).to(tl.float32)
        if SKIP_KIND != 0:
            kept *= load_coefficient(
                c_skip, sample, queries, channels, mask, columns < HEAD_DIM,
                c_skip_stride_b, c_skip_stride_s, c_skip_stride_c, SKIP_KIND,
            )  # fmt: skip
        if OUT_KIND != 0:
            output *= load_coefficient(
                c_out, sample, queries, channels, mask, columns < HEAD_DIM,
                c_out_stride_b, c_out_stride_s, c_out_stride_c, OUT_KIND,
            )  # fmt: skip
        output += kept
    corner = out + ((sample * tokens + queries)[:, None] * heads + head) * HEAD_DIM
    tl.store(corner + columns[None, :], output.to(out.dtype.element_ty), mask=mask[:, None])
    if lse is not None:
        tl.store(lse + sample_head * tokens + queries, largest + tl.log2(total), mask=mask)


def skip_arguments(
    residual: torch.Tensor | None = None, c_skip: torch.Tensor | None = None, c_out: torch.Tensor | None = None
) -> tuple:
    """Return the kernel arguments for ``c_skip · residual + c_out · F`` with canonical coefficients, or for F alone if
    there is no residual."""
    residual = None if residual is None else readable(residual)
    skip_kind, skip_strides = kind_and_strides(c_skip)
    out_kind, out_strides = kind_and_strides(c_out)
    pointers_and_strides = (*(residual, *head_strides(residual)), *(c_skip, *skip_strides), *(c_out, *out_strides))
    return *pointers_and_strides, skip_kind, out_kind


def join_parts(
    partial_out, partial_lse, out, lse, schedule: Schedule, skip: tuple = skip_arguments(), only_if=(None, None)
) -> None:
    """Complete out [B, S, H, D] and lse [B, H, S] from parts [parts of all tiles, rows, D] and [.., rows]. skip: the
    result of `skip_arguments`. only_if: a scalar in fp32 and a number; nothing is written if the scalar is below it."""
    _, rows, head_dim = partial_out.shape
    _, tokens, heads, _ = out.shape
    tiles = (schedule.items - schedule.whole) // schedule.parts
    launch_kernel(
        _join_kernel,
        (tiles, rows // JOIN_ROWS),
        partial_out,
        partial_lse,
        out,
        lse,
        *only_if,
        tokens,
        heads,
        schedule.whole,
        schedule.parts,
        *skip,
        ROWS=rows,
        HEAD_DIM=head_dim,
        BLOCK=JOIN_ROWS,
        num_warps=4,
        maxnreg=255,  # else the ptxas of CUDA 13 spills registers to fit more programs than run
    )


# ---------------------------------------------------------------------------------------------------------------------
# Operands
# ---------------------------------------------------------------------------------------------------------------------


def _descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """Return a TMA descriptor over x [B, S, H, D] in tiles of rows. Reads past a sample's last token give 0; writes
    there are dropped."""
    batch, tokens, heads, head_dim = x.shape
    stride_b, stride_s, stride_h = head_strides(x)
    block = [1, 1, rows, head_dim]
    shape, strides = [batch, heads, tokens, head_dim], [stride_b, stride_h, stride_s, 1]
    layout = shared_layout(tuple(block), x.dtype)
    return descriptor_of(TensorDescriptor, x, shape, strides, block_shape=block, layout=layout)


@functools.lru_cache
def shared_layout(block: tuple[int, ...], dtype: torch.dtype):
    """Return the shared-memory layout of a block that TMA reads or writes."""
    return gl.NVMMASharedLayout.get_default_for(list(block), GLUON_TYPES[dtype])
