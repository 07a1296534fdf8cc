"""Tiles of a convolution's result, and the pixels of x that a tile reads. A tile is a box of pixels × columns; columns
are channels of the result."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..sizes import cdiv


@dataclass(frozen=True)
class ConvTiles:
    """The tiling: box_height × box_width pixels and columns + tail columns per tile, and depth channels of x per step.

    A tensor's size in the kernel is a power of two; with a tail a tile's need not be: 96 columns are 64 and 32.
    """

    box_height: int
    box_width: int
    columns: int
    tail: int
    depth: int
    num_warps: int
    num_stages: int


# Columns and tail, from large to small, up to what the registers hold.
_WGMMA_COLUMNS = ((256, 0), (128, 64), (128, 0), (64, 32), (64, 0), (32, 0), (16, 0))
_WARP_COLUMNS = _WGMMA_COLUMNS[2:]
_NARROW_COLUMNS = _WGMMA_COLUMNS[4:]
# The cost of a tile's pixels in units of columns: narrow tiles read pixels more often.
_COST_OF_PIXELS = 32
# Bytes of shared memory for the steps in flight, if one program or two share a multiprocessor.
_ALONE, _OF_TWO = 200 << 10, 100 << 10
_MOST_STAGES = 6


@functools.cache
def choose_conv_tiles(
    capability: tuple[int, int], dtype: torch.dtype, descriptors: bool, H: int, W: int, C: int, N: int
) -> ConvTiles:
    """Return the tiles for images [H, W, C] and a weight of N rows on a GPU of this compute capability, such as (9,
    0)."""
    if dtype == torch.float32:  # no tensor cores: every operand passes through registers, which limits the tile
        return ConvTiles(*choose_box(H, W, 64), *choose_columns(N, _NARROW_COLUMNS), 16, num_warps=8, num_stages=2)
    in_8_bits = dtype.itemsize == 1
    if descriptors and capability[0] in (9, 10):
        # These tensor cores read a box of one row from where TMA put it. Other boxes would pass through registers.
        (columns, tail), depth = choose_columns(N, _WGMMA_COLUMNS), choose_depth(C, 64, in_8_bits)
        memory = _ALONE if columns + tail > 128 else _OF_TWO
        stages = min(memory // ((128 + columns + tail) * depth * dtype.itemsize), _MOST_STAGES)
        return ConvTiles(1, 128, columns, tail, depth, num_warps=8, num_stages=stages)
    # If the channels are not a multiple of 16 bytes, they pass through registers on their way to shared memory.
    aligned = C * dtype.itemsize % 16 == 0
    columns, tail = choose_columns(N, _WARP_COLUMNS if aligned else _NARROW_COLUMNS)
    return ConvTiles(*choose_box(H, W, 128), columns, tail, choose_depth(C, 32, in_8_bits), num_warps=8, num_stages=4)


def choose_columns(N: int, candidates: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """Return the columns and tail of the tiles with the lowest cost."""
    return min(candidates, key=lambda pair: cdiv(N, sum(pair)) * (sum(pair) + _COST_OF_PIXELS))


def choose_depth(C: int, largest: int, in_8_bits: bool = False) -> int:
    """Return the largest of 16, 32 and 64, up to `largest`, that pads C no further than the smaller ones. In 8 bits all
    are twice as many: tensor cores multiply 32 bytes at a time."""
    depths = (depth << in_8_bits for depth in (64, 32, 16) if depth <= largest)
    return min(depths, key=lambda depth: cdiv(C, depth) * depth)


def choose_box(H: int, W: int, pixels: int) -> tuple[int, int]:
    """Return the height and width of the boxes that cover an image with the fewest pixels outside it."""
    boxes = [(height, pixels // height) for height in (8, 16, 1)]
    return min(boxes, key=lambda box: cdiv(H, box[0]) * cdiv(W, box[1]))


def residual_repeats(shape: tuple[int, ...], result: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Return how often (1 or 2) each frame, row and column of a residual counts in a result, or None if the shapes do
    not fit."""
    if len(shape) != 5 or (shape[0], shape[4]) != (result[0], result[4]):
        return None
    sizes = list(zip(shape[1:4], result[1:4], strict=True))
    fits = all(small == large or small == cdiv(large, 2) for small, large in sizes)
    return tuple(1 if small == large else 2 for small, large in sizes) if fits else None


@triton.jit
def locate_box(box, T, H, W, UPSAMPLE: tl.constexpr, BOX_H: tl.constexpr, BOX_W: tl.constexpr):
    """Return the sample, frame, top and left of a box, in pixels of x, and the row and column phase of its result. The
    phases of a box have consecutive numbers, because they read the same pixels."""
    PHASES: tl.constexpr = 4 if UPSAMPLE else 1
    phase = box % PHASES
    box = box // PHASES
    across = tl.cdiv(W, BOX_W)
    down = tl.cdiv(H, BOX_H)
    frame = box // (across * down)
    return frame // T, frame % T, box // across % down * BOX_H, box % across * BOX_W, phase // 2, phase % 2


@triton.jit
def find_shift(place, phase, KH: tl.constexpr, UPSAMPLE: tl.constexpr):
    """Return the offset, -1, 0 or 1, from a result's row or column to the row or column of x at a position in the
    window. A window of 2 has the doubling of pixels folded into it (conv_fold.py)."""
    if UPSAMPLE and KH == 2:
        return phase + place - 1
    elif UPSAMPLE:
        return (phase + place + 1) // 2 - 1
    else:
        return place - KH // 2


@triton.jit
def repeated_image(sample, frame, T, REPEAT: tl.constexpr):
    """Return the residual's image for a frame of a sample with T frames. Each image counts for REPEAT frames (1 or 2),
    but the first counts for one if T is odd."""
    return sample * tl.cdiv(T, REPEAT) + (frame + T % REPEAT) // REPEAT
