"""Sparse-linear attention in plain torch: its definition, the tests' oracle, and the path when no kernel can run.

    o_s = softmax(q kᵀ / √D) v                        over the key blocks that are kept for the query's block
    o_l = φ(q) Σ φ(k)ᵀ v / (ε + φ(q) Σ φ(k)ᵀ)         φ: softmax over D; both sums over all tokens
    out = o_s + o_l Wᵀ + b                            W [D, D] and b [D], proj_l, are the same for all heads
    out = o_s                                         without proj_l

q, k, v, out [B, S, H, D]. The key blocks whose mean has the largest product with the mean of the query's block are kept
(Zhang et al. 2025, SLA, sections 3 and 4). The linear branch covers all tokens, not only those that the softmax leaves
out, as in TurboDiffusion. TurboDiffusion rounds every step to bf16. Here each of the three results is rounded once to
q's dtype. The products of means are not rounded, which decides between blocks that would tie after rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ..attention.sdpa import PYTORCHS
from ..attention_8bit.attention_8bit_reference import attend, per_token, quantize_qkv, straight_through, untranspose
from ..quantized import FP8

EPSILON = 1e-5
GATHERED_VALUES = 1 << 24  # of the gathered keys, at a time


class KeptBlocks(NamedTuple):
    """The number of key blocks kept for every block of queries.

    raised: True if count is 1 only because the published rule keeps none, which would give a softmax of 0 / 0.
    """

    count: int
    raised: bool


def kept_blocks(tokens: int, block_k: int, topk: float) -> KeptBlocks:
    """Return the share topk of ⌈tokens / block_k⌉ key blocks, rounded down, but at least one."""
    blocks = -(-tokens // block_k)
    published = min(blocks, int(topk * blocks))
    return KeptBlocks(max(1, published), published < 1)


def sparse_block_map(q: torch.Tensor, k: torch.Tensor, kept: int, block_q: int, block_k: int) -> torch.Tensor:
    """Return the key blocks that are kept, [B, H, ⌈S / block_q⌉, kept] int32, ascending."""
    q, k = q.detach(), k.detach()
    mean = k.mean(1, dtype=_wide(k))[:, :, None]
    return choose_blocks(pool(q, block_q).to(q.dtype), (pool(k, block_k) - mean).to(q.dtype), kept)


def pool(x: torch.Tensor, block: int) -> torch.Tensor:
    """Return the mean of x [B, S, H, D] over each block of tokens: [B, H, blocks, D]. The last block may be shorter."""
    blocks = _blocks(x, block)
    lengths = torch.full((blocks.shape[2], 1), block, device=x.device)
    lengths[-1] -= -x.shape[1] % block
    return blocks.sum(3, dtype=_wide(x)) / lengths


def choose_blocks(pooled_q: torch.Tensor, pooled_k: torch.Tensor, kept: int) -> torch.Tensor:
    """Do what `sparse_block_map` does, from the blocks' means [B, H, blocks, D]."""
    return block_scores(pooled_q, pooled_k).topk(kept, sorted=False).indices.sort(-1).values.int()


def block_scores(pooled_q: torch.Tensor, pooled_k: torch.Tensor) -> torch.Tensor:
    """Return the scores that blocks are chosen by, [B, H, ⌈S / block_q⌉, ⌈S / block_k⌉] in fp32, or fp64 for fp64."""
    return pooled_q.to(_wide(pooled_q)) @ pooled_k.to(_wide(pooled_k)).mT


def sparse_linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    proj_weight: torch.Tensor | None,
    proj_bias: torch.Tensor | None,
    block_map: torch.Tensor,
    block_q: int,
    block_k: int,
) -> torch.Tensor:
    """Return ``out`` of the formulas above for block_map [B, H, ⌈S / block_q⌉, kept]. Differentiable in all but
    block_map."""
    output = sparse_attention(q, k, v, block_map, block_q, block_k, _attend_exactly)
    return _with_linear_branch(output, q, k, v, proj_weight, proj_bias)


def sparse_linear_attention_8bit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    proj_weight: torch.Tensor | None,
    proj_bias: torch.Tensor | None,
    block_map: torch.Tensor,
    block_q: int,
    block_k: int,
    v_format: torch.dtype,
) -> torch.Tensor:
    """Return sparse-linear attention with the softmax's q, k, v in 8 bits, as quantize_qkv has them. The linear branch
    is the exact one. Gradients are those of the exact formulas at the rounded values.

    TurboDiffusion's 8 bits differ. There a block of q or of k shares a scale; here a row of q, or KEY_GROUP tokens of
    k. There halves are rounded away from zero, 1e-7 is added to scales, v is scaled to 2.25 and not to 448, and on some
    GPUs PV is summed in fp16.
    """
    exact, rounded = _scaled(q, k, v), _quantized(q, k, v, v_format)
    q8, k8, v8 = (straight_through(*pair) for pair in zip(exact, rounded, strict=True))

    def attend_8bit(queries, keys, values, is_key):
        return attend(queries, keys, values, v_format, is_key)

    output = sparse_attention(q8, k8, v8, block_map, block_q, block_k, attend_8bit).to(q.dtype)
    return _with_linear_branch(output, q, k, v, proj_weight, proj_bias)


def _with_linear_branch(output, q, k, v, proj_weight, proj_bias):
    return output if proj_weight is None else output + project(linear_attention(q, k, v), proj_weight, proj_bias)


def linear_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return o_l, [B, S, H, D]."""
    phi_q, phi_k = (x.transpose(1, 2).to(_wide(x)).softmax(-1) for x in (q, k))
    state = phi_k.mT @ v.transpose(1, 2).to(phi_k.dtype)
    total = phi_k.sum(2)[..., None]
    return ((phi_q @ state) / (EPSILON + phi_q @ total)).transpose(1, 2).to(q.dtype)


def project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Apply proj_l in x's dtype."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_map: torch.Tensor,
    block_q: int,
    block_k: int,
    attend: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Return o_s, [B, S, H, D], computed for some blocks of queries at a time, with their kept keys gathered.

    attend: (queries [B, H, n, block_q, D], keys and values [B, H, n, kept · block_k, D], mask) -> their attention. The
        mask [B, H, n, 1, kept · block_k] is True for entries that are keys.
    """
    B, S, H, D = q.shape
    queries, keys, values = _blocks(q, block_q), _blocks(k, block_k), _blocks(v, block_k)
    sample = torch.arange(B, device=q.device)[:, None, None, None]
    head = torch.arange(H, device=q.device)[:, None, None]
    within = torch.arange(block_k, device=q.device)

    def attend_part(queries, keys, values, kept):
        is_key = (kept[..., None] * block_k + within < S).flatten(3)[..., None, :]
        return attend(queries, *(x[sample, head, kept].flatten(3, 4) for x in (keys, values)), is_key)

    at_a_time = max(1, GATHERED_VALUES // (B * H * block_map.shape[3] * block_k * D))
    parts = []
    for some, kept in zip(queries.split(at_a_time, 2), block_map.split(at_a_time, 2), strict=True):
        # Without checkpoints the gathered keys of all queries would be kept for the backward.
        parts.append(_checkpointed(attend_part, some, keys, values, kept.long()))
    return torch.cat(parts, 2).flatten(2, 3)[:, :, :S].transpose(1, 2)


def _checkpointed(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)
    return function(*tensors)


def _attend_exactly(queries, keys, values, is_key):
    merged = (x.flatten(0, 1) for x in (queries, keys, values))  # PyTorch's fast kernels take four dimensions
    output = PYTORCHS(*merged, attn_mask=is_key.flatten(0, 1))
    return output.view(queries.shape)


def _scaled(q, k, v):
    """Return the values that are quantised: q times the softmax's scale in base 2, k minus its mean, and v. All are
    fp32 [B, S, H, D]."""
    k = k.float()
    return q.float() * _scale_log2(q), k - k.mean(1, keepdim=True), v.float()


@torch.no_grad()
def _quantized(q, k, v, v_format):
    """Return the values of `_scaled`, rounded to 8 bits."""
    heads, tokens = q.shape[2], q.shape[1]
    flat = (x.flatten(2) for x in (q, k, v))
    q8, q_scale, k8, k_scale, v8, v_scale = quantize_qkv(
        *flat, None, None, None, None, heads, 0.0, _scale_log2(q), v_format
    )
    values = untranspose(v8, tokens) if v_format == FP8 else v8.float()
    return q8 * q_scale[..., None], k8 * per_token(k_scale, tokens)[..., None], values * v_scale[:, None]


def _scale_log2(q: torch.Tensor) -> float:
    return q.shape[-1] ** -0.5 * math.log2(math.e)


def _blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """Return x [B, S, H, D] as [B, H, blocks, block, D], padded with zeros after the last token."""
    padded = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % block))
    return padded.transpose(1, 2).unflatten(2, (-1, block))


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
