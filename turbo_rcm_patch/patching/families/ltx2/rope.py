"""LTX-2's RoPE tables as the kernels read them: every sample, token and head has angles of its own.

diffusers gives cos and sin for all channels, each angle in both columns of a pair, [B, S, H·D] ("interleaved"), or for
the halves of each head, [B, H, S, D/2] ("split").
"""

from __future__ import annotations

import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2Attention

from ....kernels import reference
from ...steps.layers import Tables
from .sub_layers import Rotary

SPLIT = "split"


def tables_of(rotary: Rotary | None, attn: torch.nn.Module) -> Tables | None:
    """Return views [B, S, H, D/2] of cos and sin, or None without RoPE."""
    if rotary is None:
        return None
    if attn.rope_type == SPLIT:
        return tuple(table.transpose(1, 2) for table in rotary)
    return tuple(table.unflatten(2, (attn.heads, -1))[..., 0::2] for table in rotary)


def rotate(attn: torch.nn.Module, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotate the heads of x [B, S, H, D] as an attention's own processor does."""
    return reference.rotate(x, *tables_of(rotary, attn), attn.rope_type == SPLIT)


def why_not_read(rotary: Rotary | None, x: torch.Tensor, attn: torch.nn.Module) -> str | None:
    """Return why the kernels cannot read these tables for hidden states x [B, S, C], or None if they can."""
    if rotary is None:
        return None
    if type(attn) is not LTX2Attention:
        return "another attention"
    (B, S, _), H, D = x.shape, attn.heads, attn.head_dim
    sizes = (H, S, D // 2) if attn.rope_type == SPLIT else (S, H * D)
    fits = D % 2 == 0 and all(table.shape[0] in (1, B) and tuple(table.shape[1:]) == sizes for table in rotary)
    return None if fits else "RoPE tables of another shape"
