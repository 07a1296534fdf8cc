"""The six rows of modulation of a block: for the whole sample, or for runs of tokens that share a timestep.

TI2V-5B gives every token its own timestep, but a video has only one or two: one for a given first frame, and one for
the other frames. The time embedding is computed once for each run of equal timesteps. The kernels find the row of a
token. The model still passes on one row per token, for hooks and other code that read it.

The runs are found by waiting for the GPU, which a CUDA graph cannot do. So they are found before a forward is recorded
or replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from diffusers.models.transformers.transformer_wan import WanTimeTextImageEmbedding
from torch.multiprocessing.reductions import StorageWeakRef

from ....kernels import MAX_RUNS, Runs
from ....plain import function_bound_to, hook_around_forward, hook_in_place_of_forward, is_original
from ...cuda_graphs import why_not_recorded
from ...steps.plan import SHARED, Shared

Row = torch.Tensor | Runs


class TimestepRuns(NamedTuple):
    """The runs of equal timesteps in a contiguous tensor [B, S] or [B·S]: the values [R] and the lengths [R]."""

    timestep: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor

    def padded(self, count: int) -> TimestepRuns | None:
        """Return these runs with empty ones after them, so that there are `count`, or None if there are more."""
        missing = count - len(self.values)
        if missing < 0:
            return None
        values, lengths = (torch.nn.functional.pad(each, (0, missing)) for each in (self.values, self.lengths))
        return TimestepRuns(self.timestep, values, lengths)

    def are_of(self, timestep: torch.Tensor) -> bool:
        """True if timestep [B·S] is that tensor or a view of all of it."""
        same = timestep.data_ptr() == self.timestep.data_ptr() and timestep.dtype == self.timestep.dtype
        return same and timestep.numel() == self.timestep.numel()


class TokenRuns(NamedTuple):
    """The rows [R, 6·C] that a timestep_proj [B, S, 6·C] was made of, the runs' starts [R + 1], where it lies, and its
    version."""

    rows: torch.Tensor
    starts: torch.Tensor
    storage: StorageWeakRef
    version: int

    @classmethod
    def of(cls, timestep_proj: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor) -> TokenRuns:
        """Return the runs of a timestep_proj as it is now. Later writes to it are noticed."""
        return cls(rows, starts, StorageWeakRef(timestep_proj.untyped_storage()), timestep_proj._version)

    def made(self, temb: torch.Tensor) -> bool:
        """True if temb [B, S, 6, C] is that timestep_proj or a view of all of it, unchanged since."""
        same = not self.storage.expired() and self.storage == StorageWeakRef(temb.untyped_storage())
        same = same and temb.numel() == temb.untyped_storage().nbytes() // temb.element_size()
        return same and temb._version == self.version


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
    runs = None if timestep_seq_len is None else _find_runs(self, timestep, *prompt) or _runs_ahead(shared, timestep)
    if runs is None:
        return type(self).forward(self, timestep, *prompt, timestep_seq_len)
    temb, rows, *projected = type(self).forward(self, runs.values, *prompt)

    def expand(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(runs.lengths, 0, output_size=len(timestep)).unflatten(0, (-1, timestep_seq_len))

    # This must be an ordinary tensor: an inference tensor does not count writes to it.
    with torch.inference_mode(False), torch.no_grad():
        timestep_proj = expand(rows)
    starts = torch.nn.functional.pad(runs.lengths.cumsum(0), (1, 0)).int()
    shared.runs = TokenRuns.of(timestep_proj, rows, starts)
    return expand(temb), timestep_proj, *projected


def runs_ahead(embedder: torch.nn.Module, timestep: torch.Tensor, *prompt: torch.Tensor | None) -> TimestepRuns | None:
    """Return the runs of a timestep [B, S] that `embedder_forward` would find, or None if it would embed all tokens."""
    if function_bound_to(embedder, vars(embedder).get("forward")) is not embedder_forward:
        return None
    return _find_runs(embedder, timestep.contiguous(), *prompt)


@contextmanager
def with_runs_ahead(shared: Shared, runs: TimestepRuns | None) -> Iterator[None]:
    """Let `embedder_forward` take these runs if it is recorded, so that it cannot find them. Leave none behind."""
    shared.timestep_runs = runs
    try:
        yield
    finally:
        shared.timestep_runs = shared.runs = None  # they may lie in a graph's memory


def _runs_ahead(shared: Shared, timestep: torch.Tensor) -> TimestepRuns | None:
    """Return the runs that were found ahead of the forward of a timestep [B·S], or None."""
    runs = None if torch.compiler.is_compiling() else shared.timestep_runs
    return runs if runs is not None and runs.are_of(timestep) else None  # another thread's forward has other runs


def _find_runs(
    embedder: WanTimeTextImageEmbedding, timestep: torch.Tensor, *prompt: torch.Tensor | None
) -> TimestepRuns | None:
    """Return the runs of equal timesteps, or None if they must not be looked for or are too many."""
    if not _may_embed_runs(embedder, timestep, *prompt):
        return None
    values, lengths = torch.unique_consecutive(timestep, return_counts=True)  # waits for the GPU
    return TimestepRuns(timestep, values, lengths) if len(values) <= MAX_RUNS else None


def _may_embed_runs(embedder: WanTimeTextImageEmbedding, *inputs: torch.Tensor | None) -> bool:
    """True if embedding fewer timesteps than tokens has no visible effect."""
    if torch.compiler.is_compiling() or inputs[0].is_meta or why_not_recorded(inputs) is not None:
        return False
    parts = (embedder.timesteps_proj, *embedder.time_embedder.modules(), embedder.act_fn, embedder.time_proj)
    is_known = type(embedder) is WanTimeTextImageEmbedding and is_original(type(embedder).forward, type(embedder))
    return is_known and not any(map(_has_hook_of_user, parts))


def _has_hook_of_user(module: torch.nn.Module) -> bool:
    """True if a hook other than offloading's sees the module's inputs."""
    if hook_around_forward(module) is not None:
        return True
    registry = vars(module).get("_diffusers_hook")
    hooks = [vars(module).get("_hf_hook"), *(registry.hooks.values() if registry is not None else ())]
    hooks = [part for hook in hooks if hook is not None for part in getattr(hook, "hooks", [hook])]
    if not hooks:
        return hook_in_place_of_forward(module) is not None
    return any(type(hook).__module__.split(".")[0] not in ("accelerate", "diffusers") for hook in hooks)


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


def gate_varies_by(gate: Row) -> str:
    """Return the unit that has its own row of the gate: "sample", "token" or "run"."""
    if isinstance(gate, Runs):
        return "run"
    return "token" if gate.shape[1] > 1 else "sample"
