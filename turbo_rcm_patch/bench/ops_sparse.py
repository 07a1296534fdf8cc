"""The contests of the sparse tiers' attention, in 8 bits as their presets have it. The limits are the tiers'."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .. import kernels
from ..config import PRESETS
from ..kernels.sparse_linear_attention_reference import linear_attention
from .ops import Contest, Draws, attention_oracle
from .ops_quantized import autoregressive


def sparse_linear_attention(
    heads: int, tokens: int, head_dim: int, device: torch.device, compiled: Callable
) -> Contest:
    """Sparse-linear attention to the default share of key blocks. The oracle keeps those that ours chooses: which they
    are among near ties says nothing of what errs."""
    draw = Draws(device)
    q, k, v = (draw(1, tokens, heads, head_dim) for _ in range(3))
    weight, bias = draw(head_dim, head_dim) * head_dim**-0.5, torch.zeros(head_dim, dtype=q.dtype, device=device)
    topk = PRESETS["sparse"].topk
    block_q, block_k = kernels.sparse_block_sizes(device, quantized=True)

    def oracle(rows: torch.Tensor) -> torch.Tensor:
        kept = kernels.kept_blocks(tokens, block_k, topk).count
        of_rows = kernels.chosen_key_blocks(q, k, kept, block_q, block_k)[0][:, rows // block_q].long()
        is_kept = torch.zeros(*of_rows.shape[:2], -(-tokens // block_k), dtype=torch.bool, device=device)
        is_kept = is_kept.scatter(2, of_rows, True).repeat_interleave(block_k, 2)[..., :tokens]
        parts = []
        for head in range(heads):
            queries, keys, values = (x[:, :, [head]].double() for x in (q[:, rows], k, v))
            scores = queries[0, :, 0] @ keys[0, :, 0].T * head_dim**-0.5
            softmax = scores.masked_fill(~is_kept[head], -math.inf).softmax(1) @ values[0, :, 0]
            parts.append(softmax + linear_attention(queries, keys, values)[0, :, 0] @ weight.double().T)
        return torch.stack(parts, 1)[None]

    return Contest(
        ours={
            "sparse_linear_attention": lambda: kernels.sparse_linear_attention(
                q, k, v, weight, bias, topk=topk, block_q=block_q, block_k=block_k, quantized=True
            )
        },
        rivals={},
        oracle=oracle,
        tokens=tokens,
    )


def block_sparse_attention(heads: int, tokens: int, head_dim: int, device: torch.device, compiled: Callable) -> Contest:
    """Block-sparse attention with the default mass. How fast it is depends on what that keeps: of these values, whose
    neighbouring tokens are alike, half of the blocks with an error of 9 %, as of the tiny model's own."""
    draw = Draws(device)

    def values() -> torch.Tensor:
        one_by_one = (autoregressive(draw(1, tokens, 1, head_dim).float(), 0.99) for _ in range(heads))  # little memory
        return torch.cat([head.bfloat16() for head in one_by_one], 2)

    q, k, v = 2 * values(), values(), values()

    def ours() -> torch.Tensor:
        quantized = kernels.quantize_qkv(*(x.flatten(2) for x in (q, k, v)), heads=heads)
        return kernels.block_sparse_attention_8bit(quantized, mass=PRESETS["block_sparse"].mass)

    return Contest(ours={"block_sparse_attention": ours}, rivals={}, oracle=attention_oracle(q, k, v), tokens=tokens)
