"""The pieces of a Wan block, each as one fused op, or as diffusers' module where its weights may not be read.

Every piece comes as a pair: ``why_not_…`` names the reason for the module, and the function acts on it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.autograd.forward_ad as fwAD
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, dispatch_attention_fn
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import nn

from ... import kernels
from ...config import PatchConfig
from ...kernels import reference
from ...plain import hook_on, is_original, why_not_linear, why_not_norm, why_not_plain
from ..context_parallel import ulysses_attention, why_not_between_all_to_alls


class Storage(NamedTuple):
    """How a block's residual is stored: in dtype, divided by scale."""

    dtype: torch.dtype
    scale: float = 1.0

    def as_meant(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A stored x [B, S, C], multiplied, in dtype."""
        return x.to(dtype) if self.scale == 1 else (x.float() * self.scale).to(dtype)


# Rounding the residual after each of three skips is most of a bf16 block's error. fp16 rounds with three more bits;
# divided like this it holds values up to 2e6, and below 2e-3 rounds to multiples of 2e-6, which is little beside the
# others of its token.
HELD = Storage(torch.float16, 32.0)


def residual_between_skips(config: PatchConfig, dtype: torch.dtype) -> Storage:
    """How the residual of a model of `dtype` is stored between a block's first skip and its last."""
    differentiated = torch.is_grad_enabled() or fwAD._current_level >= 0
    return HELD if config.residual == "fp16" and dtype == torch.bfloat16 and not differentiated else Storage(dtype)


def normalize(
    norm: nn.Module,
    x: torch.Tensor,
    stored: Storage,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    dtype: torch.dtype,
    implementation: str,
) -> torch.Tensor:
    """LayerNorm of a stored x [B, S, C], modulated by scale and shift [B, 1|S, C] where given, in dtype."""
    if type(norm) is nn.Identity and scale is None:
        return norm(stored.as_meant(x, dtype))
    if why_not_norm(norm, FP32LayerNorm, x.device) is None:
        options = {"eps": norm.eps / stored.scale**2, "dtype": dtype, "implementation": implementation}
        return kernels.layer_norm_modulate(x, weight=norm.weight, bias=norm.bias, scale=scale, shift=shift, **options)
    return normalize_unfused(norm, x, stored, scale, shift, dtype)


def normalize_unfused(
    norm: nn.Module,
    x: torch.Tensor,
    stored: Storage,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`normalize` as diffusers writes it."""
    y = norm(stored.as_meant(x, torch.float32))
    return (y if scale is None else y * (1 + scale) + shift).to(dtype)


def normed_heads(
    norm: nn.Module,
    x: torch.Tensor,
    heads: int,
    half_tables: tuple[torch.Tensor, torch.Tensor] | None,
    implementation: str,
) -> torch.Tensor:
    """RMSNorm over all heads of x [B, S, C], split into [B, S, H, D] and rotated by the half tables where given."""
    cos, sin = half_tables or (None, None)
    if why_not_norm(norm, nn.RMSNorm, x.device) is None:
        eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
        return kernels.rms_norm_rope(
            x, norm.weight, heads=heads, eps=eps, cos=cos, sin=sin, implementation=implementation
        )
    y = norm(x).unflatten(-1, (heads, -1))
    return y if cos is None else reference.rotate(y, cos, sin)


def why_not_fused_attention(attn: WanAttention) -> str | None:
    """Why the whole attention module must be called: something on it, or a processor, that would else be dropped."""
    if type(attn.processor) is not WanAttnProcessor:
        return f"processor {type(attn.processor).__name__}"
    if not is_original(WanAttnProcessor.__call__, WanAttnProcessor):
        return "WanAttnProcessor changed by a program"
    return why_not_plain(attn, WanAttention)


def why_not_own_attention(attn: WanAttention, *, crossing: bool = False, differentiated: bool = False) -> str | None:
    """Why the attention itself goes through diffusers' dispatch: a backend or a parallel layout that the user chose.

    crossing: cross-attention, which context parallelism leaves alone.
    """
    processor = attn.processor
    backend = processor._attention_backend or _AttentionBackendRegistry.get_active_backend()[0]
    if processor._attention_backend is not None or backend != AttentionBackendName.NATIVE:
        return f"attention backend {AttentionBackendName(backend).value}"
    if processor._parallel_config is None or crossing:
        return None
    return why_not_between_all_to_alls(processor._parallel_config, attn.heads, differentiated=differentiated)


def attend(
    attn: WanAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    config: PatchConfig,
    *,
    added_to: torch.Tensor | None = None,
    crossing: bool = False,
) -> torch.Tensor:
    """Attention of q [B, S, H, D] over k, v [B, L, H, D], plus `added_to` [B, S, H, D] where given.

    crossing: cross-attention, which context parallelism leaves alone.
    """
    processor = attn.processor
    parallel_config = None if crossing else processor._parallel_config
    with_backward = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    differentiated = with_backward or fwAD._current_level >= 0
    if why_not_own_attention(attn, crossing=crossing, differentiated=differentiated) is None:
        implementation = attention_implementation(
            config, q.device, q.dtype, q.shape[-1], with_residual=added_to is not None, with_backward=with_backward
        )
        if parallel_config is not None:
            own = functools.partial(kernels.attention, implementation=implementation)
            return ulysses_attention(q, k, v, parallel_config, own)
        return kernels.attention(q, k, v, residual=added_to, implementation=implementation)
    output = dispatch_attention_fn(q, k, v, backend=processor._attention_backend, parallel_config=parallel_config)
    return output.type_as(q) if added_to is None else added_to + output.type_as(q)


def attention_implementation(
    config: PatchConfig, device: torch.device, dtype: torch.dtype, head_dim: int, **circumstances: bool
) -> str:
    """The implementation argument for `kernels.attention` on this device: "torch" is PyTorch's SDPA.

    circumstances: with_residual and with_backward, as for `kernels.sdpa_is_faster`.
    """
    if config.attention == "sdpa":
        return "torch"
    chooses = config.attention == "auto" and config.implementation == "auto"
    if chooses and kernels.sdpa_is_faster(device, dtype, head_dim, **circumstances):
        return "torch"
    return config.implementation


def why_not_linear_qkv(attn: WanAttention, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why q, k and v of a self-attention do not come from one op."""
    if attn.fused_projections:
        return "fused projections"
    linears = (attn.to_q, attn.to_k, attn.to_v)
    reason = next(filter(None, (why_not_linear(linear, device, dtype) for linear in linears)), None)
    if reason is None and len({(linear.weight.shape, linear.bias is None) for linear in linears}) > 1:
        return "unequal projections"
    return reason


def project_qkv(attn: WanAttention, x: torch.Tensor, implementation: str) -> tuple[torch.Tensor, ...]:
    """q, k and v [B, S, C] of a self-attention over x [B, S, C]."""
    if why_not_linear_qkv(attn, x.device, x.dtype) is None:
        linears = (attn.to_q, attn.to_k, attn.to_v)
        weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
        return kernels.linear_qkv(x, weights, biases, implementation=implementation)
    if attn.fused_projections:
        return attn.to_qkv(x).chunk(3, dim=-1)
    return attn.to_q(x), attn.to_k(x), attn.to_v(x)


def why_not_linear_skip(layers: list[nn.Module], device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a projection, a linear and perhaps a dropout, and the skip after it stay separate steps."""
    linear, *dropouts = layers
    for dropout in dropouts:
        if hook_on(dropout) or (dropout.training and getattr(dropout, "p", 0) > 0):
            return hook_on(dropout) or "dropout"
    return why_not_linear(linear, device, dtype)


def project_and_skip(
    layers: list[nn.Module],
    a: torch.Tensor,
    residual: torch.Tensor,
    gate: torch.Tensor | None,
    stored: Storage,
    result: Storage,
    implementation: str,
) -> torch.Tensor:
    """``residual + gate · layers(a)`` for a [B, S, K], residual [B, S, C], gate [B, 1|S, C] or None for 1.

    stored, result: how the residual is stored, and the result is to be.
    """
    if why_not_linear_skip(layers, a.device, a.dtype) is None:
        linear, options = layers[0], _skip_options(gate, stored, result, implementation)
        return kernels.linear_skip(a, linear.weight, linear.bias, residual, **options)
    for layer in layers:
        a = layer(a)
    return add_gated(residual, a, gate, stored, result, implementation)


def add_gated(
    residual: torch.Tensor,
    output: torch.Tensor,
    gate: torch.Tensor | None,
    stored: Storage,
    result: Storage,
    implementation: str,
) -> torch.Tensor:
    """``residual + gate · output`` as a pass of its own, for residual, output [B, S, C], gate [B, 1|S, C] or None."""
    return kernels.skip(residual, output, **_skip_options(gate, stored, result, implementation))


def _skip_options(
    gate: torch.Tensor | None, stored: Storage, result: Storage, implementation: str
) -> dict[str, object]:
    scales = {"residual_scale": stored.scale, "result_scale": result.scale}
    c_out = 1.0 if gate is None else gate
    return {"c_out": c_out, "dtype": result.dtype, "implementation": implementation, **scales}


def why_not_linear_gelu(ffn: FeedForward, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the feed-forward's first linear and its GELU stay two steps."""
    activation = ffn.net[0]
    if type(activation) is GELU and activation.approximate != "tanh":
        return f"GELU {activation.approximate}"
    return why_not_plain(activation, GELU) or why_not_linear(activation.proj, device, dtype)


def expand(ffn: FeedForward, x: torch.Tensor, implementation: str) -> torch.Tensor:
    """``dropout(gelu(linear(x)))``: [B, S, C] to [B, S, ffn_dim]."""
    if why_not_linear_gelu(ffn, x.device, x.dtype) is None:
        proj = ffn.net[0].proj
        return ffn.net[1](kernels.linear_gelu(x, proj.weight, proj.bias, implementation=implementation))
    return ffn.net[1](ffn.net[0](x))
