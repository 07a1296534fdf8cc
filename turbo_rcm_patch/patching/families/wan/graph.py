"""WanTransformer3DModel.forward as a CUDA graph, if its kernels take longer to launch than to run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.transformer_wan import WanAttention, WanTransformer3DModel
from torch import nn

from ....config import SLA_TOPK, PatchConfig, Sparse
from ...cuda_graphs import Inputs
from ...steps.context_parallel import ranks_of
from ...steps.plan import SHARED
from ..family import graph_of
from ..graphs import Graphed
from ..token_runs import TimestepRuns, with_runs_ahead
from .forward import wan_block
from .modulation import runs_ahead
from .repeatable import why_not_repeatable

# Launching a block takes an H200's host 2.6 ms, and 3.7 in 8 bits (results page, host time). In this time the GPU does
# 1.6e12 FLOP of a bf16 block, or 3.3e12 of one in 8 bits, which count half. The rest is for slower hosts.
MOST_FLOPS_PER_BLOCK = 2e12
# Under context parallelism all GPUs wait in each block for the slowest host, and collectives are launched too. On two
# H200s a graph of 2.3e12 FLOP gained up to 10 %, and one of 4.7e12 lost 1.7 %.
FACTOR_IN_PARALLEL = 2
# Under context parallelism each GPU's tokens get this many runs of equal timesteps. Some may be empty, because only the
# GPU with a given first frame has two of its own. But NCCL replays only recordings that all GPUs made at the same time.
# So the key, which has the number of runs, must be the same on all.
RUNS_IN_PARALLEL = 2
NOT_IN_FEW_RUNS = f"timesteps per token that are not embedded as {RUNS_IN_PARALLEL} runs or fewer"

WAN_BLOCK = wan_block(WanAttention)


def transformer_forward(
    self: WanTransformer3DModel,
    hidden_states: torch.Tensor,
    timestep: torch.LongTensor,
    encoder_hidden_states: torch.Tensor,
    encoder_hidden_states_image: torch.Tensor | None = None,
    return_dict: bool = True,
    attention_kwargs: dict[str, Any] | None = None,
) -> Transformer2DModelOutput | tuple[torch.Tensor]:
    """Replay WanTransformer3DModel.forward from a CUDA graph if that is safe and faster. Bound on instances.

    hidden_states [B, C, F, H, W], timestep [B] or per token [B, S], encoder_hidden_states [B, L, text_dim],
    encoder_hidden_states_image [B, L', image_dim] or None; the sample is [B, C_out, F, H, W].
    """
    inputs: Inputs = (hidden_states, timestep, encoder_hidden_states, encoder_hidden_states_image)
    reason = "attention_kwargs" if attention_kwargs is not None else None
    if reason is None and hidden_states.ndim != 5:
        reason = "latents without five dimensions"
    if torch.compiler.is_compiling() or not (graph := graph_of(self)).takes(self, inputs, reason):
        # Pass keywords: diffusers' decorator around the class's forward reads a LoRA's scale only from keywords.
        return type(self).forward(self, *inputs, return_dict=return_dict, attention_kwargs=attention_kwargs)
    if timestep.ndim == 2:
        inputs, reason = _with_runs(self, inputs)
    sample = graph.run(inputs, reason=reason)
    return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)


def _with_runs(transformer: WanTransformer3DModel, inputs: Inputs) -> tuple[Inputs, str | None]:
    """Return inputs with a timestep [B, S], and after them the values and lengths of its runs if these can be embedded.

    Under context parallelism a GPU that cannot do that makes no graph, and this also returns the reason.
    """
    latents, timestep, *prompt = inputs
    is_parallel = ranks_of(transformer._parallel_config) > 1
    runs = runs_ahead(transformer.condition_embedder, timestep, *prompt)
    if runs is not None and is_parallel:
        runs = runs.padded(RUNS_IN_PARALLEL)
    if runs is not None:
        return (latents, runs.timestep, *prompt, runs.values, runs.lengths), None
    return inputs, NOT_IN_FEW_RUNS if is_parallel else None


def _compute(
    transformer: WanTransformer3DModel,
    _options: tuple,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    text: torch.Tensor,
    image: torch.Tensor | None,
    *runs: torch.Tensor,
) -> torch.Tensor:
    """Return the sample of the class's own forward. runs: values [R] and lengths [R] of equal timesteps, or nothing."""
    with with_runs_ahead(getattr(transformer, SHARED), TimestepRuns(timestep, *runs) if runs else None):
        return type(transformer).forward(transformer, latents, timestep, text, image, return_dict=False)[0]


def _is_large(transformer: WanTransformer3DModel, inputs: Inputs, config: PatchConfig) -> bool:
    ranks = ranks_of(transformer._parallel_config)
    flops = flops_per_block(transformer, inputs[0], config) / ranks
    return is_more(flops, MOST_FLOPS_PER_BLOCK, ranks)


def is_more(flops: float, most: float, ranks: int) -> bool:
    """True if a GPU's FLOPs in a block are more than it pays to record. ranks: the GPUs that share the tokens, or 1."""
    return flops > most * (FACTOR_IN_PARALLEL if ranks > 1 else 1)


def _why_not_repeatable(module: nn.Module, device: torch.device, forward: Callable | None) -> str | None:
    return why_not_repeatable(module, device, WAN_BLOCK, forward)


def flops_per_block(transformer: WanTransformer3DModel, latents: torch.Tensor, config: PatchConfig) -> float:
    """Return the floating-point operations of one block's linears and self-attention for latents [B, C, F, H, W].

    Operations in 8 bits count half, because they are twice as fast. Key blocks that SLA skips do not count.
    """
    widths = transformer.config
    batch, _, *sizes = latents.shape
    tokens = math.prod(size // patch for size, patch in zip(sizes, widths.patch_size, strict=True))
    dim = widths.num_attention_heads * widths.attention_head_dim
    # Per token: q, k, v and out of self-attention, q and out of cross-attention, two linears of the feed-forward.
    linears = 2 * (6 * dim * dim + 2 * dim * widths.ffn_dim)
    return flops_of(batch, (tokens, tokens), linears, dim, config, SLA_TOPK)


def flops_of(batch: int, tokens: tuple[int, int], linears: float, dim: int, config: PatchConfig, topk: float) -> float:
    """Return the FLOPs of a block. linears: those of its linears per token. dim: the width of its self-attention.

    tokens: of a sample, and those that each of them attends to. topk: the family's share of key blocks, if the
    configuration names none.
    """
    tokens, keys = tokens
    kept = config.topk or topk if isinstance(config, Sparse) else 1.0
    costs = {"linears": linears, "attention": 4 * keys * dim * kept}
    return batch * tokens * sum(flops * (0.5 if config.in_8_bits(part) else 1.0) for part, flops in costs.items())


GRAPHED = Graphed("patch_embedding", _compute, _is_large, _why_not_repeatable)
