"""Tiles of the portable GEMM for sm_89, which has 100 KiB of shared memory per multiprocessor and no TMA.

Two programs of fewer stages fit a multiprocessor. They run only where `turbo-rcm tune` found them the fastest.
"""

from __future__ import annotations

import torch

from ..dispatch import device_properties
from .gemm_portable import Tiles
from .spec import NOT_FOR_8_BITS, LinearSpec, why_not_allowed

SM89 = "portable Triton, tiles for sm_89"
CAPABILITY = (8, 9)
_TILES = (
    Tiles(128, 64, 32, num_warps=4, num_stages=3, programs=2),
    Tiles(64, 64, 32, num_warps=4, num_stages=3, programs=3),
)


def tiles_sm89(capability: tuple[int, int], dtype: torch.dtype, descriptors: bool) -> tuple[Tiles, ...]:
    """Return the tiles, from large to small. They serve every dtype, with descriptors or without."""
    return _TILES


def why_not_sm89(spec: LinearSpec) -> str | None:
    """Return the reason why these tiles do not run for a spec, or None if they can."""
    if spec.device.type != "cuda" or device_properties(spec.device)[0] != CAPABILITY:
        return "no GPU of sm_89"
    if spec.eight_bits:
        return NOT_FOR_8_BITS
    return "not for fp32" if spec.dtype == torch.float32 else why_not_allowed(spec)
