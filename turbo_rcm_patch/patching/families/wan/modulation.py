"""The six rows of modulation of a block: for the whole sample, or for runs of tokens that share a timestep."""

from __future__ import annotations

import torch
from diffusers.models.transformers.transformer_wan import WanTimeTextImageEmbedding

from ....kernels import Runs
from ....plain import function_bound_to
from ...steps.plan import SHARED, Shared
from ..token_runs import Row, TimestepRuns, find_runs, may_embed_runs, runs_ahead_of


def embedder_forward(
    self: WanTimeTextImageEmbedding,
    timestep: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    encoder_hidden_states_image: torch.Tensor | None = None,
    timestep_seq_len: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """WanTimeTextImageEmbedding.forward that embeds every run of equal timesteps once; bound on instances.

    timestep [B], or [B·S] with S as timestep_seq_len; returns temb, timestep_proj, and the projected text and image.
    """
    shared: Shared = getattr(self, SHARED)
    shared.runs = None
    prompt = (encoder_hidden_states, encoder_hidden_states_image)
    runs = None if timestep_seq_len is None else _find_runs(self, timestep, *prompt) or runs_ahead_of(shared, timestep)
    if runs is None:
        return type(self).forward(self, timestep, *prompt, timestep_seq_len)
    temb, rows, *projected = type(self).forward(self, runs.values, *prompt)
    timestep_proj, shared.runs = runs.expand_for_blocks(rows)
    temb, timestep_proj = (x.unflatten(0, (-1, timestep_seq_len)) for x in (runs.expand(temb), timestep_proj))
    return temb, timestep_proj, *projected


def runs_ahead(embedder: torch.nn.Module, timestep: torch.Tensor, *prompt: torch.Tensor | None) -> TimestepRuns | None:
    """Return the runs of a timestep [B, S] that `embedder_forward` would find, or None if it would embed all tokens."""
    if function_bound_to(embedder, vars(embedder).get("forward")) is not embedder_forward:
        return None
    return _find_runs(embedder, timestep.contiguous(), *prompt)


def _find_runs(
    embedder: WanTimeTextImageEmbedding, timestep: torch.Tensor, *prompt: torch.Tensor | None
) -> TimestepRuns | None:
    """Return the runs of equal timesteps, or None if they must not be looked for or are too many."""
    parts = (embedder.timesteps_proj, *embedder.time_embedder.modules(), embedder.act_fn, embedder.time_proj)
    may = may_embed_runs(embedder, WanTimeTextImageEmbedding, parts, (timestep, *prompt))
    return find_runs(timestep) if may else None


def modulation(scale_shift_table: torch.Tensor, temb: torch.Tensor, x: torch.Tensor, shared: Shared) -> list[Row]:
    """Return six fp32 rows of modulation for x [B, S, C].

    They are [B|1, 1, C] each for temb [B|1, 6, C]. For temb per token, [B|1, S, 6, C], they are Runs or [B|1, S, C].
    """
    if temb.ndim == 3:
        return list((scale_shift_table + temb.float()).chunk(6, dim=1))
    runs = None if torch.compiler.is_compiling() else shared.runs
    if runs is None or temb.shape[:2] != x.shape[:2] or not runs.made(temb):
        return [row.squeeze(2) for row in (scale_shift_table.unsqueeze(0) + temb.float()).chunk(6, dim=2)]
    rows = scale_shift_table + runs.rows.unflatten(1, (6, -1)).float()
    return [Runs(row, runs.starts) for row in rows.unbind(1)]
