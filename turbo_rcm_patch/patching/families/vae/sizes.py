"""The sizes of videos and of the decoder's convolutions, by a VAE's config."""

from __future__ import annotations

from collections.abc import Mapping

# T, H, W, C, N, kt, kh, upsample, interleave. The first list is Wan 2.1's decoder at 832x480, in chunks of up to 16
# frames. The second is the wide levels of TI2V-5B's decoder at 1280x704.
CONVOLUTIONS_WAN = (
    (16, 480, 832, 96, 96, 3, 3, 1, 1),
    (16, 240, 416, 192, 192, 3, 3, 1, 1),
    (16, 120, 208, 384, 384, 3, 3, 1, 1),
    (16, 120, 208, 192, 384, 3, 3, 1, 1),
    (21, 60, 104, 384, 384, 3, 3, 1, 1),
    (21, 60, 104, 16, 384, 3, 3, 1, 1),
    (16, 480, 832, 96, 3, 3, 3, 1, 1),
    (16, 60, 104, 384, 192, 1, 3, 2, 1),
    (16, 120, 208, 384, 192, 1, 3, 2, 1),
    (16, 240, 416, 192, 96, 1, 3, 2, 1),
    (20, 60, 104, 384, 384, 3, 1, 1, 2),
    (16, 120, 208, 192, 384, 1, 1, 1, 1),
)
CONVOLUTIONS_5B = (
    (16, 88, 160, 1024, 1024, 3, 3, 1, 1),
    (16, 176, 320, 512, 512, 3, 3, 1, 1),
    (8, 352, 640, 256, 256, 3, 3, 1, 1),
)


def latent_channels(config: Mapping[str, object]) -> int:
    """Return the channels of a latent. Absent entries have diffusers' defaults here, which are Wan 2.1's."""
    return config.get("z_dim") or config.get("latent_channels") or 16


def compression(config: Mapping[str, object]) -> tuple[int, int]:
    """Return the pixels along height and width, and the frames, that a latent stands for."""
    spatial = config.get("scale_factor_spatial") or config.get("spatial_compression_ratio")
    temporal = config.get("scale_factor_temporal") or config.get("temporal_compression_ratio")
    if (scaling := config.get("spatio_temporal_scaling")) is not None:  # LTX-2's config may leave both out
        doubled = 2 ** sum(scaling)
        return spatial or config["patch_size"] * doubled, temporal or config["patch_size_t"] * doubled
    return spatial or 8, temporal or 4


def latent_size(config: Mapping[str, object], height: int, width: int, frames: int) -> tuple[int, int, int]:
    """Return the frames, height and width of the latent of a video."""
    spatial, temporal = compression(config)
    return (frames - 1) // temporal + 1, height // spatial, width // spatial


def convolutions(config: Mapping[str, object]) -> tuple[tuple[int, ...], ...]:
    """Return the sizes at which `turbo-rcm tune` times the decoder's convolutions. LTX-2's is not patched."""
    if "latent_channels" in config:
        return ()
    return CONVOLUTIONS_5B if latent_channels(config) == 48 else CONVOLUTIONS_WAN
