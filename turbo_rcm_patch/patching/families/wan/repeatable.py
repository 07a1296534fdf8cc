"""The modules of Wan's models that are safe to run once more, or to replay."""

from __future__ import annotations

import torch
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers.transformer_wan import (
    WanImageEmbedding,
    WanRotaryPosEmbed,
    WanTimeTextImageEmbedding,
    WanTransformer3DModel,
    WanTransformerBlock,
)
from torch import nn

from .. import repeatable
from .block import WanBlock, why_not_fused_attention

_KNOWN = (
    FP32LayerNorm,
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

    device: of the inputs. forward: the patch's own forward on the instance.
    """
    known = (*_KNOWN, kind.attention_class, kind.norm_class)
    reason = repeatable.why_not_repeatable(module, device, known, forward)
    if reason is None and type(module) is kind.attention_class:
        processor = next((known for known in kind.processors if type(module.processor) is known), kind.self_processor)
        reason = why_not_fused_attention(module, kind, processor) or repeatable.why_not_repeatable_attention(module)
    return reason
