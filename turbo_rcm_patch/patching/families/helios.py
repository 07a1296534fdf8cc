"""Helios makes a video chunk by chunk: its hidden states are tokens of earlier frames, the history, then of new ones.

The block is Wan's, with differences. The history has timestep 0, so that each sample has two runs of tokens with one
row of modulation each. Only the new frames attend to the prompt. RoPE's cos and sin are one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from diffusers.models.transformers.transformer_helios import (
    HeliosAttention,
    HeliosAttnProcessor,
    HeliosTransformer3DModel,
    HeliosTransformerBlock,
)
from torch import nn

from ...kernels import MAX_RUNS
from ...tiers import Tier
from ..cuda_graphs import why_not_recorded
from ..steps.layers import Tables
from ..steps.plan import Shared, state_of
from .family import Family
from .token_runs import Row, TokenRuns
from .wan import sizes as wan_sizes
from .wan.block import WanBlock
from .wan.modulation import modulation
from .wan.names import WAN_NAMES
from .wan.parts import FIRST_LAYER, wan_blocks
from .wan.sub_layers import Inputs

# Latent frames of a step with the pipeline's defaults: the new ones, and the short, mid and long history. Beside each
# is how many times longer its patches' edges are.
CHUNK = (9, 1), (2, 1), (2, 2), (16, 4)


class Beside(NamedTuple):
    """Other arguments of the attentions. new_tokens: of a sample. amplified: keys of its history are multiplied."""

    new_tokens: int | None
    amplified: bool


@dataclass(frozen=True)
class HeliosBlock(WanBlock):
    """The differences between Helios's block and Wan's."""

    def why_whole(self, rotary: torch.Tensor, beside: Beside) -> str | None:
        """Return why a self-attention with these inputs is called as a whole, or None."""
        return super().why_whole(rotary, None) or ("amplified history" if beside.amplified else None)

    def takes_image(self, attn: nn.Module) -> bool:
        """False: the processor does not use projections of an image."""
        return False


def block_inputs(
    block: HeliosTransformerBlock,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    rotary_emb: torch.Tensor,
    original_context_length: int | None = None,
) -> Inputs:
    """Return what the plan runs on, for the arguments of HeliosTransformerBlock.forward.

    hidden_states [B, S, C], encoder_hidden_states [B|1, L, C], temb [B, 6, C] or per token [B, S, 6, C], rotary_emb cos
    beside sin [B|1, S, 2·D], original_context_length: the new tokens, which come last.
    """
    tokens = hidden_states.shape[1]
    history = 0 if original_context_length is None else tokens - original_context_length
    rows = _rows(block, hidden_states, temb, history)
    beside = Beside(original_context_length, history > 0 and block.attn1.is_amplify_history)
    skipped = history if block.guidance_cross_attn else 0
    return Inputs(hidden_states, encoder_hidden_states, rows, rotary_emb, beside, skipped)


def _rows(block: HeliosTransformerBlock, x: torch.Tensor, temb: torch.Tensor, history: int) -> list[Row]:
    """Return six rows of modulation. temb per token has one row expanded, or equal rows in each of two runs."""
    shared = state_of(block).shared
    if temb.ndim == 4 and temb.stride(1) == 0:
        temb = temb[:, 0]
    elif temb.ndim == 4:
        _remember_runs(shared, temb, history)
    return modulation(block.scale_shift_table, temb, x, shared)


def _remember_runs(shared: Shared, temb: torch.Tensor, history: int) -> None:
    """Keep a row of temb [B, S, 6, C] for the history and one for the new frames of each sample, if these are all."""
    if torch.compiler.is_compiling() or why_not_recorded((temb,)) is not None:
        return
    if temb.is_meta or temb.is_inference():  # neither kind counts writes to it
        return
    if shared.runs is not None and shared.runs.made(temb):
        return
    samples, tokens = temb.shape[:2]
    starts = [0, history] if 0 < history < tokens else [0]
    if samples * len(starts) > MAX_RUNS:
        return
    for first, last in zip(starts, [*starts[1:], tokens], strict=True):
        run = temb[:, first:last]
        if not torch.equal(run, run[:, :1].expand_as(run)):  # waits for the GPU
            return
    every = [sample * tokens + start for sample in range(samples) for start in starts]
    every = torch.tensor([*every, samples * tokens], dtype=torch.int32, device=temb.device)
    rows = temb[:, starts].flatten(0, 1).flatten(1)
    shared.runs = TokenRuns.of(temb, rows, every)


def angles(rotary: torch.Tensor) -> Tables:
    """Return views of cos and sin with one angle for each pair of channels, [B|1, S, 1, D/2]."""
    cos, sin = rotary.unsqueeze(2).chunk(2, dim=-1)
    return cos[..., 0::2], sin[..., 1::2]


def is_shared(rotary: torch.Tensor) -> bool:
    """True if all samples have the same angles."""
    return rotary.ndim == 3 and rotary.shape[0] == 1


def call_self_attention(attn: nn.Module, x: torch.Tensor, rotary: torch.Tensor, beside: Beside) -> torch.Tensor:
    """Call a self-attention as HeliosTransformerBlock does."""
    return attn(x, None, None, rotary, beside.new_tokens)


def call_cross_attention(attn: nn.Module, x: torch.Tensor, context: torch.Tensor, beside: Beside) -> torch.Tensor:
    """Call a cross-attention as HeliosTransformerBlock does."""
    return attn(x, context, None, None, beside.new_tokens)


def tokens(config: Mapping[str, object], latent: tuple[int, int, int]) -> int:
    """Return the tokens of a step: a chunk with its history, whatever the video's length. latent: as `Sizes` has it."""
    patch = config.get("patch_size") or (1, 2, 2)
    sizes = (((frames, *latent[1:]), times) for frames, times in CHUNK)
    return sum(
        math.prod(math.ceil(length / (edge * times)) for length, edge in zip(size, patch, strict=True))
        for size, times in sizes
    )


def bytes_per_token(config: Mapping[str, object], wide: int, tier: Tier) -> int:
    """Return what Wan's function of this name does. Each token of the history and of the chunk has its modulation.

    A self-attention that amplifies its history runs diffusers' code. Nine tensors of the model's width are then alive
    beside the modulation, and the rotary embeddings.
    """
    in_blocks, head_dim = wan_sizes.bytes_with_modulation(config, wide, tier), config["attention_head_dim"]
    if not config.get("is_amplify_history"):
        return in_blocks
    amplified = (7 + 9) * wide * config["num_attention_heads"] * head_dim + 2 * wan_sizes.FP32_BYTES * head_dim
    return max(in_blocks, amplified)


def bytes_after_blocks(config: Mapping[str, object], wide: int) -> int:
    """Return the bytes per token of the largest set of tensors that are alive after the blocks.

    They are the time embedding, its projection, the hidden states, and five tensors in fp32 of the output norm and its
    modulation, for the four fifths of the tokens that are new. One tensor of the model's width stands for the prompts,
    latents and tables.
    """
    C = config["num_attention_heads"] * config["attention_head_dim"]
    return (9 * wide + 4 * wan_sizes.FP32_BYTES) * C


SIZES = wan_sizes.SIZES._replace(
    tokens=tokens,
    bytes_per_token=bytes_per_token,
    unpatched_bytes_per_token=wan_sizes.unpatched_bytes_with_modulation,
    bytes_after_blocks=bytes_after_blocks,
)
BLOCK = HeliosBlock(
    HeliosAttention,
    HeliosAttnProcessor,
    HeliosAttnProcessor,
    angles,
    is_shared,
    call_self_attention,
    call_cross_attention,
    block_inputs,
)
HELIOS = Family(
    HeliosTransformer3DModel,
    "Helios",
    (wan_blocks("blocks", HeliosTransformerBlock, BLOCK, can_be_sparse=True, sizes=SIZES),),
    FIRST_LAYER,
    WAN_NAMES,
    notes=lambda transformer: ["not fused: the patch embeddings of the history; no CUDA graphs"],
)
