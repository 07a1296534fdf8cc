"""The portable attention to kept blocks with the softmax's q, k and v in 8 bits, for sm_80 to sm_120.

It works like attention_8bit_portable.py, over the keys of the kept blocks only. Before its only store it adds one of
two terms: the linear branch, which takes q in its original dtype, or the estimate for the blocks that were left out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..attention.attention_tiles import load_tile, readable, store_tile, tile_operand
from ..attention_8bit.attention_8bit_portable import attend, choose_tile, load_values, packed_operand, values_operand
from ..attention_8bit.attention_8bit_reference import KEY_GROUP
from ..attention_8bit.quantize_qkv import QuantizedQKV
from ..dispatch import device_properties
from ..launch import launch_kernel, register_options
from ..quantized import FP8
from ..sizes import cdiv
from ..tma import head_strides
from .sparse_linear_portable import (
    Blocks,
    LinearBranch,
    add_left_out,
    add_linear_branch,
    block_operands,
    branch_operands,
    fit_tile,
    kept_keys,
    key_of,
    list_of,
)


def sparse_attention_forward(
    qkv: QuantizedQKV,
    q: torch.Tensor | None,
    blocks: Blocks,
    branch: LinearBranch | None,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
) -> None:
    """Write softmax attention of qkv to the kept blocks, plus the branch or the left-out blocks' term, to out, packed
    [B, S, H, D]. The sum is divided by out_scale [B] if given.

    q: the linear branch's q, [B, S, H, D] with any strides; unused without a branch.
    """
    q = None if branch is None else readable(q)
    batch, tokens, heads, head_dim = qkv.q.shape
    capability = device_properties(qkv.q.device)[0]
    tile = fit_tile(choose_tile(capability, qkv.v.dtype), blocks.block_q, blocks.block_k, capability)
    launch_kernel(
        _sparse_attention_8bit_kernel,
        (cdiv(tokens, tile.BLOCK_M), heads, batch),
        packed_operand(qkv.q, tile.BLOCK_M, capability),
        qkv.q_scale,
        packed_operand(qkv.k, tile.BLOCK_N, capability),
        qkv.k_scale,
        values_operand(qkv.v, tile.BLOCK_N, capability),
        qkv.v_scale,
        None if q is None else tile_operand(q, tile.BLOCK_M, capability),
        *block_operands(blocks),
        *branch_operands(branch, capability),
        out,
        out_scale,
        tokens,
        heads,
        blocks.block_map.shape[3],
        *head_strides(q),
        V_FP8=qkv.v.dtype == FP8,
        HEAD_DIM=head_dim,
        GROUP=KEY_GROUP,
        QUERIES=blocks.block_q,
        KEYS=blocks.block_k,
        **tile._asdict(),
        **register_options(capability),
    )


@triton.jit(do_not_specialize=["tokens", "heads", "width"])
def _sparse_attention_8bit_kernel(
    q, q_scale, k, k_scale, v, v_scale, wide_q, block_map, counts, kept_share, left_value, key_weight, state, bias, out,
    out_scale, tokens, heads, width,
    wide_q_stride_b, wide_q_stride_s, wide_q_stride_h, V_FP8: tl.constexpr, HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_M queries of one head, all of one block of queries. counts, kept_share and left_value
    may be None, and so may wide_q, key_weight, state, bias and out_scale."""
    start = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    sample = tl.program_id(2)
    strides = (tl.cast(tokens, tl.int64) * heads * HEAD_DIM, heads * HEAD_DIM, HEAD_DIM)
    row = list_of(sample, head, heads, start, tokens, QUERIES)
    kept_blocks, kept, whole, cut = kept_keys(block_map, counts, row, width, tokens, KEYS)
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
        key = key_of(kept_blocks, i + 1, kept, KEYS, BLOCK_N)  # early, so that the next tiles can be loaded ahead
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
    if kept_share is not None:
        output = add_left_out(output, kept_share, left_value, row, HEAD_DIM)
    if state is not None:
        wide_strides = (wide_q_stride_b, wide_q_stride_s, wide_q_stride_h)
        output = add_linear_branch(
            output, wide_q, wide_strides, key_weight, state, bias, sample, head, heads, start, tokens, HEAD_DIM
        )
    if out_scale is not None:
        output *= 1.0 / tl.load(out_scale + sample)
    store_tile(out, output, sample, head, heads, start, tokens, HEAD_DIM, BLOCK_M, HEAD_DIM)
