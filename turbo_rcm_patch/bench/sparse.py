"""Sparse-linear attention for `verify`: an oracle of the same computation, and the choice of key blocks as a part.

Rounding decides between two key blocks that matter about equally. Another block gives another result, and its distance
says nothing about the error. So all compared attentions keep the key blocks that the oracle chooses. The quality of a
patched block's own choice is checked separately.
"""

from __future__ import annotations

import torch
from torch import nn

from .. import kernels
from ..kernels.sparse_linear.sparse_linear_reference import pool
from ..patching.families import blocks_like
from ..patching.steps.sparse_linear import SparseAttnProcessor, block_sizes, is_sparse


def sparse_self_attention(block: nn.Module) -> nn.Module | None:
    """Return the self-attention of a block of any family if it is sparse-linear, else None."""
    blocks = blocks_like(block)
    attn = None if blocks is None else blocks.self_attention_of(block)
    return attn if attn is not None and is_sparse(attn) else None


def best_choice(processor: SparseAttnProcessor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the key blocks to keep for the oracle's q and k [B, S, H, D]."""
    block_q, block_k = block_sizes(processor, q.device)
    kept = kernels.kept_blocks(q.shape[1], block_k, processor.topk).count
    return kernels.sparse_block_map(q, k, kept, block_q, block_k)


def choice_error(processor: SparseAttnProcessor, q: torch.Tensor, k: torch.Tensor, dtype: torch.dtype) -> float:
    """Return how much of the scores q̄ k̄ the patched block's choice loses, with the oracle's q and k rounded to dtype.

    This is the largest loss over all lists of kept blocks, per kept block and relative to |q̄| · max |k̄|, where k̄ has
    its mean subtracted.
    """
    q, k = q.to(dtype), k.to(dtype)
    sizes = block_sizes(processor, q.device)
    best = best_choice(processor, q.float(), k.float())
    ours = kernels.chosen_key_blocks(q, k, best.shape[-1], *sizes, processor.implementation)
    pooled_q, pooled_k = pool(q.double(), sizes[0]), pool(k.double(), sizes[1])
    pooled_k = pooled_k - k.double().mean(1)[:, :, None]
    scores = pooled_q @ pooled_k.mT
    lost = scores.gather(-1, best.long()).sum(-1) - scores.gather(-1, ours.long()).sum(-1)
    scale = best.shape[-1] * pooled_q.norm(dim=-1) * pooled_k.norm(dim=-1).amax(-1, keepdim=True)
    return (lost / scale.clamp(min=torch.finfo(torch.float32).tiny)).max().item()
