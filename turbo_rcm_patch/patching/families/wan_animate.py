"""Wan 2.2 Animate: Wan's block under a class of its own, with a face adapter between every fifth and the next."""

from __future__ import annotations

from diffusers.models.transformers.transformer_wan_animate import (
    WanAnimateTransformer3DModel,
    WanAttention,
    WanTransformerBlock,
)

from .family import Family
from .wan.forward import wan_block
from .wan.names import WAN_NAMES
from .wan.parts import FIRST_LAYER, embedder, wan_blocks

WAN_ANIMATE = Family(
    WanAnimateTransformer3DModel,
    "Wan 2.2 Animate",
    (wan_blocks("blocks", WanTransformerBlock, wan_block(WanAttention)),),
    FIRST_LAYER,
    WAN_NAMES,
    more=embedder,
    notes=lambda transformer: [
        f"not fused: {len(transformer.face_adapter)} face adapters between the blocks, motion and face encoders; no "
        "CUDA graphs"
    ],
)
