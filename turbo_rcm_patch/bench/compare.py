"""Compare a generation unpatched, under torch.compile and patched: times, memory and differences of the results."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import torch
from diffusers import DiffusionPipeline

from ..config import PatchConfig, resolve_config
from ..patching import Patch
from ..patching.apply import transformers_of
from ..patching.families.vae import is_vae
from .coding import decode_flops
from .compilations import compilations
from .environment import Environment, describe_environment
from .metrics import Difference
from .replaced import progress_bar
from .timing import StageTimings, TimedGeneration, in_turns, timed_generation
from .variants import (
    PATCHED,
    UNPATCHED,
    Variants,
    allocated,
    memory_of,
    single_process,
)


@dataclass(frozen=True)
class Variant:
    """One way to run the pipeline. Speed-ups and differences are against the unpatched one.

    latents, frames: None for the unpatched variant itself. frames: None too if only latents were made.
    video: frames [F, H, W, 3] in [0, 1] of the first sample, or None without frames.
    compiled: how many kernels of Triton's and graphs of torch.compile's were compiled in the measured generations.
    step_error, decode_error: relative L2 of a step and of the decoded frames to fp32, where a benchmark measured them.
    weights: bytes of the transformers' tensors in this variant.
    """

    name: str
    timings: StageTimings
    total_speedup: float
    steps_speedup: float
    latents: Difference | None
    frames: Difference | None
    video: np.ndarray | None
    compiled: int
    step_error: float | None = None
    decode_error: float | None = None
    weights: int | None = None


@dataclass(frozen=True)
class Comparison:
    """The variants in the order unpatched, torch.compile (if it was run), patched, and the caller's settings.

    decode_flops: the FLOPs of diffusers' decoder for a generation's latents, or None if none are decoded.
    """

    settings: dict[str, object]
    environment: Environment
    patch_summary: str
    variants: tuple[Variant, ...]
    decode_flops: int | None = None

    def difference(self) -> tuple[np.ndarray, int]:
        """Return the patched video minus the first one, [F, H, W, 3], amplified, and the factor: the largest power of
        two that keeps the difference in [0, 1]. NaN in a video counts as a difference of 1."""
        difference = np.nan_to_num(np.abs(self.variants[-1].video - self.variants[0].video), nan=1.0)
        largest = float(difference.max())
        gain = 2 ** math.floor(-math.log2(largest)) if largest else 1
        return gain * difference, gain

    def to_dict(self) -> dict[str, object]:
        """Return everything except the videos, for ``json.dump``: times in seconds, memory in bytes.

        difference_gain: the factor of `difference`, or None without frames.
        """
        plain = asdict(replace(self, variants=tuple(replace(variant, video=None) for variant in self.variants)))
        for variant in plain["variants"]:
            del variant["video"]
        made = all(variant.video is not None for variant in self.variants)
        return plain | {"difference_gain": self.difference()[1] if made else None}


def compare(
    pipe: DiffusionPipeline,
    call: dict[str, object],
    *,
    seed: int = 0,
    config: PatchConfig | str = "exact",
    with_compile: bool | None = None,
    warmups: int = 1,
    repeats: int = 3,
    settings: dict[str, object] | None = None,
) -> Comparison:
    """Run ``pipe(**call)`` from the same seed in every variant. The pipeline is unchanged afterwards.

    The variants take turns, so that a GPU that slows down as it warms slows all of them. The patch's CUDA graphs are
    recorded in an unmeasured generation, because all later videos of a user replay them.

    with_compile: True to run regional torch.compile (``compile_repeated_blocks``) too. None: only on a GPU.
    warmups, repeats: unmeasured and measured generations per variant; timings are medians over the measured ones.
    settings: facts to record beside the figures, such as the model's name.
    """
    device = torch.device(pipe._execution_device)
    variants = single_process(pipe, resolve_config(config), with_compile)
    runs = take_turns(pipe, lambda: seeded_generation(pipe, call, seed), variants, warmups, repeats, device)
    return comparison_of(pipe, runs, {**(settings or {}), "seed": seed}, device)


def seeded_generation(pipe: DiffusionPipeline, call: dict[str, object], seed: int) -> TimedGeneration:
    """Run ``pipe(**call)`` from a seed."""
    return timed_generation(pipe, **call, generator=torch.Generator(pipe._execution_device).manual_seed(seed))


@dataclass
class Runs:
    """The measured generations of one variant: their timings and compilations, the last result, the memory that it left
    allocated (bytes), the size of the weights (bytes), and the patch's summary."""

    timings: list[StageTimings] = field(default_factory=list)
    compiled: int = 0
    made: TimedGeneration | None = None
    left: int = 0
    weights: int = 0
    summary: str = ""


def take_turns(
    pipe: DiffusionPipeline,
    generate: Callable[[], TimedGeneration],
    variants: Variants,
    warmups: int,
    repeats: int,
    device: torch.device,
) -> dict[str, Runs]:
    """Run the generations of every variant in turns, and return them by name. A variant is on only in its generations.

    A memory peak does not include the memory that other variants hold meanwhile. What was left before in reference
    cycles is freed first: freed in a variant's turn, it would count as more memory of the others.
    """
    gc.collect()
    runs = {name: Runs() for name in variants.switches}
    for turn, name in in_turns(variants.switches, warmups + repeats):
        switch, run = variants.switches[name], runs[name]
        bar = progress_bar(pipe, desc=f"{name} {turn + 1}/{warmups + repeats}", leave=False)
        before = allocated(device)
        with bar, switch() as applied, compilations() as compiled:
            run.made = _generate_recorded(generate, applied)
            run.weights = sum(map(memory_of, transformers_of(pipe).values()))
            graph_memory = 0 if applied is None else applied.graph_memory
            run.summary = "" if applied is None else applied.summary()
        others = sum(other.left for other in runs.values() if other is not run) + variants.spare_memory
        if turn >= warmups:
            run.timings.append(_with_memory(run.made.timings, graph_memory - others))
            run.compiled += compiled()
        run.left += allocated(device) - before
    return runs


def _generate_recorded(generate: Callable[[], TimedGeneration], applied: Patch | None) -> TimedGeneration:
    """Return a generation. Generate again as long as the patch recorded CUDA graphs in it."""
    made = generate()
    recorded = 0
    while applied is not None and applied.graph_count > recorded:
        recorded = applied.graph_count
        made = generate()
    return made


def _with_memory(timings: StageTimings, more: int) -> StageTimings:
    """Return the timings with more bytes of peak memory, such as CUDA graphs', which are not counted as allocated."""
    return timings if timings.peak_memory is None else replace(timings, peak_memory=timings.peak_memory + more)


def comparison_of(
    pipe: DiffusionPipeline, runs: Mapping[str, Runs], settings: dict[str, object], device: torch.device
) -> Comparison:
    """Return the comparison of measured runs, among which are the unpatched one and the patched one."""
    base, flops = runs[UNPATCHED], None
    if base.made.frames is not None and is_vae(pipe.vae):
        flops = decode_flops(pipe.vae, base.made.latents.shape)
    variants = tuple(_variant(name, run, base, device) for name, run in runs.items())
    return Comparison(settings, describe_environment(device), runs[PATCHED].summary, variants, flops)


def _variant(name: str, run: Runs, base: Runs, device: torch.device) -> Variant:
    timings, base_timings = StageTimings.median(run.timings), StageTimings.median(base.timings)
    latents, frames = None, None
    has_arrays = isinstance(run.made.frames, np.ndarray)
    if run is not base:
        latents = Difference.of_latents(run.made.latents, base.made.latents)
        if has_arrays:
            frames = Difference.of_frames(*(torch.from_numpy(each.made.frames) for each in (run, base)), device)
    return Variant(
        name=name,
        timings=timings,
        total_speedup=base_timings.total / timings.total,
        steps_speedup=sum(base_timings.steps) / sum(timings.steps),
        latents=latents,
        frames=frames,
        video=run.made.frames[0] if has_arrays else None,
        compiled=run.compiled,
        weights=run.weights,
    )
