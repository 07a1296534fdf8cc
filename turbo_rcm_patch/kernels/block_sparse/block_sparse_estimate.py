"""The estimated shares p of block-sparse attention on a GPU: one kernel for sm_80 to sm_120.

    weights = softmax(q̄ k̄ᵀ · scale + log(length of each part of keys))     for each part of queries
    p       = weights summed over the parts of a block of keys, and averaged over the tokens of a block of queries

q̄, k̄ [B, H, parts, D] are the means of parts, p is [B, H, QB, KB]. block_sparse_reference.py defines it. A program goes
over the means of k twice: first for the sums of its softmax, then for p. So no matrix over pairs of parts is written.
It takes several blocks of queries, so that fewer programs read the means of k: for 12 heads, 32,760 tokens and blocks
of 192 queries, 264 programs read 1,024 means.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..attention.attention_tiles import LOG2_E
from ..dispatch import kernel_op
from ..launch import launch_kernel
from ..sizes import cdiv, next_power_of_2
from .block_sparse_reference import part_size


@kernel_op("estimate_blocks")
def estimate_blocks(
    pooled_q: torch.Tensor, pooled_k: torch.Tensor, scale: float, tokens: int, block_q: int, block_k: int
) -> torch.Tensor:
    """Return p [B, H, QB, KB] in fp32, from the means of parts of blocks [B, H, parts, D] of one dtype.

    D and the number of parts in a block of keys must be powers of two. The reference's `estimate` rounds scores and
    weights to the means' dtype; this does not.
    """
    shares = _allocate_shares(pooled_q, pooled_k, scale, tokens, block_q, block_k)
    batch, heads, query_blocks, _ = shares.shape
    part_q, part_k = part_size(block_q), part_size(block_k)
    padded = next_power_of_2(block_q // part_q)
    # Without tensor cores, larger tiles of fp32 need more registers than there are.
    rows, columns = (16, 16) if pooled_q.dtype == torch.float32 else (64, 64)
    launch_kernel(
        _estimate_kernel,
        (cdiv(query_blocks, rows // padded), heads, batch),
        pooled_q.contiguous(),
        pooled_k.contiguous(),
        shares,
        tokens,
        scale * LOG2_E,
        QUERIES=block_q,
        KEYS=block_k,
        QUERY_PART=part_q,
        KEY_PART=part_k,
        PADDED=padded,
        HEAD_DIM=pooled_q.shape[3],
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )
    return shares


@estimate_blocks.register_fake
def _allocate_shares(pooled_q, pooled_k, scale, tokens, block_q, block_k):
    shape = *pooled_q.shape[:2], cdiv(tokens, block_q), cdiv(tokens, block_k)
    return pooled_q.new_empty(shape, dtype=torch.float32)


@triton.jit(do_not_specialize=["tokens"])
def _estimate_kernel(
    pooled_q, pooled_k, shares, tokens, scale_log2, QUERIES: tl.constexpr, KEYS: tl.constexpr, QUERY_PART: tl.constexpr,
    KEY_PART: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program computes p for ROWS / PADDED blocks of queries of one head, from COLUMNS parts of keys at a time.

    PADDED: rows for the parts of a block of queries, a power of two.
    """
    PARTS: tl.constexpr = QUERIES // QUERY_PART
    KEY_PARTS: tl.constexpr = KEYS // KEY_PART
    BLOCKS: tl.constexpr = ROWS // PADDED
    query_blocks = tl.cdiv(tokens, QUERIES)
    key_blocks = tl.cdiv(tokens, KEYS)
    of_head = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    pooled_q += of_head * query_blocks * (PARTS * HEAD_DIM)
    pooled_k += of_head * key_blocks * (KEY_PARTS * HEAD_DIM)
    shares += of_head * query_blocks * key_blocks

    row = tl.arange(0, ROWS)
    query_block = tl.program_id(0) * BLOCKS + row // PADDED
    part = row % PADDED
    is_part = (part < PARTS) & (query_block < query_blocks)
    rows = (query_block * PARTS + part)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    q_tile = tl.load(pooled_q + rows, mask=is_part[:, None], other=0.0)

    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    for first in tl.range(0, key_blocks * KEY_PARTS, COLUMNS):
        scores = _scores(q_tile, pooled_k, first, tokens, key_blocks * KEY_PARTS, scale_log2, KEY_PART, COLUMNS)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        row_sum = row_sum * tl.exp2(row_max - new_max) + tl.sum(tl.exp2(scores - new_max[:, None]), 1)
        row_max = new_max

    in_block = tl.minimum(tl.maximum(tokens - query_block * QUERIES, 1), QUERIES)
    in_part = tl.minimum(tl.maximum(tokens - query_block * QUERIES - part * QUERY_PART, 0), QUERY_PART)
    factor = tl.where(is_part, in_part.to(tl.float32) / in_block, 0.0) / row_sum
    out_block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    for first in tl.range(0, key_blocks * KEY_PARTS, COLUMNS):
        scores = _scores(q_tile, pooled_k, first, tokens, key_blocks * KEY_PARTS, scale_log2, KEY_PART, COLUMNS)
        weights = tl.exp2(scores - row_max[:, None]) * factor[:, None]
        weights = weights.reshape(BLOCKS, PADDED, COLUMNS // KEY_PARTS, KEY_PARTS)
        key_block = first // KEY_PARTS + tl.arange(0, COLUMNS // KEY_PARTS)
        place = out_block.to(tl.int64)[:, None] * key_blocks + key_block[None, :]
        is_pair = (out_block < query_blocks)[:, None] & (key_block < key_blocks)[None, :]
        tl.store(shares + place, tl.sum(tl.sum(weights, 3), 1), mask=is_pair)


@triton.jit
def _scores(
    q_tile, pooled_k, first, tokens, key_parts, scale_log2, KEY_PART: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Return the scores in base 2 of COLUMNS parts of keys from ``first`` on, with the logarithm of their length. It is
    -inf for parts without tokens."""
    HEAD_DIM: tl.constexpr = q_tile.shape[1]
    part = first + tl.arange(0, COLUMNS)
    rows = part[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    k_tile = tl.load(pooled_k + rows, mask=(part < key_parts)[:, None], other=0.0)
    length = tl.minimum(tl.maximum(tokens - part * KEY_PART, 0), KEY_PART).to(tl.float32) / KEY_PART
    return tl.dot(q_tile, k_tile.T, input_precision="ieee") * scale_log2 + tl.log2(length)[None, :]
