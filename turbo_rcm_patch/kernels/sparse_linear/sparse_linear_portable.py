"""The portable attention to kept blocks, for sparse-linear and block-sparse attention, on sm_80 to sm_120.

It works like attention_portable.py, over the keys of the kept blocks only. While the result is still in registers, one
of two terms is added: the linear branch, by one product with the pre-pass's state (sparse_linear_prepass.py), or the
estimated share and value of the blocks that were left out (block_sparse_reference.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..attention.attention_portable import attend
from ..attention.attention_tiles import (
    LOG2_E,
    Tile,
    choose_tile,
    has_descriptors,
    load_tile,
    readable,
    store_tile,
    tile_operand,
)
from ..dispatch import device_properties
from ..launch import launch_kernel, register_options
from ..sizes import cdiv
from ..tma import head_strides
from .sparse_linear_reference import EPSILON

LOG2E = tl.constexpr(LOG2_E)
EPS = tl.constexpr(EPSILON)
MOST_KEYS = 64  # at a time: 128 would spill registers on sm_100, and leave room for few programs on sm_90
FP32_COLUMNS = tl.constexpr(16)


class Blocks(NamedTuple):
    """The key blocks that each block of queries keeps.

    block_map: [B, H, QB, width] int32, ascending. block_q, block_k: tokens of a block.
    Block-sparse attention also has counts [B, H, QB] int32, the number of valid entries of each list, and kept_share
    [B, H, QB] and left_value [B, H, QB, D], fp32: the softmax's result is multiplied by kept_share, and left_value is
    added.
    """

    block_map: torch.Tensor
    block_q: int
    block_k: int
    counts: torch.Tensor | None = None
    kept_share: torch.Tensor | None = None
    left_value: torch.Tensor | None = None


class LinearBranch(NamedTuple):
    """key_weight and state from summarize_keys, and proj_l's bias [D] of any stride or None."""

    key_weight: torch.Tensor
    state: torch.Tensor
    bias: torch.Tensor | None


def sparse_attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Blocks, branch: LinearBranch | None, out: torch.Tensor
) -> None:
    """Write softmax attention of q, k, v to the kept blocks, plus the branch or the left-out blocks' term, to out.

    q, k, v: [B, S, H, D] with any strides. out: packed.
    """
    q, k, v = readable(q), readable(k), readable(v)
    batch, tokens, heads, head_dim = q.shape
    capability = device_properties(q.device)[0]
    tile = choose_tile("attention", capability, q.dtype, head_dim)
    tile = fit_tile(tile, blocks.block_q, min(blocks.block_k, MOST_KEYS), capability)
    launch_kernel(
        _sparse_attention_kernel,
        (cdiv(tokens, tile.BLOCK_M), heads, batch),
        tile_operand(q, tile.BLOCK_M, capability),
        tile_operand(k, tile.BLOCK_N, capability),
        tile_operand(v, tile.BLOCK_N, capability),
        *block_operands(blocks),
        *branch_operands(branch, capability),
        out,
        tokens,
        heads,
        blocks.block_map.shape[3],
        head_dim**-0.5 * LOG2_E,
        *head_strides(q),
        *head_strides(k),
        *head_strides(v),
        HEAD_DIM=head_dim,
        QUERIES=blocks.block_q,
        KEYS=blocks.block_k,
        **tile._asdict(),
        **register_options(capability),
    )


def block_operands(blocks: Blocks) -> tuple[torch.Tensor | None, ...]:
    """Return block_map, counts, kept_share and left_value as kernels take them."""
    return blocks.block_map.contiguous(), blocks.counts, blocks.kept_share, blocks.left_value


def branch_operands(branch: LinearBranch | None, capability: tuple[int, int]) -> tuple[object, ...]:
    """Return key_weight, state and bias as kernels take them."""
    if branch is None:
        return None, None, None
    bias = None if branch.bias is None else branch.bias.contiguous()
    return branch.key_weight, state_operand(branch.state, capability), bias


def fit_tile(tile: Tile, block_q: int, block_k: int, capability: tuple[int, int]) -> Tile:
    """Return the tile, reduced to the size of the blocks if it is larger.

    On sm_90 and sm_100 a tile with fewer queries gets fewer warps, so that a warp keeps its number of queries. On GPUs
    whose warps multiply alone the number of warps stays; otherwise registers spill.
    """
    rows, columns = min(tile.BLOCK_M, block_q), min(tile.BLOCK_N, block_k)
    shrinks = capability[0] in (9, 10)
    num_warps = tile.num_warps * rows // tile.BLOCK_M if shrinks else tile.num_warps
    return type(tile)(rows, columns, num_warps, tile.num_stages)


def state_operand(state: torch.Tensor, capability: tuple[int, int]) -> torch.Tensor | TensorDescriptor:
    """Return the operand from which a kernel reads one head's state [D, D] of [B, H, D, D]: a TMA descriptor or
    state."""
    if not has_descriptors(capability, state.dtype):
        return state
    return TensorDescriptor(state, list(state.shape), list(state.stride()), [1, 1, *state.shape[2:]])


@triton.jit
def list_of(sample, head, heads, query, tokens, QUERIES: tl.constexpr):
    """Return the index of the list of key blocks that a query's block reads."""
    return (tl.cast(sample, tl.int64) * heads + head) * tl.cdiv(tokens, QUERIES) + query // QUERIES


@triton.jit
def kept_keys(block_map, counts, row, width, tokens, KEYS: tl.constexpr):
    """Return four values of list `row`: a pointer to it, its number of key blocks, its number of whole key blocks, and
    the first key of the block that is cut, or `tokens` if none is. counts is None if every list is full."""
    kept_blocks = block_map + row * width
    kept = width
    if counts is not None:
        kept = tl.load(counts + row)
    last = tl.load(kept_blocks + kept - 1) * KEYS
    cut = last + KEYS > tokens
    return kept_blocks, kept, kept - cut.to(tl.int32), tl.where(cut, last, tokens)


@triton.jit
def key_of(kept_blocks, i, kept, KEYS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the first key of the i-th tile of BLOCK_N keys of the kept blocks. Past the last tile, return a key in the
    last block."""
    PARTS: tl.constexpr = KEYS // BLOCK_N
    return tl.load(kept_blocks + tl.minimum(i // PARTS, kept - 1)) * KEYS + i % PARTS * BLOCK_N


@triton.jit
def add_left_out(output, kept_share, left_value, row, HEAD_DIM: tl.constexpr):
    """Return kept_share · output [M, D] + left_value of list `row`."""
    values = tl.load(left_value + row * HEAD_DIM + tl.arange(0, HEAD_DIM))
    return output * tl.load(kept_share + row) + values[None, :]


@triton.jit
def add_linear_branch(
    output, q, q_strides, key_weight, state, bias, sample, head, heads, start, tokens, HEAD_DIM: tl.constexpr
):
    """Return output [M, D] + o_l Wᵀ + b for the queries from start on."""
    BLOCK_M: tl.constexpr = output.shape[0]
    columns = tl.arange(0, HEAD_DIM)
    of_head = tl.cast(sample, tl.int64) * heads + head
    key_weight += of_head * HEAD_DIM
    wide = load_tile(q, q_strides, sample, head, start, tokens, HEAD_DIM, BLOCK_M, HEAD_DIM).to(tl.float32)
    largest = tl.max(wide, 1)
    phi = tl.exp2((wide - largest[:, None]) * LOG2E)
    weights = phi * tl.load(key_weight + columns)[None, :]
    inverse = 1.0 / (tl.sum(phi, 1) * EPS + tl.sum(weights, 1))
    if bias is not None:
        output += tl.load(bias + columns).to(tl.float32)[None, :]
    if isinstance(state, tl.tensor_descriptor):
        projected = state.load([sample, head, 0, 0]).reshape(HEAD_DIM, HEAD_DIM)
        output = tl.dot((weights * inverse[:, None]).to(projected.dtype), projected, output)
    else:
        state += of_head * (HEAD_DIM * HEAD_DIM)
        if state.dtype.element_ty != tl.float32:
            projected = tl.load(state + columns[:, None] * HEAD_DIM + columns[None, :])
            output = tl.dot((weights * inverse[:, None]).to(projected.dtype), projected, output)
        else:
            # Without tensor cores, a product of whole tiles would need more registers than there are.
            for first in tl.range(0, HEAD_DIM, FP32_COLUMNS, num_stages=1):
                some = first + tl.arange(0, FP32_COLUMNS)
                part = load_tile(q + first, q_strides, sample, head, start, tokens, FP32_COLUMNS, BLOCK_M, FP32_COLUMNS)
                part = tl.exp2((part.to(tl.float32) - largest[:, None]) * LOG2E) * inverse[:, None]
                part *= tl.load(key_weight + some)[None, :]
                rows_of_state = tl.load(state + some[:, None] * HEAD_DIM + columns[None, :])
                output = tl.dot(part, rows_of_state, output, input_precision="ieee")
    return output


@triton.jit(do_not_specialize=["tokens", "heads", "width"])
def _sparse_attention_kernel(
    q, k, v, block_map, counts, kept_share, left_value, key_weight, state, bias, out, tokens, heads, width, scale_log2,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h,
    HEAD_DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_M queries of one head, all of one block of queries. counts, kept_share and left_value
    may be None, and so may key_weight, state and bias."""
    start = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    sample = tl.program_id(2)
    k_strides = (k_stride_b, k_stride_s, k_stride_h)
    v_strides = (v_stride_b, v_stride_s, v_stride_h)
    q_strides = (q_stride_b, q_stride_s, q_stride_h)
    row = list_of(sample, head, heads, start, tokens, QUERIES)
    kept_blocks, kept, whole, cut = kept_keys(block_map, counts, row, width, tokens, KEYS)
    q_tile = load_tile(q, q_strides, sample, head, start, tokens, HEAD_DIM, BLOCK_M, HEAD_DIM)
    output = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    key = key_of(kept_blocks, 0, kept, KEYS, BLOCK_N)
    for i in tl.range(0, whole * (KEYS // BLOCK_N)):
        k_tile = load_tile(k, k_strides, sample, head, key, tokens, HEAD_DIM, BLOCK_N, HEAD_DIM)
        v_tile = load_tile(v, v_strides, sample, head, key, tokens, HEAD_DIM, BLOCK_N, HEAD_DIM)
        output, row_max, row_sum = attend(
            q_tile, k_tile, v_tile, output, row_max, row_sum, BLOCK_N, scale_log2, MASK=False
        )
        key = key_of(kept_blocks, i + 1, kept, KEYS, BLOCK_N)  # early, so that the next tiles can be loaded ahead
    for key in tl.range(cut, tokens, BLOCK_N):
        k_tile = load_tile(k, k_strides, sample, head, key, tokens, HEAD_DIM, BLOCK_N, HEAD_DIM)
        v_tile = load_tile(v, v_strides, sample, head, key, tokens, HEAD_DIM, BLOCK_N, HEAD_DIM)
        output, row_max, row_sum = attend(
            q_tile, k_tile, v_tile, output, row_max, row_sum, tokens - key, scale_log2, MASK=True
        )
    output = output / row_sum[:, None]
    if kept_share is not None:
        output = add_left_out(output, kept_share, left_value, row, HEAD_DIM)
    if state is not None:
        output = add_linear_branch(
            output, q, q_strides, key_weight, state, bias, sample, head, heads, start, tokens, HEAD_DIM
        )
    store_tile(out, output, sample, head, heads, start, tokens, HEAD_DIM, BLOCK_M, HEAD_DIM)
