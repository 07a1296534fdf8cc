"""The sizes of the decoder's convolutions, by a VAE's config."""

from __future__ import annotations

from collections.abc import Mapping

from ....latents import latent_channels

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


def convolutions(config: Mapping[str, object]) -> tuple[tuple[int, ...], ...]:
    """Return the sizes at which `turbo-rcm tune` times the decoder's convolutions. LTX-2's is not patched."""
    if "latent_channels" in config:
        return ()
    return CONVOLUTIONS_5B if latent_channels(config) == 48 else CONVOLUTIONS_WAN
