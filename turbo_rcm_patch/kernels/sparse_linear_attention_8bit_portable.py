"""The portable sparse-linear attention with the softmax's q, k and v in 8 bits: sm_80 to sm_120.

As attention_8bit_portable, over the keys of the kept blocks alone, and with the linear branch, which takes q as it was
before 8 bits, added before the only store.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .attention_8bit_portable import attend, choose_tile, load_values, packed_operand, values_operand
from .attention_tiles import load_tile, readable, store_tile, tile_operand
from .dispatch import device_properties
from .launch import launch_kernel, register_options
from .quantize_qkv import QuantizedQKV
from .quantized import FP8
from .quantized_attention_reference import KEY_GROUP
from .sparse_linear_attention_portable import add_linear_branch, fit_tile, kept_keys, key_of, state_operand
from .tma import head_strides


def sparse_attention_forward(
    qkv: QuantizedQKV,
    q: torch.Tensor,
    block_map: torch.Tensor,
    key_weight: torch.Tensor,
    state: torch.Tensor,
    bias: torch.Tensor | None,
    block_q: int,
    block_k: int,
    out: torch.Tensor,
) -> None:
    """Write softmax attention to the kept blocks of qkv plus the linear branch of q [B, S, H, D], of any strides, to
    out; the rest as in sparse_linear_attention_portable."""
    q = readable(q)
    batch, tokens, heads, head_dim = q.shape
    capability = device_properties(q.device)[0]
    tile = fit_tile(choose_tile(capability, qkv.v.dtype), block_q, block_k, capability)
    with torch.cuda.device_of(q):
        launch_kernel(
            _sparse_attention_8bit_kernel,
            (triton.cdiv(tokens, tile.BLOCK_M), heads, batch),
            packed_operand(qkv.q, tile.BLOCK_M, capability),
            qkv.q_scale,
            packed_operand(qkv.k, tile.BLOCK_N, capability),
            qkv.k_scale,
            values_operand(qkv.v, tile.BLOCK_N, capability),
            qkv.v_scale,
            tile_operand(q, tile.BLOCK_M, capability),
            block_map.contiguous(),
            key_weight,
            state_operand(state, capability),
            None if bias is None else bias.contiguous(),
            out,
            tokens,
            heads,
            block_map.shape[3],
            *head_strides(q),
            V_FP8=qkv.v.dtype == FP8,
            HEAD_DIM=head_dim,
            GROUP=KEY_GROUP,
            QUERIES=block_q,
            KEYS=block_k,
            **tile._asdict(),
            **register_options(capability),
        )


@triton.jit(do_not_specialize=["tokens", "heads", "kept"])
def _sparse_attention_8bit_kernel(
    q, q_scale, k, k_scale, v, v_scale, wide_q, block_map, key_weight, state, bias, out, tokens, heads, kept,
    wide_q_stride_b, wide_q_stride_s, wide_q_stride_h, V_FP8: tl.constexpr, HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head and of one block of queries."""
    start = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    sample = tl.program_id(2)
    strides = (tl.cast(tokens, tl.int64) * heads * HEAD_DIM, heads * HEAD_DIM, HEAD_DIM)
    kept_blocks, whole, cut = kept_keys(block_map, sample, head, heads, start, tokens, kept, QUERIES, KEYS)
    rows = start + tl.arange(0, BLOCK_M)
    q_tile = load_tile(q, strides, sample, head, start, tokens, HEAD_DIM, BLOCK_M, HEAD_DIM)
    row_scales = q_scale + (sample.to(tl.int64) * tokens + rows) * heads + head
    row_scale = tl.load(row_scales, mask=rows < tokens, other=1.0)
    key_scales = k_scale + (sample.to(tl.int64) * heads + head) * tl.cdiv(tokens, GROUP)
    output = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M, 8), tl.float32)
    key = key_of(kept_blocks, 0, kept, KEYS, BLOCK_N)
    for i in tl.range(0, whole * (KEYS // BLOCK_N)):
        k_tile = load_tile(k, strides, sample, head, key, tokens, HEAD_DIM, BLOCK_N, HEAD_DIM)
        if V_FP8:
            v_tile = load_values(v, sample, head, heads, key, tokens, HEAD_DIM, BLOCK_N, GROUP)
        else:
            v_tile = load_tile(v, strides, sample, head, key, tokens, HEAD_DIM, BLOCK_N, HEAD_DIM)
        unit = row_scale * tl.load(key_scales + key // GROUP)
        output, row_max, row_sum = attend(q_tile, k_tile, v_tile, output, row_max, row_sum, unit, BLOCK_N, MASK=False)
        key = key_of(kept_blocks, i + 1, kept, KEYS, BLOCK_N)  # now, that the next tiles can be loaded ahead
    for key in tl.range(cut, tokens, BLOCK_N):
        k_tile = load_tile(k, strides, sample, head, key, tokens, HEAD_DIM, BLOCK_N, HEAD_DIM)
        if V_FP8:
            v_tile = load_values(v, sample, head, heads, key, tokens, HEAD_DIM, BLOCK_N, GROUP)
        else:
            v_tile = load_tile(v, strides, sample, head, key, tokens, HEAD_DIM, BLOCK_N, HEAD_DIM)
        unit = row_scale * tl.load(key_scales + key // GROUP)
        output, row_max, row_sum = attend(
            q_tile, k_tile, v_tile, output, row_max, row_sum, unit, tokens - key, MASK=True
        )

    channels = (sample.to(tl.int64) * heads + head) * HEAD_DIM + tl.arange(0, HEAD_DIM)
    output = output * (1.0 / tl.sum(row_sum, 1))[:, None] * tl.load(v_scale + channels)[None, :]
    wide_strides = (wide_q_stride_b, wide_q_stride_s, wide_q_stride_h)
    output = add_linear_branch(
        output, wide_q, wide_strides, key_weight, state, bias, sample, head, heads, start, tokens, HEAD_DIM
    )
    store_tile(out, output, sample, head, heads, start, tokens, HEAD_DIM, BLOCK_M, HEAD_DIM)
