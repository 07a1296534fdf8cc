"""Non-causal attention whose only store may end in the skip.

    F   = softmax(scale · q kᵀ) v                 q [B, S, H, D]; k, v [B, Skv, H, D]
    out = c_skip · residual + c_out · F           residual, out [B, S, H, D]; coefficients over the H·D channels

FlashAttention-2 (Dao 2023, algorithms 1 and 2): one program owns a tile of rows of one head and streams the other side,
with an online softmax in base 2. Tiles are read from [B, S, H, D] in place: through a TMA descriptor where the GPU has
TMA and the layout allows it, else through pointers. Both give zeros past a sample's last token and past the head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from . import reference as torch_reference
from .aot import AotCase
from .coefficient import (
    ONE,
    PER_CHANNEL,
    Coefficient,
    canonical_coefficient,
    coefficient_kind,
    coefficient_strides,
    load_coefficient,
)
from .dispatch import device_properties, kernel_op, use_triton
from .tma import TMA_CAPABILITY, head_strides, heads_fit_tma

MAX_HEAD_DIM = 256
LOG2_E = math.log2(math.e)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    c_skip: Coefficient = 1.0,
    c_out: Coefficient = 1.0,
    scale: float | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """softmax(scale · q kᵀ) v, or ``c_skip * residual + c_out * (that)`` when a residual is given.

    q [B, S, H, D]; k, v [B, Skv, H, D]; residual [B, S, H, D]; all of one dtype, any strides. Coefficients: a number,
    [B], [C], [B, 1, C] or [B, S, C] with C = H·D channels. scale > 0 defaults to D**-0.5. Returns [B, S, H, D] in q's
    dtype. Differentiable in every tensor. implementation: see dispatch.use_triton; head_dims above 256 take the torch
    reference. Raises ValueError for shapes, dtypes, a scale or coefficients that do not fit.
    """
    _check(q, k, v, residual, c_skip, c_out, scale, implementation)
    batch, tokens, heads, head_dim = q.shape
    c_skip = canonical_coefficient("c_skip", c_skip, batch, tokens, heads * head_dim, q.device)
    c_out = canonical_coefficient("c_out", c_out, batch, tokens, heads * head_dim, q.device)
    scale = head_dim**-0.5 if scale is None else float(scale)
    operands = (q, k, v, residual, c_skip, c_out)
    wants_kernel = use_triton(implementation, *operands, has_gradient=True)
    if not wants_kernel or head_dim > MAX_HEAD_DIM or q.numel() == 0:
        return torch_reference.attention(*operands, scale)
    # The skip's own gradients need only the residual and c_skip; all others need the raw output and the logsumexp.
    save_for_backward = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, c_out))
    return _attention(*operands, scale, save_for_backward)[0]


def _check(q, k, v, residual, c_skip, c_out, scale, implementation):
    if q.dim() != 4:
        raise ValueError(f"q has shape {list(q.shape)}; attention takes [B, S, H, D].")
    batch, _, heads, head_dim = q.shape
    for name, x in (("k", k), ("v", v)):
        if x.dim() != 4 or (x.shape[0], *x.shape[2:]) != (batch, heads, head_dim) or x.shape[1] != k.shape[1]:
            raise ValueError(
                f"{name} has shape {list(x.shape)} beside q {list(q.shape)} and k {list(k.shape)}; k and v must be "
                f"[B, Skv, H, D] with B={batch}, H={heads}, D={head_dim}."
            )
    if k.shape[1] == 0:
        raise ValueError("k and v have no tokens (Skv = 0); a softmax over nothing is undefined, so skip the call.")
    if residual is not None and residual.shape != q.shape:
        raise ValueError(f"residual has shape {list(residual.shape)}; it must have q's, {list(q.shape)}.")
    for name, x in (("k", k), ("v", v), ("residual", residual)):
        if x is not None and x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype} but q is {q.dtype}; cast them to one dtype.")
    if residual is None and not all(_is_one(c) for c in (c_skip, c_out)):
        raise ValueError("c_skip or c_out is given without a residual; give the residual, or leave both at 1.")
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale={scale}; it must be positive and finite.")
    if implementation == "triton" and head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}; the kernel takes up to {MAX_HEAD_DIM}. Use 'auto' or 'torch'.")


def _is_one(coefficient: Coefficient | None) -> bool:
    return coefficient is None or (isinstance(coefficient, (int, float)) and coefficient == 1)


# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def _load_tile(
    x, strides, sample, head, start, tokens, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Tokens start..start+BLOCK of one sample and head, [BLOCK, BLOCK_D]; zero where there is no such token or column.

    x: a descriptor over [B, H, S, D], or a pointer that goes with the strides over (B, S, H).
    """
    if isinstance(x, tl.tensor_descriptor):
        return x.load([sample, head, start, 0]).reshape(BLOCK, BLOCK_D)
    else:
        # 64-bit up to the tile, 32-bit inside it.
        corner = x + tl.cast(sample, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[2]
        corner += tl.cast(start, tl.int64) * strides[1]
        rows = tl.arange(0, BLOCK)
        columns = tl.arange(0, BLOCK_D)
        mask = (rows < tokens - start)[:, None]
        if BLOCK_D != HEAD_DIM:
            mask = mask & (columns < HEAD_DIM)[None, :]
        return tl.load(corner + rows[:, None] * strides[1] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _store_tile(
    x, tile, sample, head, heads, start, tokens, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Store [BLOCK, BLOCK_D] as tokens start..start+BLOCK of one sample and head of a packed [B, S, H, D] tensor."""
    corner = x + ((tl.cast(sample, tl.int64) * tokens + start) * heads + head) * HEAD_DIM
    rows = tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    mask = (rows < tokens - start)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(corner + rows[:, None] * (heads * HEAD_DIM) + columns[None, :], tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _row_statistics(x, sample, head, heads, tokens):
    """Where the rows of one sample and head begin in a packed [B, H, S] tensor."""
    return x + (tl.cast(sample, tl.int64) * heads + head) * tokens


@triton.jit
def _attend(q, k, v, output, row_max, row_sum, keys, scale_log2, MASK: tl.constexpr):
    """Add one tile of keys to the online softmax; with MASK only its first ``keys`` rows are keys."""
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
    """One program: BLOCK_M queries of one head. residual may be None. raw_out (F before the skip) and lse (logsumexp in
    base 2, [B, H, S]) are None unless a backward will need them."""
    start = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    sample = tl.program_id(2)
    k_strides = (k_stride_b, k_stride_s, k_stride_h)
    v_strides = (v_stride_b, v_stride_s, v_stride_h)
    q_strides = (q_stride_b, q_stride_s, q_stride_h)
    q_tile = _load_tile(q, q_strides, sample, head, start, tokens, HEAD_DIM, BLOCK_M, BLOCK_D)
    output = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    whole = kv_tokens // BLOCK_N * BLOCK_N
    for key in tl.range(0, whole, BLOCK_N):
        k_tile = _load_tile(k, k_strides, sample, head, key, kv_tokens, HEAD_DIM, BLOCK_N, BLOCK_D)
        v_tile = _load_tile(v, v_strides, sample, head, key, kv_tokens, HEAD_DIM, BLOCK_N, BLOCK_D)
        output, row_max, row_sum = _attend(
            q_tile, k_tile, v_tile, output, row_max, row_sum, BLOCK_N, scale_log2, MASK=False
        )
    # At most once. As a loop it is pipelined like the first; behind an `if` its loads would spill registers on sm_8x.
    for key in tl.range(whole, kv_tokens, BLOCK_N):
        k_tile = _load_tile(k, k_strides, sample, head, key, kv_tokens, HEAD_DIM, BLOCK_N, BLOCK_D)
        v_tile = _load_tile(v, v_strides, sample, head, key, kv_tokens, HEAD_DIM, BLOCK_N, BLOCK_D)
        output, row_max, row_sum = _attend(
            q_tile, k_tile, v_tile, output, row_max, row_sum, kv_tokens - key, scale_log2, MASK=True
        )
    output = output / row_sum[:, None]

    rows = start + tl.arange(0, BLOCK_M)
    row_mask = rows < tokens
    if lse is not None:
        tl.store(_row_statistics(lse, sample, head, heads, tokens) + rows, row_max + tl.log2(row_sum), mask=row_mask)
        _store_tile(raw_out, output, sample, head, heads, start, tokens, HEAD_DIM, BLOCK_M, BLOCK_D)
    if residual is not None:
        residual_strides = (residual_stride_b, residual_stride_s, residual_stride_h)
        kept = _load_tile(residual, residual_strides, sample, head, start, tokens, HEAD_DIM, BLOCK_M, BLOCK_D)
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
    _store_tile(out, output, sample, head, heads, start, tokens, HEAD_DIM, BLOCK_M, BLOCK_D)


@triton.jit(do_not_specialize=["tokens"])
def _attention_delta_kernel(
    grad, raw_out, delta, tokens, heads, grad_stride_b, grad_stride_s, grad_stride_h,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta [B, H, S] = rowsum(grad ∘ F), for the backward of the softmax (FlashAttention-2, algorithm 2, line 4)."""
    start = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    sample = tl.program_id(2)
    packed = (tokens * heads * HEAD_DIM, heads * HEAD_DIM, HEAD_DIM)
    grad_strides = (grad_stride_b, grad_stride_s, grad_stride_h)
    grad_tile = _load_tile(grad, grad_strides, sample, head, start, tokens, HEAD_DIM, BLOCK_M, BLOCK_D)
    out_tile = _load_tile(raw_out, packed, sample, head, start, tokens, HEAD_DIM, BLOCK_M, BLOCK_D)
    rows = start + tl.arange(0, BLOCK_M)
    product = tl.sum(grad_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    tl.store(_row_statistics(delta, sample, head, heads, tokens) + rows, product, mask=rows < tokens)


@triton.jit(do_not_specialize=["tokens", "kv_tokens"])
def _attention_grad_kv_kernel(
    q, k, v, grad, lse, delta, grad_k, grad_v, tokens, kv_tokens, heads, scale, scale_log2,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h,
    grad_stride_b, grad_stride_s, grad_stride_h,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: the gradients of BLOCK_N keys and values of one head, over all queries. Keys are the rows here. It
    needs no mask: past the last query the probabilities are 0, and rows past the last key are not stored."""
    start = tl.program_id(0) * BLOCK_N
    head = tl.program_id(1)
    sample = tl.program_id(2)
    q_strides = (q_stride_b, q_stride_s, q_stride_h)
    k_strides = (k_stride_b, k_stride_s, k_stride_h)
    v_strides = (v_stride_b, v_stride_s, v_stride_h)
    grad_strides = (grad_stride_b, grad_stride_s, grad_stride_h)
    k_tile = _load_tile(k, k_strides, sample, head, start, kv_tokens, HEAD_DIM, BLOCK_N, BLOCK_D)
    v_tile = _load_tile(v, v_strides, sample, head, start, kv_tokens, HEAD_DIM, BLOCK_N, BLOCK_D)
    lse_rows = _row_statistics(lse, sample, head, heads, tokens)
    delta_rows = _row_statistics(delta, sample, head, heads, tokens)
    k_sum = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    v_sum = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for query in tl.range(0, tokens, BLOCK_M):
        q_tile = _load_tile(q, q_strides, sample, head, query, tokens, HEAD_DIM, BLOCK_M, BLOCK_D)
        grad_tile = _load_tile(grad, grad_strides, sample, head, query, tokens, HEAD_DIM, BLOCK_M, BLOCK_D)
        rows = query + tl.arange(0, BLOCK_M)
        # 0 would do as well, q and grad being 0 there, but then ptxas serialises the wgmmas (triton 3.7).
        row_lse = tl.load(lse_rows + rows, mask=rows < tokens, other=float("inf"))
        row_delta = tl.load(delta_rows + rows, mask=rows < tokens, other=0.0)
        scores = tl.dot(k_tile, q_tile.T, input_precision="ieee")
        p = tl.exp2(scores * scale_log2 - row_lse[None, :])
        v_sum = tl.dot(p.to(grad_tile.dtype), grad_tile, v_sum, input_precision="ieee")
        grad_p = tl.dot(v_tile, grad_tile.T, input_precision="ieee")
        grad_scores = p * (grad_p - row_delta[None, :])
        k_sum = tl.dot(grad_scores.to(q_tile.dtype), q_tile, k_sum, input_precision="ieee")
    _store_tile(grad_k, k_sum * scale, sample, head, heads, start, kv_tokens, HEAD_DIM, BLOCK_N, BLOCK_D)
    _store_tile(grad_v, v_sum, sample, head, heads, start, kv_tokens, HEAD_DIM, BLOCK_N, BLOCK_D)


@triton.jit(do_not_specialize=["tokens", "kv_tokens"])
def _attention_grad_q_kernel(
    q, k, v, grad, lse, delta, grad_q, tokens, kv_tokens, heads, scale, scale_log2,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h,
    grad_stride_b, grad_stride_s, grad_stride_h,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: the gradient of BLOCK_M queries of one head, over all keys. It needs no mask: past the last key the
    keys are 0, and so is their share once the probabilities are held to their bound, 1 (0 · inf would be NaN)."""
    start = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    sample = tl.program_id(2)
    q_strides = (q_stride_b, q_stride_s, q_stride_h)
    k_strides = (k_stride_b, k_stride_s, k_stride_h)
    v_strides = (v_stride_b, v_stride_s, v_stride_h)
    grad_strides = (grad_stride_b, grad_stride_s, grad_stride_h)
    q_tile = _load_tile(q, q_strides, sample, head, start, tokens, HEAD_DIM, BLOCK_M, BLOCK_D)
    grad_tile = _load_tile(grad, grad_strides, sample, head, start, tokens, HEAD_DIM, BLOCK_M, BLOCK_D)
    rows = start + tl.arange(0, BLOCK_M)
    row_lse = tl.load(_row_statistics(lse, sample, head, heads, tokens) + rows, mask=rows < tokens, other=0.0)
    row_delta = tl.load(_row_statistics(delta, sample, head, heads, tokens) + rows, mask=rows < tokens, other=0.0)
    q_sum = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for key in tl.range(0, kv_tokens, BLOCK_N):
        k_tile = _load_tile(k, k_strides, sample, head, key, kv_tokens, HEAD_DIM, BLOCK_N, BLOCK_D)
        v_tile = _load_tile(v, v_strides, sample, head, key, kv_tokens, HEAD_DIM, BLOCK_N, BLOCK_D)
        scores = tl.dot(q_tile, k_tile.T, input_precision="ieee")
        p = tl.exp2(tl.minimum(scores * scale_log2 - row_lse[:, None], 0.0))
        grad_p = tl.dot(grad_tile, v_tile.T, input_precision="ieee")
        grad_scores = p * (grad_p - row_delta[:, None])
        q_sum = tl.dot(grad_scores.to(k_tile.dtype), k_tile, q_sum, input_precision="ieee")
    _store_tile(grad_q, q_sum * scale, sample, head, heads, start, tokens, HEAD_DIM, BLOCK_M, BLOCK_D)


# ---------------------------------------------------------------------------------------------------------------------
# Launch
# ---------------------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """How many queries and keys one program holds at a time, and how it is launched."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


# Per kernel, the tile for head_dims up to 64, 128 and 256: the largest that keep registers from spilling and fit shared
# memory (227 KiB on sm_90 and sm_100; 99 KiB on sm_86, sm_89 and sm_120).
WARPGROUP_TILES = {  # sm_90 and sm_100, whose dots read their operands from shared memory
    "attention": (Tile(128, 128, 8, 3), Tile(128, 128, 8, 3), Tile(64, 64, 8, 2)),
    "grad_kv": (Tile(64, 128, 8, 2), Tile(64, 128, 8, 2), Tile(32, 64, 8, 2)),
    "grad_q": (Tile(128, 128, 8, 2), Tile(128, 128, 8, 2), Tile(64, 64, 8, 2)),
}
WARP_TILES = {  # sm_80, sm_86, sm_89 and sm_120, whose dots read them from registers
    "attention": (Tile(128, 64, 8, 3), Tile(128, 32, 8, 3), Tile(64, 32, 8, 2)),
    "grad_kv": (Tile(64, 32, 4, 2), Tile(64, 64, 8, 2), Tile(32, 32, 8, 2)),
    "grad_q": (Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
}
FLOAT32_TILES = {  # without tensor cores all are alike
    "attention": (Tile(64, 16, 8, 2), Tile(16, 32, 8, 2), Tile(16, 16, 8, 2)),
    "grad_kv": (Tile(16, 64, 8, 2), Tile(16, 32, 8, 2), Tile(16, 16, 8, 2)),
    "grad_q": (Tile(32, 32, 8, 2), Tile(16, 32, 8, 2), Tile(16, 16, 8, 2)),
}
DELTA_ROWS = 32


def choose_tile(kernel: str, capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> Tile:
    """The tile of kernel "attention", "grad_kv" or "grad_q" on a GPU of this compute capability."""
    width = 0 if head_dim <= 64 else 1 if head_dim <= 128 else 2
    half_tiles = WARPGROUP_TILES if capability[0] in (9, 10) else WARP_TILES
    return (FLOAT32_TILES if dtype == torch.float32 else half_tiles)[kernel][width]


def _block_d(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _has_descriptors(capability: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether tiles are best read by TMA. Below sm_90 Triton would turn a descriptor into scalar loads; fp32 has no
    tensor-core dot that takes its operand from shared memory."""
    return capability >= TMA_CAPABILITY and dtype.itemsize == 2


def _readable(x: torch.Tensor) -> torch.Tensor:
    """x [B, S, H, D] itself where the kernels can read it with wide loads, else a packed copy."""
    return x if heads_fit_tma(x) else x.contiguous()


def _operand(x: torch.Tensor, block: int, capability: tuple[int, int]) -> torch.Tensor | TensorDescriptor:
    """What the kernel gets to read tiles of x [B, S, H, D]: a TMA descriptor, or x itself."""
    if not _has_descriptors(capability, x.dtype) or not heads_fit_tma(x):
        return x
    batch, tokens, heads, head_dim = x.shape
    stride_b, stride_s, stride_h = head_strides(x)
    # Triton folds the tile's unit dimensions away only where they come first.
    shape, strides = [batch, heads, tokens, head_dim], [stride_b, stride_h, stride_s, 1]
    return TensorDescriptor(x, shape, strides, [1, 1, block, _block_d(head_dim)])


@kernel_op("attention")
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    residual: torch.Tensor | None,
    c_skip: torch.Tensor | None,
    c_out: torch.Tensor | None,
    scale: float,
    save_for_backward: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, F [B, S, H, D] and the logsumexp in base 2, fp32 [B, H, S]; F and it are empty unless save_for_backward."""
    out, raw_out, lse = _allocate(q, k, v, residual, c_skip, c_out, scale, save_for_backward)
    q, k, v = _readable(q), _readable(k), _readable(v)
    residual = None if residual is None else _readable(residual)
    batch, tokens, heads, head_dim = q.shape
    capability = device_properties(q.device)[0]
    tile = choose_tile("attention", capability, q.dtype, head_dim)
    with torch.cuda.device_of(q):
        _attention_kernel[triton.cdiv(tokens, tile.BLOCK_M), heads, batch](
            _operand(q, tile.BLOCK_M, capability),
            _operand(k, tile.BLOCK_N, capability),
            _operand(v, tile.BLOCK_N, capability),
            residual,
            c_skip,
            c_out,
            out,
            raw_out if save_for_backward else None,
            lse if save_for_backward else None,
            tokens,
            k.shape[1],
            heads,
            scale * LOG2_E,
            *head_strides(q),
            *head_strides(k),
            *head_strides(v),
            *head_strides(residual),
            *coefficient_strides(c_skip),
            *coefficient_strides(c_out),
            SKIP_KIND=coefficient_kind(c_skip),
            OUT_KIND=coefficient_kind(c_out),
            HEAD_DIM=head_dim,
            BLOCK_D=_block_d(head_dim),
            **tile._asdict(),
        )
    return out, raw_out, lse


@_attention.register_fake
def _allocate(q, k, v, residual, c_skip, c_out, scale, save_for_backward):
    batch, tokens, heads, _ = q.shape
    out = q.new_empty(q.shape)
    if not save_for_backward:
        return out, q.new_empty(0), q.new_empty(0, dtype=torch.float32)
    return out, q.new_empty(q.shape), q.new_empty((batch, heads, tokens), dtype=torch.float32)


@kernel_op("attention_backward")
def _attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    needs_q: bool,
    needs_kv: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v for the gradient of F, [B, S, H, D]; the ones not needed are empty."""
    grad_q, grad_k, grad_v = _allocate_gradients(grad, q, k, v, raw_out, lse, scale, needs_q, needs_kv)
    grad, q, k, v = _readable(grad), _readable(q), _readable(k), _readable(v)
    batch, tokens, heads, head_dim = q.shape
    kv_tokens = k.shape[1]
    block_d = _block_d(head_dim)
    capability = device_properties(q.device)[0]
    delta = torch.empty_like(lse)
    strides = (*head_strides(q), *head_strides(k), *head_strides(v), *head_strides(grad))

    def launch(kernel, tile, grid, outputs):
        kernel[grid](
            _operand(q, tile.BLOCK_M, capability),
            _operand(k, tile.BLOCK_N, capability),
            _operand(v, tile.BLOCK_N, capability),
            _operand(grad, tile.BLOCK_M, capability),
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
            BLOCK_D=block_d,
            **tile._asdict(),
        )

    with torch.cuda.device_of(q):
        _attention_delta_kernel[triton.cdiv(tokens, DELTA_ROWS), heads, batch](
            grad,
            raw_out,
            delta,
            tokens,
            heads,
            *head_strides(grad),
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            BLOCK_M=DELTA_ROWS,
        )
        if needs_kv:
            tile = choose_tile("grad_kv", capability, q.dtype, head_dim)
            grid = (triton.cdiv(kv_tokens, tile.BLOCK_N), heads, batch)
            launch(_attention_grad_kv_kernel, tile, grid, (grad_k, grad_v))
        if needs_q:
            tile = choose_tile("grad_q", capability, q.dtype, head_dim)
            grid = (triton.cdiv(tokens, tile.BLOCK_M), heads, batch)
            launch(_attention_grad_q_kernel, tile, grid, (grad_q,))
    return grad_q, grad_k, grad_v


@_attention_backward.register_fake
def _allocate_gradients(grad, q, k, v, raw_out, lse, scale, needs_q, needs_kv):
    return (
        q.new_empty(q.shape if needs_q else 0),
        k.new_empty(k.shape if needs_kv else 0),
        v.new_empty(v.shape if needs_kv else 0),
    )


def _save(ctx, inputs, output):
    q, k, v, residual, c_skip, c_out, ctx.scale, _ = inputs
    _, raw_out, lse = output
    ctx.mark_non_differentiable(raw_out, lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, residual, c_skip, c_out, raw_out, lse)


def _backward(ctx, grad, _grad_raw_out, _grad_lse):
    q, k, v, residual, c_skip, c_out, raw_out, lse = ctx.saved_tensors
    needs_q, needs_k, needs_v, needs_residual, needs_c_skip, needs_c_out, _, _ = ctx.needs_input_grad
    grad_q = grad_k = grad_v = None
    if needs_q or needs_k or needs_v:
        grad_raw_out = _scaled(grad, c_out)
        grad_q, grad_k, grad_v = _attention_backward(
            grad_raw_out, q, k, v, raw_out, lse, ctx.scale, needs_q, needs_k or needs_v
        )
    return (
        grad_q if needs_q else None,
        grad_k if needs_k else None,
        grad_v if needs_v else None,
        _scaled(grad, c_skip) if needs_residual else None,
        _coefficient_gradient(grad, residual, c_skip) if needs_c_skip else None,
        _coefficient_gradient(grad, raw_out, c_out) if needs_c_out else None,
        None,
        None,
    )


def _scaled(grad: torch.Tensor, coefficient: torch.Tensor | None) -> torch.Tensor:
    """coefficient * grad [B, S, H, D], in fp32, rounded once."""
    if coefficient is None:
        return grad
    return (grad.flatten(2).float() * coefficient.float()).to(grad.dtype).view(grad.shape)


def _coefficient_gradient(grad: torch.Tensor, factor: torch.Tensor, coefficient: torch.Tensor) -> torch.Tensor:
    """Gradient of a coefficient that multiplied ``factor`` [B, S, H, D], in the coefficient's own shape."""
    product = grad.flatten(2).float() * factor.flatten(2).float()
    return product.sum_to_size(coefficient.shape).to(coefficient.dtype)


_attention.register_autograd(_backward, setup_context=_save)


# ---------------------------------------------------------------------------------------------------------------------
# Ahead-of-time compilation
# ---------------------------------------------------------------------------------------------------------------------

TRITON_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def aot_cases(capability: tuple[int, int]) -> Iterator[AotCase]:
    """Every kernel as it would be launched on this capability: bf16 at head_dim 64 and 128, fp32 at 64."""
    plain = dict.fromkeys(("residual", "c_skip", "c_out", "raw_out", "lse")) | {"SKIP_KIND": ONE, "OUT_KIND": ONE}
    skip = {"SKIP_KIND": PER_CHANNEL, "OUT_KIND": PER_CHANNEL, "c_skip_stride_c": 1, "c_out_stride_c": 1}
    for dtype, head_dim in ((torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float32, 64)):
        for name, kernel, tile, constants in (
            ("attention", _attention_kernel, choose_tile("attention", capability, dtype, head_dim), plain),
            ("attention_skip", _attention_kernel, choose_tile("attention", capability, dtype, head_dim), skip),
            ("attention_delta", _attention_delta_kernel, Tile(DELTA_ROWS, 0, 4, 3), {}),
            ("attention_grad_kv", _attention_grad_kv_kernel, choose_tile("grad_kv", capability, dtype, head_dim), {}),
            ("attention_grad_q", _attention_grad_q_kernel, choose_tile("grad_q", capability, dtype, head_dim), {}),
        ):
            yield _aot_case(name, kernel, capability, dtype, head_dim, tile, constants)


def _aot_case(name, kernel, capability, dtype, head_dim, tile, constants) -> AotCase:
    block_d = _block_d(head_dim)
    constants = constants | {"HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_M": tile.BLOCK_M, "BLOCK_N": tile.BLOCK_N}
    constants = {argument: value for argument, value in constants.items() if argument in kernel.arg_names}
    element = TRITON_NAMES[dtype]
    types = dict.fromkeys(("c_skip", "c_out", "lse", "delta"), "*fp32")
    types |= dict.fromkeys(("scale", "scale_log2"), "fp32")
    types |= dict.fromkeys(("residual", "out", "raw_out", "grad_q", "grad_k", "grad_v"), f"*{element}")
    for operand, rows in (("q", tile.BLOCK_M), ("k", tile.BLOCK_N), ("v", tile.BLOCK_N), ("grad", tile.BLOCK_M)):
        described = _has_descriptors(capability, dtype) and kernel is not _attention_delta_kernel
        types[operand] = f"tensordesc<{element}[1, 1, {rows}, {block_d}]>" if described else f"*{element}"
    types |= dict.fromkeys(constants, "constexpr")
    signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names}
    aligned = [argument for argument, kind in signature.items() if kind.startswith("*")]
    aligned += [argument for argument, kind in signature.items() if kind == "i32" and "_stride_" in argument]
    return AotCase(
        name=f"{name}_{element}_d{head_dim}",
        kernel=kernel,
        signature=signature,
        constexprs=constants,
        divisible_by_16=tuple(aligned),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
