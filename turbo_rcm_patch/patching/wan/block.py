"""WanTransformerBlock.forward with fused sub-layers: h = norm(x); x = x + gate · F(h), three times.

The result is diffusers' own (transformer_wan.py) with fewer roundings: everything between two stores stays in fp32.
"""

from __future__ import annotations

import torch
from diffusers.models.attention import FeedForward
from diffusers.models.transformers.transformer_wan import WanAttention, WanTransformerBlock

from ... import kernels
from ...config import PatchConfig
from ...plain import why_not_plain
from ..graphs import why_not_recorded
from .layers import (
    Storage,
    add_gated,
    attend,
    expand,
    normalize,
    normalize_unfused,
    normed_heads,
    project_and_skip,
    project_qkv,
    residual_between_skips,
    why_not_fused_attention,
)
from .repeatable import why_not_repeatable
from .state import STATE, WanState

Rotary = tuple[torch.Tensor, torch.Tensor]


def block_forward(
    self: WanTransformerBlock,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    rotary_emb: Rotary,
) -> torch.Tensor:
    """WanTransformerBlock.forward on fused ops; bound on instances.

    hidden_states [B, S, C], encoder_hidden_states [B, L, C], temb [B, 6, C] or per token [B, S, 6, C], rotary_emb cos
    and sin [1, S, 1, D]; returns [B, S, C].
    """
    if torch.is_autocast_enabled(hidden_states.device.type):
        return type(self).forward(self, hidden_states, encoder_hidden_states, temb, rotary_emb)
    state, inputs = getattr(self, STATE), (hidden_states, encoder_hidden_states, temb, rotary_emb)
    if _may_compile_ahead(state, hidden_states, encoder_hidden_states, temb, *rotary_emb):
        state.compiles_ahead = False
        if _may_run_ahead(self, hidden_states.device):
            kernels.compile_ahead(lambda: _forward(self, state.fresh(), *inputs))
    return _forward(self, state, *inputs)


def _may_compile_ahead(state: WanState, *inputs: torch.Tensor) -> bool:
    """Whether this is the first call that launches kernels of a GPU, and nothing around it watches or records it."""
    if torch.compiler.is_compiling() or not state.compiles_ahead:
        return False
    return _launches_kernels(state.config, inputs[0]) and why_not_recorded(inputs) is None


def _launches_kernels(config: PatchConfig, x: torch.Tensor) -> bool:
    return x.is_cuda and config.implementation != "torch" and kernels.why_not_triton_on(x.device, x.dtype) is None


def _may_run_ahead(block: WanTransformerBlock, device: torch.device) -> bool:
    """Whether nothing in a block notices a run that does not count. If something may, each kernel is compiled where it
    is first launched.
    """
    parts = (module for module in block.modules() if module is not block)
    return not any(why_not_repeatable(part, device) for part in parts)


def _forward(
    block: WanTransformerBlock,
    state: WanState,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    rotary_emb: Rotary,
) -> torch.Tensor:
    shift_msa, scale_msa, gate_msa, c_shift_msa, c_scale_msa, c_gate_msa = _modulation(block.scale_shift_table, temb)
    between = residual_between_skips(state.config, hidden_states.dtype)
    x = _self_attention(block, state, hidden_states, shift_msa, scale_msa, gate_msa, rotary_emb, between)
    x = _cross_attention(block, state, x, between, encoder_hidden_states, hidden_states.dtype)
    return _feed_forward(block, state, x, between, c_shift_msa, c_scale_msa, c_gate_msa, hidden_states.dtype)


def _modulation(scale_shift_table: torch.Tensor, temb: torch.Tensor) -> list[torch.Tensor]:
    """Six fp32 rows, each [B, 1, C], or [B, S, C] where temb is per token."""
    if temb.ndim == 4:
        return [row.squeeze(2) for row in (scale_shift_table.unsqueeze(0) + temb.float()).chunk(6, dim=2)]
    return list((scale_shift_table + temb.float()).chunk(6, dim=1))


def _self_attention(
    block: WanTransformerBlock,
    state: WanState,
    x: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    gate: torch.Tensor,
    rotary_emb: Rotary,
    result: Storage,
) -> torch.Tensor:
    """result: how it is to be stored."""
    attn, config = block.attn1, state.config
    stored = Storage(x.dtype)
    if "self_attention" not in config.fuse:
        h = normalize_unfused(block.norm1, x, stored, scale, shift, x.dtype)
        return add_gated(x, attn(h, None, None, rotary_emb), gate, stored, result, config.implementation)
    h = normalize(block.norm1, x, stored, scale, shift, x.dtype, config.implementation)
    if why_not_fused_attention(attn) or not _shared_by_batch(rotary_emb):
        return add_gated(x, attn(h, None, None, rotary_emb), gate, stored, result, config.implementation)
    q, k, v = project_qkv(attn, h, config.implementation)
    tables = state.half_rotary(rotary_emb)
    q = normed_heads(attn.norm_q, q, attn.heads, tables, config.implementation)
    k = normed_heads(attn.norm_k, k, attn.heads, tables, config.implementation)
    v = v.unflatten(2, (attn.heads, -1))
    attended = attend(attn, q, k, v, config)
    return project_and_skip(list(attn.to_out), attended.flatten(2), x, gate, stored, result, config.implementation)


def _shared_by_batch(rotary_emb: Rotary) -> bool:
    return all(table.ndim == 4 and table.shape[0] == table.shape[2] == 1 for table in rotary_emb)


def _cross_attention(
    block: WanTransformerBlock,
    state: WanState,
    x: torch.Tensor,
    stored: Storage,
    encoder_hidden_states: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """stored: how x is, and the result too. dtype: the model's."""
    attn, config = block.attn2, state.config
    if "cross_attention" not in config.fuse:
        h = normalize_unfused(block.norm2, x, stored, None, None, dtype)
        return add_gated(x, attn(h, encoder_hidden_states), None, stored, stored, config.implementation)
    h = normalize(block.norm2, x, stored, None, None, dtype, config.implementation)
    if why_not_fused_attention(attn):
        return add_gated(x, attn(h, encoder_hidden_states, None, None), None, stored, stored, config.implementation)
    q = normed_heads(attn.norm_q, attn.to_q(h), attn.heads, None, config.implementation)
    attended = _attend_context(attn, state, q, encoder_hidden_states)
    return project_and_skip(list(attn.to_out), attended.flatten(2), x, None, stored, stored, config.implementation)


def _attend_context(attn: WanAttention, state: WanState, q: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    """Attention over the text, plus attention over the image where the context holds one."""
    keys_values = state.keys_values(attn, context)
    attended = attend(attn, q, keys_values.key, keys_values.value, state.config, crossing=True)
    if keys_values.image_key is None:
        return attended
    image_key, image_value = keys_values.image_key, keys_values.image_value
    return attend(attn, q, image_key, image_value, state.config, added_to=attended, crossing=True)


def _feed_forward(
    block: WanTransformerBlock,
    state: WanState,
    x: torch.Tensor,
    stored: Storage,
    shift: torch.Tensor,
    scale: torch.Tensor,
    gate: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """stored: how x is. dtype: the model's, and the result's."""
    ffn, config, result = block.ffn, state.config, Storage(dtype)
    if "feed_forward" not in config.fuse:
        h = normalize_unfused(block.norm3, x, stored, scale, shift, dtype)
        return add_gated(x, ffn(h), gate, stored, result, config.implementation)
    h = normalize(block.norm3, x, stored, scale, shift, dtype, config.implementation)
    if why_not_plain(ffn, FeedForward):
        return add_gated(x, ffn(h), gate, stored, result, config.implementation)
    expanded = expand(ffn, h, config.implementation)
    return project_and_skip(list(ffn.net[2:]), expanded, x, gate, stored, result, config.implementation)
