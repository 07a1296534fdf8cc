"""The choice of the key blocks that block-sparse attention keeps, on a GPU: sm_80 to sm_120.

    means of parts of q, k and v    a kernel, one read of each
    p of the definition             a kernel (block_sparse_estimate.py)
    the lists                       a kernel that holds a row of p in registers and finds its threshold bit by bit

Without the last, p would have to be sorted, which takes longer than all the rest.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ..dispatch import kernel_op
from ..launch import launch_kernel
from ..sizes import next_power_of_2
from ..sparse_linear.threshold import largest_threshold
from .block_sparse_estimate import estimate_blocks
from .block_sparse_reference import Lists, part_size, parts_of


def choose_lists(
    pooled_q: torch.Tensor,
    pooled_k: torch.Tensor,
    scale: float,
    tokens: int,
    mass: float,
    block_q: int,
    block_k: int,
) -> Lists:
    """Return the Lists of kept blocks, from the means of parts of blocks [B, H, parts, D] of one dtype."""
    shares = estimate_blocks(pooled_q, pooled_k, scale, tokens, block_q, block_k)
    return Lists(*_keep(shares, mass, block_q, block_k))


@kernel_op("pool_parts")
def pool_parts(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    tokens: int,
    block: int,
    size: int,
    tokens_per_scale: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the means of x [B, T, H, D] over parts of blocks, as the reference's `pool` does: [B, H, parts, D].

    tokens: the number of tokens among the T. x must be zero after them. size: tokens of a part.
    scale: [B, ⌈tokens / tokens_per_scale⌉, H] fp32, multiplied with x, or None.
    """
    means = _allocate_means(x, scale, tokens, block, size, tokens_per_scale, dtype)
    launch_kernel(
        _pool_parts_kernel,
        (means.shape[2], means.shape[1], means.shape[0]),
        x,
        scale,
        means,
        tokens,
        x.shape[1],
        *x.stride(),
        *((0, 0, 0) if scale is None else scale.stride()),
        tokens_per_scale,
        HEAD_DIM=x.shape[3],
        SIZE=size,
        num_warps=4 if size * x.shape[3] <= 8192 else 8,
    )
    return means


@pool_parts.register_fake
def _allocate_means(x, scale, tokens, block, size, tokens_per_scale, dtype):
    shape = x.shape[0], x.shape[2], parts_of(tokens, block, size), x.shape[3]
    return x.new_empty(shape, dtype=dtype)


def pool_estimated(
    x: torch.Tensor, block: int, dtype: torch.dtype, scale: torch.Tensor | None = None, tokens_per_scale: int = 1
) -> torch.Tensor:
    """Return the means of x [B, S, H, D] over the parts of blocks that the estimate uses."""
    return pool_parts(x, scale, x.shape[1], block, part_size(block), tokens_per_scale, dtype)


@kernel_op("keep_blocks")
def _keep(
    shares: torch.Tensor, mass: float, block_q: int, block_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the Lists for p [B, H, QB, KB] in fp32, as a tuple."""
    block_map, counts, left, kept_share = _allocate_lists(shares, mass, block_q, block_k)
    batch, heads, query_blocks, key_blocks = shares.shape
    block = next_power_of_2(key_blocks)
    launch_kernel(
        _keep_kernel,
        (query_blocks, heads, batch),
        shares.contiguous(),
        block_map,
        counts,
        left,
        kept_share,
        heads,
        key_blocks,
        mass if mass < 1 else math.inf,  # no sum reaches infinity: all blocks are kept, however small
        QUERIES=block_q,
        KEYS=block_k,
        BLOCK=block,
        num_warps=4 if block <= 2048 else 16,
    )
    return block_map, counts, left, kept_share


@_keep.register_fake
def _allocate_lists(shares, mass, block_q, block_k):
    per_row = shares.shape[:3]
    return (
        shares.new_empty(shares.shape, dtype=torch.int32),
        shares.new_empty(per_row, dtype=torch.int32),
        shares.new_empty(shares.shape),
        shares.new_empty(per_row),
    )


@triton.jit(do_not_specialize=["tokens", "limit", "tokens_per_scale"])
def _pool_parts_kernel(
    x, scale, means, tokens, limit, stride_b, stride_s, stride_h, stride_d, scale_stride_b, scale_stride_s,
    scale_stride_h, tokens_per_scale, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One program averages one part of one head. limit: the rows of x. scale may be None."""
    part = tl.program_id(0)
    head = tl.program_id(1)
    sample = tl.program_id(2).to(tl.int64)
    rows = part * SIZE + tl.arange(0, SIZE)
    columns = tl.arange(0, HEAD_DIM)
    is_row = rows < limit
    corner = x + sample * stride_b + head.to(tl.int64) * stride_h
    offsets = rows.to(tl.int64)[:, None] * stride_s + columns.to(tl.int64)[None, :] * stride_d
    tile = tl.load(corner + offsets, mask=is_row[:, None], other=0.0).to(tl.float32)
    if scale is not None:
        of_row = scale + sample * scale_stride_b + head * scale_stride_h + rows // tokens_per_scale * scale_stride_s
        tile *= tl.load(of_row, mask=is_row, other=0.0)[:, None]
    count = tl.minimum(tl.maximum(tokens - part * SIZE, 1), SIZE)
    row = (sample * tl.num_programs(1) + head) * tl.num_programs(0) + part
    tl.store(means + row * HEAD_DIM + columns, tl.sum(tile, 0) / count)


@triton.jit(do_not_specialize=["heads", "key_blocks"])
def _keep_kernel(
    shares, block_map, counts, left, kept_share, heads, key_blocks, mass,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program lists the kept blocks of keys for one block of queries of one head."""
    query_block = tl.program_id(0)
    row = (tl.program_id(2).to(tl.int64) * heads + tl.program_id(1)) * tl.num_programs(0) + query_block
    block = tl.arange(0, BLOCK)
    is_block = block < key_blocks
    share = tl.load(shares + row * key_blocks + block, mask=is_block, other=0.0)
    bits = share.to(tl.int32, bitcast=True)  # the bits of non-negative floats have the order of the floats
    threshold = largest_threshold(bits, share, mass * tl.sum(share), tl.full((), 0, tl.int32))
    own = (block * KEYS < query_block * QUERIES + QUERIES) & (query_block * QUERIES < block * KEYS + KEYS)
    kept = ((bits >= threshold) | own) & is_block
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(block_map + row * key_blocks + place, block, mask=kept)
    tl.store(counts + row, tl.sum(kept.to(tl.int32)))
    left_share = tl.where(kept, 0.0, share)
    tl.store(left + row * key_blocks + block, left_share, mask=is_block)
    tl.store(kept_share + row, 1.0 - tl.sum(left_share))
