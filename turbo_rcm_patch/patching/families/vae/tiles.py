"""Run a network over images in tiles, whose results are blended. Tiles and blending are diffusers' own.

Only a result's visible part is kept, in its place, and the ends that other tiles are blended with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """The sizes by which images are cut into tiles, each a pair of height and width.

    size: of a tile. step: from one tile to the next. crop: the part of a tile's result that stays. blend: how much of
    the results above and on the left fades into it.
    """

    size: tuple[int, int]
    step: tuple[int, int]
    crop: tuple[int, int]
    blend: tuple[int, int]


def run_in_tiles(
    x: torch.Tensor,
    tiles: Tiles,
    run: Callable[[torch.Tensor], torch.Tensor],
    out: torch.Tensor,
    finish: Callable[[torch.Tensor], torch.Tensor] = lambda result: result,
) -> torch.Tensor:
    """Write the results of all tiles of x [..., H, W] to out, and return the part of out that they fill.

    run: a tile -> its result, which is blended in place. finish: the part that stays -> what is written.
    """
    (tile_h, tile_w), (step_h, step_w), (crop_h, crop_w), (blend_h, blend_w) = tiles
    height, width = x.shape[-2:]
    ends: dict[int, torch.Tensor] = {}  # of the results above, by column
    bottom = 0
    for top in range(0, height, step_h):
        left, right, band = None, 0, out[..., bottom:, :]
        for first in range(0, width, step_w):
            result = run(x[..., top : top + tile_h, first : first + tile_w])
            if top > 0:
                _blend(ends.pop(first), result, blend_h, dim=-2)
            if left is not None:
                _blend(left, result, blend_w, dim=-1)
            ends[first], left = _end(result, blend_h, dim=-2), _end(result, blend_w, dim=-1)
            shown = finish(result[..., :crop_h, :crop_w])
            place = band[..., : shown.shape[-2], right : right + shown.shape[-1]]
            place.copy_(shown[..., : place.shape[-2], : place.shape[-1]])
            right += place.shape[-1]
            del result, shown  # not kept while the next tile runs
        bottom += place.shape[-2]
    return out[..., :bottom, :right]  # smaller where tiles are less than strides


def _blend(before: torch.Tensor, frames: torch.Tensor, extent: int, dim: int) -> None:
    """Fade the end of the previous tile into the beginning of frames, in place, along a dimension."""
    extent = min(before.shape[dim], frames.shape[dim], extent)
    if extent <= 0:
        return
    wide = torch.promote_types(frames.dtype, torch.float32)
    share = torch.arange(extent, device=frames.device, dtype=wide) / extent
    share = share[:, None] if dim == -2 else share
    old = before.narrow(dim, before.shape[dim] - extent, extent).to(wide)
    new = frames.narrow(dim, 0, extent)
    new.copy_(old * (1 - share) + new.to(wide) * share)


def _end(frames: torch.Tensor, extent: int, dim: int) -> torch.Tensor:
    """Return a copy of the last rows or columns, so that the rest need not be kept."""
    start = max(0, frames.shape[dim] - extent)
    return frames.narrow(dim, start, frames.shape[dim] - start).clone()
