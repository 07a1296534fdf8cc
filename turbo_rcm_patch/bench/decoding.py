"""Decode a generation's latents, beside an oracle of higher precision."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator

import torch
from diffusers import ModelMixin
from torch.utils.flop_counter import FlopCounterMode

SETTINGS = ("use_", "tile_")  # a VAE's attributes for slices and tiles, which change what decoding computes


@contextlib.contextmanager
def latents_for(vae: ModelMixin) -> Iterator[list[torch.Tensor]]:
    """Yield a list that collects the latents [B, z_dim, F, H, W] that the VAE decodes in this context."""
    decode, seen = vae.decode, []

    def watched(z: torch.Tensor, *args, **kwargs):
        seen.append(z)
        return decode(z, *args, **kwargs)

    before = vars(vae).get("decode")
    vae.decode = watched
    try:
        yield seen
    finally:
        if before is None:
            del vae.decode
        else:
            vae.decode = before


def decoded(vae: ModelMixin, z: torch.Tensor) -> torch.Tensor:
    """Return the VAE's sample as the VAE decodes now."""
    with torch.no_grad():
        return vae.decode(z, return_dict=False)[0]


def decode_flops(vae: ModelMixin, shape: torch.Size) -> int:
    """Return the FLOPs of diffusers' own decoder without tiling, for latents [B, z_dim, F, H, W]."""
    return _decode_flops(type(vae), vae.to_json_string(), tuple(shape))


@functools.cache
def _decode_flops(vae_class: type[ModelMixin], config: str, shape: tuple[int, ...]) -> int:
    with torch.device("meta"):
        twin = vae_class.from_config(json.loads(config))
        with FlopCounterMode(display=False) as counted:
            decoded(twin, torch.empty(shape))
    return counted.get_total_flops()


def decode_oracle(vae: ModelMixin, z: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sample of diffusers' own decoder, in the VAE's slices and tiles. dtype: fp64, or fp32 without TF32."""
    with z.device:
        twin = type(vae).from_config(vae.config).to(dtype)
    twin.load_state_dict(vae.state_dict())
    vars(twin).update((name, value) for name, value in vars(vae).items() if name.startswith(SETTINGS))
    with without_tf32():
        return decoded(twin, z.to(dtype))


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
