"""The sizes of latents, by a VAE's config. Needs neither torch nor a loaded model."""

from __future__ import annotations

from collections.abc import Mapping


def latent_channels(config: Mapping[str, object]) -> int:
    """Return the channels of a latent. Without an entry these are diffusers' default, Wan 2.1's."""
    return config.get("z_dim") or config.get("latent_channels") or 16


def compression(config: Mapping[str, object]) -> tuple[int, int]:
    """Return the pixels along height and width, and the frames, that one latent pixel stands for.

    Published configs lack entries that diffusers' classes got later. These have the classes' defaults here.
    """
    spatial = config.get("scale_factor_spatial") or config.get("spatial_compression_ratio")
    temporal = config.get("scale_factor_temporal") or config.get("temporal_compression_ratio")
    if (scaling := config.get("spatio_temporal_scaling")) is not None:  # LTX-2's config may leave both out
        doubled = 2 ** sum(scaling)
        return spatial or config.get("patch_size", 4) * doubled, temporal or config.get("patch_size_t", 1) * doubled
    return spatial or 8, temporal or 4


def latent_size(config: Mapping[str, object], height: int, width: int, frames: int) -> tuple[int, int, int]:
    """Return the frames, height and width of the latent of a video."""
    spatial, temporal = compression(config)
    return (frames - 1) // temporal + 1, height // spatial, width // spatial
