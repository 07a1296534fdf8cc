"""Block-sparse attention without training, in plain torch: the definition, the oracle of tests, and the path where no
kernel applies.

    p    = the share that each block of keys is estimated to have of a block of queries' attention      [QB, KB]
    kept = the blocks of keys with the largest p, until they hold `mass` of it; and those with the queries' own tokens
    out  = (1 - Σ p_left) · softmax(q kᵀ / √D) v over the kept blocks + Σ p_left · (mean of v in the block)

q, k, v, out [B, S, H, D]. The estimate is attention among the means of parts of blocks, mostly of 32 tokens, of q and
of k less its mean over the tokens: each part's softmax is summed over its blocks of keys, so that parts of a block of
queries that look at different blocks keep both. What is left out enters with its estimated share, which is at most
1 - mass.

Related: SpargeAttn (Zhang et al. 2025) keeps blocks by products of means; Sol-Attn (2026) adds a correction for the
blocks that are left out. What each part here buys is in docs/designs.md.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..attention_8bit.attention_8bit_reference import attend as attend_8bit
from ..attention_8bit.attention_8bit_reference import per_token, untranspose
from ..quantized import FP8

LN_2 = math.log(2)
SCORES = 1 << 24  # that are computed together at a time


class Lists(NamedTuple):
    """Which blocks of keys are kept of B samples, H heads and QB blocks of queries, out of KB, and what stands for the
    others.

    block_map: [B, H, QB, KB] int32, the kept ones first and ascending. counts: [B, H, QB] int32, how many are kept.
    left: [B, H, QB, KB] fp32 (or wider), p of the blocks that are left out, else 0. kept_share: [B, H, QB], 1 - Σ left.
    """

    block_map: torch.Tensor
    counts: torch.Tensor
    left: torch.Tensor
    kept_share: torch.Tensor


def part_size(block: int) -> int:
    """Tokens of a part of a block: 32; of a block of 32, or that they do not divide, half; of an odd one all."""
    if block > 32 and block % 32 == 0:
        return 32
    return block // 2 if block % 2 == 0 else block


def lengths(tokens: int, size: int, count: int, device: torch.device) -> torch.Tensor:
    """How many of so many tokens are in each of `count` parts of a size; 0 behind the last."""
    return (tokens - size * torch.arange(count, device=device)).clamp(0, size)


def parts_of(tokens: int, block: int, size: int) -> int:
    """How many parts of a size whole blocks have that hold so many tokens."""
    return -(-tokens // block) * (block // size)


def pool(x: torch.Tensor, block: int, size: int) -> torch.Tensor:
    """The means of x [B, S, H, D] over parts of blocks: [B, H, parts_of, D], fp32 or wider; 0 of a part without tokens.
    size: tokens of a part."""
    wide = torch.promote_types(x.dtype, torch.float32)
    count = parts_of(x.shape[1], block, size)
    padded = F.pad(x, (0, 0, 0, 0, 0, count * size - x.shape[1]))
    sums = padded.unflatten(1, (count, size)).sum(2, dtype=wide).transpose(1, 2)
    return sums / lengths(x.shape[1], size, count, x.device).clamp_min(1)[:, None]


def less_mean(pooled_k: torch.Tensor, tokens: int, size: int) -> torch.Tensor:
    """Means of parts of k [B, H, parts, D] less that over all tokens, which no softmax sees."""
    weights = lengths(tokens, size, pooled_k.shape[2], pooled_k.device)[:, None] / tokens
    return pooled_k - (pooled_k * weights).sum(2, keepdim=True)


def estimate(
    pooled_q: torch.Tensor, pooled_k: torch.Tensor, scale: float, tokens: int, block_q: int, block_k: int
) -> torch.Tensor:
    """p, [B, H, QB, KB] in fp32 or wider, from the means of parts of blocks [B, H, parts, D] of one dtype.

    Of matrices of all parts, which are large, no more than two are kept at a time.
    """
    part_q, part_k = part_size(block_q), part_size(block_k)
    of_queries = lengths(tokens, part_q, pooled_q.shape[2], pooled_q.device)
    of_keys = lengths(tokens, part_k, pooled_k.shape[2], pooled_k.device)
    scores = (pooled_q * scale) @ pooled_k.mT
    last = slice(-(block_k // part_k), None)  # parts of the last block, which alone may have fewer tokens than others
    scores[..., last] += (of_keys[last] / part_k).log().to(scores.dtype)
    scores = scores.softmax(-1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    shares = scores.unflatten(-1, (-1, block_k // part_k)).sum(-1, dtype=wide)
    del scores
    of_queries = of_queries.unflatten(0, (-1, block_q // part_q))
    shares = shares.unflatten(2, (-1, block_q // part_q))
    shares *= (of_queries / of_queries.sum(-1, keepdim=True))[..., None]
    return shares.sum(3)


def keep(shares: torch.Tensor, mass: float, block_q: int, block_k: int) -> Lists:
    """The blocks to keep by p. Of blocks with equal p all are kept or none; with mass = 1 all."""
    ordered = shares.double().sort(-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    needed = (before < mass * ordered.sum(-1, keepdim=True)).sum(-1, keepdim=True)
    kept = shares.double() >= ordered.gather(-1, needed.clamp_min(1) - 1)  # of NaN none is needed
    kept = kept | _own_blocks(*shares.shape[2:], block_q, block_k, shares.device) | (mass == 1)
    left = shares.masked_fill(kept, 0)
    block_map = (~kept).int().sort(stable=True, dim=-1).indices.int()
    return Lists(block_map, kept.sum(-1, dtype=torch.int32), left, 1 - left.sum(-1))


def _own_blocks(query_blocks: int, key_blocks: int, block_q: int, block_k: int, device: torch.device) -> torch.Tensor:
    """[QB, KB]: whether a block of queries and one of keys share tokens."""
    queries = torch.arange(query_blocks, device=device)[:, None] * block_q
    keys = torch.arange(key_blocks, device=device) * block_k
    return (keys < queries + block_q) & (queries < keys + block_k)


def lists(q: torch.Tensor, k: torch.Tensor, mass: float, block_q: int, block_k: int) -> Lists:
    """What is kept of q and k [B, S, H, D], with the softmax's scale 1/√D."""
    tokens = q.shape[1]
    pooled_q = pool(q, block_q, part_size(block_q))
    pooled_k = less_mean(pool(k, block_k, part_size(block_k)), tokens, part_size(block_k))
    pooled = (x.to(q.dtype) for x in (pooled_q, pooled_k))
    return keep(estimate(*pooled, q.shape[3] ** -0.5, tokens, block_q, block_k), mass, block_q, block_k)


def block_sparse_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mass: float, block_q: int, block_k: int
) -> torch.Tensor:
    """out of the formulas above. Differentiable in q, k and v, with what is kept and its shares as constants."""
    found = lists(q.detach(), k.detach(), mass, block_q, block_k)

    def attend(queries, keys, values, is_kept):
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=is_kept)

    return _attend(q, k, v, found, block_q, block_k, attend).to(q.dtype)


def block_sparse_attention_8bit(
    q: torch.Tensor,
    q_scale: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    v: torch.Tensor,
    v_scale: torch.Tensor,
    dtype: torch.dtype,
    mass: float,
    block_q: int,
    block_k: int,
) -> torch.Tensor:
    """The same of a QuantizedQKV's tensors, in dtype; the estimate's means are rounded to it."""
    tokens = q.shape[1]
    queries = q.float() * q_scale[..., None]  # of scores in base 2
    keys = k.float() * per_token(k_scale, tokens)[..., None]
    values = (untranspose(v, tokens) if v.dtype == FP8 else v.float()) * v_scale[:, None]
    pooled = (pool(x, block, part_size(block)).to(dtype) for x, block in ((queries, block_q), (keys, block_k)))
    found = keep(estimate(*pooled, LN_2, tokens, block_q, block_k), mass, block_q, block_k)

    def attend(queries, keys, values, is_kept):
        return attend_8bit(queries, keys, values / v_scale[:, :, None], v.dtype, is_kept) * v_scale[:, :, None]

    return _attend(queries, keys, values, found, block_q, block_k, attend).to(dtype)


def _attend(q, k, v, found: Lists, block_q, block_k, attend) -> torch.Tensor:
    """out, of some blocks of queries at a time. attend: from queries [B, H, M, D], all keys and values and which of
    them are kept, [B, H, M, S], to attention."""
    B, S, H, _ = q.shape
    kept = _is_listed(found)
    left_value = found.left @ pool(v, block_k, block_k).to(found.left.dtype)
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    blocks_at_a_time = max(1, SCORES // (B * H * S * block_q))
    outputs = []
    for first in range(0, kept.shape[2], blocks_at_a_time):
        of_block = torch.arange(first * block_q, min(S, (first + blocks_at_a_time) * block_q), device=q.device)
        block = of_block // block_q
        is_kept = kept[:, :, block].repeat_interleave(block_k, -1)[..., :S]
        attended = attend(queries[:, :, of_block], keys, values, is_kept)
        outputs.append(attended * found.kept_share[:, :, block, None] + left_value[:, :, block])
    return torch.cat(outputs, 2).transpose(1, 2)


def _is_listed(found: Lists) -> torch.Tensor:
    """[B, H, QB, KB]: whether a block is among the first `counts` of its list."""
    place = torch.arange(found.block_map.shape[3], device=found.counts.device)
    listed = place < found.counts[..., None]
    return torch.zeros_like(listed).scatter(-1, found.block_map.long(), listed)
