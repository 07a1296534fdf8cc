"""Wan 2.1 VACE: Wan's blocks, and control blocks that pass their own hidden states on and give hints to the blocks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from diffusers import WanVACEPipeline
from diffusers.models.transformers.transformer_wan import WanAttention, WanTransformerBlock
from diffusers.models.transformers.transformer_wan_vace import WanVACETransformer3DModel, WanVACETransformerBlock

from ...plain import is_autocast
from ..steps.plan import state_of
from .family import Family, Pipeline
from .wan import sizes as wan_sizes
from .wan.forward import run_block, wan_block
from .wan.modulation import modulation
from .wan.names import WAN_NAMES
from .wan.parts import FIRST_LAYER, linears_in_loras, wan_blocks
from .wan.sub_layers import Inputs, Rotary


def control_block_forward(
    self: WanVACETransformerBlock,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    control_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    rotary_emb: Rotary,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """WanVACETransformerBlock.forward on fused ops; bound on instances.

    hidden_states, control_hidden_states [B, S, C], encoder_hidden_states [B|1, L, C], temb [B, 6, C], rotary_emb cos
    and sin [1, S, 1, D]; returns the hint, None without an output projection, and the control's hidden states.
    """
    if is_autocast(hidden_states.device):
        inputs = (hidden_states, encoder_hidden_states, control_hidden_states, temb, rotary_emb)
        return type(self).forward(self, *inputs)
    inputs = control_inputs(self, hidden_states, encoder_hidden_states, control_hidden_states, temb, rotary_emb)
    control_hidden_states = run_block(self, inputs)
    hint = None if self.proj_out is None else self.proj_out(control_hidden_states)
    return hint, control_hidden_states


def control_inputs(
    block: WanVACETransformerBlock,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    control_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    rotary_emb: Rotary,
) -> Inputs:
    """Return what the plan runs on, for the arguments of `control_block_forward`."""
    if block.proj_in is not None:
        control_hidden_states = block.proj_in(control_hidden_states) + hidden_states
    table, shared = block.scale_shift_table.to(temb.device), state_of(block).shared
    rows = modulation(table, temb, control_hidden_states, shared)
    return Inputs(control_hidden_states, encoder_hidden_states, rows, rotary_emb)


def given_bytes(
    config: Mapping[str, object], height: int, width: int, frames: int, wide: int, vae_wide: int
) -> tuple[int, int]:
    """Return the bytes of the video that controls the result, while the VAE encodes it and after that.

    At first they are the video and its mask, in fp32 and in the VAE's dtype, and the video masked the other way. The
    video in fp32 stays.
    """
    video = 3 * height * width * frames
    return video * (2 * wan_sizes.FP32_BYTES + 3 * vae_wide), video * wan_sizes.FP32_BYTES


SIZES = wan_sizes.SIZES._replace(given_images=1, given_bytes=given_bytes)
WAN_VACE = Family(
    WanVACETransformer3DModel,
    "Wan 2.1 VACE",
    (
        wan_blocks("blocks", WanTransformerBlock, wan_block(WanAttention), can_be_sparse=True, sizes=SIZES),
        wan_blocks(
            "vace_blocks",
            WanVACETransformerBlock,
            wan_block(WanAttention, control_inputs),
            forward=control_block_forward,
            can_be_sparse=True,
        ),
    ),
    FIRST_LAYER,
    WAN_NAMES,
    notes=lambda transformer: [
        "not fused: the control blocks' input and output projections, the hints' sums; no CUDA graphs"
    ],
    pipelines=(Pipeline(WanVACEPipeline, "video"),),
    linears_in_loras=linears_in_loras,
)
