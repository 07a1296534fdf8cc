"""The portable 8-bit attention forward for sm_80 to sm_120, with the skip optionally fused into its only store.

As in attention_portable.py, one program owns a tile of queries of one head and streams the keys. An integer score s is
never converted to a float. Instead s is added to the bits of 1.5 · 2^23, which gives the bits of the float
1.5 · 2^23 + s. The addition is free, because the matrix product starts from these bits. The one multiply-add before
exp2 removes the constant. The cost is a rounding of less than one unit of s, the same for all scores of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..attention.attention_tiles import load_tile, readable, store_tile
from ..coefficient import kind_and_strides, load_coefficient
from ..dispatch import device_properties
from ..launch import launch_kernel, register_options
from ..quantized import FP8
from ..sizes import cdiv
from ..tma import TMA_CAPABILITY, head_strides
from .attention_8bit_reference import KEY_GROUP
from .quantize_qkv import MAGIC, MAGIC_BITS

LOG2_LARGEST = tl.constexpr(8.807354922057604)  # log2 of 448, the value of a row's largest weight


class Tile(NamedTuple):
    """The numbers of queries and keys that a program holds at a time, and its launch options."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


# Tiles by v's format and the GPU. On sm_90 a multiprocessor runs several small programs, the softmax of one during the
# matmuls of the others. Elsewhere the tiles are the largest that spill no registers.
HOPPER_TILE = Tile(64, 128, 4, 3)
TENSOR_MEMORY_TILE = Tile(64, 64, 8, 3)  # sm_100
FP8_TILE = Tile(128, 64, 8, 2)  # sm_89 and sm_120
FP16_TILE = Tile(128, 32, 8, 3)  # sm_80, sm_86 and other GPUs (not sm_100) with v in fp16


def choose_tile(capability: tuple[int, int], v_format: torch.dtype) -> Tile:
    """Return the tile for a GPU of this compute capability."""
    if capability[0] == 10:
        return TENSOR_MEMORY_TILE
    if v_format != FP8:
        return FP16_TILE
    return HOPPER_TILE if capability[0] == 9 else FP8_TILE


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
) -> None:
    """Write ``c_skip · residual + c_out · F`` to out, or without a residual F, divided by out_scale [B] if given.

    q to v_scale: the tensors of a QuantizedQKV. residual: [B, S, H, D] with any strides, or None.
    c_skip, c_out: canonical coefficients (coefficient.py). out: [B, S, H, D], packed.
    """
    residual = None if residual is None else readable(residual)
    batch, tokens, heads, head_dim = q.shape
    capability = device_properties(q.device)[0]
    tile = choose_tile(capability, v.dtype)
    skip_kind, skip_strides = kind_and_strides(c_skip)
    out_kind, out_strides = kind_and_strides(c_out)
    launch_kernel(
        _attention_8bit_kernel,
        (cdiv(tokens, tile.BLOCK_M), heads, batch),
        packed_operand(q, tile.BLOCK_M, capability),
        q_scale,
        packed_operand(k, tile.BLOCK_N, capability),
        k_scale,
        values_operand(v, tile.BLOCK_N, capability),
        v_scale,
        residual,
        c_skip,
        c_out,
        out,
        out_scale,
        tokens,
        heads,
        *head_strides(residual),
        *skip_strides,
        *out_strides,
        SKIP_KIND=skip_kind,
        OUT_KIND=out_kind,
        V_FP8=v.dtype == FP8,
        HEAD_DIM=head_dim,
        GROUP=KEY_GROUP,
        **tile._asdict(),
        **register_options(capability),
    )


def packed_operand(x: torch.Tensor, block: int, capability: tuple[int, int]) -> torch.Tensor | TensorDescriptor:
    """Return the operand from which a kernel reads tiles of a packed x [B, S, H, D]: a TMA descriptor if the GPU has
    TMA, else x."""
    if capability < TMA_CAPABILITY:
        return x
    batch, tokens, heads, head_dim = x.shape
    stride_b, stride_s, stride_h = head_strides(x)
    shape, strides = [batch, heads, tokens, head_dim], [stride_b, stride_h, stride_s, 1]
    return TensorDescriptor(x, shape, strides, [1, 1, block, head_dim])


def values_operand(v: torch.Tensor, block: int, capability: tuple[int, int]) -> torch.Tensor | TensorDescriptor:
    """Return the operand from which a kernel reads tiles of v. v: [B, H, D, T] in e4m3 or fp16, packed."""
    if v.dtype != FP8 or capability < TMA_CAPABILITY:
        return packed_operand(v, block, capability)
    return TensorDescriptor(v, list(v.shape), list(v.stride()), [1, 1, v.shape[2], block])


@triton.jit
def load_values(
    v, sample, head, heads, key, tokens, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr
):
    """Load BLOCK_N tokens of an e4m3 v [B, H, D, T], in key_order, as [BLOCK_N, D]. T is a multiple of BLOCK_N."""
    if isinstance(v, tl.tensor_descriptor):
        return v.load([sample, head, 0, key]).reshape(HEAD_DIM, BLOCK_N).T
    else:
        columns = tl.cdiv(tokens, GROUP) * GROUP
        row = (sample.to(tl.int64) * heads + head) * HEAD_DIM + tl.arange(0, HEAD_DIM)
        return tl.load(v + (row * columns)[:, None] + key + tl.arange(0, BLOCK_N)[None, :]).T


@triton.jit
def attend(q, k, v, output, row_max, row_sum, unit, keys, MASK: tl.constexpr):
    """Add one tile of keys to the online softmax. With MASK only the tile's first ``keys`` rows are keys.

    unit: the value of an integer score of 1, for each row. row_sum [M, 8]: the sums that each thread has of a row.
    """
    BLOCK_M: tl.constexpr = q.shape[0]
    BLOCK_N: tl.constexpr = k.shape[0]
    scores = (tl.dot(q, k.T, out_dtype=tl.int32) + MAGIC_BITS).to(tl.float32, bitcast=True)
    if MASK:
        scores = tl.where((tl.arange(0, BLOCK_N) < keys)[None, :], scores, float("-inf"))
    new_max = tl.maximum(row_max, (tl.max(scores, 1) - MAGIC) * unit)
    p = tl.exp2(scores * unit[:, None] - (unit * MAGIC + (new_max - LOG2_LARGEST))[:, None])
    correction = tl.exp2(row_max - new_max)
    row_sum = row_sum * correction[:, None] + tl.sum(p.reshape(BLOCK_M, BLOCK_N // 8, 8), 1)
    if v.dtype == tl.float16:
        output = tl.dot(p.to(tl.float16), v, output * correction[:, None])
    else:
        # Reorder as key_order does v: a thread's columns are then those of its operand of the next product.
        p = p.reshape(BLOCK_M, BLOCK_N // 32, 2, 2, 4, 2).permute(0, 1, 2, 4, 3, 5).reshape(BLOCK_M, BLOCK_N)
        # Tensor cores add e4m3 products with 14 bits, enough within a tile of keys, but not across tiles.
        output = output * correction[:, None] + tl.dot(p.to(v.dtype), v)
    return output, new_max, row_sum


@triton.jit(do_not_specialize=["tokens", "heads"])
def _attention_8bit_kernel(
    q, q_scale, k, k_scale, v, v_scale, residual, c_skip, c_out, out, out_scale, tokens, heads,
    residual_stride_b, residual_stride_s, residual_stride_h,
    c_skip_stride_b, c_skip_stride_s, c_skip_stride_c, c_out_stride_b, c_out_stride_s, c_out_stride_c,
    SKIP_KIND: tl.constexpr, OUT_KIND: tl.constexpr, V_FP8: tl.constexpr,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_M queries of one head. residual and out_scale may be None."""
    start = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    sample = tl.program_id(2)
    strides = (tl.cast(tokens, tl.int64) * heads * HEAD_DIM, heads * HEAD_DIM, HEAD_DIM)
    rows = start + tl.arange(0, BLOCK_M)
    row_mask = rows < tokens
    q_tile = load_tile(q, strides, sample, head, start, tokens, HEAD_DIM, BLOCK_M, HEAD_DIM)
    row_scale = tl.load(q_scale + (sample.to(tl.int64) * tokens + rows) * heads + head, mask=row_mask, other=1.0)
    key_scales = k_scale + (sample.to(tl.int64) * heads + head) * tl.cdiv(tokens, GROUP)
    output = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M, 8), tl.float32)
    whole = tokens // BLOCK_N * BLOCK_N
    for key in tl.range(0, whole, BLOCK_N):
        k_tile = load_tile(k, strides, sample, head, key, tokens, HEAD_DIM, BLOCK_N, HEAD_DIM)
        if V_FP8:
            v_tile = load_values(v, sample, head, heads, key, tokens, HEAD_DIM, BLOCK_N, GROUP)
        else:
            v_tile = load_tile(v, strides, sample, head, key, tokens, HEAD_DIM, BLOCK_N, HEAD_DIM)
        unit = row_scale * tl.load(key_scales + key // GROUP)
        output, row_max, row_sum = attend(q_tile, k_tile, v_tile, output, row_max, row_sum, unit, BLOCK_N, MASK=False)
    for key in tl.range(whole, tokens, BLOCK_N):  # runs at most once; a loop is pipelined like the first
        k_tile = load_tile(k, strides, sample, head, key, tokens, HEAD_DIM, BLOCK_N, HEAD_DIM)
        if V_FP8:
            v_tile = load_values(v, sample, head, heads, key, tokens, HEAD_DIM, BLOCK_N, GROUP)
        else:
            v_tile = load_tile(v, strides, sample, head, key, tokens, HEAD_DIM, BLOCK_N, HEAD_DIM)
        unit = row_scale * tl.load(key_scales + key // GROUP)
        output, row_max, row_sum = attend(
            q_tile, k_tile, v_tile, output, row_max, row_sum, unit, tokens - key, MASK=True
        )

    columns = tl.arange(0, HEAD_DIM)
    channels = head * HEAD_DIM + columns
    channel_scale = tl.load(v_scale + sample * heads * HEAD_DIM + channels)
    output = output * (1.0 / tl.sum(row_sum, 1))[:, None] * channel_scale[None, :]
    if out_scale is not None:
        output *= 1.0 / tl.load(out_scale + sample)
    if residual is not None:
        residual_strides = (residual_stride_b, residual_stride_s, residual_stride_h)
        kept = load_tile(residual, residual_strides, sample, head, start, tokens, HEAD_DIM, BLOCK_M, HEAD_DIM)
        kept = kept.to(tl.float32)
        column_mask = columns < HEAD_DIM
        if SKIP_KIND != 0:
            kept *= load_coefficient(
                c_skip, sample, rows, channels, row_mask, column_mask,
                c_skip_stride_b, c_skip_stride_s, c_skip_stride_c, SKIP_KIND,
            )  # fmt: skip
        if OUT_KIND != 0:
            output *= load_coefficient(
                c_out, sample, rows, channels, row_mask, column_mask,
                c_out_stride_b, c_out_stride_s, c_out_stride_c, OUT_KIND,
            )  # fmt: skip
        output = kept + output
    store_tile(out, output, sample, head, heads, start, tokens, HEAD_DIM, BLOCK_M, HEAD_DIM)
