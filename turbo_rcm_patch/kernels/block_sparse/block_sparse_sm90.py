"""Block-sparse attention in 8 bits on sm_90: the inputs it takes, and its launch.

The kernel is the dense one, attention_8bit_sm90_kernel.py, with lists of key tiles. A block of queries is the tile of
its three consumers together. So they share every tile of keys, and none waits for another's list. Lists have different
lengths, so each program has one tile of queries, and the GPU starts the next program when one ends.
"""

from __future__ import annotations

import contextlib

import torch

from ..attention.attention_sm90 import skip_arguments
from ..attention_8bit import attention_8bit_sm90
from ..attention_8bit.quantize_qkv import QuantizedQKV
from ..launch import launch_kernel
from ..sparse_linear.sparse_linear_portable import Blocks

with contextlib.suppress(ImportError, AttributeError):  # attention_sm90.GLUON_ERROR holds the error
    from ..attention_8bit.attention_8bit_sm90 import TILE_KEYS, descriptor, values_descriptor
    from ..attention_8bit.attention_8bit_sm90_kernel import QUERIES, attention_8bit_kernel

BLOCKS = (192, 128)  # queries and keys of a block


def why_not(
    device: torch.device, dtype: torch.dtype, v_format: torch.dtype, head_dim: int, block_q: int, block_k: int
) -> str | None:
    """Return the reason why the kernel cannot take 8-bit q and k on this device with this v_format, result dtype,
    head_dim and block sizes, or None if it can."""
    reason = attention_8bit_sm90.why_not(device, v_format, dtype, head_dim)
    if reason is None and (block_q, block_k) != BLOCKS:
        return f"blocks of {block_q} queries and {block_k} keys"
    return reason


def attention_forward(qkv: QuantizedQKV, blocks: Blocks, out: torch.Tensor, out_scale: torch.Tensor | None) -> None:
    """Write softmax attention of qkv to the kept blocks, plus the estimate for the others, to out, packed [B, S, H, D].
    The sum is divided by out_scale [B] if given.

    `why_not` must accept qkv and blocks. blocks must have counts, kept_share and left_value.
    """
    batch, tokens, heads, _ = out.shape
    items = batch * heads * blocks.block_map.shape[2]
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
        *skip_arguments(None, None, None),
        num_warps=4,
    )
