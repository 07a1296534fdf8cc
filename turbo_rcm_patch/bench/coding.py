"""Decode and encode with a VAE as a generation does, beside an oracle of higher precision."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator

import torch
from diffusers import DiffusionPipeline, ModelMixin
from torch.utils.flop_counter import FlopCounterMode

from ..patching.tiny_vae import has_tiny_vae
from .replaced import replaced

SETTINGS = ("use_", "tile_")  # a VAE's attributes for slices and tiles, which change what it computes


@contextlib.contextmanager
def inputs_of(vae: ModelMixin, method: str) -> Iterator[list[torch.Tensor]]:
    """Yield a list that collects the VAE's inputs in this context.

    method: "decode", for latents [B, z_dim, F, H, W], or "encode", for pixels [B, 3, F, H, W].
    """
    original, seen = getattr(vae, method), []

    def watched(x: torch.Tensor, *args, **kwargs):
        seen.append(x)
        return original(x, *args, **kwargs)

    with replaced(vae, method, watched):
        yield seen


def refuse_tiny_vae(pipe: DiffusionPipeline) -> None:
    """Raise ValueError if a tiny VAE decodes, which cannot be judged by the pipeline's own VAE."""
    if has_tiny_vae(getattr(pipe, "vae", None)):
        raise ValueError("a tiny VAE decodes in this pipeline; call restore() on its handle first.")


@torch.no_grad()
def coded(vae: ModelMixin, method: str, x: torch.Tensor) -> torch.Tensor:
    """Return the sample that the VAE decodes now, or the moments of the latents that it encodes."""
    result = getattr(vae, method)(x, return_dict=False)[0]
    return result if method == "decode" else result.parameters


def decode_flops(vae: ModelMixin, shape: torch.Size) -> int:
    """Return the FLOPs of diffusers' own decoder without tiling, for latents [B, z_dim, F, H, W]."""
    return _decode_flops(type(vae), vae.to_json_string(), tuple(shape))


@functools.cache
def _decode_flops(vae_class: type[ModelMixin], config: str, shape: tuple[int, ...]) -> int:
    with torch.device("meta"):
        twin = vae_class.from_config(json.loads(config))
        with FlopCounterMode(display=False) as counted:
            coded(twin, "decode", torch.empty(shape))
    return counted.get_total_flops()


def coding_oracle(vae: ModelMixin, method: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the result of diffusers' own code, in the VAE's slices and tiles. dtype: fp64, or fp32 without TF32."""
    with x.device:
        twin = type(vae).from_config(vae.config).to(dtype)
    twin.load_state_dict(vae.state_dict())
    vars(twin).update((name, value) for name, value in vars(vae).items() if name.startswith(SETTINGS))
    with without_tf32():
        return coded(twin, method, x.to(dtype))


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Compute matrix products and convolutions of fp32 in fp32, without TF32."""
    conv, matmul = torch.backends.cudnn.conv, torch.get_float32_matmul_precision()
    before = conv.fp32_precision
    torch.set_float32_matmul_precision("highest")
    conv.fp32_precision = "ieee"
    try:
        yield
    finally:
        conv.fp32_precision = before
        torch.set_float32_matmul_precision(matmul)
