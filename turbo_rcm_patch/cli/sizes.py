"""The sizes of videos that a model takes, from its configs. Needs neither torch nor a loaded model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..latents import compression
from .errors import CommandError

# Published configs lack entries that diffusers' classes got later. These are the classes' defaults.
TRANSFORMER_DEFAULTS = {"patch_size": (1, 2, 2), "rope_max_seq_len": 1024}


@dataclass(frozen=True)
class SizeRules:
    """The sizes that a model takes: height and width in multiples of these pixels, 1 + a multiple of `temporal` frames.

    positions: the length of the RoPE table, which limits the patches along each axis. None: no known table.
    patch: pixels that one patch covers along height and width, and latent frames.
    """

    height: int = 16
    width: int = 16
    temporal: int = 4
    positions: int | None = None
    patch: tuple[int, int, int] = (16, 16, 1)

    def check(self, height: int | None, width: int | None, frames: int | None) -> None:
        """Raise CommandError for a size that breaks the rules. None stands for the default size, which keeps them."""
        self._check_positions(height, width, frames)
        for option, size, factor in (("--height", height, self.height), ("--width", width, self.width)):
            if size is not None and (size < factor or size % factor):
                raise CommandError(f"{option} {size} is not divisible by {factor}; try {_nearest(size, factor)}.")
        if frames is not None and (frames < 1 or (frames - 1) % self.temporal):
            nearest = 1 + max(0, round((frames - 1) / self.temporal)) * self.temporal
            raise CommandError(f"--frames {frames} is not {self.temporal}k+1; try {nearest}.")

    def _check_positions(self, height: int | None, width: int | None, frames: int | None) -> None:
        if self.positions is None:
            return
        patch_height, patch_width, patch_frames = self.patch
        largest = {
            "--height": (height, self.positions * patch_height // self.height * self.height),
            "--width": (width, self.positions * patch_width // self.width * self.width),
            "--frames": (frames, (self.positions * patch_frames - 1) * self.temporal + 1),
        }
        for option, (size, limit) in largest.items():
            if size is not None and size > limit:
                raise CommandError(
                    f"{option} {size} is too large: the model's RoPE table has {self.positions} positions along each "
                    f"axis; give at most {limit}."
                )


def size_rules(vae: Mapping, transformer: Mapping) -> SizeRules:
    """Return the rules from the configs of a VAE and a transformer, which may lack entries."""
    patch_size, positions = (transformer.get(name) or value for name, value in TRANSFORMER_DEFAULTS.items())
    spatial, temporal = compression(vae)
    if isinstance(patch_size, int) and "patch_size_t" in transformer:  # such a model's RoPE has no table
        patch_size, positions = (transformer["patch_size_t"] or 1, patch_size, patch_size), None
    if not isinstance(patch_size, (list, tuple)) or len(patch_size) != 3:
        raise CommandError(f"the transformer's config has patch_size {patch_size}; accepted are three numbers.")
    patch_frames, patch_height, patch_width = patch_size
    patch = spatial * patch_height, spatial * patch_width, patch_frames
    # WanPipeline itself refuses sizes that 16 does not divide.
    return SizeRules(math.lcm(16, patch[0]), math.lcm(16, patch[1]), temporal, positions, patch)


def _nearest(size: int, factor: int) -> int:
    return max(factor, round(size / factor) * factor)
