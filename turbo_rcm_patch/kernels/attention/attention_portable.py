"""The portable attention forward for sm_80 to sm_120, with the skip optionally fused into its only store.

FlashAttention-2 (Dao 2023, algorithm 1): one program owns a tile of queries of one head and streams the keys, with an
online softmax in base 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..coefficient import kind_and_strides, load_coefficient
from ..dispatch import device_properties
from ..launch import launch_kernel
from ..sizes import cdiv
from ..tma import head_strides
from .attention_tiles import LOG2_E, block_d, choose_tile, load_tile, readable, row_statistics, store_tile, tile_operand


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    residual: torch.Tensor | None,
    c_skip: torch.Tensor | None,
    c_out: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    raw_out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> None:
    """Write ``c_skip · residual + c_out · F``, or F without a residual, to out. Write F to raw_out and the
    logsumexp of the scores in base 2 to lse, if these are given.

    q, residual: [B, S, H, D], with any strides. k, v: [B, Skv, H, D], with any strides.
    c_skip, c_out: canonical coefficients (coefficient.py).
    out, raw_out: [B, S, H, D], packed. lse: [B, H, S] fp32, packed.
    """
    q, k, v = readable(q), readable(k), readable(v)
    residual = None if residual is None else readable(residual)
    batch, tokens, heads, head_dim = q.shape
    capability = device_properties(q.device)[0]
    tile = choose_tile("attention", capability, q.dtype, head_dim)
    skip_kind, skip_strides = kind_and_strides(c_skip)
    out_kind, out_strides = kind_and_strides(c_out)
    launch_kernel(
        _attention_kernel,
        (cdiv(tokens, tile.BLOCK_M), heads, batch),
        tile_operand(q, tile.BLOCK_M, capability),
        tile_operand(k, tile.BLOCK_N, capability),
        tile_operand(v, tile.BLOCK_N, capability),
        residual,
        c_skip,
        c_out,
        out,
        raw_out,
        lse,
        tokens,
        k.shape[1],
        heads,
        scale * LOG2_E,
        *head_strides(q),
        *head_strides(k),
        *head_strides(v),
        *head_strides(residual),
        *skip_strides,
        *out_strides,
        SKIP_KIND=skip_kind,
        OUT_KIND=out_kind,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d(head_dim),
        **tile._asdict(),
    )


@triton.jit
def attend(q, k, v, output, row_max, row_sum, keys, scale_log2, MASK: tl.constexpr):
    """Add one tile of keys to the online softmax. With MASK only the tile's first ``keys`` rows are keys."""
    scores = tl.dot(q, k.T, input_precision="ieee")
    if MASK:
        scores = tl.where((tl.arange(0, k.shape[0]) < keys)[None, :], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    p = tl.exp2(scores * scale_log2 - new_max[:, None])
    correction = tl.exp2(row_max - new_max)
    row_sum = row_sum * correction + tl.sum(p, 1)
    output = tl.dot(p.to(v.dtype), v, output * correction[:, None], input_precision="ieee")
    return output, new_max, row_sum


@triton.jit(do_not_specialize=["tokens", "kv_tokens"])
def _attention_kernel(
    q, k, v, residual, c_skip, c_out, out, raw_out, lse, tokens, kv_tokens, heads, scale_log2,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h,
    residual_stride_b, residual_stride_s, residual_stride_h,
    c_skip_stride_b, c_skip_stride_s, c_skip_stride_c, c_out_stride_b, c_out_stride_s, c_out_stride_c,
    SKIP_KIND: tl.constexpr, OUT_KIND: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_M queries of one head.

    residual may be None. raw_out is F before the skip. lse [B, H, S] is the logsumexp in base 2. Both are None unless a
    backward needs them.
    """
    start = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    sample = tl.program_id(2)
    k_strides = (k_stride_b, k_stride_s, k_stride_h)
    v_strides = (v_stride_b, v_stride_s, v_stride_h)
    q_strides = (q_stride_b, q_stride_s, q_stride_h)
    q_tile = load_tile(q, q_strides, sample, head, start, tokens, HEAD_DIM, BLOCK_M, BLOCK_D)
    output = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    whole = kv_tokens // BLOCK_N * BLOCK_N
    for key in tl.range(0, whole, BLOCK_N):
        k_tile = load_tile(k, k_strides, sample, head, key, kv_tokens, HEAD_DIM, BLOCK_N, BLOCK_D)
        v_tile = load_tile(v, v_strides, sample, head, key, kv_tokens, HEAD_DIM, BLOCK_N, BLOCK_D)
        output, row_max, row_sum = attend(
            q_tile, k_tile, v_tile, output, row_max, row_sum, BLOCK_N, scale_log2, MASK=False
        )
    # This loop runs at most once. A loop is pipelined like the first one; an `if` would spill registers on sm_8x.
    for key in tl.range(whole, kv_tokens, BLOCK_N):
        k_tile = load_tile(k, k_strides, sample, head, key, kv_tokens, HEAD_DIM, BLOCK_N, BLOCK_D)
        v_tile = load_tile(v, v_strides, sample, head, key, kv_tokens, HEAD_DIM, BLOCK_N, BLOCK_D)
        output, row_max, row_sum = attend(
            q_tile, k_tile, v_tile, output, row_max, row_sum, kv_tokens - key, scale_log2, MASK=True
        )
    output = output / row_sum[:, None]

    rows = start + tl.arange(0, BLOCK_M)
    row_mask = rows < tokens
    if lse is not None:
        tl.store(row_statistics(lse, sample, head, heads, tokens) + rows, row_max + tl.log2(row_sum), mask=row_mask)
        store_tile(raw_out, output, sample, head, heads, start, tokens, HEAD_DIM, BLOCK_M, BLOCK_D)
    if residual is not None:
        residual_strides = (residual_stride_b, residual_stride_s, residual_stride_h)
        kept = load_tile(residual, residual_strides, sample, head, start, tokens, HEAD_DIM, BLOCK_M, BLOCK_D)
        kept = kept.to(tl.float32)
        columns = tl.arange(0, BLOCK_D)
        channels = head * HEAD_DIM + columns
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
    store_tile(out, output, sample, head, heads, start, tokens, HEAD_DIM, BLOCK_M, BLOCK_D)
