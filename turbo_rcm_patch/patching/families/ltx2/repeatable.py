"""The modules of LTX-2 that are safe to run once more, or to replay."""

from __future__ import annotations

from collections.abc import Callable

import torch
from diffusers.models.embeddings import PixArtAlphaCombinedTimestepSizeEmbeddings
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_ltx2 import (
    LTX2AdaLayerNormSingle,
    LTX2Attention,
    LTX2AudioVideoRotaryPosEmbed,
    LTX2VideoTransformer3DModel,
    LTX2VideoTransformerBlock,
)
from torch import nn

from .. import repeatable
from .attentions import why_not_fused_attention

_KNOWN = (
    nn.LayerNorm,
    nn.RMSNorm,
    LTX2AdaLayerNormSingle,
    LTX2Attention,
    LTX2AudioVideoRotaryPosEmbed,
    LTX2VideoTransformer3DModel,
    LTX2VideoTransformerBlock,
    PixArtAlphaCombinedTimestepSizeEmbeddings,
    RMSNorm,
)


def why_not_repeatable(module: nn.Module, device: torch.device, forward: Callable | None = None) -> str | None:
    """Return why it would have a visible effect to run this module once more, or to replay it. Return None if not.

    device: of the inputs. forward: the patch's own forward on the instance.
    """
    reason = repeatable.why_not_repeatable(module, device, _KNOWN, forward)
    if reason is None and type(module) is LTX2Attention:
        reason = why_not_fused_attention(module) or repeatable.why_not_repeatable_attention(module)
    return reason
