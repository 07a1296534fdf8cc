"""The sizes of videos that a model takes, from its configs. Needs neither torch nor a loaded model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..latents import compression
from .errors import CommandError

PATCH_SIZE = (1, 2, 2)  # diffusers' default: configs that were published before may lack it


@dataclass(frozen=True)
class SizeRules:
    """The sizes of a model: multiples of `height` and `width` pixels, and 1 + a multiple of `temporal` frames."""

    height: int = 16
    width: int = 16
    temporal: int = 4

    def check(self, height: int | None, width: int | None, frames: int | None) -> None:
        """Raise CommandError for a size that breaks the rules. None stands for the default size, which keeps them."""
        for option, size, factor in (("--height", height, self.height), ("--width", width, self.width)):
            if size is not None and (size < factor or size % factor):
                raise CommandError(f"{option} {size} is not divisible by {factor}; try {_nearest(size, factor)}.")
        if frames is not None and (frames < 1 or (frames - 1) % self.temporal):
            nearest = 1 + max(0, round((frames - 1) / self.temporal)) * self.temporal
            raise CommandError(f"--frames {frames} is not {self.temporal}k+1; try {nearest}.")


def size_rules(vae: Mapping, transformer: Mapping) -> SizeRules:
    """Return the rules from the configs of a VAE and a transformer, which may lack entries."""
    patch_size = transformer.get("patch_size") or PATCH_SIZE
    spatial, temporal = compression(vae)
    if isinstance(patch_size, int) and "patch_size_t" in transformer:
        patch_size = transformer["patch_size_t"] or 1, patch_size, patch_size
    if not isinstance(patch_size, (list, tuple)) or len(patch_size) != 3:
        raise CommandError(f"the transformer's config has patch_size {patch_size}; accepted are three numbers.")
    _, patch_height, patch_width = patch_size
    # WanPipeline itself refuses sizes that 16 does not divide.
    return SizeRules(math.lcm(16, spatial * patch_height), math.lcm(16, spatial * patch_width), temporal)


def _nearest(size: int, factor: int) -> int:
    return max(factor, round(size / factor) * factor)
