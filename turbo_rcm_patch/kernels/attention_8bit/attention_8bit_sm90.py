"""The 8-bit attention forward on sm_90: the inputs it takes, and its launch. Work is split as in attention_sm90.py.

    F   = softmax(q kᵀ) v               of a QuantizedQKV with e4m3 values and D 64 or 128, in bf16, fp16 or e4m3
    out = c_skip · residual + c_out · F

The kernel is in attention_8bit_sm90_kernel.py.
"""

from __future__ import annotations

import contextlib

import torch

from ..attention import attention_sm90
from ..attention.attention_sm90 import HEAD_DIMS, join_parts, make_schedule, shared_layout, skip_arguments
from ..dispatch import device_properties, why_not_sm90
from ..launch import launch_kernel
from ..quantized import FP8
from ..sizes import cdiv
from ..tma import head_strides

with contextlib.suppress(ImportError, AttributeError):  # attention_sm90.GLUON_ERROR holds the error
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .attention_8bit_sm90_kernel import CONSUMERS, KEYS, QUERIES, attention_8bit_kernel

    TILE_QUERIES, TILE_KEYS = CONSUMERS.value * QUERIES.value, KEYS.value


def why_not(device: torch.device, v_format: torch.dtype, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return the reason why the kernel cannot take a QuantizedQKV with v in this format for a result of this dtype, or
    None if it can."""
    reason = why_not_sm90(device, torch.bfloat16 if dtype == FP8 else dtype, attention_sm90.GLUON_ERROR)
    if reason is None and v_format != FP8:
        return "v in fp16"
    return f"head_dim {head_dim}" if reason is None and head_dim not in HEAD_DIMS else reason


def attention_forward(
    q: torch.Tensor,
    q_scale: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    v: torch.Tensor,
    v_scale: torch.Tensor,
    residual: torch.Tensor | None,
    c_skip: torch.Tensor | None,
    c_out: torch.Tensor | None,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
    only_if: tuple[torch.Tensor, float] | tuple[None, None] = (None, None),
) -> None:
    """Write ``c_skip · residual + c_out · F`` to out, or without a residual F, divided by out_scale [B] if given.

    q to v_scale: the tensors of a QuantizedQKV that `why_not` accepts. residual: [B, S, H, D] with any strides, or
        None.
    c_skip, c_out: canonical coefficients (coefficient.py). out: [B, S, H, D], packed.
    only_if: a scalar in fp32 and a number. If the scalar is below the number, nothing is written.
    """
    skip = skip_arguments(residual, c_skip, c_out)
    batch, tokens, heads, head_dim = q.shape
    tiles = batch * heads * cdiv(tokens, TILE_QUERIES)
    multiprocessors = device_properties(q.device)[1]
    schedule = make_schedule(tiles, cdiv(tokens, TILE_KEYS), multiprocessors)
    partial_out = partial_lse = None
    if schedule.parts > 1:
        parts = schedule.items - schedule.whole
        partial_out = torch.empty((parts, TILE_QUERIES, head_dim), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty((parts, TILE_QUERIES), dtype=torch.float32, device=q.device)
    launch_kernel(
        attention_8bit_kernel,
        (min(schedule.items, multiprocessors),),
        descriptor(q, QUERIES.value),
        q_scale,
        descriptor(k, TILE_KEYS),
        k_scale,
        values_descriptor(v),
        v_scale,
        descriptor(out, QUERIES.value),
        out_scale,
        partial_out,
        partial_lse,
        tokens,
        heads,
        schedule.items,
        schedule.whole,
        schedule.parts,
        *(None,) * 4,  # no block-sparse lists
        *only_if,
        *skip,
        num_warps=4,
    )
    if schedule.parts > 1:
        join_parts(partial_out, partial_lse, out, None, schedule, skip, only_if)


def descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """Return a TMA descriptor over x [B, S, H, D] in tiles of rows. Reads past a sample's end give 0; writes there are
    dropped."""
    batch, tokens, heads, head_dim = x.shape
    stride_b, stride_s, stride_h = head_strides(x)
    block = (1, 1, rows, head_dim)
    shape, strides = [batch, heads, tokens, head_dim], [stride_b, stride_h, stride_s, 1]
    return TensorDescriptor(x, shape, strides, list(block), shared_layout(block, x.dtype))


def values_descriptor(v: torch.Tensor) -> TensorDescriptor:
    """Return a TMA descriptor over v [B, H, D, T] in tiles of keys."""
    block = (1, 1, v.shape[2], TILE_KEYS)
    return TensorDescriptor(v, list(v.shape), list(v.stride()), list(block), shared_layout(block, v.dtype))
