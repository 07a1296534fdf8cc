"""Timesteps per token: runs of consecutive tokens that share a timestep have one row of modulation together.

TI2V-5B, and LTX-2 from an image, give every token its own timestep, but a video has only one or two: one for a given
first frame, and one for the other frames. The time embedding is computed once for each run of equal timesteps. The
kernels find the row of a token. The model still passes on one row per token, for hooks and other code that read it.

The runs are found by waiting for the GPU, which a CUDA graph cannot do. So they are found before a forward is recorded
or replayed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ...kernels import MAX_RUNS, Runs
from ...plain import hook_around_forward, hook_in_place_of_forward, is_original
from ..cuda_graphs import why_not_recorded
from ..steps.plan import Shared

Row = torch.Tensor | Runs  # of modulation: [B|1, S|1, C], or one for each run of tokens


class TimestepRuns(NamedTuple):
    """The runs of equal timesteps in a contiguous tensor [B, S] or [B·S]: the values [R] and the lengths [R]."""

    timestep: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of_lengths(cls, timestep: torch.Tensor, lengths: torch.Tensor) -> TimestepRuns:
        """Return the runs of these lengths, none of which is 0, with the values that a timestep has there."""
        return cls(timestep, timestep.flatten()[_starts(lengths)[:-1]], lengths)

    @property
    def starts(self) -> torch.Tensor:
        """The runs' first tokens and the number of all tokens, [R + 1] int32, as the kernels read them."""
        return _starts(self.lengths).int()

    def padded(self, count: int) -> TimestepRuns | None:
        """Return these runs with empty ones after them, so that there are `count`, or None if there are more."""
        missing = count - len(self.values)
        if missing < 0:
            return None
        values, lengths = (nn.functional.pad(each, (0, missing)) for each in (self.values, self.lengths))
        return TimestepRuns(self.timestep, values, lengths)

    def are_of(self, timestep: torch.Tensor) -> bool:
        """True if timestep [B·S] is that tensor or a view of all of it."""
        same = timestep.data_ptr() == self.timestep.data_ptr() and timestep.dtype == self.timestep.dtype
        return same and timestep.numel() == self.timestep.numel()

    def expand(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [R, C] of the runs as rows of their tokens, [B·S, C]."""
        return rows.repeat_interleave(self.lengths, 0, output_size=self.timestep.numel())

    def expand_for_blocks(self, rows: torch.Tensor) -> tuple[torch.Tensor, TokenRuns]:
        """Return what `expand` does, and the runs by which blocks recognise it."""
        # This must be an ordinary tensor: an inference tensor does not count writes to it.
        with torch.inference_mode(False), torch.no_grad():
            by_token = self.expand(rows)
        return by_token, TokenRuns.of(by_token, rows, self.starts)


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(lengths.cumsum(0), (1, 0))


class TokenRuns(NamedTuple):
    """The rows [R, n·C] that a temb [B, S, n·C] was made of, the runs' starts [R + 1], where the temb lies, and its
    version."""

    rows: torch.Tensor
    starts: torch.Tensor
    storage: StorageWeakRef
    version: int

    @classmethod
    def of(cls, temb: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor) -> TokenRuns:
        """Return the runs of a temb as it is now. Later writes to it are noticed."""
        return cls(rows, starts, StorageWeakRef(temb.untyped_storage()), temb._version)

    def made(self, temb: torch.Tensor) -> bool:
        """True if temb, of any shape, is that tensor or a view of all of it, unchanged since."""
        same = not self.storage.expired() and self.storage == StorageWeakRef(temb.untyped_storage())
        same = same and temb.numel() == temb.untyped_storage().nbytes() // temb.element_size()
        return same and temb._version == self.version


class Ahead(NamedTuple):
    """Runs that were found ahead of a forward, and the thread that computes it."""

    runs: TimestepRuns
    thread: int


@contextmanager
def with_runs_ahead(shared: Shared, runs: TimestepRuns | None) -> Iterator[None]:
    """While a graph is recorded, embedders cannot look for runs. Let them take these, and leave none behind."""
    shared.timestep_runs = None if runs is None else Ahead(runs, threading.get_ident())
    try:
        yield
    finally:
        shared.timestep_runs = shared.runs = None  # they may lie in a graph's memory


def runs_ahead_here(shared: Shared) -> TimestepRuns | None:
    """Return the runs that were found before the forward that this thread is in, or None."""
    ahead: Ahead | None = None if torch.compiler.is_compiling() else shared.timestep_runs
    return ahead.runs if ahead is not None and ahead.thread == threading.get_ident() else None


def runs_ahead_of(shared: Shared, timestep: torch.Tensor) -> TimestepRuns | None:
    """Return the runs that were found ahead of the forward of this timestep [B·S], or None."""
    runs = runs_ahead_here(shared)
    return runs if runs is not None and runs.are_of(timestep) else None


def find_runs(timestep: torch.Tensor) -> TimestepRuns | None:
    """Return the runs of equal timesteps, or None if they are too many. `may_embed_runs` tells if it may be called."""
    values, lengths = torch.unique_consecutive(timestep, return_counts=True)  # waits for the GPU
    return TimestepRuns(timestep, values, lengths) if len(values) <= MAX_RUNS else None


def may_embed_runs(
    embedder: nn.Module, embedder_class: type[nn.Module], parts: Iterable[nn.Module], inputs: Sequence
) -> bool:
    """True if embedding fewer timesteps than tokens has no visible effect.

    embedder_class: the only class whose forward is known. parts: the modules that would see fewer timesteps. inputs: of
    the embedder, first the timestep.
    """
    if torch.compiler.is_compiling() or inputs[0].is_meta or why_not_recorded(inputs) is not None:
        return False
    is_known = type(embedder) is embedder_class and is_original(type(embedder).forward, type(embedder))
    return is_known and not any(map(_has_hook_of_user, parts))


def _has_hook_of_user(module: nn.Module) -> bool:
    """True if a hook other than offloading's sees the module's inputs."""
    if hook_around_forward(module) is not None:
        return True
    registry = vars(module).get("_diffusers_hook")
    hooks = [vars(module).get("_hf_hook"), *(registry.hooks.values() if registry is not None else ())]
    hooks = [part for hook in hooks if hook is not None for part in getattr(hook, "hooks", [hook])]
    if not hooks:
        return hook_in_place_of_forward(module) is not None
    return any(type(hook).__module__.split(".")[0] not in ("accelerate", "diffusers") for hook in hooks)


def gate_varies_by(gate: Row) -> str:
    """Return the unit that has its own row of the gate: "sample", "token" or "run"."""
    if isinstance(gate, Runs):
        return "run"
    return "token" if gate.shape[1] > 1 else "sample"
