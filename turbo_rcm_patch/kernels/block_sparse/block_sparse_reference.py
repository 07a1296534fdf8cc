"""Block-sparse attention without training, in plain torch: its definition, the tests' oracle, and the path when no
kernel can run.

    p    = the estimated share of each block of keys in the attention of a block of queries             [QB, KB]
    kept = the blocks of keys with the largest p, until they hold `mass` of it, and those with the queries' own tokens
    out  = (1 - Σ p_left) · softmax(q kᵀ / √D) v over the kept blocks + Σ p_left · (mean of v in the block)

q, k, v, out [B, S, H, D]. The estimate is attention among the means of parts of blocks, mostly of 32 tokens. The means
are those of q, and of k minus its mean over the tokens. The softmax of each part of queries is summed over each block
of keys. If two parts of a block of queries attend to different blocks of keys, both are then kept. The blocks left out
enter the result with their estimated share, which is at most 1 - mass.

Related: SpargeAttn (Zhang et al. 2025) keeps blocks by products of means. Sol-Attn (2026) adds a correction for the
blocks that are left out. docs/designs.md says what each part of this design gains.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..attention.sdpa import PYTORCHS
from ..attention_8bit.attention_8bit_reference import attend as attend_8bit
from ..attention_8bit.attention_8bit_reference import per_token, untranspose
from ..quantized import FP8, round_to

LN_2 = math.log(2)
SCORES = 1 << 24  # computed at a time


class Lists(NamedTuple):
    """The kept blocks of keys for B samples, H heads and QB blocks of queries, out of KB, and the shares of the others.

    block_map: [B, H, QB, KB] int32, the kept blocks first, ascending. counts: [B, H, QB] int32, the number kept.
    left: [B, H, QB, KB] fp32 (or wider), p of the blocks left out, 0 for kept ones. kept_share: [B, H, QB], 1 - Σ left.
    """

    block_map: torch.Tensor
    counts: torch.Tensor
    left: torch.Tensor
    kept_share: torch.Tensor


def part_size(block: int) -> int:
    """Return the tokens of a part of a block: 32 if they divide a larger block, else half of an even block, or all of
    an odd one."""
    if block > 32 and block % 32 == 0:
        return 32
    return block // 2 if block % 2 == 0 else block


def lengths(tokens: int, size: int, count: int, device: torch.device) -> torch.Tensor:
    """Return how many of the tokens are in each of `count` parts of a size; 0 for parts after the last token."""
    return (tokens - size * torch.arange(count, device=device)).clamp(0, size)


def parts_of(tokens: int, block: int, size: int) -> int:
    """Return the number of parts of a size in the whole blocks that cover the tokens."""
    return -(-tokens // block) * (block // size)


def pool(x: torch.Tensor, block: int, size: int) -> torch.Tensor:
    """Return the means of x [B, S, H, D] over parts of blocks: [B, H, parts, D], fp32 or wider. The mean of a part
    without tokens is 0. size: tokens of a part."""
    wide = torch.promote_types(x.dtype, torch.float32)
    count = parts_of(x.shape[1], block, size)
    padded = F.pad(x, (0, 0, 0, 0, 0, count * size - x.shape[1]))
    sums = padded.unflatten(1, (count, size)).sum(2, dtype=wide).transpose(1, 2)
    return sums / lengths(x.shape[1], size, count, x.device).clamp_min(1)[:, None]


def less_mean(pooled_k: torch.Tensor, tokens: int, size: int) -> torch.Tensor:
    """Return the means of parts of k [B, H, parts, D] minus the mean over all tokens, which does not change a
    softmax."""
    weights = lengths(tokens, size, pooled_k.shape[2], pooled_k.device)[:, None] / tokens
    return pooled_k - (pooled_k * weights).sum(2, keepdim=True)


def estimate(
    pooled_q: torch.Tensor, pooled_k: torch.Tensor, scale: float, tokens: int, block_q: int, block_k: int
) -> torch.Tensor:
    """Return p, [B, H, QB, KB] in fp32 or wider, from the means of parts of blocks [B, H, parts, D] of one dtype.

    Matrices over all pairs of parts are large; at most two exist at a time.
    """
    part_q, part_k = part_size(block_q), part_size(block_k)
    of_queries = lengths(tokens, part_q, pooled_q.shape[2], pooled_q.device)
    of_keys = lengths(tokens, part_k, pooled_k.shape[2], pooled_k.device)
    scores = (pooled_q * scale) @ pooled_k.mT
    last = slice(-(block_k // part_k), None)  # the parts of the last block, the only ones that may be shorter
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
    """Return the blocks to keep by p. Blocks with equal p are all kept or all left out. With mass = 1 all are kept."""
    ordered = shares.double().sort(-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    needed = (before < mass * ordered.sum(-1, keepdim=True)).sum(-1, keepdim=True)
    kept = shares.double() >= ordered.gather(-1, needed.clamp_min(1) - 1)  # with NaN, needed is 0
    kept = kept | _own_blocks(*shares.shape[2:], block_q, block_k, shares.device) | (mass == 1)
    left = shares.masked_fill(kept, 0)
    block_map = (~kept).int().sort(stable=True, dim=-1).indices.int()
    return Lists(block_map, kept.sum(-1, dtype=torch.int32), left, 1 - left.sum(-1))


def _own_blocks(query_blocks: int, key_blocks: int, block_q: int, block_k: int, device: torch.device) -> torch.Tensor:
    """Return [QB, KB] bool: True if a block of queries and a block of keys share tokens."""
    queries = torch.arange(query_blocks, device=device)[:, None] * block_q
    keys = torch.arange(key_blocks, device=device) * block_k
    return (keys < queries + block_q) & (queries < keys + block_k)


def lists(q: torch.Tensor, k: torch.Tensor, mass: float, block_q: int, block_k: int) -> Lists:
    """Return the Lists of kept blocks for q and k [B, S, H, D], with the softmax's scale 1/√D."""
    tokens = q.shape[1]
    pooled_q = pool(q, block_q, part_size(block_q))
    pooled_k = less_mean(pool(k, block_k, part_size(block_k)), tokens, part_size(block_k))
    pooled = (x.to(q.dtype) for x in (pooled_q, pooled_k))
    return keep(estimate(*pooled, q.shape[3] ** -0.5, tokens, block_q, block_k), mass, block_q, block_k)


def block_sparse_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mass: float, block_q: int, block_k: int
) -> torch.Tensor:
    """Return ``out`` of the formulas above. Differentiable in q, k and v; the kept blocks and the shares are
    constants."""
    found = lists(q.detach(), k.detach(), mass, block_q, block_k)

    def attend(queries, keys, values, is_kept):
        return PYTORCHS(queries, keys, values, attn_mask=is_kept)

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
    out_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``out`` for a QuantizedQKV's tensors, in dtype. The estimate's means are rounded to dtype.

    With out_scale [B] the result is divided by it and rounded to e4m3.
    """
    tokens = q.shape[1]
    queries = q.float() * q_scale[..., None]  # for scores in base 2
    keys = k.float() * per_token(k_scale, tokens)[..., None]
    values = (untranspose(v, tokens) if v.dtype == FP8 else v.float()) * v_scale[:, None]
    pooled = (pool(x, block, part_size(block)).to(dtype) for x, block in ((queries, block_q), (keys, block_k)))
    found = keep(estimate(*pooled, LN_2, tokens, block_q, block_k), mass, block_q, block_k)

    def attend(queries, keys, values, is_kept):
        return attend_8bit(queries, keys, values / v_scale[:, :, None], v.dtype, is_kept) * v_scale[:, :, None]

    out = _attend(queries, keys, values, found, block_q, block_k, attend)
    return out.to(dtype) if out_scale is None else round_to(out / out_scale[:, None, None, None], FP8)


def _attend(q, k, v, found: Lists, block_q, block_k, attend) -> torch.Tensor:
    """Return ``out``, computed for some blocks of queries at a time.

    attend: a function of queries [B, H, M, D], all keys and values, and the mask of kept keys [B, H, M, S], that
    returns their attention.
    """
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
    """Return [B, H, QB, KB] bool: True if a block of keys is among the first `counts` of its list."""
    place = torch.arange(found.block_map.shape[3], device=found.counts.device)
    listed = place < found.counts[..., None]
    return torch.zeros_like(listed).scatter(-1, found.block_map.long(), listed)
