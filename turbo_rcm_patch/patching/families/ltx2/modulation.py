"""The rows of modulation of an LTX-2 block: a table of the block plus what the timestep gives.

From an image every token has its own timestep, and three embedders get the video's: `time_embed`, and the two of the
attentions between the streams, of which the last one gets a multiple of it.
"""

from __future__ import annotations

import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2AdaLayerNormSingle

from ....kernels import Runs
from ....plain import function_bound_to
from ...steps.plan import SHARED, Shared
from ..token_runs import Row, TimestepRuns, TokenRuns, find_runs, may_embed_runs, runs_ahead_here
from .sub_layers import Modulation

# The embedders that get the video's timesteps, by path.
EMBEDDERS = "time_embed", "av_cross_attn_video_scale_shift", "av_cross_attn_video_a2v_gate"


def embedder_forward(
    self: LTX2AdaLayerNormSingle,
    timestep: torch.Tensor,
    added_cond_kwargs: dict[str, torch.Tensor] | None = None,
    batch_size: int | None = None,
    hidden_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """LTX2AdaLayerNormSingle.forward that embeds every run of equal timesteps once; bound on instances.

    timestep [B] or [B·S]; returns the rows of modulation [B|B·S, n·C] and the time embedding [B|B·S, C].
    """
    options = added_cond_kwargs, batch_size, hidden_dtype
    if torch.compiler.is_compiling():
        return type(self).forward(self, timestep, *options)
    shared: Shared = getattr(self, SHARED)
    by_token = added_cond_kwargs is None and batch_size is not None and timestep.numel() > batch_size
    runs = _runs_of(self, timestep, shared) if by_token else None
    if runs is None:
        made = None
        temb, embedded = type(self).forward(self, timestep, *options)
    else:
        rows, embedded = type(self).forward(self, runs.values, *options)
        temb, made = runs.expand_for_blocks(rows)
        embedded = runs.expand(embedded)
    shared.runs = {**(shared.runs or {}), self: made}  # a new dictionary: another thread may read the old one
    return temb, embedded


def runs_ahead(embedder: torch.nn.Module, timestep: torch.Tensor, samples: int) -> TimestepRuns | None:
    """Return the runs of a timestep [B, S] that `time_embed` would find, or None if it would embed all of it."""
    if function_bound_to(embedder, vars(embedder).get("forward")) is not embedder_forward:
        return None
    timestep = timestep.contiguous()
    return find_runs(timestep) if timestep.numel() > samples and _may_embed_runs(embedder, timestep) else None


def _runs_of(embedder: LTX2AdaLayerNormSingle, timestep: torch.Tensor, shared: Shared) -> TimestepRuns | None:
    """Return the runs of equal timesteps [B·S], or None if they must not be looked for or are too many."""
    if _may_embed_runs(embedder, timestep):
        return find_runs(timestep)
    # While a graph is recorded, there are no hooks, and every timestep per token is the video's or a multiple of it.
    ahead = runs_ahead_here(shared)
    same = ahead is not None and ahead.timestep.numel() == timestep.numel()
    return TimestepRuns.of_lengths(timestep, ahead.lengths) if same else None


def _may_embed_runs(embedder: torch.nn.Module, timestep: torch.Tensor) -> bool:
    parts = (part for part in embedder.modules() if part is not embedder)
    return may_embed_runs(embedder, LTX2AdaLayerNormSingle, parts, (timestep,))


def runs_that_made(temb: torch.Tensor, x: torch.Tensor, shared: Shared) -> TokenRuns | None:
    """Return the runs that an embedder made a temb [B, S, n·C] of, for x [B, S, C], or None if it did not."""
    known = None if torch.compiler.is_compiling() else shared.runs
    if known is None or temb.shape[:2] != x.shape[:2]:
        return None
    return next((runs for runs in known.values() if runs is not None and runs.made(temb)), None)


def rows_of(table: torch.Tensor, temb: torch.Tensor, runs: TokenRuns | None = None) -> tuple[Row, ...]:
    """Return the rows table [n, C] + temb [B, 1|S, n·C], each [B, 1|S, C], or by the runs that temb was made of.

    One row for a sample or a run is computed in fp32. Rows for every token stay in the model's dtype, as diffusers
    computes them: in fp32 they would take twice the memory.
    """
    if runs is not None:
        rows = table.to(runs.rows.device) + runs.rows.unflatten(1, (len(table), -1)).float()
        return tuple(Runs(row, runs.starts) for row in rows.unbind(1))
    temb = temb.unflatten(2, (len(table), -1))
    if temb.shape[1] == 1:
        temb = temb.to(torch.promote_types(temb.dtype, torch.float32))
    return (table.to(temb.device) + temb).unbind(2)


def stream_rows(
    table: torch.Tensor, temb: torch.Tensor, x: torch.Tensor, shared: Shared
) -> tuple[Modulation, Modulation, Modulation]:
    """Return the modulation of a stream x in its self-attention, feed-forward, and prompt attention (LTX-2.3)."""
    rows = rows_of(table, temb, runs_that_made(temb, x, shared))
    return Modulation(*rows[:3]), Modulation(*rows[3:6]), Modulation(*rows[6:9])


def prompt_rows(table: torch.Tensor, temb: torch.Tensor | None, x: torch.Tensor) -> Modulation:
    """Return the modulation of a prompt (LTX-2.3). temb: [B, 1, 2·C], or None for one that no timestep changes."""
    if temb is not None:
        return Modulation(*rows_of(table, temb))
    return Modulation(*table[None, None].to(x.device, x.dtype).unbind(2))


def rows_between_streams(
    table: torch.Tensor, temb: torch.Tensor, gate: torch.Tensor, x: torch.Tensor, shared: Shared
) -> tuple[Modulation, ...]:
    """Return the modulation of a stream x in the attention from audio to video, and in that from video to audio.

    table [5, C], temb [B, 1|S, 4·C], gate [B, 1|S, C]. Both have the gate, which only the one that changes the stream
    uses.
    """
    a2v_scale, a2v_shift, v2a_scale, v2a_shift = rows_of(table[:4], temb, runs_that_made(temb, x, shared))
    (gate,) = rows_of(table[4:], gate, runs_that_made(gate, x, shared))
    return Modulation(a2v_shift, a2v_scale, gate), Modulation(v2a_shift, v2a_scale, gate)
