"""What the patch does in each block right now, step by step, for the summary."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from diffusers.models.attention import FeedForward
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel, WanTransformerBlock
from diffusers.utils.torch_utils import get_module_execution_device
from torch import nn

from ... import kernels
from ...config import PatchConfig
from ...kernels import gemm_hopper
from ...plain import why_not_norm, why_not_plain
from .graph import graph_of
from .layers import (
    attention_implementation,
    residual_between_skips,
    why_not_fused_attention,
    why_not_linear_gelu,
    why_not_linear_qkv,
    why_not_linear_skip,
    why_not_own_attention,
)
from .state import STATE, WanState

NOT_ASKED = "not in fuse"


def plan_rows(transformer: WanTransformer3DModel) -> list[tuple[str, str, str, dict[str, int]]]:
    """(sub-layer, step, kernel, {reason: blocks that fall back for it}) for every fused step."""
    state: WanState = getattr(transformer, STATE)
    # Under offloading the weights rest elsewhere than the forward runs.
    device, dtype = get_module_execution_device(transformer), transformer.patch_embedding.weight.dtype
    kernel = _kernel_name(state.config.implementation, device, dtype)
    choice = attention_implementation(state.config, device, dtype, transformer.config.attention_head_dim)
    attention_kernel = _kernel_name(choice, device, dtype, otherwise="PyTorch SDPA")
    rows: dict[tuple[str, str], dict[str, int]] = {}
    for block in transformer.blocks:
        for sub_layer, step, reason in _block_steps(block, state.config, dtype):
            reasons = rows.setdefault((sub_layer, step), {})
            if reason:
                reasons[reason] = reasons.get(reason, 0) + 1
    choice = "torch" if gemm_hopper.why_not_on(device, dtype) else state.config.implementation
    qkv_kernel = _kernel_name(choice, device, dtype, otherwise="PyTorch linear")
    others = {"attention": attention_kernel, "QKV projection": qkv_kernel}
    named = [(sub_layer, step, others.get(step, kernel), reasons) for (sub_layer, step), reasons in rows.items()]
    reason = state.why_not_context(transformer.patch_embedding.weight.device)
    how = "computed in each replay" if graph_of(transformer).serves else "kept"
    return [*named, ("constants", "prompt, cross K/V", how, {reason: len(transformer.blocks)} if reason else {})]


def notes(transformer: WanTransformer3DModel) -> list[str]:
    """How the residual is kept between a block's skips, and what CUDA graphs do: a line each."""
    config, dtype = getattr(transformer, STATE).config, transformer.patch_embedding.weight.dtype
    with torch.no_grad():
        kept = residual_between_skips(config, dtype)
    divided = "" if kept.scale == 1 else f", divided by {kept.scale:g}"
    residual = f"residual between a block's skips: {str(kept.dtype).removeprefix('torch.')}{divided}"
    return [residual, graph_of(transformer).note()]


def _block_steps(
    block: WanTransformerBlock, config: PatchConfig, dtype: torch.dtype
) -> Iterator[tuple[str, str, str | None]]:
    # Offloading moves a block's weights together, so they are "elsewhere" only when apart from each other.
    device = block.scale_shift_table.device
    for group, norm, attn in (
        ("self_attention", block.norm1, block.attn1),
        ("cross_attention", block.norm2, block.attn2),
    ):
        asked = None if group in config.fuse else NOT_ASKED
        whole = asked or why_not_fused_attention(attn)
        yield group, "norm + modulation", asked or _why_not_layer_norm(norm, device)
        if group == "self_attention":
            yield group, "QKV projection", whole or why_not_linear_qkv(attn, device, dtype)
        yield group, "QK-norm + RoPE", whole or _why_not_qk_norm(attn, device)
        yield group, "attention", whole or why_not_own_attention(attn, crossing=group == "cross_attention")
        yield group, "projection + skip", whole or why_not_linear_skip(list(attn.to_out), device, dtype)
    asked = None if "feed_forward" in config.fuse else NOT_ASKED
    whole = asked or why_not_plain(block.ffn, FeedForward)
    yield "feed_forward", "norm + modulation", asked or _why_not_layer_norm(block.norm3, device)
    yield "feed_forward", "linear + GELU", whole or why_not_linear_gelu(block.ffn, device, dtype)
    yield "feed_forward", "linear + skip", whole or why_not_linear_skip(list(block.ffn.net[2:]), device, dtype)


def _why_not_layer_norm(norm: nn.Module, device: torch.device) -> str | None:
    return None if type(norm) is nn.Identity else why_not_norm(norm, FP32LayerNorm, device)


def _why_not_qk_norm(attn: nn.Module, device: torch.device) -> str | None:
    return why_not_norm(attn.norm_q, nn.RMSNorm, device) or why_not_norm(attn.norm_k, nn.RMSNorm, device)


def _kernel_name(
    implementation: str, device: torch.device, dtype: torch.dtype, otherwise: str = "torch reference"
) -> str:
    if implementation == "torch":
        return otherwise
    reason = kernels.why_not_triton_on(device, dtype)
    if reason is None and (implementation == "triton" or device.type == "cuda"):
        return "Triton"
    return f"{otherwise} ({reason or 'cpu tensors'})"
