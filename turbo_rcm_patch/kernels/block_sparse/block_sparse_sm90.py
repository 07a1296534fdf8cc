"""Block-sparse attention in 8 bits on sm_90: the inputs it takes, and its launch.

The kernel is the dense one, attention_8bit_sm90_kernel.py, with lists of key tiles. A block of queries is the tile of
its three consumers together. So they share every tile of keys, and none waits for another's list. Lists have different
lengths, so each program has one tile of queries, and the GPU starts the next program when one ends.

If nearly all blocks are kept, the kernel without lists is faster: its programs are persistent, and split the last tiles
of queries along the keys. The CPU does not wait for the lists' lengths. It launches both kernels, and their mean length
tells each on the GPU whether to do anything. If `mass` is too low for so many blocks, there is one launch.
"""

from __future__ import annotations

import contextlib

import torch

from ..attention.attention_sm90 import make_schedule, skip_arguments
from ..attention_8bit import attention_8bit_sm90
from ..attention_8bit.quantize_qkv import QuantizedQKV
from ..dispatch import device_properties
from ..launch import launch_kernel
from ..sizes import cdiv
from ..sparse_linear.sparse_linear_portable import Blocks

with contextlib.suppress(ImportError, AttributeError):  # attention_sm90.GLUON_ERROR holds the error
    from ..attention_8bit.attention_8bit_sm90 import TILE_KEYS, descriptor, values_descriptor
    from ..attention_8bit.attention_8bit_sm90_kernel import QUERIES, attention_8bit_kernel

BLOCKS = (192, 128)  # queries and keys of a block
# The fixed cost of a tile of queries with a list, in units of the time for one tile of keys. An H200's times with all
# blocks kept (docs/designs.md) give 12 or 13 at 12x32760x128, 9 or 10 at 32x28672x128 and 19 at 40x75600x128.
LIST_COST = 14
LEAST_DENSE = 0.9  # A smaller share of kept blocks always has lists.


def why_not(
    device: torch.device, dtype: torch.dtype, v_format: torch.dtype, head_dim: int, block_q: int, block_k: int
) -> str | None:
    """Return the reason why the kernel cannot take 8-bit q and k on this device with this v_format, result dtype,
    head_dim and block sizes, or None if it can."""
    reason = attention_8bit_sm90.why_not(device, v_format, dtype, head_dim)
    if reason is None and (block_q, block_k) != BLOCKS:
        return f"blocks of {block_q} queries and {block_k} keys"
    return reason


def dense_share(tiles: int, key_tiles: int, multiprocessors: int) -> float:
    """Return the mean share of key blocks from which attention without lists is faster. tiles: of queries."""
    dense = make_schedule(tiles, key_tiles, multiprocessors).time(key_tiles, multiprocessors)
    rounds = cdiv(tiles, multiprocessors)
    return max(LEAST_DENSE, (dense / rounds - LIST_COST) / key_tiles)


def attention_forward(
    qkv: QuantizedQKV, blocks: Blocks, out: torch.Tensor, out_scale: torch.Tensor | None, mass: float
) -> None:
    """Write softmax attention of qkv to the kept blocks, plus the estimate for the others, to out, packed [B, S, H, D].
    The sum is divided by out_scale [B] if given. If nearly all blocks are kept, write attention to all of them.

    `why_not` must accept qkv and blocks. blocks must have counts, kept_share and left_value. mass: the share of the
    attention for which the blocks were chosen. No more than about this share of the blocks is kept, except for ties.
    """
    batch, tokens, heads, _ = out.shape
    _, _, query_blocks, key_blocks = blocks.block_map.shape
    items = batch * heads * query_blocks
    share = dense_share(items, key_blocks, device_properties(out.device)[1])
    dense_if = (None, None)
    if mass > share:
        dense_if = blocks.counts.mean(dtype=torch.float32), share * key_blocks
        attention_8bit_sm90.attention_forward(*qkv[:6], None, None, None, out, out_scale, dense_if)
    launch_kernel(
        attention_8bit_kernel,
        (items,),
        descriptor(qkv.q, QUERIES.value),
        qkv.q_scale,
        descriptor(qkv.k, TILE_KEYS),
        qkv.k_scale,
        values_descriptor(qkv.v),
        qkv.v_scale,
        descriptor(out, QUERIES.value),
        out_scale,
        None,
        None,
        tokens,
        heads,
        items,
        items,
        1,
        blocks.block_map,
        blocks.counts,
        blocks.kept_share,
        blocks.left_value,
        *dense_if,
        *skip_arguments(None, None, None),
        num_warps=4,
    )
