"""SkyReels-V2: Wan's block with an attention mask, and with a timestep per frame in diffusion forcing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from diffusers.models.transformers.transformer_skyreels_v2 import (
    SkyReelsV2Attention,
    SkyReelsV2Transformer3DModel,
    SkyReelsV2TransformerBlock,
)

from ..steps.plan import state_of
from .family import Family
from .wan import sizes as wan_sizes
from .wan.forward import wan_block
from .wan.modulation import modulation
from .wan.names import WAN_NAMES
from .wan.parts import FIRST_LAYER, wan_blocks
from .wan.sub_layers import Inputs, Rotary


def block_inputs(
    block: SkyReelsV2TransformerBlock,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    rotary_emb: Rotary,
    attention_mask: torch.Tensor | None,
) -> Inputs:
    """Return what the plan runs on, for the arguments of SkyReelsV2TransformerBlock.forward.

    hidden_states [B, S, C], encoder_hidden_states [B|1, L, C], temb [B, 6, C] or per token [B, 6, S, C], rotary_emb cos
    and sin [1, S, 1, D], attention_mask [1, 1, S, S] or None. With a mask, which num_frame_per_block > 1 makes, the
    self-attention is called as a whole.
    """
    temb = temb.transpose(1, 2) if temb.dim() == 4 else temb
    rows = modulation(block.scale_shift_table, temb, hidden_states, state_of(block).shared)
    return Inputs(hidden_states, encoder_hidden_states, rows, rotary_emb, attention_mask)


def bytes_with_timesteps(config: Mapping[str, object], wide: int, table: int, block: int) -> tuple[int, int]:
    """Return what Wan's function of this name does. Here the rows of modulation are of all tokens, and in fp32.

    A block makes them of the projection. They are alive beside its tensors. While they are made, the projection in fp32
    and their sum are alive.
    """
    C = config["num_attention_heads"] * config["attention_head_dim"]
    with_rows, after_blocks = wan_sizes.bytes_with_timesteps(config, wide, table, block)
    rows = 6 * wan_sizes.FP32_BYTES * C
    return max(with_rows + rows, 8 * wide * C + 2 * rows), after_blocks


SIZES = wan_sizes.SIZES._replace(bytes_with_timesteps=bytes_with_timesteps)
BLOCKS = wan_blocks("blocks", SkyReelsV2TransformerBlock, wan_block(SkyReelsV2Attention, block_inputs), sizes=SIZES)
SKYREELS_V2 = Family(
    SkyReelsV2Transformer3DModel,
    "SkyReels-V2 T2V, I2V and diffusion forcing",
    (BLOCKS,),
    FIRST_LAYER,
    WAN_NAMES,
    notes=lambda transformer: ["no CUDA graphs"],
)
