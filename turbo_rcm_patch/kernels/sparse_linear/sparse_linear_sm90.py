"""Sparse-linear attention in 8 bits on sm_90: the inputs it takes, and its launch.

The kernel is in sparse_linear_sm90_kernel.py. It takes e4m3 values, blocks of 64 or 128 queries and 128 keys, D of 64
or 128, q in bf16 or fp16, and results in q's dtype or e4m3.
"""

from __future__ import annotations

import contextlib

import torch

from ..attention.attention_tiles import readable
from ..attention_8bit import attention_8bit_sm90
from ..attention_8bit.quantize_qkv import QuantizedQKV
from ..dispatch import device_properties
from ..launch import launch_kernel
from ..sizes import cdiv
from .sparse_linear_portable import Blocks, LinearBranch

NO_BRANCH = LinearBranch(None, None, None)

with contextlib.suppress(ImportError, AttributeError):  # attention_sm90.GLUON_ERROR holds the error
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from ..attention.attention_sm90 import shared_layout
    from ..attention_8bit.attention_8bit_sm90 import descriptor, values_descriptor
    from .sparse_linear_sm90_kernel import KEYS, QUERIES, STATE_ROWS, sparse_linear_attention_8bit_kernel


def why_not(
    device: torch.device, dtype: torch.dtype, v_format: torch.dtype, head_dim: int, block_q: int, block_k: int
) -> str | None:
    """Return the reason why the kernel cannot run, or None if it can.

    dtype: of q before it was quantised. v_format: the 8-bit format of v. block_q, block_k: tokens in a block.
    """
    reason = attention_8bit_sm90.why_not(device, v_format, dtype, head_dim)
    if reason is None and (block_k != KEYS.value or block_q % QUERIES.value):
        return f"blocks of {block_q} queries and {block_k} keys"
    return reason


def sparse_attention_forward(
    qkv: QuantizedQKV,
    q: torch.Tensor,
    blocks: Blocks,
    branch: LinearBranch | None,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
) -> None:
    """Write softmax attention of qkv to the kept blocks, plus the linear branch if there is one, to out, packed.
    The sum is divided by out_scale [B] if given.

    q: [B, S, H, D] with any strides, for the linear branch. `why_not` must accept all operands.
    """
    q = readable(q)
    batch, tokens, heads, _ = q.shape
    branch = NO_BRANCH if branch is None else branch
    tiles = batch * heads * cdiv(tokens, QUERIES.value)
    launch_kernel(
        sparse_linear_attention_8bit_kernel,
        (min(tiles, device_properties(q.device)[1]),),
        descriptor(qkv.q, QUERIES.value),
        qkv.q_scale,
        descriptor(qkv.k, KEYS.value),
        qkv.k_scale,
        values_descriptor(qkv.v),
        qkv.v_scale,
        descriptor(q, QUERIES.value),
        blocks.block_map.contiguous(),
        branch.key_weight,
        None if branch.state is None else _state_descriptor(branch.state),
        None if branch.bias is None else branch.bias.contiguous(),
        descriptor(out, QUERIES.value),
        out_scale,
        tokens,
        heads,
        tiles,
        blocks.block_q,
        blocks.block_map.shape[3],
        num_warps=4,
    )


def _state_descriptor(state: torch.Tensor) -> TensorDescriptor:
    """Return a TMA descriptor over state [B, H, D, D] in pieces of STATE_ROWS rows."""
    block = (1, 1, STATE_ROWS.value, state.shape[3])
    layout = shared_layout(block, state.dtype)
    return TensorDescriptor(state, list(state.shape), list(state.stride()), list(block), layout)
