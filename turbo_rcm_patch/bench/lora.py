"""What a LoRA costs: adapters with random values on a transformer, and variants to time beside it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import torch
from diffusers import DiffusionPipeline
from torch import nn

from ..config import PatchConfig
from ..patching import Patch, patch
from .variants import Switch

TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
BESIDE_A_LORA = WITHOUT, RESCALED = "patched without LoRA", "patched, a new scale at each step"
SHARE = 0.3  # of what a projection gives, that random adapters add
SCALES = (1.0, 0.5)  # in turns


def add_random_lora(transformer: nn.Module, ranks: Sequence[int], seed: int = 0) -> None:
    """Load one adapter of each rank on all projections of the attentions and feed-forwards, all active, in the model's
    dtype."""
    from peft import LoraConfig

    names = [f"random_{i}" for i in range(len(ranks))]
    for name, rank in zip(names, ranks, strict=True):
        transformer.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=list(TARGETS)), adapter_name=name)
    transformer.set_adapters(names)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in transformer.named_parameters():
        if "lora_" in name:
            rows, columns = parameter.shape
            std = columns**-0.5 * (SHARE / len(ranks) ** 0.5 if "lora_B" in name else 1.0)
            values = std * torch.randn(rows, columns, generator=generator)
            parameter.data = values.to(parameter.device, transformer.dtype)


def lora_variants(pipe: DiffusionPipeline, config: PatchConfig) -> dict[str, Switch]:
    """The patched pipeline with its adapters switched off, and with another scale before each step."""
    return {WITHOUT: lambda: _switched_off(pipe, config), RESCALED: lambda: _rescaled(pipe, config)}


@contextlib.contextmanager
def _switched_off(pipe: DiffusionPipeline, config: PatchConfig) -> Iterator[Patch]:
    pipe.transformer.disable_lora()
    try:
        with patch(pipe, config) as applied:
            yield applied
    finally:
        pipe.transformer.enable_lora()


@contextlib.contextmanager
def _rescaled(pipe: DiffusionPipeline, config: PatchConfig) -> Iterator[Patch]:
    """The scale is changed at the end of a step, which it counts to, as does its effect on the next."""
    transformer, scheduler, scales = pipe.transformer, pipe.scheduler, itertools.cycle(SCALES[::-1])
    names, step = transformer.active_adapters(), scheduler.step

    def step_and_rescale(*args, **options):
        transformer.set_adapters(names, next(scales))
        return step(*args, **options)

    scheduler.step = step_and_rescale
    try:
        with patch(pipe, config) as applied:
            yield applied
    finally:
        del scheduler.step
        transformer.set_adapters(names, SCALES[0])
