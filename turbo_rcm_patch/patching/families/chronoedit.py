"""ChronoEdit: image editing as a short video. Copies of Wan's blocks under classes of their own."""

from __future__ import annotations

from diffusers.models.transformers.transformer_chronoedit import (
    ChronoEditTransformer3DModel,
    WanAttention,
    WanTransformerBlock,
)

from .family import Family
from .wan.forward import wan_block
from .wan.names import WAN_NAMES
from .wan.parts import FIRST_LAYER, wan_blocks

CHRONOEDIT = Family(
    ChronoEditTransformer3DModel,
    "ChronoEdit",
    (wan_blocks("blocks", WanTransformerBlock, wan_block(WanAttention), can_be_sparse=True),),
    FIRST_LAYER,
    WAN_NAMES,
    notes=lambda transformer: ["no CUDA graphs"],
)
