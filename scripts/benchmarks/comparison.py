"""Compare as `turbo_rcm_patch.bench.compare` does, with what only benchmarks need.

They check all variants against fp32 before any is timed, run on several GPUs, and add variants of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from diffusers import ContextParallelConfig, DiffusionPipeline
from torch import nn

from turbo_rcm_patch.bench.coding import coded, coding_oracle, inputs_of, refuse_tiny_vae
from turbo_rcm_patch.bench.compare import Comparison, comparison_of, seeded_generation, take_turns
from turbo_rcm_patch.bench.metrics import relative_l2
from turbo_rcm_patch.bench.oracle import first_calls, run_oracle, tensors_of
from turbo_rcm_patch.bench.timing import TimedGeneration
from turbo_rcm_patch.bench.variants import (
    COMPILED,
    EXACT_PATCH,
    PATCHED,
    UNPATCHED,
    Patching,
    Switch,
    Variants,
    single_process,
    unpatched_variants,
)
from turbo_rcm_patch.config import PatchConfig, resolve_config
from turbo_rcm_patch.patching import patch
from turbo_rcm_patch.patching.apply import transformers_of
from turbo_rcm_patch.patching.families.vae import is_vae
from turbo_rcm_patch.tiers import EXACT

COMPILED_AFTER_A_CHANGE = "torch.compile, the step after a new scale"
# Latent frames that the VAE also decodes in fp32. Its convolutions reach backwards in time alone, so that the frames
# made of the first ones are the same without the rest, which would take minutes.
ORACLE_LATENTS = 9


def compare_checked(
    pipe: DiffusionPipeline,
    call: dict[str, object],
    *,
    seed: int = 0,
    config: PatchConfig | str = "exact",
    with_compile: bool | None = None,
    with_oracle: bool = True,
    ulysses: int = 1,
    warmups: int = 1,
    repeats: int = 3,
    settings: dict[str, object] | None = None,
    beside: Mapping[str, Switch] | None = None,
    changed: Switch | None = None,
    patched: Patching | None = None,
) -> Comparison:
    """Do the same as `compare`, whose options it has too.

    with_oracle: True to check every variant against fp32 first: each transformer's first call, and the decoding if
        frames are made. The fp32 weights need memory beside the model's. Raises RuntimeError if the patched variant's
        error is above the tier's limits.
    ulysses: the number of GPUs among which diffusers' Ulysses context parallelism splits every sample. Above 1, that
        many processes each call this function in the default process group of torch.distributed, and the pipeline's
        transformer stays parallel. Times and memory are this process's. All processes wait for each other before a
        generation.
    beside: switches of more variants by name. They are timed but not checked.
    changed: a switch that changes the model after a generation's first step. torch.compile then compiles again. One
        such generation runs last, for the time of its second step.
    patched: patches the pipeline with a configuration, for more than `patch` does, such as the text encoder too.
    """
    config = resolve_config(config)
    if with_oracle:
        refuse_tiny_vae(pipe)
    device = torch.device(pipe._execution_device)

    def generate() -> TimedGeneration:
        if ulysses > 1:
            torch.distributed.barrier()
        return seeded_generation(pipe, call, seed)

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
    comparison = comparison_of(pipe, runs, {**(settings or {}), "seed": seed}, device)
    found = [(each, errors.get(each.name, _Errors())) for each in comparison.variants]
    judged = (replace(each, step_error=error.step, decode_error=error.decode) for each, error in found)
    return replace(comparison, variants=tuple(judged))


@contextlib.contextmanager
def _within(outer: Switch, inner: Switch) -> Iterator[None]:
    with outer(), inner():
        yield


def context_parallel(
    pipe: DiffusionPipeline, config: PatchConfig, with_compile: bool | None, degree: int, patched: Patching | None
) -> Variants:
    """Return the variants under Ulysses context parallelism of the default process group, which has `degree` processes.

    The pipeline's transformers are parallel afterwards for good. Arguments as for `single_process`.
    """
    patched = patched or partial(patch, pipe)
    for model in transformers_of(pipe).values():
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=degree))
    return Variants(unpatched_variants(pipe, with_compile) | {PATCHED: lambda: patched(config)})


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
