"""Which modules nobody can tell to have run once more, or not at all: a CUDA graph replays what they once launched, and
a block's first call runs them ahead for their kernels alone.
"""

from __future__ import annotations

import torch
from diffusers.models.embeddings import TimestepEmbedding, Timesteps
from diffusers.models.transformers.transformer_wan import (
    WanAttention,
    WanRotaryPosEmbed,
    WanTimeTextImageEmbedding,
    WanTransformer3DModel,
    WanTransformerBlock,
)
from torch import nn

from ...plain import why_not_read
from .layers import why_not_fused_attention, why_not_own_attention
from .state import DEPENDS_ON_PARAMETERS

# Classes whose outputs depend on their inputs, tensors and attributes alone.
_KNOWN = (
    *DEPENDS_ON_PARAMETERS,
    nn.Conv3d,
    nn.Identity,
    nn.SiLU,
    Timesteps,
    TimestepEmbedding,
    WanRotaryPosEmbed,
    WanTimeTextImageEmbedding,
    WanTransformerBlock,
    WanTransformer3DModel,
)


def why_not_repeatable(module: nn.Module, device: torch.device, forward: object | None = None) -> str | None:
    """Why it would be noticed that this module ran without being called, or was called without running; None if not.

    By hooks and foreign layers; dropout draws, and the attention of several GPUs waits for the others. The modules
    inside are not looked at. device: of the inputs. forward: one on the instance that is the patch's own.
    """
    if module._compiled_call_impl is not None:
        return "torch.compile"
    if isinstance(module, nn.Dropout) and module.training and module.p > 0:
        return "dropout"
    reason = why_not_read(module, _KNOWN, device, forward)
    if reason is None and isinstance(module, WanAttention):
        if module.processor._parallel_config is not None:
            return "context parallelism"
        reason = why_not_fused_attention(module) or why_not_own_attention(module)
    return reason
