"""Block-sparse attention in 8 bits on sm_90: which inputs it takes, and the launch.

The kernel is the dense one, attention_8bit_sm90_kernel.py, whose programs walk lists of key tiles: a block of queries
is what its three consumers attend with, so that they share every tile of keys and none waits for another's list. Lists
have different lengths, so each program has one tile of queries, and the GPU hands out the next as programs end.
"""

from __future__ import annotations

import contextlib

import torch

from ..attention.attention_sm90 import skip_arguments
from ..attention_8bit import attention_8bit_sm90
from ..attention_8bit.quantize_qkv import QuantizedQKV
from ..launch import launch_kernel
from ..sparse_linear.sparse_linear_portable import Blocks

with contextlib.suppress(ImportError, AttributeError):  # as attention_sm90.GLUON_ERROR tells
    from ..attention_8bit.attention_8bit_sm90 import TILE_KEYS, descriptor, values_descriptor
    from ..attention_8bit.attention_8bit_sm90_kernel import QUERIES, attention_8bit_kernel

BLOCKS = (192, 128)  # queries and keys


def why_not(
    device: torch.device, dtype: torch.dtype, v_format: torch.dtype, head_dim: int, block_q: int, block_k: int
) -> str | None:
    """The reason why the kernel cannot take q and k in 8 bits on this device, with values of this format, for a result
    of this dtype, of this head_dim and blocks of these sizes, or None if it can."""
    reason = attention_8bit_sm90.why_not(device, v_format, dtype, head_dim)
    if reason is None and (block_q, block_k) != BLOCKS:
        return f"blocks of {block_q} queries and {block_k} keys"
    return reason


def attention_forward(qkv: QuantizedQKV, blocks: Blocks, out: torch.Tensor) -> None:
    """Write softmax attention of qkv to the kept blocks, and what stands for the others, to out, packed [B, S, H, D].
    `why_not` accepts qkv and blocks, whose counts, kept_share and left_value are given."""
    batch, tokens, heads, _ = out.shape
    items = batch * heads * blocks.block_map.shape[2]
    with torch.cuda.device_of(out):
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
            None,
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
            *skip_arguments(None, None, None),
            num_warps=4,
        )
