"""AnyFlow, a flow map distilled from Wan: Wan's block with a timestep per frame, and RoPE tables of complex numbers.

diffusers' model computes the modulation of each frame, and repeats it for each token. A block reads one row for every
run of frames with the same timesteps; usually that is one run for the whole video.

AnyFlow-FAR makes a video chunk by chunk with the same blocks. Its causal self-attention reads a cache of earlier chunks
and is called as a whole. Frames far back have fewer tokens than the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_anyflow import (
    AnyFlowAttention,
    AnyFlowAttnProcessor,
    AnyFlowCrossAttnProcessor,
    AnyFlowDualTimestepTextImageEmbedding,
    AnyFlowTransformer3DModel,
    AnyFlowTransformerBlock,
)
from diffusers.models.transformers.transformer_anyflow_far import AnyFlowAttention as FARAttention
from diffusers.models.transformers.transformer_anyflow_far import AnyFlowAttnProcessor as FARAttnProcessor
from diffusers.models.transformers.transformer_anyflow_far import AnyFlowCrossAttnProcessor as FARCrossAttnProcessor
from diffusers.models.transformers.transformer_anyflow_far import (
    AnyFlowDualTimestepTextImageEmbeddingCausal,
    AnyFlowFARTransformer3DModel,
)
from diffusers.models.transformers.transformer_anyflow_far import AnyFlowTransformerBlock as FARTransformerBlock
from torch import nn

from ...config import PatchConfig
from ...kernels import MAX_RUNS
from ..cuda_graphs import why_not_recorded
from ..steps.layers import Tables
from ..steps.plan import SHARED, Shared, state_of
from .family import Family, Targets
from .token_runs import TokenRuns
from .wan import sizes as wan_sizes
from .wan.block import WanBlock
from .wan.modulation import modulation
from .wan.names import WAN_NAMES
from .wan.parts import FIRST_LAYER, wan_blocks
from .wan.sub_layers import Inputs

Rotary = dict[str, torch.Tensor]  # "query" and "key": complex [1, 1, S, D/2]


def block_inputs(
    block: AnyFlowTransformerBlock,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    rotary_emb: Rotary,
    attention_mask: torch.Tensor | None,
    kv_cache: object = None,
    kv_cache_flag: object = None,
) -> Inputs:
    """Return what the plan runs on, for the arguments of AnyFlowTransformerBlock.forward, as AnyFlow-FAR has it too.

    hidden_states [B, S, C], encoder_hidden_states [B|1, L, C], temb [B, S, 6, C]. With a mask or a cache the
    self-attention is called as a whole.
    """
    rows = modulation(block.scale_shift_table, temb, hidden_states, state_of(block).shared)
    beside = None
    if kv_cache is not None:
        beside = {"attention_mask": attention_mask, "kv_cache": kv_cache, "kv_cache_flag": kv_cache_flag}
    elif attention_mask is not None:
        beside = {"attention_mask": attention_mask}
    return Inputs(hidden_states, encoder_hidden_states, rows, rotary_emb, beside)


def angles(rotary: Rotary) -> Tables:
    """Return cos and sin of the tables in fp32, [1, S, 1, D/2]."""
    table = rotary["query"].transpose(1, 2)
    return table.real.float(), table.imag.float()


def is_shared(rotary: Rotary) -> bool:
    """True if all samples and heads, and queries and keys, have the same angles."""
    query, key = rotary["query"], rotary["key"]
    return query is key and query.ndim == 4 and query.shape[:2] == (1, 1)


def call_self_attention(
    attn: nn.Module, x: torch.Tensor, rotary: Rotary, beside: dict[str, object] | None
) -> torch.Tensor:
    """Call a self-attention as AnyFlowTransformerBlock does."""
    beside = {"attention_mask": None} if beside is None else beside
    return attn(hidden_states=x, rotary_emb=rotary, **beside)


def call_cross_attention(attn: nn.Module, x: torch.Tensor, context: torch.Tensor, _beside: object) -> torch.Tensor:
    """Call a cross-attention as AnyFlowTransformerBlock does."""
    return attn(hidden_states=x, encoder_hidden_states=context)


def embedder_forward(
    self: AnyFlowDualTimestepTextImageEmbedding | AnyFlowDualTimestepTextImageEmbeddingCausal,
    timestep: torch.Tensor,
    r_timestep: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    encoder_hidden_states_image: torch.Tensor | None = None,
    *,
    clean_timestep: torch.Tensor | None = None,
    **layout: dict[str, object],
) -> tuple[torch.Tensor, ...]:
    """Run the forward of either model's embedder, and remember runs of equal timesteps; bound on instances.

    timestep, r_timestep [B, F]; returns temb [B, S, C], timestep_proj [B, S, 6·C], and the projected text and image.
    layout: layout_cfg, or AnyFlow-FAR's far_cfg. With clean frames, which only training has, no runs are remembered.
    """
    prompt = (encoder_hidden_states, encoder_hidden_states_image)
    options = layout if clean_timestep is None else {**layout, "clean_timestep": clean_timestep}
    shared: Shared = getattr(self, SHARED)
    shared.runs = None
    embedded = type(self).forward(self, timestep, r_timestep, *prompt, **options)
    if clean_timestep is None:
        (frames,) = layout.values()
        tokens = frames["full_token_per_frame"], frames.get("compressed_token_per_frame", 0)
        compressed = max(0, timestep.shape[1] - frames.get("num_full_frames", timestep.shape[1]))
        _remember_runs(shared, timestep, r_timestep, prompt, embedded[1], *tokens, compressed)
    return embedded


def _remember_runs(
    shared: Shared,
    timestep: torch.Tensor,
    r_timestep: torch.Tensor,
    prompt: tuple[torch.Tensor | None, ...],
    timestep_proj: torch.Tensor,
    full_tokens: int,
    compressed_tokens: int,
    compressed: int,
) -> None:
    """Keep the rows of timestep_proj [B, S, 6·C] by runs of frames with the same timesteps, unless there are too many.

    full_tokens, compressed_tokens: tokens of a frame. compressed: the number of compressed frames, which come first.
    """
    if torch.compiler.is_compiling() or why_not_recorded((timestep, r_timestep, *prompt)) is not None:
        return
    if timestep.is_meta or timestep_proj.is_inference():  # neither kind counts writes to it
        return
    tokens = torch.full_like(timestep, full_tokens, dtype=torch.long)
    tokens[:, :compressed] = compressed_tokens
    pairs = torch.stack([timestep.double(), r_timestep.double()]).flatten(1)
    values, run = torch.unique_consecutive(pairs, dim=1, return_inverse=True)  # waits for the GPU
    runs = values.shape[1]
    if runs > MAX_RUNS:
        return
    counts = torch.zeros(runs, dtype=torch.long, device=run.device).index_add_(0, run, tokens.flatten())
    starts = nn.functional.pad(counts.cumsum(0), (1, 0))
    rows = timestep_proj.flatten(0, 1)[starts[:-1]]
    shared.runs = TokenRuns.of(timestep_proj, rows, starts.int())


def _more(transformer: nn.Module, config: PatchConfig) -> Targets:
    return [("condition_embedder", transformer.condition_embedder, embedder_forward)]


def bytes_after_blocks(config: Mapping[str, object], wide: int) -> int:
    """Return the bytes per token of the largest set of tensors that are alive after the blocks.

    They are the time embedding, its projection, the hidden states, and five tensors in fp32 of the output norm and its
    modulation. One tensor of the model's width stands for the prompts, latents and tables.
    """
    C = config["num_attention_heads"] * config["attention_head_dim"]
    return (9 * wide + 5 * wan_sizes.FP32_BYTES) * C


SIZES = wan_sizes.SIZES._replace(
    bytes_per_token=wan_sizes.bytes_with_modulation,
    unpatched_bytes_per_token=wan_sizes.unpatched_bytes_with_modulation,
    bytes_after_blocks=bytes_after_blocks,
)
_block = partial(
    WanBlock,
    angles=angles,
    is_shared=is_shared,
    call_self=call_self_attention,
    call_cross=call_cross_attention,
    inputs=block_inputs,
    norm_class=RMSNorm,
)
BLOCK = _block(AnyFlowAttention, AnyFlowAttnProcessor, AnyFlowCrossAttnProcessor)
# The steps do not do the work of its causal processor, so that the self-attention is called as a whole.
CAUSAL_BLOCK = _block(FARAttention, FARAttnProcessor, FARCrossAttnProcessor)
ANYFLOW = Family(
    AnyFlowTransformer3DModel,
    "AnyFlow",
    (wan_blocks("blocks", AnyFlowTransformerBlock, BLOCK, can_be_sparse=True, sizes=SIZES),),
    FIRST_LAYER,
    WAN_NAMES,
    more=_more,
    notes=lambda transformer: ["no CUDA graphs"],
)
ANYFLOW_FAR = Family(
    AnyFlowFARTransformer3DModel,
    "AnyFlow-FAR",
    (wan_blocks("blocks", FARTransformerBlock, CAUSAL_BLOCK),),
    FIRST_LAYER,
    WAN_NAMES,
    more=_more,
    notes=lambda transformer: ["no CUDA graphs"],
)
