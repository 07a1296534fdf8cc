"""Try the kernels that only `turbo-rcm tune` may choose, each beside the kernel that an op usually takes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ..kernels.choice.registry import Kernel, Op
from .ops import Contender, Contest

Lists = Sequence[Op]  # the lists of kernels that a contest picks from


def kernels_by_tune(lists: Lists) -> list[tuple[Op, Kernel]]:
    """Return the kernels that only `turbo-rcm tune` may choose, each with its list."""
    return [(one, kernel) for one in lists for kernel in one.kernels if kernel.by_tune]


def with_trials(lists: Lists, contest: Contest) -> Contest:
    """Return a contest with those kernels that can run as further alternatives."""
    (ours,) = contest.ours.values()
    trials = ((kernel.name, functools.partial(_trying, one, kernel, ours)) for one, kernel in kernels_by_tune(lists))
    return replace(contest, alternatives=contest.alternatives | {name: run for name, run in trials if can_run(run)})


def times_of_trials(lists: Lists, timings: Mapping[str, Mapping[str, object]]) -> dict[str, float]:
    """Return the milliseconds of the kernels `by_tune`, by name. Refused kernels are left out."""
    found = {kernel.name: timings.get(kernel.name, {}).get("milliseconds") for _, kernel in kernels_by_tune(lists)}
    return {name: round(time, 4) for name, time in found.items() if time}


def can_run(run: Contender) -> bool:
    """True if a backend or kernel accepts these tensors. Errors after which the GPU cannot go on are raised."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns of why a backend cannot run
            run()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception:  # Triton raises many kinds for a GPU that it does not know
        return False
    return True


def _trying(op: Op, kernel: Kernel, run: Contender) -> object:
    with op.trying(kernel) as picked:
        result = run()
    if not picked:
        raise ValueError(f"this contest does not pick from the kernels of {op.name}.")
    return result
