"""How the result of a convolution is cut into tiles, boxes of pixels × columns, which are channels of the result; and
which pixels of x a tile reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..sizes import cdiv


@dataclass(frozen=True)
class ConvTiles:
    """box_height × box_width pixels × columns + tail per tile (a tensor's size is a power of two, a tile's need not be:
    96 columns are 64 and 32), and depth channels of x per step."""

    box_height: int
    box_width: int
    columns: int
    tail: int
    depth: int
    num_warps: int
    num_stages: int


# Columns and tail, from large to small: as many as the registers hold beside the rest.
_WGMMA_COLUMNS = ((256, 0), (128, 64), (128, 0), (64, 32), (64, 0), (32, 0), (16, 0))
_WARP_COLUMNS = _WGMMA_COLUMNS[2:]
_NARROW_COLUMNS = _WGMMA_COLUMNS[4:]
# What the pixels of a tile cost beside its columns, in columns: narrow tiles read them more often.
_COST_OF_PIXELS = 32
# Bytes of shared memory for the steps in flight: of one program that fills a multiprocessor, and of one of two.
_ALONE, _OF_TWO = 200 << 10, 100 << 10
_MOST_STAGES = 6


def choose_conv_tiles(
    capability: tuple[int, int], dtype: torch.dtype, descriptors: bool, H: int, W: int, C: int, N: int
) -> ConvTiles:
    """The tiles for images [H, W, C] and a weight of N rows on a GPU of this compute capability, as (9, 0)."""
    if dtype == torch.float32:  # no tensor cores: every operand passes through registers, which bounds the tile
        return ConvTiles(*choose_box(H, W, 64), *choose_columns(N, _NARROW_COLUMNS), 16, num_warps=8, num_stages=2)
    if descriptors and capability[0] in (9, 10):
        # Triton hands a box of one row to these tensor cores where TMA put it; others would pass through registers.
        (columns, tail), depth = choose_columns(N, _WGMMA_COLUMNS), choose_depth(C, 64)
        memory = _ALONE if columns + tail > 128 else _OF_TWO
        stages = min(memory // ((128 + columns + tail) * depth * dtype.itemsize), _MOST_STAGES)
        return ConvTiles(1, 128, columns, tail, depth, num_warps=8, num_stages=stages)
    # Channels that are no multiple of 16 bytes pass through registers on their way to shared memory.
    aligned = C * dtype.itemsize % 16 == 0
    columns, tail = choose_columns(N, _WARP_COLUMNS if aligned else _NARROW_COLUMNS)
    return ConvTiles(*choose_box(H, W, 128), columns, tail, choose_depth(C, 32), num_warps=8, num_stages=4)


def choose_columns(N: int, candidates: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """Columns and tail of the tiles that cost least."""
    return min(candidates, key=lambda pair: cdiv(N, sum(pair)) * (sum(pair) + _COST_OF_PIXELS))


def choose_depth(C: int, largest: int) -> int:
    """The largest of 16, 32 and 64, up to `largest`, that adds no more channels than a smaller one."""
    depths = (depth for depth in (64, 32, 16) if depth <= largest)
    return min(depths, key=lambda depth: cdiv(C, depth) * depth)


def choose_box(H: int, W: int, pixels: int) -> tuple[int, int]:
    """Height and width of the boxes that cover an image with the fewest pixels beside it."""
    boxes = [(height, pixels // height) for height in (8, 16, 1)]
    return min(boxes, key=lambda box: cdiv(H, box[0]) * cdiv(W, box[1]))


@triton.jit
def locate_box(box, T, H, W, UPSAMPLE: tl.constexpr, BOX_H: tl.constexpr, BOX_W: tl.constexpr):
    """The sample, frame, top and left of a box, in pixels of x, and the phase of its result. The phases of a box follow
    each other, as they read the same pixels."""
    PHASES: tl.constexpr = 4 if UPSAMPLE else 1
    phase = box % PHASES
    box = box // PHASES
    across = tl.cdiv(W, BOX_W)
    down = tl.cdiv(H, BOX_H)
    frame = box // (across * down)
    return frame // T, frame % T, box // across % down * BOX_H, box % across * BOX_W, phase // 2, phase % 2


@triton.jit
def find_shift(place, phase, KH: tl.constexpr, UPSAMPLE: tl.constexpr):
    """From a result's row or column to that of x at a place in the window: -1, 0 or 1."""
    if UPSAMPLE:
        return (phase + place + 1) // 2 - 1
    else:
        return place - KH // 2


@triton.jit
def repeated_image(sample, frame, T, REPEAT: tl.constexpr):
    """The image of a residual for a frame of the T of a sample, where each image is for so many frames (1 or 2), and
    the first for one alone if T is odd."""
    return sample * tl.cdiv(T, REPEAT) + (frame + T % REPEAT) // REPEAT
