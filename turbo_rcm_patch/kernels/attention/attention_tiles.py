"""Tiles of [B, S, H, D] tensors for the portable attention kernels: their sizes, and how to read and write them.

Tiles are read in place: through a TMA descriptor if the GPU has TMA and the layout allows it, else through pointers.
Both give zeros past a sample's last token and past the head_dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..sizes import next_power_of_2
from ..tma import TMA_CAPABILITY, descriptor_of, head_strides, heads_fit_tma

LOG2_E = math.log2(math.e)


class Tile(NamedTuple):
    """The numbers of queries and keys that a program holds at a time, and its launch options."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


# The tiles of each kernel for head_dims up to 64, 128 and 256: the largest that spill no registers and fit shared
# memory, 227 KiB on sm_90 and sm_100, and 99 KiB on sm_86, sm_89 and sm_120.
WARPGROUP_TILES = {  # sm_90 and sm_100, whose dots read their operands from shared memory
    "attention": (Tile(128, 128, 8, 3), Tile(128, 128, 8, 3), Tile(64, 64, 8, 2)),
    "grad_kv": (Tile(64, 128, 8, 2), Tile(64, 128, 8, 2), Tile(32, 64, 8, 2)),
    "grad_q": (Tile(128, 128, 8, 2), Tile(128, 128, 8, 2), Tile(64, 64, 8, 2)),
}
WARP_TILES = {  # sm_80, sm_86 and sm_89, whose dots read their operands from registers
    "attention": (Tile(128, 64, 8, 3), Tile(128, 32, 8, 3), Tile(64, 32, 8, 2)),
    "grad_kv": (Tile(64, 32, 4, 2), Tile(64, 64, 8, 2), Tile(32, 32, 8, 2)),
    "grad_q": (Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
}
WARP_TMA_TILES = WARP_TILES | {  # sm_120
    "attention": (Tile(128, 64, 8, 3), Tile(128, 32, 8, 3), Tile(32, 32, 8, 2)),
}
FLOAT32_TILES = {  # the same on all GPUs, because fp32 uses no tensor cores
    "attention": (Tile(64, 16, 8, 2), Tile(16, 32, 8, 2), Tile(16, 16, 8, 2)),
    "grad_kv": (Tile(16, 64, 8, 2), Tile(16, 32, 8, 2), Tile(16, 16, 8, 2)),
    "grad_q": (Tile(32, 32, 8, 2), Tile(16, 32, 8, 2), Tile(16, 16, 8, 2)),
}
# If rows are not a multiple of 16 bytes, elements are read one by one, and their addresses take many registers.
ODD_TILE, ODD_FLOAT32_TILE = Tile(32, 32, 8, 2), Tile(16, 16, 8, 2)


def choose_tile(kernel: str, capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> Tile:
    """Return the tile of kernel "attention", "grad_kv" or "grad_q" on a GPU of this compute capability."""
    if head_dim * dtype.itemsize % 16:
        return ODD_FLOAT32_TILE if dtype == torch.float32 else ODD_TILE
    width = 0 if head_dim <= 64 else 1 if head_dim <= 128 else 2
    if dtype == torch.float32:
        tiles = FLOAT32_TILES
    elif capability[0] in (9, 10):
        tiles = WARPGROUP_TILES
    else:
        tiles = WARP_TMA_TILES if capability >= TMA_CAPABILITY else WARP_TILES
    return tiles[kernel][width]


def block_d(head_dim: int) -> int:
    return max(16, next_power_of_2(head_dim))


def has_descriptors(capability: tuple[int, int], dtype: torch.dtype) -> bool:
    """True if tiles are best read by TMA. Below sm_90 Triton would turn a descriptor into scalar loads. fp32 has no
    tensor-core dot that reads its operand from shared memory."""
    return capability >= TMA_CAPABILITY and dtype.itemsize == 2


def readable(x: torch.Tensor) -> torch.Tensor:
    """Return x [B, S, H, D] itself if the kernels can read it with wide loads, else a packed copy."""
    return x if heads_fit_tma(x) else x.contiguous()


def tile_operand(x: torch.Tensor, block: int, capability: tuple[int, int]) -> torch.Tensor | TensorDescriptor:
    """Return the operand from which a kernel reads tiles of x [B, S, H, D]: a TMA descriptor, or x itself."""
    if not has_descriptors(capability, x.dtype) or not heads_fit_tma(x):
        return x
    batch, tokens, heads, head_dim = x.shape
    stride_b, stride_s, stride_h = head_strides(x)
    # Triton removes the tile's unit dimensions only if they come first.
    shape, strides = [batch, heads, tokens, head_dim], [stride_b, stride_h, stride_s, 1]
    return descriptor_of(TensorDescriptor, x, shape, strides, block_shape=[1, 1, block, block_d(head_dim)])


@triton.jit
def load_tile(
    x, strides, sample, head, start, tokens, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load tokens start..start+BLOCK of one sample and head, [BLOCK, BLOCK_D]. Missing tokens and columns are zero.

    x: a descriptor over [B, H, S, D], or a pointer, for which strides are those over (B, S, H).
    """
    if isinstance(x, tl.tensor_descriptor):
        return x.load([sample, head, start, 0]).reshape(BLOCK, BLOCK_D)
    else:
        # Offsets are 64-bit up to the tile, 32-bit inside it.
        corner = x + tl.cast(sample, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[2]
        corner += tl.cast(start, tl.int64) * strides[1]
        rows = tl.arange(0, BLOCK)
        columns = tl.arange(0, BLOCK_D)
        mask = (rows < tokens - start)[:, None]
        if BLOCK_D != HEAD_DIM:
            mask = mask & (columns < HEAD_DIM)[None, :]
        return tl.load(corner + rows[:, None] * strides[1] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(
    x, tile, sample, head, heads, start, tokens, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Store [BLOCK, BLOCK_D] as tokens start..start+BLOCK of one sample and head of a packed [B, S, H, D] tensor."""
    corner = x + ((tl.cast(sample, tl.int64) * tokens + start) * heads + head) * HEAD_DIM
    rows = tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    mask = (rows < tokens - start)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(corner + rows[:, None] * (heads * HEAD_DIM) + columns[None, :], tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def row_statistics(x, sample, head, heads, tokens):
    """Return a pointer to the rows of one sample and head in a packed [B, H, S] tensor."""
    return x + (tl.cast(sample, tl.int64) * heads + head) * tokens
