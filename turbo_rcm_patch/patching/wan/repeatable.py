"""Which modules nobody can tell to have run once more, or not at all: a CUDA graph replays what they once launched, and
a block's first call runs them ahead for their kernels alone.
"""

from __future__ import annotations

import torch
from diffusers.models.embeddings import TimestepEmbedding, Timesteps
from diffusers.models.transformers.transformer_wan import (
    WanAttention,
    WanAttnProcessor,
    WanRotaryPosEmbed,
    WanTimeTextImageEmbedding,
    WanTransformer3DModel,
    WanTransformerBlock,
)
from torch import nn

from ...plain import why_not_read
from ..snapshot import code_of
from .layers import why_not_fused_attention, why_not_own_attention
from .state import DEPENDS_ON_PARAMETERS

# Classes whose outputs depend on their inputs, tensors and attributes alone while calling them runs this: programs that
# skip steps replace the forward of a class.
_KNOWN = {
    cls: code_of(cls)
    for cls in (
        *DEPENDS_ON_PARAMETERS,
        nn.Conv3d,
        nn.Identity,
        nn.SiLU,
        Timesteps,
        TimestepEmbedding,
        WanAttnProcessor,
        WanRotaryPosEmbed,
        WanTimeTextImageEmbedding,
        WanTransformerBlock,
        WanTransformer3DModel,
    )
}


def why_not_repeatable(module: nn.Module, device: torch.device, forward: object | None = None) -> str | None:
    """Why a run of this module on inputs of this device that is not a call, or a call without one, could be noticed.

    Hooks and foreign layers could, dropout draws, and the attention of several GPUs waits for the others. forward: one
    on the instance that is the patch's own. The modules inside are not looked at.
    """
    if module._compiled_call_impl is not None:
        return "torch.compile"
    if isinstance(module, nn.Dropout) and module.training and module.p > 0:
        return "dropout"
    reason = why_not_read(module, tuple(_KNOWN), device, forward)
    if reason is None and isinstance(module, WanAttention):
        reason = why_not_fused_attention(module) or why_not_own_attention(module) or _why_not_code(module.processor)
    return reason or _why_not_code(module)


def _why_not_code(thing: object) -> str | None:
    """Whether a program has replaced what calling the class of a known thing runs."""
    return None if code_of(type(thing)) is _KNOWN[type(thing)] else "replaced forward of its class"
