"""Modules that are safe to run once more, or to replay: no side effects and no hooks.

A CUDA graph replays the kernels of modules without calling them, and a block's first call runs modules an extra time to
compile their kernels.
"""

from __future__ import annotations

import torch
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from diffusers.models.embeddings import PixArtAlphaTextProjection, TimestepEmbedding, Timesteps
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers.transformer_wan import (
    WanImageEmbedding,
    WanRotaryPosEmbed,
    WanTimeTextImageEmbedding,
    WanTransformer3DModel,
    WanTransformerBlock,
)
from torch import nn

from ....plain import is_lora_layer, linear_of, why_not_read
from ...lora.inside_projections import why_not_inside
from ...steps.attention import why_not_own_attention
from ...steps.plan import active_backend
from ...weights.linear_8bit import QuantizedLinear
from .block import WanBlock, why_not_fused_attention

# Classes whose outputs depend on their inputs, tensors and attributes alone (dropout draws only in training).
_KNOWN = (
    nn.Conv3d,
    nn.Dropout,
    nn.GELU,
    nn.Identity,
    nn.Linear,
    nn.ModuleDict,
    nn.ModuleList,
    nn.ParameterDict,
    nn.SiLU,
    FP32LayerNorm,
    FeedForward,
    GELU,
    PixArtAlphaTextProjection,
    QuantizedLinear,
    TimestepEmbedding,
    Timesteps,
    WanImageEmbedding,
    WanRotaryPosEmbed,
    WanTimeTextImageEmbedding,
    WanTransformer3DModel,
    WanTransformerBlock,
)


def why_not_repeatable(
    module: nn.Module, device: torch.device, kind: WanBlock, forward: object | None = None
) -> str | None:
    """Return why it would have a visible effect to run this module once more, or to replay it. Return None if not.

    Hooks and unknown layers may have side effects, dropout draws random numbers, and attention on several GPUs waits
    for the other GPUs. Submodules are not checked. device: of the inputs. forward: the patch's own forward on the
    instance.
    """
    if module._compiled_call_impl is not None:
        return "torch.compile"
    if isinstance(module, nn.Dropout) and module.training and module.p > 0:
        return "dropout"
    if is_lora_layer(module):
        reason = None if linear_of(module) is not module else why_not_inside(module)
        return None if reason is None else f"LoRA layer: {reason}"
    reason = why_not_read(module, (*_KNOWN, kind.attention_class, kind.norm_class), device, forward)
    if reason is None and type(module) is kind.attention_class:
        processor = next((known for known in kind.processors if type(module.processor) is known), kind.self_processor)
        reason = why_not_fused_attention(module, kind, processor) or why_not_own_attention(module, active_backend())
        if reason is None and module.processor._parallel_config is not None:
            reason = "context parallelism"
    return reason
