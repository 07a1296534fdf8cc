"""Sparse-linear attention like TurboDiffusion's module, in PyTorch with flex_attention instead of its CUDA kernel.

This rival runs wherever PyTorch does."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

EPSILON = 1e-5


def sla_in_pytorch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    kept: int,
    block_q: int,
    block_k: int,
) -> torch.Tensor:
    """Return the attention [B, S, H, D] of q, k, v [B, S, H, D] with proj_l's weight [D, D] and bias [D], of one dtype.

    It is meant to be compiled. Unlike TurboDiffusion's, the products of blocks' means are not rounded to 16 bits, so
    that it keeps the same blocks as `kernels.sparse_linear_attention`.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    softmax = flex_attention(q, k, v, block_mask=_block_mask(q, k, kept, block_q, block_k))
    phi_q, phi_k = q.softmax(-1), k.softmax(-1)
    state, total = phi_k.mT @ v, phi_k.sum(2, keepdim=True)
    linear = (phi_q @ state) / (EPSILON + (phi_q * total).sum(3, keepdim=True))
    return (softmax + F.linear(linear, weight, bias)).transpose(1, 2)


def _block_mask(q: torch.Tensor, k: torch.Tensor, kept: int, block_q: int, block_k: int) -> BlockMask:
    """Return the key blocks whose means have the largest products with the query blocks' means. q, k [B, H, S, D]."""
    pooled_q = _pool(q, block_q).to(q.dtype)
    pooled_k = (_pool(k, block_k) - k.mean(2, keepdim=True, dtype=torch.float32)).to(k.dtype)
    scores = pooled_q.float() @ pooled_k.float().mT
    chosen = scores.topk(kept, sorted=False).indices
    is_kept = torch.zeros_like(scores, dtype=torch.bool).scatter(3, chosen, True)

    def mask_mod(batch, head, query, key):
        return is_kept[batch, head, query // block_q, key // block_k]

    indices = F.pad(chosen, (0, scores.shape[3] - kept)).int()
    counts = torch.full_like(indices[..., 0], kept)
    none = torch.zeros_like(counts), torch.zeros_like(indices)  # of the blocks that are kept in part
    return BlockMask.from_kv_blocks(
        *none,
        counts,
        indices,
        BLOCK_SIZE=(block_q, block_k),
        mask_mod=mask_mod,  # the compiled kernel needs it only for parts of blocks, the uncompiled one for all
        seq_lengths=(q.shape[2], k.shape[2]),
        compute_q_blocks=False,  # for a backward
    )


def _pool(x: torch.Tensor, block: int) -> torch.Tensor:
    """Return the means in fp32 over each block of tokens of x [B, H, S, D], the last of which may be shorter."""
    tokens = x.shape[2]
    sums = F.pad(x, (0, 0, 0, -tokens % block)).unflatten(2, (-1, block)).sum(3, dtype=torch.float32)
    starts = torch.arange(0, tokens, block, device=x.device)
    return sums / (tokens - starts).clamp(max=block)[:, None]
