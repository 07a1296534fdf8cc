"""Estimate the GPU memory of a model's transformers in each tier, from its configs alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import nn

from ..config import Quantized
from ..kernels.quantized import FP8
from ..patching.families import CASES, family_of
from ..patching.families.vae.sizes import latent_size
from ..patching.steps.sparse_linear import why_not_replaceable
from ..patching.weights.convert import convertible_linears
from ..patching.weights.load import component_folders, empty_model, read_vae_config
from ..tables import table
from ..tiers import EXACT, QUANTIZED, SPARSE, Tier

SIZES = ((480, 832, 81), (720, 1280, 81))  # height, width, frames of videos
FP32_BYTES = 4
AROUND = 1.1  # peak over tensors: gaps and rounding of torch's allocator, workspaces; within 5 % on an H200


@dataclass(frozen=True)
class Fit:
    """Bytes for one transformer of a model in a tier. steps: bytes that a step adds, by height, width and frames."""

    component: str
    tier: str
    weights: int
    steps: dict[tuple[int, int, int], int]

    @property
    def peaks(self) -> dict[tuple[int, int, int], int]:
        """The peak memory of a step with the weights, by size. It is higher if every token has its own timestep."""
        return {size: round(AROUND * (self.weights + step)) for size, step in self.steps.items()}


def fits(source: str | Path, dtype: torch.dtype = torch.bfloat16) -> list[Fit]:
    """Return the memory of each transformer in a pipeline's or a transformer's folder, or of one of CASES by name.

    A step's figure counts the largest set of a block's tensors that are alive together. Attention itself, one timestep
    for all tokens and the kernels' workspaces add little. The text encoder and the VAE are not counted.

    Raises ValueError for a folder that is missing or holds no supported transformer.
    """
    found = []
    for name, model, vae in _models(source):
        sizes, config = family_of(model).blocks[0].sizes, model.config
        tokens = {size: sizes.tokens(config, latent_size(vae, *size)) for size in SIZES}
        for tier, weights in _weights(model, dtype):
            per_token = sizes.bytes_per_token(config, dtype.itemsize, tier)
            steps = {size: count * per_token for size, count in tokens.items()}
            found.append(Fit(name or "transformer", tier.name, weights, steps))
    return found


def _models(source: str | Path) -> Iterator[tuple[str, nn.Module, Mapping]]:
    """Yield the name and the VAE's config of each transformer, which is on the meta device."""
    case = CASES.get(str(source))
    if case is not None:
        with init_empty_weights():
            yield "", case.transformer_class(**case.transformer), case.vae
        return
    if not Path(source).is_dir():
        raise ValueError(
            f"{source}: no such folder; give the folder of a diffusers pipeline or transformer, or a size: "
            f"{', '.join(CASES)}."
        )
    for name, path in component_folders(Path(source)).items():
        yield name, empty_model(path), read_vae_config(path)


def fits_table(found: list[Fit]) -> str:
    """Return the figures in GiB, as text."""
    sizes = (part for h, w, f in SIZES for part in (f"step at {w}x{h}, {f} frames", "peak"))
    header = ("transformer", "tier", "weights", *sizes)
    rows = [
        (fit.component, fit.tier, _gib(fit.weights), *(part for size in SIZES for part in _step_and_peak(fit, size)))
        for fit in found
    ]
    return table([header, *rows])


def _step_and_peak(fit: Fit, size: tuple[int, int, int]) -> tuple[str, str]:
    return f"+ about {_gib(fit.steps[size])}", f"about {_gib(fit.peaks[size])}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _weights(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[Tier, int]]:
    """Yield the bytes of the weights in each tier that the model can have."""
    yield EXACT, _bytes(model, dtype)
    yield QUANTIZED, (in_8_bits := _bytes_in_8_bits(model, dtype))
    attentions = list(family_of(model).self_attentions(model))
    if why_not_replaceable("", attentions) is None:
        head_dims = [attn.inner_dim // attn.heads for _, attn, _ in attentions]
        yield SPARSE, in_8_bits + sum((size + 1) * size * dtype.itemsize for size in head_dims)  # proj_l and its bias


def _bytes(model: nn.Module, dtype: torch.dtype) -> int:
    fp32 = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return sum(
        parameter.numel() * (FP32_BYTES if fp32 & set(name.split(".")) else dtype.itemsize)
        for name, parameter in model.named_parameters()
    )


def _bytes_in_8_bits(model: nn.Module, dtype: torch.dtype) -> int:
    family = family_of(model)
    linears = convertible_linears(model, family.linears(model), Quantized()).values()
    saved = sum(linear.weight.numel() * (dtype.itemsize - FP8.itemsize) for linear in linears)
    return _bytes(model, dtype) - saved + sum(FP32_BYTES * (linear.out_features + 1) for linear in linears)
