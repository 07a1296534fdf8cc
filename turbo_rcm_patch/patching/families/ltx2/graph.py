"""LTX2VideoTransformer3DModel.forward as a CUDA graph, if its kernels take longer to launch than to run.

A block launches three times as many kernels as one of Wan's, because the sound goes through all of it: half of them are
for the few tokens of the sound.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping

import torch
from diffusers.models.transformers.transformer_ltx2 import AudioVisualModelOutput, LTX2VideoTransformer3DModel

from ....config import PatchConfig
from ...cuda_graphs import Inputs
from ...steps.context_parallel import ranks_of
from ...steps.plan import SHARED
from ..family import graph_of
from ..graphs import Graphed
from ..token_runs import TimestepRuns, with_runs_ahead
from ..wan.graph import MOST_FLOPS_PER_BLOCK as MOST_OF_WAN
from ..wan.graph import flops_of, is_more
from .call import TOPK
from .masks import leave_out_masks
from .modulation import runs_ahead
from .repeatable import why_not_repeatable

MOST_FLOPS_PER_BLOCK = 3 * MOST_OF_WAN  # launching takes three times as long

TENSORS = (
    *("hidden_states", "audio_hidden_states", "encoder_hidden_states", "audio_encoder_hidden_states"),
    *("timestep", "audio_timestep", "sigma", "audio_sigma", "video_coords", "audio_coords"),
    *("encoder_attention_mask", "audio_encoder_attention_mask", "video_self_attention_mask", "video_keyframes_mask"),
)
TIMESTEP = TENSORS.index("timestep")
# Arguments that a graph cannot have, with the reasons.
REFUSED = {
    "attention_kwargs": "attention_kwargs",
    "spatio_temporal_guidance_blocks": "perturbed attention",  # which waits for the GPU to tell its mask's values
    "perturbation_mask": "perturbed attention",
}
_SIGNATURE = inspect.signature(LTX2VideoTransformer3DModel.forward)


@functools.wraps(LTX2VideoTransformer3DModel.forward, assigned=())  # for code that reads the signature
def transformer_forward(
    self: LTX2VideoTransformer3DModel, *args: object, **kwargs: object
) -> AudioVisualModelOutput | tuple[torch.Tensor, torch.Tensor]:
    """Run LTX2VideoTransformer3DModel.forward without masks of prompts, where they can be left out. Bound on instances.

    Replay it from a CUDA graph if that is safe and faster.
    """
    arguments = _SIGNATURE.bind(self, *args, **kwargs).arguments
    del arguments["self"]
    leave_out_masks(self, arguments)
    inputs = tuple(map(arguments.get, TENSORS))
    if torch.compiler.is_compiling() or not (graph := graph_of(self)).takes(self, inputs, _why_not_call(arguments)):
        # Pass keywords: diffusers' decorator around the class's forward reads a LoRA's scale only from keywords.
        return type(self).forward(self, **arguments)
    others = {name: value for name, value in arguments.items() if name not in (*TENSORS, *REFUSED, "return_dict")}
    inputs, reason = _with_runs(self, inputs)
    video, audio = graph.run(inputs, tuple(others.items()), reason)
    if not arguments.get("return_dict", True):
        return video, audio
    return AudioVisualModelOutput(sample=video, audio_sample=audio)


def _why_not_call(arguments: Mapping[str, object]) -> str | None:
    """Return why a call with these arguments runs without a graph, or None."""
    refused = (reason for name, reason in REFUSED.items() if arguments.get(name) is not None)
    if (reason := next(refused, None)) is not None:
        return reason
    if arguments.get("video_coords") is None or arguments.get("audio_coords") is None:
        return "no coordinates"  # the model makes them with copies from the CPU
    sigmas = (sigma for sigma in map(arguments.get, ("sigma", "audio_sigma")) if sigma is not None)
    if any(sigma.numel() > len(arguments["hidden_states"]) for sigma in sigmas):
        return "sigmas per token"  # which may have other runs than the timesteps per token
    return None


def _with_runs(transformer: LTX2VideoTransformer3DModel, inputs: Inputs) -> tuple[Inputs, str | None]:
    """Return inputs with a contiguous timestep [B, S], and after them the lengths [R] of its runs if these are few.

    Other inputs are returned as they are. If several GPUs share the tokens, also return why they make no graph.
    """
    latents, timestep = inputs[0], inputs[TIMESTEP]
    if timestep is None or timestep.numel() == len(latents):
        return inputs, None
    if ranks_of(transformer._parallel_config) > 1:
        return inputs, "timesteps per token on several GPUs"
    runs = runs_ahead(transformer.time_embed, timestep, len(latents))
    if runs is None:
        return inputs, None
    return (*inputs[:TIMESTEP], runs.timestep, *inputs[TIMESTEP + 1 :], runs.lengths), None


def _compute(
    transformer: LTX2VideoTransformer3DModel, options: tuple[tuple[str, object], ...], *inputs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both streams of the class's own forward. inputs: TENSORS, perhaps then the lengths of runs."""
    tensors, lengths = dict(zip(TENSORS, inputs, strict=False)), inputs[len(TENSORS) :]
    runs = TimestepRuns.of_lengths(tensors["timestep"], *lengths) if lengths else None
    with with_runs_ahead(getattr(transformer, SHARED), runs):
        return type(transformer).forward(transformer, **tensors, **dict(options), return_dict=False)


def _is_large(transformer: LTX2VideoTransformer3DModel, inputs: Inputs, config: PatchConfig) -> bool:
    ranks = ranks_of(transformer._parallel_config)
    return is_more(flops_per_block(transformer, inputs[0], config, ranks), MOST_FLOPS_PER_BLOCK, ranks)


def flops_per_block(
    transformer: LTX2VideoTransformer3DModel, latents: torch.Tensor, config: PatchConfig, ranks: int = 1
) -> float:
    """Return the floating-point operations of one block's linears and self-attention of the video [B, S, C].

    As for Wan, operations in 8 bits count half. ranks: the GPUs that share the tokens of a sample, of which S are here.
    """
    widths = transformer.config
    dim = widths.num_attention_heads * widths.attention_head_dim
    between = widths.audio_num_attention_heads * widths.audio_attention_head_dim
    # Per token: q, k, v and out of self-attention, q and out of the prompt's, q and out of audio to video, k and v of
    # video to audio, two linears of the feed-forward.
    linears = 2 * (6 * dim * dim + 4 * dim * between + 8 * dim * dim)
    batch, tokens, _ = latents.shape
    return flops_of(batch, (tokens, tokens * ranks), linears, dim, config, TOPK)


GRAPHED = Graphed("proj_in", _compute, _is_large, why_not_repeatable)
