"""The backward of attention (FlashAttention-2, Dao 2023, algorithm 2), portable: sm_80 to sm_120.

The first of three kernels computes delta = rowsum(grad ∘ F). The second computes the gradients of K and V, one program
per tile of keys. The third computes the gradient of Q, one program per tile of queries. The probabilities are computed
again from the logsumexp that the forward saved.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import device_properties
from ..launch import launch_kernel
from ..sizes import cdiv
from ..tma import head_strides
from .attention_tiles import LOG2_E, block_d, choose_tile, load_tile, readable, row_statistics, store_tile, tile_operand

DELTA_ROWS = 32


def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    grad_q: torch.Tensor | None,
    grad_kv: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Write the gradients of q, k and v for grad, the gradient of F, [B, S, H, D].

    raw_out: F, packed. lse: the logsumexp of the scores in base 2, packed fp32 [B, H, S]. grad_q, grad_kv: packed
    outputs, or None if not needed.
    """
    grad, q, k, v = readable(grad), readable(q), readable(k), readable(v)
    batch, tokens, heads, head_dim = q.shape
    kv_tokens = k.shape[1]
    capability = device_properties(q.device)[0]
    delta = torch.empty_like(lse)
    strides = (*head_strides(q), *head_strides(k), *head_strides(v), *head_strides(grad))

    def launch(kernel, tile, grid, outputs):
        launch_kernel(
            kernel,
            grid,
            tile_operand(q, tile.BLOCK_M, capability),
            tile_operand(k, tile.BLOCK_N, capability),
            tile_operand(v, tile.BLOCK_N, capability),
            tile_operand(grad, tile.BLOCK_M, capability),
            lse,
            delta,
            *outputs,
            tokens,
            kv_tokens,
            heads,
            scale,
            scale * LOG2_E,
            *strides,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d(head_dim),
            **tile._asdict(),
        )

    launch_kernel(
        _attention_delta_kernel,
        (cdiv(tokens, DELTA_ROWS), heads, batch),
        grad,
        raw_out,
        delta,
        tokens,
        heads,
        *head_strides(grad),
        HEAD_DIM=head_dim,
        BLOCK_D=block_d(head_dim),
        BLOCK_M=DELTA_ROWS,
    )
    if grad_kv is not None:
        tile = choose_tile("grad_kv", capability, q.dtype, head_dim)
        grid = (cdiv(kv_tokens, tile.BLOCK_N), heads, batch)
        launch(_attention_grad_kv_kernel, tile, grid, grad_kv)
    if grad_q is not None:
        tile = choose_tile("grad_q", capability, q.dtype, head_dim)
        grid = (cdiv(tokens, tile.BLOCK_M), heads, batch)
        launch(_attention_grad_q_kernel, tile, grid, (grad_q,))


@triton.jit(do_not_specialize=["tokens"])
def _attention_delta_kernel(
    grad, raw_out, delta, tokens, heads, grad_stride_b, grad_stride_s, grad_stride_h,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write delta [B, H, S] = rowsum(grad ∘ F), for the backward of the softmax (FlashAttention-2, algorithm 2, line
    4)."""
    start = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    sample = tl.program_id(2)
    packed = (tokens * heads * HEAD_DIM, heads * HEAD_DIM, HEAD_DIM)
    grad_strides = (grad_stride_b, grad_stride_s, grad_stride_h)
    grad_tile = load_tile(grad, grad_strides, sample, head, start, tokens, HEAD_DIM, BLOCK_M, BLOCK_D)
    out_tile = load_tile(raw_out, packed, sample, head, start, tokens, HEAD_DIM, BLOCK_M, BLOCK_D)
    rows = start + tl.arange(0, BLOCK_M)
    product = tl.sum(grad_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    tl.store(row_statistics(delta, sample, head, heads, tokens) + rows, product, mask=rows < tokens)


@triton.jit(do_not_specialize=["tokens", "kv_tokens"])
def _attention_grad_kv_kernel(
    q, k, v, grad, lse, delta, grad_k, grad_v, tokens, kv_tokens, heads, scale, scale_log2,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h,
    grad_stride_b, grad_stride_s, grad_stride_h,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program computes the gradients of BLOCK_N keys and values of one head, over all queries. The rows are keys.

    No mask is needed: past the last query the probabilities are 0, and rows past the last key are not stored.
    """
    start = tl.program_id(0) * BLOCK_N
    head = tl.program_id(1)
    sample = tl.program_id(2)
    q_strides = (q_stride_b, q_stride_s, q_stride_h)
    k_strides = (k_stride_b, k_stride_s, k_stride_h)
    v_strides = (v_stride_b, v_stride_s, v_stride_h)
    grad_strides = (grad_stride_b, grad_stride_s, grad_stride_h)
    k_tile = load_tile(k, k_strides, sample, head, start, kv_tokens, HEAD_DIM, BLOCK_N, BLOCK_D)
    v_tile = load_tile(v, v_strides, sample, head, start, kv_tokens, HEAD_DIM, BLOCK_N, BLOCK_D)
    lse_rows = row_statistics(lse, sample, head, heads, tokens)
    delta_rows = row_statistics(delta, sample, head, heads, tokens)
    k_sum = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    v_sum = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for query in tl.range(0, tokens, BLOCK_M):
        q_tile = load_tile(q, q_strides, sample, head, query, tokens, HEAD_DIM, BLOCK_M, BLOCK_D)
        grad_tile = load_tile(grad, grad_strides, sample, head, query, tokens, HEAD_DIM, BLOCK_M, BLOCK_D)
        rows = query + tl.arange(0, BLOCK_M)
        # 0 would be right too, because q and grad are 0 there, but then ptxas serialises the wgmmas (Triton 3.7).
        row_lse = tl.load(lse_rows + rows, mask=rows < tokens, other=float("inf"))
        row_delta = tl.load(delta_rows + rows, mask=rows < tokens, other=0.0)
        scores = tl.dot(k_tile, q_tile.T, input_precision="ieee")
        p = tl.exp2(scores * scale_log2 - row_lse[None, :])
        v_sum = tl.dot(p.to(grad_tile.dtype), grad_tile, v_sum, input_precision="ieee")
        grad_p = tl.dot(v_tile, grad_tile.T, input_precision="ieee")
        grad_scores = p * (grad_p - row_delta[None, :])
        k_sum = tl.dot(grad_scores.to(q_tile.dtype), q_tile, k_sum, input_precision="ieee")
    store_tile(grad_k, k_sum * scale, sample, head, heads, start, kv_tokens, HEAD_DIM, BLOCK_N, BLOCK_D)
    store_tile(grad_v, v_sum, sample, head, heads, start, kv_tokens, HEAD_DIM, BLOCK_N, BLOCK_D)


@triton.jit(do_not_specialize=["tokens", "kv_tokens"])
def _attention_grad_q_kernel(
    q, k, v, grad, lse, delta, grad_q, tokens, kv_tokens, heads, scale, scale_log2,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h,
    grad_stride_b, grad_stride_s, grad_stride_h,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program computes the gradient of BLOCK_M queries of one head, over all keys.

    No mask is needed: past the last key the keys are 0, and so is their contribution. The probabilities are clamped to
    their bound, 1, because 0 · inf would be NaN.
    """
    start = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    sample = tl.program_id(2)
    q_strides = (q_stride_b, q_stride_s, q_stride_h)
    k_strides = (k_stride_b, k_stride_s, k_stride_h)
    v_strides = (v_stride_b, v_stride_s, v_stride_h)
    grad_strides = (grad_stride_b, grad_stride_s, grad_stride_h)
    q_tile = load_tile(q, q_strides, sample, head, start, tokens, HEAD_DIM, BLOCK_M, BLOCK_D)
    grad_tile = load_tile(grad, grad_strides, sample, head, start, tokens, HEAD_DIM, BLOCK_M, BLOCK_D)
    rows = start + tl.arange(0, BLOCK_M)
    row_lse = tl.load(row_statistics(lse, sample, head, heads, tokens) + rows, mask=rows < tokens, other=0.0)
    row_delta = tl.load(row_statistics(delta, sample, head, heads, tokens) + rows, mask=rows < tokens, other=0.0)
    q_sum = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for key in tl.range(0, kv_tokens, BLOCK_N):
        k_tile = load_tile(k, k_strides, sample, head, key, kv_tokens, HEAD_DIM, BLOCK_N, BLOCK_D)
        v_tile = load_tile(v, v_strides, sample, head, key, kv_tokens, HEAD_DIM, BLOCK_N, BLOCK_D)
        scores = tl.dot(q_tile, k_tile.T, input_precision="ieee")
        p = tl.exp2(tl.minimum(scores * scale_log2 - row_lse[:, None], 0.0))
        grad_p = tl.dot(grad_tile, v_tile.T, input_precision="ieee")
        grad_scores = p * (grad_p - row_delta[:, None])
        q_sum = tl.dot(grad_scores.to(k_tile.dtype), k_tile, q_sum, input_precision="ieee")
    store_tile(grad_q, q_sum * scale, sample, head, heads, start, tokens, HEAD_DIM, BLOCK_M, BLOCK_D)
