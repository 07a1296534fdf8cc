"""The methods that the patch binds on a VAE's encoder: `_encode` and `tiled_encode`. `encode` and `forward` call them.

Their loops over frames are replaced. The tiles, their blending and the results are diffusers' own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import patchify
from torch import nn

from .chunks import TILES_WORKING_SET, WORKING_SET, frames_of_a_latent, frames_to_encode, weights_bytes
from .classes import RESAMPLE, RESIDUAL_DOWN_BLOCK, patch_size_of
from .encoder import FRAMES, count_encoded, encoded
from .forward import compiled_ahead, free_beside, joined, plan_for, takes, vae_state
from .steps import VaePlan
from .tiles import Tiles, run_in_tiles


def encode(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Run the VAE's `_encode`, several frames at a time; bound on instances.

    x: [B, 3, F, H, W] -> the latents' moments [B, 2 · z_dim, F', H', W'].
    """
    patch = patch_size_of(self)
    edges = self.tile_sample_min_height, self.tile_sample_min_width
    in_tiles = self.use_tiling and any(size > edge for size, edge in zip(x.shape[-2:], edges, strict=False))
    if not _takes(self, x, patch, counted=not in_tiles):  # diffusers' code comes to tiled_encode too, which counts
        return type(self)._encode(self, x)
    if in_tiles:
        return self.tiled_encode(patchify(x, patch))
    plan, frames = plan_for(self, x), _at_once(self, x, patch)
    return joined(_parts(self, x, frames, plan, patch), _count(self, x))


def tiled_encode(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Run the VAE's `tiled_encode` with several frames of a tile at a time. Bound on instances.

    x: [B, C, F, H, W], patchified if the VAE does that.
    """
    if not _takes(self, x, 1):
        return type(self).tiled_encode(self, x)
    ratio = self.spatial_compression_ratio // patch_size_of(self)
    size = self.tile_sample_min_height, self.tile_sample_min_width
    step = self.tile_sample_stride_height, self.tile_sample_stride_width
    crop = tuple(stride // ratio for stride in step)
    blend = tuple(max(0, edge // ratio - shown) for edge, shown in zip(size, crop, strict=True))
    plan, frames = plan_for(self, x), _at_once(self, x[..., : size[0], : size[1]], working_set=TILES_WORKING_SET)
    channels = self.quant_conv.out_channels
    moments = x.new_empty(x.shape[0], channels, _count(self, x), *(edge // ratio for edge in x.shape[-2:]))
    run = lambda part: joined(_parts(self, part, frames, plan), _count(self, x))  # noqa: E731
    return run_in_tiles(x, Tiles(size, step, crop, blend), run, moments).contiguous()


def _takes(vae: nn.Module, x: torch.Tensor, patch: int, *, counted: bool = True) -> bool:
    """True if our code encodes x, which is still to be patchified by `patch`."""
    return takes(vae, x, "encoder", lambda: _fits(vae.encoder, x, patch), counted=counted)


def _fits(encoder: nn.Module, x: torch.Tensor, patch: int) -> bool:
    """True if the encoder takes pixels of this shape."""
    if x.dim() != 5 or x.numel() == 0 or x.shape[1] * patch**2 != encoder.conv_in.in_channels:
        return False
    kinds = Counter(map(type, encoder.modules()))
    edge = patch * 2 ** sum(kinds[kind] for kind in RESAMPLE)
    divisor = edge if any(kinds[kind] for kind in RESIDUAL_DOWN_BLOCK) else patch
    return frames_of_a_latent(encoder) <= FRAMES and all(s >= edge and s % divisor == 0 for s in x.shape[-2:])


def _count(vae: nn.Module, x: torch.Tensor) -> int:
    """Return the number of latent frames of a video."""
    return 1 + (count_encoded(x.shape[2]) - 1) // frames_of_a_latent(vae.encoder)


def _at_once(vae: nn.Module, x: torch.Tensor, patch: int = 1, *, working_set: int = WORKING_SET) -> int:
    """Return the number of frames to encode at a time. working_set: bytes of activations."""
    pixels = x.shape[0] * x.shape[-2] * x.shape[-1] // patch**2
    free = free_beside(vae, x.device, weights_bytes(vae.encoder, is_image=x.shape[2] == 1))
    chunk = vae_state(vae).config.vae_chunk
    return frames_to_encode(vae, pixels, x.itemsize, chunk, working_set=working_set, free=free)


def _parts(vae: nn.Module, x: torch.Tensor, frames: int, plan: VaePlan, patch: int = 1) -> Iterator[torch.Tensor]:
    """Return the parts of `encoded`. Compile the kernels ahead if this is the first encode of its kind."""
    return compiled_ahead(vae, vae.encoder, x, plan, lambda: encoded(vae, x, plan, frames, patch))
