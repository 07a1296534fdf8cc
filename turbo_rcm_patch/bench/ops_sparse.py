"""The contests of the sparse tiers' attention, in 8 bits, as in their presets, and in bf16.

The error limits are the tiers'."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .. import kernels
from ..config import PRESETS, SLA_TOPK
from ..kernels.sparse_linear.sparse_linear_reference import linear_attention
from .ops import Contest, Draws, attention_oracle
from .ops_quantized import autoregressive

DENSE = "ours, dense in 8 bits"


def sparse_linear_attention(
    heads: int, tokens: int, head_dim: int, device: torch.device, compiled: Callable
) -> Contest:
    """Sparse-linear attention to the default share of key blocks."""
    draw = Draws(device)
    q, k, v = (draw(1, tokens, heads, head_dim) for _ in range(3))
    weight, bias = sla_projection(draw, head_dim)

    def ours() -> torch.Tensor:
        return kernels.sparse_linear_attention(q, k, v, weight, bias, **sla_options(device))

    return Contest(
        ours={"sparse_linear_attention": ours}, rivals={}, oracle=sla_oracle(q, k, q, k, v, weight), tokens=tokens
    )


def sla_projection(draw: Draws, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight and bias of a proj_l."""
    weight = draw(head_dim, head_dim) * head_dim**-0.5
    return weight, torch.zeros_like(weight[0])


def sla_options(device: torch.device, *, quantized: bool = True) -> dict[str, object]:
    block_q, block_k = kernels.sparse_block_sizes(device, quantized=quantized)
    return {"topk": SLA_TOPK, "block_q": block_q, "block_k": block_k, "quantized": quantized}


def sla_oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    wide_q: torch.Tensor,
    wide_k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    *,
    quantized: bool = True,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the oracle in fp64, from wide_q, wide_k and v [1, S, H, D].

    It keeps the key blocks that ours chooses from q and k: a different choice between near ties is no error."""
    _, tokens, heads, head_dim = v.shape
    block_q, block_k = kernels.sparse_block_sizes(v.device, quantized=quantized)
    kept = kernels.kept_blocks(tokens, block_k, SLA_TOPK).count

    def on_rows(rows: torch.Tensor) -> torch.Tensor:
        of_rows = kernels.chosen_key_blocks(q, k, kept, block_q, block_k)[0][:, rows // block_q].long()
        is_kept = torch.zeros(*of_rows.shape[:2], -(-tokens // block_k), dtype=torch.bool, device=v.device)
        is_kept = is_kept.scatter(2, of_rows, True).repeat_interleave(block_k, 2)[..., :tokens]
        parts = []
        for head in range(heads):
            queries, keys, values = (x[:, :, [head]].double() for x in (wide_q[:, rows], wide_k, v))
            scores = queries[0, :, 0] @ keys[0, :, 0].T * head_dim**-0.5
            softmax = scores.masked_fill(~is_kept[head], -math.inf).softmax(1) @ values[0, :, 0]
            parts.append(softmax + linear_attention(queries, keys, values)[0, :, 0] @ weight.double().T)
        return torch.stack(parts, 1)[None]

    return on_rows


def block_sparse_attention(
    heads: int,
    tokens: int,
    head_dim: int,
    device: torch.device,
    compiled: Callable,
    mass: float = PRESETS["block_sparse"].mass,
) -> Contest:
    """Block-sparse attention. Its speed depends on the blocks that a mass keeps.

    Neighbouring tokens have similar values here. The default mass then keeps half of the blocks, with an error of about
    7 %. With the tiny model's own values the error is 8 %.
    """
    draw = Draws(device)
    q, k, v = (alike_values(draw, tokens, heads, head_dim) for _ in range(3))
    q = 2 * q
    block_q, block_k = kernels.block_sparse_sizes(device, q.dtype, quantized=True)

    def quantized() -> kernels.QuantizedQKV:
        return kernels.quantize_qkv(*(x.flatten(2) for x in (q, k, v)), heads=heads)

    def ours() -> torch.Tensor:
        return kernels.block_sparse_attention_8bit(quantized(), mass=mass, block_q=block_q, block_k=block_k)

    return Contest(
        ours={"block_sparse_attention": ours},
        rivals={},
        partial={DENSE: lambda: kernels.attention_8bit(quantized())},
        oracle=attention_oracle(q, k, v),
        tokens=tokens,
        kept=kernels.kept_share(q, k, mass=mass, block_q=block_q, block_k=block_k),
    )


def alike_values(draw: Draws, tokens: int, heads: int, head_dim: int) -> torch.Tensor:
    """Return values [1, S, H, D], packed, whose neighbouring tokens are alike."""
    one_by_one = (autoregressive(draw(1, tokens, 1, head_dim).float(), 0.99) for _ in range(heads))  # little memory
    return torch.cat([head.bfloat16() for head in one_by_one], 2).contiguous()  # cat lays the tokens out last
