"""Parts of every training stage: device, seeded and resumable loop, log, and a moving average of weights."""

from __future__ import annotations

import copy
import json
import math
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs

CHECKPOINT_SECONDS = 120


class OutOfTime(Exception):
    """The time of this run is over. The checkpoint holds everything that the next run needs."""


class Run:
    """One training run: the device and precision, the folder it writes to, its seed and when it must stop."""

    def __init__(self, folder: Path, seed: int, minutes: float = math.inf):
        self.folder, self.seed = folder, seed
        # Autocast without its cache: else every replay of a CUDA graph would take weights that were cast before.
        self.accelerator = Accelerator(mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(cache_enabled=False)])
        self.device = self.accelerator.device
        self._deadline = time.monotonic() + 60 * minutes
        folder.mkdir(parents=True, exist_ok=True)

    def seed_of(self, name: str, index: int) -> int:
        """Return a seed for the index-th of the draws of this name."""
        return zlib.crc32(f"{self.seed} {name} {index}".encode())

    def save(self, model, name: str) -> None:
        """Run ``save_pretrained`` into a folder of the run that appears only when it is complete."""
        partial = self.folder / f"{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        model.save_pretrained(partial)
        partial.rename(self.folder / name)

    def out_of_time(self) -> bool:
        return time.monotonic() > self._deadline

    def log(self, stage: str, **values) -> None:
        """Print a line, and keep it in log.jsonl."""
        line = {"stage": stage, **{key: _rounded(value) for key, value in values.items()}}
        print(json.dumps(line), flush=True)
        with open(self.folder / "log.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    def last_log(self, stage: str) -> dict:
        """Return the newest line of a stage."""
        return [line for line in self._lines() if line["stage"] == stage][-1]

    def has_logged(self, stage: str) -> bool:
        return any(line["stage"] == stage for line in self._lines())

    def _lines(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]


class Stage:
    """A stage's loop. Every step has its own seed, so an interrupted run goes on as if it had not been.

    On a GPU the few steps that warm up a CUDA graph are an exception.

    parts: everything with a ``state_dict`` that changes. The checkpoint is ``<name>.pt`` in the run's folder.
    """

    def __init__(self, run: Run, name: str, num_steps: int, **parts):
        self.run, self.name, self.num_steps, self.parts = run, name, num_steps, parts
        self.seconds = 0.0
        self._plan = {"seed": run.seed, "steps": num_steps}
        self._path = run.folder / f"{name}.pt"
        self._losses: dict[str, list[torch.Tensor]] = {}

    def steps(self) -> Iterator[int]:
        """Yield the steps that are left. Save and raise OutOfTime if the run's time is over."""
        start = saved = time.monotonic()
        first = self._resume()
        before = self.seconds
        for step in range(first, self.num_steps):
            torch.manual_seed(self.run.seed_of(self.name, step))
            yield step
            self.seconds = before + time.monotonic() - start
            if (step + 1) % 100 == 0 or step + 1 == self.num_steps:
                self._log(step + 1)
            if time.monotonic() - saved > CHECKPOINT_SECONDS or self.run.out_of_time():
                self._save(step + 1)
                saved = time.monotonic()
                if self.run.out_of_time():
                    raise OutOfTime

    def record(self, **losses: torch.Tensor) -> None:
        """Record this step's losses. They stay on the device until they are logged."""
        for key, value in losses.items():
            self._losses.setdefault(key, []).append(value.detach())

    def _log(self, step: int) -> None:
        means = {key: torch.stack(values).float().mean().item() for key, values in self._losses.items()}
        self._losses.clear()
        self.run.log(self.name, step=step, seconds=self.seconds, **means)

    def _resume(self) -> int:
        if not self._path.exists():
            return 0
        state = torch.load(self._path, map_location=self.run.device)
        if state["plan"] != self._plan:
            raise ValueError(
                f"{self._path} is of a run with {state['plan']}, and this one has {self._plan}; give "
                "the same --seed and --fraction, or another --output."
            )
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        self.seconds = state["seconds"]
        return state["step"]

    def _save(self, step: int) -> None:
        state = {name: part.state_dict() for name, part in self.parts.items()}
        partial = self._path.with_suffix(".partial")
        torch.save({"plan": self._plan, "step": step, "seconds": self.seconds, **state}, partial)
        partial.replace(self._path)


class Average(torch.nn.Module):
    """An exponential moving average of a module's weights, in ``module``; early steps average over fewer."""

    def __init__(self, module: torch.nn.Module, decay: float):
        super().__init__()
        self.module, self.decay = copy.deepcopy(module).requires_grad_(False), decay

    @torch.no_grad()
    def update(self, module: torch.nn.Module, step: int) -> None:
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.module.parameters()), list(module.parameters()), weight)


class GraphedStep:
    """A training step whose many small launches are replayed as one CUDA graph; on a CPU it is just called.

    step: takes tensors whose shapes never change, returns tensors, and never waits for the GPU. The first call also
    runs it three times to warm up.
    """

    def __init__(self, step: Callable[..., tuple[torch.Tensor, ...]]):
        self._step, self._graph = step, None

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not inputs[0].is_cuda:
            return self._step(*inputs)
        if self._graph is None:
            self._capture(inputs)
        for static, given in zip(self._inputs, inputs, strict=True):
            static.copy_(given)
        self._graph.replay()
        return tuple(output.clone() for output in self._outputs)

    def _capture(self, inputs: tuple[torch.Tensor, ...]) -> None:
        self._inputs = [given.clone() for given in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = self._step(*self._inputs)


def _rounded(value):
    return float(f"{value:.5g}") if isinstance(value, float) else value
