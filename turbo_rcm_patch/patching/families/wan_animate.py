"""Wan 2.2 Animate: Wan's block under a class of its own, with a face adapter between every fifth and the next."""

from __future__ import annotations

from diffusers.models.transformers.transformer_wan_animate import (
    WanAnimateTransformer3DModel,
    WanAttention,
    WanTransformerBlock,
)

from .family import Blocks, Family
from .wan.forward import block_forward

WAN_ANIMATE = Family(
    WanAnimateTransformer3DModel,
    "Wan 2.2 Animate",
    (Blocks("blocks", WanTransformerBlock, WanAttention, block_forward),),
    notes=lambda transformer: [
        f"not fused: {len(transformer.face_adapter)} face adapters between the blocks, motion and face encoders; no "
        "CUDA graphs"
    ],
)
