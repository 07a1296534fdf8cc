"""Adapters with random values on a transformer, and the variants that are timed beside them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from diffusers import DiffusionPipeline
from torch import nn

from scripts.benchmarks.comparison import COMPILED_AFTER_A_CHANGE
from turbo_rcm_patch.bench.variants import Switch
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.patching import Patch, patch

TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
WITHOUT, ALONE = "patched without LoRA", "patched, one adapter"
RESCALED, SWITCHED = "patched, a new scale at each step", "patched, another adapter at each step"
BESIDE_A_LORA = (WITHOUT, RESCALED, ALONE, SWITCHED, COMPILED_AFTER_A_CHANGE)
SHARE = 0.3  # the share of a projection's result that random adapters add
GOLDEN = 0.618034  # the golden ratio: the fractions of its multiples keep apart


def add_random_lora(transformer: nn.Module, ranks: Sequence[int]) -> None:
    """Load one adapter of each rank on all projections of the attentions and feed-forwards, all active, in the model's
    dtype."""
    from peft import LoraConfig

    names = [f"random_{i}" for i in range(len(ranks))]
    for name, rank in zip(names, ranks, strict=True):
        transformer.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=list(TARGETS)), adapter_name=name)
    transformer.set_adapters(names)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in transformer.named_parameters():
        if "lora_" in name:
            rows, columns = parameter.shape
            std = columns**-0.5 * (SHARE / len(ranks) ** 0.5 if "lora_B" in name else 1.0)
            values = std * torch.randn(rows, columns, generator=generator)
            parameter.data = values.to(parameter.device, transformer.dtype)


def lora_variants(pipe: DiffusionPipeline, config: PatchConfig) -> dict[str, Switch]:
    """Return variants of the patched pipeline that change its adapters.

    The adapters are switched off, or get a new scale before each step. If there are several, two more variants have
    only the first one, and another one before each step.
    """
    names, scales = pipe.transformer.active_adapters(), _new_scales()
    rescale = lambda: pipe.transformer.set_adapters(names, next(scales))  # noqa: E731
    variants = {
        WITHOUT: lambda: _switched_off(pipe, config),
        RESCALED: lambda: _patched(pipe, config, _changing(pipe, names, rescale)),
    }
    if len(names) > 1:
        adapters = {ALONE: itertools.repeat(names[0]), SWITCHED: itertools.cycle(names)}
        variants |= {name: partial(_one_by_one, pipe, config, names, each) for name, each in adapters.items()}
    return variants


def _one_by_one(
    pipe: DiffusionPipeline, config: PatchConfig, names: Sequence[str], turns: Iterator[str]
) -> contextlib.AbstractContextManager[Patch]:
    """Return a context in which the adapters with these names take turns, one in each step."""
    return _patched(pipe, config, _changing(pipe, names, lambda: pipe.transformer.set_adapters([next(turns)])))


def rescaled_once(pipe: DiffusionPipeline) -> contextlib.AbstractContextManager[None]:
    """Return a context in which adapters have another scale from the second step on."""
    names, scales = pipe.transformer.active_adapters(), itertools.chain((1.0,), itertools.repeat(0.5))
    return _changing(pipe, names, lambda: pipe.transformer.set_adapters(names, next(scales)))


def _new_scales() -> Iterator[float]:
    """Yield scales from 0.5 to 1, none twice."""
    return (0.5 + n * GOLDEN % 0.5 for n in itertools.count())


@contextlib.contextmanager
def _switched_off(pipe: DiffusionPipeline, config: PatchConfig) -> Iterator[Patch]:
    pipe.transformer.disable_lora()
    try:
        with patch(pipe, config) as applied:
            yield applied
    finally:
        pipe.transformer.enable_lora()


@contextlib.contextmanager
def _patched(
    pipe: DiffusionPipeline, config: PatchConfig, changing: contextlib.AbstractContextManager[None]
) -> Iterator[Patch]:
    with changing, patch(pipe, config) as applied:
        yield applied


@contextlib.contextmanager
def _changing(pipe: DiffusionPipeline, names: Sequence[str], change: Callable[[], None]) -> Iterator[None]:
    """Change the model before the first step and at the end of each step, whose time includes the change.

    Afterwards the adapters of these names are as before.
    """
    step = pipe.scheduler.step

    def step_and_change(*args, **options):
        change()
        return step(*args, **options)

    change()
    pipe.scheduler.step = step_and_change
    try:
        yield
    finally:
        del pipe.scheduler.step
        pipe.transformer.set_adapters(names, 1.0)
