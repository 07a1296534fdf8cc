"""How the result of a convolution is cut into tiles: boxes of pixels × columns, which are channels of the result."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class ConvTiles:
    """box_height × box_width pixels × columns + tail per tile (a tensor's size is a power of two; a tile's need not be:
    96 columns are 64 and 32), depth channels of x per step; programs that fit a multiprocessor."""

    box_height: int
    box_width: int
    columns: int
    tail: int
    depth: int
    num_warps: int
    num_stages: int
    programs: int = 1


# From large to small: columns, tail.
_WIDE = ((256, 0), (128, 64), (128, 0), (64, 32), (64, 0), (32, 0), (16, 0))
_MEDIUM = _WIDE[1:]
_NARROW = _WIDE[4:]
# Of a tile's pixels: what they cost beside the columns, in columns.
_COST_OF_PIXELS = 32


def choose_conv_tiles(
    capability: tuple[int, int], dtype: torch.dtype, descriptors: bool, H: int, W: int, C: int, N: int
) -> ConvTiles:
    """The tiles for images [H, W, C] and a weight of N rows on a GPU of this compute capability, as (9, 0)."""
    if dtype == torch.float32:  # no tensor cores: every operand passes through registers, which bounds the tile
        return ConvTiles(*choose_box(H, W, 64), *choose_columns(N, _NARROW), depth=16, num_warps=8, num_stages=2)
    large_memory = descriptors and capability < (12, 0)
    columns, tail = choose_columns(N, _WIDE if large_memory else _MEDIUM)
    depth = choose_depth(C, 64 if descriptors else 32)
    box = choose_box(H, W, 128)
    return ConvTiles(*box, columns, tail, depth, num_warps=8, num_stages=3)


def choose_columns(N: int, candidates: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """Columns and tail of the tiles that cost least."""
    return min(candidates, key=lambda pair: triton.cdiv(N, sum(pair)) * (sum(pair) + _COST_OF_PIXELS))


def choose_depth(C: int, largest: int) -> int:
    """The largest power of two up to `largest` by which no channels are added that a smaller one would not add."""
    depths = (depth for depth in (64, 32, 16) if depth <= largest)
    return min(depths, key=lambda depth: triton.cdiv(C, depth) * depth)


def choose_box(H: int, W: int, pixels: int) -> tuple[int, int]:
    """Height and width of the boxes that cover an image with the fewest pixels beside it."""
    boxes = [(height, pixels // height) for height in (8, 16, 1)]
    return min(boxes, key=lambda box: triton.cdiv(H, box[0]) * triton.cdiv(W, box[1]))
