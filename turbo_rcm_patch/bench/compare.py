"""The same generation unpatched, under torch.compile, and patched: times, memory and how far the results are apart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from diffusers import DiffusionPipeline

from ..config import PatchConfig, resolve_config
from ..patching import Patch, patch
from .environment import Environment, describe_environment
from .metrics import Difference, relative_l2
from .timing import StageTimings, TimedGeneration, timed_generation
from .verify import FP32_LIMIT, LOW_PRECISION_FACTOR, first_call, run_oracle

UNPATCHED, COMPILED, PATCHED = "unpatched", "torch.compile", "patched"


@dataclass(frozen=True)
class Variant:
    """One way to run the pipeline. Speed-ups and differences are against the unpatched one.

    latents, frames: None for the unpatched variant itself; frames also where only latents were made.
    video: frames [F, H, W, 3] in [0, 1] of the first sample, where frames were made.
    step_error: relative L2 of the transformer's first output to the unpatched one's in fp32, where that was run.
    """

    name: str
    timings: StageTimings
    total_speedup: float
    steps_speedup: float
    latents: Difference | None
    frames: Difference | None
    video: np.ndarray | None
    step_error: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Variants in the order unpatched, torch.compile (where it was run), patched; settings as the caller gave them."""

    settings: dict[str, object]
    environment: Environment
    patch_summary: str
    variants: tuple[Variant, ...]

    def to_dict(self) -> dict[str, object]:
        """Everything but the videos, for ``json.dump``; times in seconds, memory in bytes."""
        plain = asdict(replace(self, variants=tuple(replace(variant, video=None) for variant in self.variants)))
        for variant in plain["variants"]:
            del variant["video"]
        return plain


def compare(
    pipe: DiffusionPipeline,
    call: dict[str, object],
    *,
    seed: int = 0,
    config: PatchConfig | str = "exact",
    with_compile: bool | None = None,
    with_oracle: bool = False,
    warmups: int = 1,
    repeats: int = 3,
    settings: dict[str, object] | None = None,
) -> Comparison:
    """Run ``pipe(**call)`` from the same seed in every variant; the pipeline is left as it was found.

    The variants take turns, so that a GPU that slows down as it warms does so for all of them. CUDA graphs of the patch
    are recorded in a generation that is not measured: a user's later videos all replay them.

    with_compile: whether to run regional torch.compile (``compile_repeated_blocks``) too; None: on a GPU.
    with_oracle: whether to check the transformer's first call first, in every variant against fp32, whose weights need
        memory beside the model's. Raises RuntimeError where the patched one errs more than the unpatched one may.
    warmups, repeats: unmeasured and measured generations per variant; timings are medians over the measured ones.
    settings: what to record beside the figures, such as the model's name.
    """
    config = resolve_config(config)
    device = torch.device(pipe._execution_device)
    if with_compile is None:
        with_compile = device.type == "cuda"
    summary, graph_memory = "", 0

    def generate() -> TimedGeneration:
        return timed_generation(pipe, **call, generator=torch.Generator(device).manual_seed(seed))

    @contextlib.contextmanager
    def patched() -> Iterator[Patch]:
        nonlocal summary, graph_memory
        with patch(pipe, config) as applied:
            yield applied
            summary, graph_memory = applied.summary(), applied.graph_memory

    switches = {UNPATCHED: contextlib.nullcontext, COMPILED: _CompiledBlocks(pipe), PATCHED: patched}
    if not with_compile:
        del switches[COMPILED]

    errors = _step_errors(pipe.transformer, generate, switches) if with_oracle else {}
    progress_bar = dict(getattr(pipe, "_progress_bar_config", {}))
    timings = {name: [] for name in switches}
    made = {}
    try:
        for turn in range(warmups + repeats):
            for name, switch in switches.items():
                description = f"{name} {turn + 1}/{warmups + repeats}"
                pipe.set_progress_bar_config(**{**progress_bar, "desc": description, "leave": False})
                with switch() as applied:
                    made[name] = generate()
                    recorded = 0
                    while name == PATCHED and applied.graph_count > recorded:  # in that generation
                        recorded = applied.graph_count
                        made[name] = generate()
                timings[name].append(made[name].timings)
    finally:
        pipe.set_progress_bar_config(**progress_bar)

    medians = {name: StageTimings.median(all_timings[warmups:]) for name, all_timings in timings.items()}
    if medians[PATCHED].peak_memory is not None:  # of what is allocated, which graphs' memory is not between replays
        peak_memory = medians[PATCHED].peak_memory + graph_memory
        medians[PATCHED] = replace(medians[PATCHED], peak_memory=peak_memory)
    variants = tuple(
        _variant(name, medians[name], made[name], medians[UNPATCHED], made[UNPATCHED], errors.get(name))
        for name in switches
    )
    return Comparison({**(settings or {}), "seed": seed}, describe_environment(device), summary, variants)


def _step_errors(
    transformer: torch.nn.Module,
    generate: Callable[[], object],
    switches: Mapping[str, Callable[[], contextlib.AbstractContextManager]],
) -> dict[str, float]:
    """Relative L2 error of the transformer's first output in a generation, by variant."""
    args, kwargs = first_call(transformer, generate)
    oracle = run_oracle(transformer, args, kwargs, torch.float32)[0]
    errors = {}
    for name, switch in switches.items():
        with switch(), torch.no_grad():
            errors[name] = relative_l2(transformer(*args, **kwargs)[0], oracle)
    allowed = max(LOW_PRECISION_FACTOR * errors[UNPATCHED], FP32_LIMIT)
    if not errors[PATCHED] <= allowed:
        raise RuntimeError(
            f"the patched transformer's error, a relative L2 of {errors[PATCHED]:.2e} to fp32, is above the allowed "
            f"{allowed:.2e}, {LOW_PRECISION_FACTOR} of the unpatched one's; nothing was timed. `turbo-rcm verify` says "
            "which block errs."
        )
    return errors


class _CompiledBlocks:
    """A context manager factory: regional torch.compile is on inside, off outside, and compiles once."""

    def __init__(self, pipe: DiffusionPipeline):
        models = (getattr(pipe, name, None) for name in ("transformer", "transformer_2"))
        self._models = [model for model in models if model is not None]
        self._compiled: dict[torch.nn.Module, object] = {}

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        if not self._compiled:
            for model in self._models:
                model.compile_repeated_blocks()
                self._compiled |= {m: m._compiled_call_impl for m in model.modules() if m._compiled_call_impl}
        for module, compiled_call in self._compiled.items():
            module._compiled_call_impl = compiled_call
        try:
            yield
        finally:
            for module in self._compiled:
                module._compiled_call_impl = None


def _variant(
    name: str,
    timings: StageTimings,
    made: TimedGeneration,
    base_timings: StageTimings,
    base: TimedGeneration,
    step_error: float | None,
) -> Variant:
    latents, frames = None, None
    if made is not base:
        latents = Difference.of_latents(made.latents, base.latents)
        if made.frames is not None:
            frames = Difference.of_frames(torch.from_numpy(made.frames), torch.from_numpy(base.frames))
    return Variant(
        name=name,
        timings=timings,
        total_speedup=base_timings.total / timings.total,
        steps_speedup=sum(base_timings.steps) / sum(timings.steps),
        latents=latents,
        frames=frames,
        video=None if made.frames is None else made.frames[0],
        step_error=step_error,
    )
