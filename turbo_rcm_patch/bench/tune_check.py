"""Whether `turbo-rcm tune` alone finds on a GPU what the shipped measurements say of it: which kernel every op takes,
and how long a step of a model takes by either.

A process chooses by two tables of kernels/choice/measured.py, which are exchanged here for a while. A patched block
asks them when it is first called and keeps the answers, so a patch is applied, called and taken off within one
exchange.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from diffusers import DiffusionPipeline

from ..kernels.choice import measured
from ..kernels.choice.measured import FOLDER, OPS, Tuned, Verdict, all_tuned, read_verdicts
from ..kernels.choice.tuned import CACHE
from ..patching import Patch, patch
from ..tables import table
from .compare import Runs, take_turns
from .environment import Environment
from .timing import StageTimings, TimedGeneration, timed_generation
from .variants import Switch, Variants

SIDES = SHIPPED, TUNED = "shipped", "tuned"
ALLOWED = 0.02  # of a step by the shipped choices, how much longer one by tune's may take
WARMUPS = 1
COLUMNS = ("takes", "ours, ms", "otherwise, ms")
CHOICES_HEADER = ("op", *(f"{side}: {column}" for side in SIDES for column in COLUMNS))


class Choices(NamedTuple):
    """What the patch chooses by: the verdicts that ship, by op and compute capability, and what `turbo-rcm tune` found,
    by GPU, which goes before them."""

    verdicts: Mapping[tuple[str, tuple[int, int]], Verdict]
    tuned: Mapping[str, Tuned]

    def of_gpu(self, gpu: str, capability: tuple[int, int]) -> dict[str, Verdict | None]:
        """The verdict on every op of OPS; None where nobody measured."""
        tuned = self.tuned[gpu].verdicts if gpu in self.tuned else {}
        return {op: tuned.get(op, self.verdicts.get((op, capability))) for op in OPS}


@dataclass(frozen=True)
class OpChoice:
    """An op's verdict by the measurements that ship, and by tune; None: not measured, so that PyTorch's is taken."""

    op: str
    shipped: Verdict | None
    tuned: Verdict | None

    def to_dict(self) -> dict[str, object]:
        """For ``json.dump``; times in milliseconds."""
        return {"op": self.op, SHIPPED: _plain(self.shipped), TUNED: _plain(self.tuned)}


@dataclass(frozen=True)
class TuneCheck:
    """What came of it.

    tune_seconds: how long tune took. milliseconds, patch_summaries: of a step, and of the patch, by SHIPPED and TUNED.
    """

    settings: Mapping[str, object]
    environment: Environment
    tune_seconds: float
    choices: Sequence[OpChoice]
    milliseconds: Mapping[str, float]
    patch_summaries: Mapping[str, str]

    @property
    def is_ok(self) -> bool:
        """Whether a step by tune's choices takes no longer than is allowed."""
        return slower(self.milliseconds) <= ALLOWED

    def to_dict(self) -> dict[str, object]:
        """For ``json.dump``."""
        return {
            "settings": dict(self.settings),
            "environment": asdict(self.environment),
            "tune_seconds": self.tune_seconds,
            "choices": [choice.to_dict() for choice in self.choices],
            "milliseconds": dict(self.milliseconds),
            "patch_summaries": dict(self.patch_summaries),
        }


def shipped_choices() -> Choices:
    """Those of a machine on which nobody ran tune."""
    return Choices(read_verdicts(FOLDER.glob("*.json")), {})


def tuned_choices(tune: Callable[[], object]) -> tuple[Choices, float]:
    """What tune finds where nothing ships and nothing was kept, and the seconds that it takes. The user's cache folder
    is left alone. Raises RuntimeError where it kept nothing.

    tune: measures, and keeps what it found in the cache folder.
    """
    with _empty_cache(), chosen_by(Choices({}, {})):
        start = time.perf_counter()
        tune()
        seconds = time.perf_counter() - start
        found = all_tuned()
    if not found:
        raise RuntimeError("tune kept nothing that can be read.")
    return Choices({}, found), seconds


@contextlib.contextmanager
def chosen_by(choices: Choices) -> Iterator[None]:
    """Within it a patch that is applied anew chooses by these."""
    before = measured._VERDICTS, measured._TUNED
    measured._VERDICTS, measured._TUNED = choices
    try:
        yield
    finally:
        measured._VERDICTS, measured._TUNED = before


@contextlib.contextmanager
def _empty_cache() -> Iterator[None]:
    before = os.environ.get(CACHE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[CACHE]
            else:
                os.environ[CACHE] = before


def compare_choices(shipped: Choices, tuned: Choices, gpu: str, capability: tuple[int, int]) -> list[OpChoice]:
    """Every op's verdicts on a GPU."""
    ours, theirs = (choices.of_gpu(gpu, capability) for choices in (shipped, tuned))
    return [OpChoice(op, ours[op], theirs[op]) for op in OPS]


def time_steps(
    pipe: DiffusionPipeline, call: Mapping[str, object], choices: Mapping[str, Choices], repeats: int
) -> tuple[dict[str, float], dict[str, str]]:
    """Milliseconds of a patched step by each of the choices, the median over steps of medians over repeats, which take
    turns; and the patch's summaries.

    call: the pipeline's arguments. The pipeline is left as it was found.
    """
    device = torch.device(pipe._execution_device)

    def generate() -> TimedGeneration:
        return timed_generation(pipe, **call, generator=torch.Generator(device).manual_seed(0))

    switches = {name: _patched_by(each, pipe) for name, each in choices.items()}
    runs = take_turns(pipe, generate, Variants(switches), WARMUPS, repeats, device)
    return {name: _milliseconds(run) for name, run in runs.items()}, {name: run.summary for name, run in runs.items()}


def _patched_by(choices: Choices, pipe: DiffusionPipeline) -> Switch:
    @contextlib.contextmanager
    def patched() -> Iterator[Patch]:
        with chosen_by(choices), patch(pipe) as applied:
            yield applied

    return patched


def _milliseconds(run: Runs) -> float:
    return 1e3 * statistics.median(StageTimings.median(run.timings).steps)


def slower(milliseconds: Mapping[str, float]) -> float:
    """How much longer a step by tune's choices takes, as a share of one by the shipped ones; below 0 where shorter."""
    return milliseconds[TUNED] / milliseconds[SHIPPED] - 1


def differing(choices: Sequence[Mapping]) -> list[str]:
    """The ops that tune chooses otherwise for. choices: as `OpChoice.to_dict`."""
    return [choice["op"] for choice in choices if _takes(choice[SHIPPED]) != _takes(choice[TUNED])]


def choices_table(choices: Sequence[Mapping], *, markdown: bool = False) -> str:
    """A row for every op. choices: as `OpChoice.to_dict`."""
    rows = [[choice["op"], *(cell for side in SIDES for cell in _cells(choice[side]))] for choice in choices]
    return table([CHOICES_HEADER, *rows], markdown=markdown)


def check_table(check: TuneCheck) -> str:
    """The choices, where they differ, how long tune took, and a step by both."""
    choices = [choice.to_dict() for choice in check.choices]
    others = differing(choices)
    steps = " ms, ".join(f"{name} {milliseconds:.2f}" for name, milliseconds in check.milliseconds.items())
    return "\n\n".join(
        (
            choices_table(choices),
            f"chosen otherwise: {', '.join(others)}" if others else "all are chosen alike",
            f"tune: {check.tune_seconds:.0f} s\na step: {steps} ms, {slower(check.milliseconds):+.2%} "
            f"({ALLOWED:+.0%} is allowed)",
        )
    )


def _plain(verdict: Verdict | None) -> dict[str, object] | None:
    if verdict is None:
        return None
    return {"is_ours": verdict.is_ours, "ours": verdict.ours, "rival": verdict.rival, "gpus": list(verdict.gpus)}


def _takes(verdict: Mapping | None) -> str:
    return "ours" if verdict is not None and verdict["is_ours"] else "PyTorch's"


def _cells(verdict: Mapping | None) -> list[str]:
    if verdict is None:
        return [_takes(verdict), "not measured", ""]
    ours = "failed" if verdict["ours"] is None else f"{verdict['ours']:.2f}"
    return [_takes(verdict), ours, f"{verdict['rival']:.2f}"]
