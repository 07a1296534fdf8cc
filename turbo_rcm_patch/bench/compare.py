"""Compare a generation unpatched, under torch.compile and patched: times, memory and differences of the results."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from diffusers import DiffusionPipeline
from torch import nn

from ..config import PatchConfig, resolve_config
from ..patching import Patch
from ..patching.apply import transformers_of
from ..patching.families.vae import is_vae
from ..tiers import EXACT
from .coding import coded, coding_oracle, decode_flops, inputs_of, refuse_tiny_vae
from .compilations import compilations
from .environment import Environment, describe_environment
from .metrics import Difference, relative_l2
from .oracle import first_calls, run_oracle, tensors_of
from .replaced import progress_bar
from .timing import StageTimings, TimedGeneration, in_turns, timed_generation
from .variants import (
    COMPILED,
    COMPILED_AFTER_A_CHANGE,
    EXACT_PATCH,
    PATCHED,
    UNPATCHED,
    Patching,
    Switch,
    Variants,
    allocated,
    context_parallel,
    memory_of,
    single_process,
)

# Latent frames that the VAE also decodes in fp32. Its convolutions reach backwards in time alone, so that the frames
# made of the first ones are the same without the rest, which would take minutes.
ORACLE_LATENTS = 9


@dataclass(frozen=True)
class Variant:
    """One way to run the pipeline. Speed-ups and differences are against the unpatched one.

    latents, frames: None for the unpatched variant itself. frames: None too if only latents were made.
    video: frames [F, H, W, 3] in [0, 1] of the first sample, or None without frames.
    compiled: how many kernels of Triton's and graphs of torch.compile's were compiled in the measured generations.
    step_error: relative L2 of the transformer's first output to the unpatched transformer's in fp32, of several outputs
        or two experts the largest, or None if that did not run.
    decode_error: the same for the frames that the VAE decodes from up to ORACLE_LATENTS latent frames.
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
        two that keeps the difference in [0, 1]. Where a video is NaN, the difference is 1."""
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
    with_oracle: bool = False,
    ulysses: int = 1,
    warmups: int = 1,
    repeats: int = 3,
    settings: dict[str, object] | None = None,
    beside: Mapping[str, Switch] | None = None,
    changed: Switch | None = None,
    patched: Patching | None = None,
) -> Comparison:
    """Run ``pipe(**call)`` from the same seed in every variant. The pipeline is unchanged afterwards.

    The variants take turns, so that a GPU that slows down as it warms slows all of them. The patch's CUDA graphs are
    recorded in an unmeasured generation, because all later videos of a user replay them.

    with_compile: True to run regional torch.compile (``compile_repeated_blocks``) too. None: only on a GPU.
    with_oracle: True to check every variant against fp32 first: each transformer's first call, and the decoding if
        frames are made. The fp32 weights need memory beside the model's. Raises RuntimeError if the patched variant's
        error is above the tier's limits.
    ulysses: the number of GPUs among which diffusers' Ulysses context parallelism splits every sample. Above 1, that
        many processes each call this function in the default process group of torch.distributed, and the pipeline's
        transformer stays parallel. Times and memory are this process's. All processes wait for each other before a
        generation.
    warmups, repeats: unmeasured and measured generations per variant; timings are medians over the measured ones.
    settings: facts to record beside the figures, such as the model's name.
    beside: switches of more variants by name. They are timed but not checked.
    changed: a switch that changes the model after a generation's first step. torch.compile then compiles again. One
        such generation runs last, for the time of its second step.
    patched: patches the pipeline with a configuration, for more than `patch` does, such as the text encoder too.
    """
    config = resolve_config(config)
    if with_oracle:
        refuse_tiny_vae(pipe)
    device = torch.device(pipe._execution_device)
    if with_compile is None:
        with_compile = device.type == "cuda"

    def generate() -> TimedGeneration:
        if ulysses > 1:
            torch.distributed.barrier()
        return timed_generation(pipe, **call, generator=torch.Generator(device).manual_seed(seed))

    judge = _Judge(pipe, generate, config) if with_oracle else None
    if ulysses > 1:
        variants = context_parallel(pipe, config, with_compile, ulysses, patched)
    else:
        variants = single_process(pipe, config, with_compile, patched)
    errors = judge.errors(variants.switches) if judge else {}
    del judge  # no variant's memory counts its tensors
    variants = replace(variants, switches={**variants.switches, **(beside or {})})
    runs = take_turns(pipe, generate, variants, warmups, repeats, device)
    if changed is not None and COMPILED in variants.switches:
        last = {COMPILED_AFTER_A_CHANGE: lambda: _within(variants.switches[COMPILED], changed)}
        kept = variants.spare_memory + sum(run.left for run in runs.values())
        runs |= take_turns(pipe, generate, Variants(last, kept), 0, 1, device)

    base, summary = runs[UNPATCHED], runs[PATCHED].summary
    results = tuple(_variant(name, run, base, errors.get(name, _Errors()), device) for name, run in runs.items())
    flops = None
    if base.made.frames is not None and is_vae(pipe.vae):
        flops = decode_flops(pipe.vae, base.made.latents.shape)
    return Comparison({**(settings or {}), "seed": seed}, describe_environment(device), summary, results, flops)


@contextlib.contextmanager
def _within(outer: Switch, inner: Switch) -> Iterator[None]:
    with outer(), inner():
        yield


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


def _largest(errors: Iterable[float]) -> float:
    """Return the largest of some errors, and NaN if one of them is. Python's `max` would drop one that comes later."""
    return float(np.max(list(errors)))


class _Errors(NamedTuple):
    """A variant's errors: of a step with each transformer by its name, and `decode_error`."""

    steps: Mapping[str, float] = MappingProxyType({})
    decode: float | None = None

    @property
    def step(self) -> float | None:
        """The variant's `step_error`."""
        return _largest(self.steps.values()) if self.steps else None


class _Step(NamedTuple):
    """A transformer's first call in a generation, and its outputs in fp32."""

    transformer: nn.Module
    args: tuple
    kwargs: Mapping[str, object]
    oracle: list[torch.Tensor]

    @classmethod
    def of(cls, transformer: nn.Module, args: tuple, kwargs: Mapping[str, object]) -> _Step:
        return cls(transformer, args, kwargs, tensors_of(run_oracle(transformer, args, kwargs, torch.float32)))

    def error(self) -> float:
        """Return the relative L2 of the transformer's outputs as it is now, of several the largest."""
        return _largest(map(relative_l2, tensors_of(self.transformer(*self.args, **self.kwargs)), self.oracle))


class _Judge:
    """Judges each transformer's first call in a generation, and the first decoding of its VAE, if the patch knows it.

    It holds their oracles, and computes the variants' errors.
    """

    def __init__(self, pipe: DiffusionPipeline, generate: Callable[[], object], config: PatchConfig):
        self._pipe, self._config, self._sample = pipe, config, None
        with inputs_of(pipe.vae, "decode") if is_vae(pipe.vae) else contextlib.nullcontext([]) as latents:
            transformers = transformers_of(pipe)
            calls = first_calls(transformers, generate)
        self._steps = {name: _Step.of(transformers[name], *call) for name, call in calls.items()}
        if latents:
            self._latents = latents[0]
            self._sample = coding_oracle(pipe.vae, "decode", self._latents[:, :, :ORACLE_LATENTS], torch.float32)

    def errors(self, switches: Mapping[str, Switch]) -> dict[str, _Errors]:
        """Return the errors of each variant. Raises RuntimeError if a patched transformer's error is above the limit of
        its tier, or the patched VAE's above its own."""
        errors = {name: self._errors(switch) for name, switch in switches.items()}
        base, patched = errors[UNPATCHED], errors[PATCHED]
        for name, tier in {EXACT_PATCH: EXACT, PATCHED: self._config.tier}.items():
            for transformer, error in errors[name].steps.items() if name in errors else ():
                unpatched = base.steps[transformer]
                allowed = tier.limits.allowed(unpatched, self._steps[transformer].oracle[0].dtype, "step")
                what = f"the {'exactly patched' if name == EXACT_PATCH else 'patched'} {transformer}"
                self._check(what, error, unpatched, allowed, " `turbo-rcm verify` says which block.")
        if self._sample is not None:
            allowed = self._config.decode_limits.allowed(base.decode, self._latents.dtype)
            self._check("the patched VAE", patched.decode, base.decode, allowed)
            self._check_all_frames(switches, base.decode + allowed)
        return errors

    def _check_all_frames(self, switches: Mapping[str, Switch], limit: float) -> None:
        """Check the frames that the oracle leaves out. If neither variant errs more there, the two are no further apart
        than the sum of their errors."""
        if self._latents.shape[2] <= ORACLE_LATENTS:
            return
        samples = []
        for name in (UNPATCHED, PATCHED):
            with switches[name]():
                samples.append(coded(self._pipe.vae, "decode", self._latents))
        apart = relative_l2(*reversed(samples))
        if not apart <= limit:
            raise RuntimeError(
                f"the patched VAE's frames are a relative L2 of {apart:.2e} apart from the unpatched one's, above the "
                f"{limit:.2e} that their errors to fp32 in the first {self._sample.shape[2]} frames allow; nothing was "
                "timed."
            )

    def _check(self, what: str, error: float, base: float, allowed: float, hint: str = "") -> None:
        if not error <= allowed:
            raise RuntimeError(
                f"{what} errs more than it may: a relative L2 of {error:.2e} to fp32, above the allowed {allowed:.2e} "
                f"beside the unpatched one's {base:.2e}; nothing was timed.{hint}"
            )

    def _errors(self, switch: Switch) -> _Errors:
        with switch(), torch.no_grad():
            steps = {name: step.error() for name, step in self._steps.items()}
            if self._sample is None:
                return _Errors(steps)
            frames = coded(self._pipe.vae, "decode", self._latents)[:, :, : self._sample.shape[2]]
            return _Errors(steps, relative_l2(frames, self._sample))


def _variant(name: str, run: Runs, base: Runs, errors: _Errors, device: torch.device) -> Variant:
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
        step_error=errors.step,
        decode_error=errors.decode,
        weights=run.weights,
    )
