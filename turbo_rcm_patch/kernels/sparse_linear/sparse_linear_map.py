"""The choice of the key blocks that sparse-linear attention keeps, on a GPU: sm_80 to sm_120.

    scores of the blocks' means    a kernel, because PyTorch would round the fp32 sums of tensor cores to 16 bits
    the lists                      a kernel that holds a row of scores in registers and finds its threshold bit by bit

The attention of 40 heads and 75,600 tokens to a tenth of the keys takes 19.9 ms on an H200 with PyTorch's topk. 1.9 ms
of these are topk and a sort of its result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import kernel_op
from ..launch import launch_kernel
from ..sizes import cdiv, next_power_of_2
from .sparse_linear_reference import block_scores
from .threshold import largest_threshold

SCORES = 128  # rows and columns of a program
LOWEST = tl.constexpr(-(2**31))
HALF = tl.constexpr(16)
LOW_HALF = tl.constexpr(2**16 - 1)
WITHOUT_SIGN = tl.constexpr(2**31 - 1)


def choose_blocks(pooled_q: torch.Tensor, pooled_k: torch.Tensor, kept: int) -> torch.Tensor:
    """Return the same blocks as the reference: [B, H, ⌈S / block_q⌉, kept] int32, ascending. If blocks
    have equal scores, the first ones are kept."""
    scores = block_scores if pooled_q.dtype == torch.float32 else _block_scores
    return _keep_largest(scores(pooled_q, pooled_k).float(), kept)  # autocast gives 16 bits


@kernel_op("block_scores")
def _block_scores(pooled_q: torch.Tensor, pooled_k: torch.Tensor) -> torch.Tensor:
    """Return the products of 16-bit means [B, H, blocks, D], as the reference does: [B, H, QB, KB] fp32."""
    scores = _allocate_scores(pooled_q, pooled_k)
    batch, heads, rows, columns = scores.shape
    launch_kernel(
        _block_scores_kernel,
        (cdiv(columns, SCORES), cdiv(rows, SCORES), batch * heads),
        pooled_q.contiguous(),
        pooled_k.contiguous(),
        scores,
        rows,
        columns,
        HEAD_DIM=pooled_q.shape[3],
        BLOCK=SCORES,
        num_warps=8,
    )
    return scores


@_block_scores.register_fake
def _allocate_scores(pooled_q, pooled_k):
    return pooled_q.new_empty((*pooled_q.shape[:3], pooled_k.shape[2]), dtype=torch.float32)


@kernel_op("keep_largest")
def _keep_largest(scores: torch.Tensor, kept: int) -> torch.Tensor:
    """Return the columns of the `kept` largest scores of each row of [B, H, QB, KB] fp32: [B, H, QB, kept] int32,
    ascending."""
    block_map = _allocate_map(scores, kept)
    columns = scores.shape[3]
    block = next_power_of_2(columns)
    launch_kernel(
        _keep_largest_kernel,
        (block_map.shape[:3].numel(),),
        scores.contiguous(),
        block_map,
        columns,
        kept,
        BLOCK=block,
        num_warps=1 if block <= 1024 else 4 if block <= 2048 else 16,  # a single warp waits for no other
    )
    return block_map


@_keep_largest.register_fake
def _allocate_map(scores, kept):
    return scores.new_empty((*scores.shape[:3], kept), dtype=torch.int32)


@triton.jit(do_not_specialize=["rows", "columns"])
def _block_scores_kernel(
    pooled_q, pooled_k, scores, rows, columns, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program computes BLOCK × BLOCK scores of one head."""
    head = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, HEAD_DIM)
    is_row, is_column = (row < rows)[:, None], (column < columns)[:, None]
    q = tl.load(pooled_q + head * rows * HEAD_DIM + row[:, None] * HEAD_DIM + d[None, :], mask=is_row, other=0.0)
    k = tl.load(
        pooled_k + head * columns * HEAD_DIM + column[:, None] * HEAD_DIM + d[None, :], mask=is_column, other=0.0
    )
    corner = scores + head * rows * columns
    places = row[:, None] * columns + column[None, :]
    tl.store(corner + places, tl.dot(q, k.T), mask=is_row & (column < columns)[None, :])


@triton.jit(do_not_specialize=["columns", "kept"])
def _keep_largest_kernel(scores, block_map, columns, kept, BLOCK: tl.constexpr):
    """One program lists the kept columns of one row."""
    tl.static_assert(BLOCK < 2**15, "a row's counts must fit in halves of an int32")
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_column = column < columns
    values = tl.load(scores + row * columns + column, mask=is_column, other=0.0) + 0.0  # makes -0.0 into 0.0
    # Map floats to integers of the same order. The bits of negative floats count down, so they are flipped.
    bits = values.to(tl.int32, bitcast=True)
    order = tl.where(is_column, bits ^ ((bits >> 31) & WITHOUT_SIGN), LOWEST)
    lowest = tl.where(tl.sum((order >= 0).to(tl.int32)) >= kept, 0, LOWEST)
    threshold = largest_threshold(order, 1, kept, lowest)
    above = order > threshold
    equal = (order == threshold) & is_column
    room = kept - tl.sum(above.to(tl.int32))
    counts = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << HALF), 0)  # two counts in one integer, in its halves
    equal_count = counts >> HALF
    chosen = above | (equal & (equal_count <= room))
    place = (counts & LOW_HALF) + tl.minimum(equal_count, room) - 1
    tl.store(block_map + row * kept + place, column, mask=chosen)
