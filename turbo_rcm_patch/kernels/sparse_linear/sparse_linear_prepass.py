"""The pre-pass of sparse-linear attention: summaries of all tokens in one read of q, k and v, for sm_80 to sm_120.

    pooled_q, pooled_k = means of the blocks of q, and of k minus its mean over the tokens    [B, H, blocks, D]
    key_weight = Σ φ(k)                                                                       [B, H, D] fp32
    state      = (Σ φ(k)ᵀ v) / key_weight · Wᵀ                                                [B, H, D, D]

For 8-bit attention the same reads also give q in 8 bits and the scale of v. Then k and v are read once more, but not q.

Without a linear branch there is no key_weight and no state. Then v is read for its scale alone.

Each program summarises some blocks of keys of a head. A second kernel adds up the summaries, divides and projects them.
Each row of the state is divided by its weight and holds weighted means of v, which fit fp16 for any number of tokens.
Then o_l is a mean over d with the weights φ(q)_d key_weight_d. proj_l is folded into the state and costs nothing per
query.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..attention.attention_tiles import LOG2_E, load_tile, readable, store_tile, tile_operand
from ..attention_8bit.attention_8bit_reference import SCALE_FLOOR
from ..attention_8bit.quantize_qkv import int8_step, to_int8
from ..dispatch import device_properties
from ..launch import launch_kernel, register_options
from ..sizes import cdiv
from ..tma import head_strides

PROGRAMS = 1  # per multiprocessor that summarise keys; the registers have no room for more
WARPS = 8  # per program
WARP_ELEMENTS = 256  # 16-bit elements that a warp reads at once; it then sums only its own rows
WARP_TOKENS, FP32_TOKENS = 64, 16  # at a time, if both operands of a product, or all of it, are in registers
FOLDED_ROWS, FOLDED_COLUMNS = 16, 32
SUMMARIES = 8  # read at once, to wait for memory only once
TINY = tl.constexpr(1e-30)
PHI_SCALE = tl.constexpr(2.0**15)  # factor of φ in sums, so that small values keep their digits in fp16
LOG2E = tl.constexpr(LOG2_E)


def pool_queries(
    q: torch.Tensor,
    block: int,
    pooled: torch.Tensor,
    values: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> None:
    """Write the mean of each block of tokens of q [B, S, H, D], with any strides, to pooled [B, H, blocks, D].

    values, scale: outputs for q and q_scale of a QuantizedQKV, or None. All outputs are packed.
    """
    q = readable(q)
    batch, tokens, heads, head_dim = q.shape
    launch_kernel(
        _pool_queries_kernel,
        (heads, pooled.shape[2], batch),  # heads that run together write to the same sectors of scale
        q,
        pooled,
        values,
        scale,
        tokens,
        heads,
        head_dim**-0.5 * LOG2_E,
        *head_strides(q),
        HEAD_DIM=head_dim,
        BLOCK=block,
        FLOOR=SCALE_FLOOR,
        num_warps=4,
    )


def summarize_keys(
    k: torch.Tensor,
    v: torch.Tensor,
    proj_weight: torch.Tensor | None,
    block: int,
    pooled: torch.Tensor,
    key_weight: torch.Tensor,
    state: torch.Tensor,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write pooled_k, key_weight and state for k, v [B, S, H, D] with any strides and proj_l's W, or only pooled_k
    without proj_l.

    v_scale: the output for a QuantizedQKV's v_scale, or None. All outputs are packed. Returns k's mean over the tokens,
    fp32 [B, H, 1, D].
    """
    k, v = readable(k), readable(v)
    batch, tokens, heads, head_dim = k.shape
    capability, multiprocessors = device_properties(k.device)
    blocks = pooled.shape[2]
    per_program = cdiv(blocks, max(1, PROGRAMS * multiprocessors // (batch * heads)))
    programs = cdiv(blocks, per_program)
    means = k.new_empty(pooled.shape, dtype=torch.float32)
    linear = proj_weight is not None
    states = k.new_empty((batch, heads, programs, head_dim, head_dim), dtype=torch.float32) if linear else None
    k_sums = k.new_empty((batch, heads, programs, head_dim), dtype=torch.float32)
    phi_sums = torch.empty_like(k_sums) if linear else None
    v_maxima = None if v_scale is None else torch.empty_like(k_sums)
    k_mean = k.new_empty((batch, heads, 1, head_dim), dtype=torch.float32)
    wgmma = capability[0] == 9 and k.dtype != torch.float32
    at_a_time = block if wgmma else FP32_TOKENS if k.dtype == torch.float32 else min(block, WARP_TOKENS)
    launch_kernel(
        _summarize_keys_kernel,
        (programs, heads, batch),
        tile_operand(k, at_a_time, capability),
        tile_operand(v, at_a_time, capability),
        means,
        states,
        phi_sums,
        k_sums,
        v_maxima,
        tokens,
        heads,
        per_program,
        *head_strides(k),
        *head_strides(v),
        HEAD_DIM=head_dim,
        BLOCK=block,
        AT_A_TIME=at_a_time,
        LANES=WARPS * WARP_ELEMENTS // head_dim if wgmma else 1,
        TRANSPOSED=wgmma,  # otherwise the compiler holds φ(k)ᵀ in registers, and its wgmmas wait for one another
        num_warps=WARPS,
        num_stages=3,
        **register_options(capability),
    )
    launch_kernel(
        _fold_projection_kernel,
        (head_dim // FOLDED_ROWS, heads, batch),
        k_sums,
        states,
        phi_sums,
        v_maxima,
        proj_weight,
        state if linear else None,
        key_weight if linear else None,
        k_mean,
        v_scale,
        tokens,
        heads,
        programs,
        *(proj_weight.stride() if linear else (0, 0)),
        HEAD_DIM=head_dim,
        ROWS=FOLDED_ROWS,
        COLUMNS=FOLDED_COLUMNS,
        SUMMARIES=SUMMARIES,
        FLOOR=SCALE_FLOOR,
        num_warps=8,
    )
    torch.sub(means, k_mean, out=pooled)
    return k_mean


@triton.jit(do_not_specialize=["tokens", "heads"])
def _pool_queries_kernel(
    q, pooled, values, scale, tokens, heads, scale_log2, q_stride_b, q_stride_s, q_stride_h,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """One program pools one block of one head. values and scale, the outputs for 8-bit q, may be None."""
    head = tl.program_id(0)
    block = tl.program_id(1)
    sample = tl.program_id(2)
    start = block * BLOCK
    strides = (q_stride_b, q_stride_s, q_stride_h)
    tile = load_tile(q, strides, sample, head, start, tokens, HEAD_DIM, BLOCK, HEAD_DIM).to(tl.float32)
    mean = tl.sum(tile, 0) / tl.minimum(tokens - start, BLOCK)
    row = (sample.to(tl.int64) * heads + head) * tl.num_programs(1) + block
    tl.store(pooled + row * HEAD_DIM + tl.arange(0, HEAD_DIM), mean.to(pooled.dtype.element_ty))
    if values is not None:
        step = int8_step(tile, 1, FLOOR)
        rounded = to_int8(tile * (1.0 / step)[:, None])
        store_tile(values, rounded, sample, head, heads, start, tokens, HEAD_DIM, BLOCK, HEAD_DIM)
        rows = start + tl.arange(0, BLOCK)
        row_scale = scale + (sample.to(tl.int64) * tokens + rows) * heads + head
        scaled = tl.maximum(step * scale_log2, FLOOR, propagate_nan=tl.PropagateNan.ALL)
        tl.store(row_scale, scaled, mask=rows < tokens)


@triton.jit(do_not_specialize=["tokens", "heads", "per_program"])
def _summarize_keys_kernel(
    k, v, means, states, phi_sums, k_sums, v_maxima, tokens, heads, per_program,
    k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, AT_A_TIME: tl.constexpr,
    LANES: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """One program summarises per_program blocks of one head, AT_A_TIME tokens at a time, in one loop whose loads run
    ahead.

    Sums over tokens and maxima are kept per lane; each lane gets every LANES-th token of a tile. TRANSPOSED: True if
    the state is computed transposed. states and phi_sums may be None, and so may v_maxima.
    """
    program = tl.program_id(0)
    head = tl.program_id(1)
    sample = tl.program_id(2)
    k_strides = (k_stride_b, k_stride_s, k_stride_h)
    v_strides = (v_stride_b, v_stride_s, v_stride_h)
    columns = tl.arange(0, HEAD_DIM)
    of_head = sample.to(tl.int64) * heads + head
    blocks = tl.cdiv(tokens, BLOCK)
    state = tl.zeros((HEAD_DIM, HEAD_DIM), tl.float32)
    phi_sum = tl.zeros((LANES, HEAD_DIM), tl.float32)
    k_sum = tl.zeros((LANES, HEAD_DIM), tl.float32)
    block_sum = tl.zeros((LANES, HEAD_DIM), tl.float32)
    v_maximum = tl.zeros((LANES, HEAD_DIM), tl.float32)
    TILES: tl.constexpr = BLOCK // AT_A_TIME
    PARTS: tl.constexpr = AT_A_TIME // LANES
    end = tl.minimum((program + 1) * per_program, blocks) * TILES
    for tile in tl.range(program * per_program * TILES, end):
        start = tile * AT_A_TIME
        k_tile = load_tile(k, k_strides, sample, head, start, tokens, HEAD_DIM, AT_A_TIME, HEAD_DIM)
        if states is not None or v_maxima is not None:
            v_tile = load_tile(v, v_strides, sample, head, start, tokens, HEAD_DIM, AT_A_TIME, HEAD_DIM)
        wide = k_tile.to(tl.float32)
        block_sum += tl.sum(wide.reshape(PARTS, LANES, HEAD_DIM), 0)
        if tile % TILES == TILES - 1:
            block = tile // TILES
            mean = tl.sum(block_sum, 0) / tl.minimum(tokens - block * BLOCK, BLOCK)
            tl.store(means + (of_head * blocks + block) * HEAD_DIM + columns, mean)
            k_sum += block_sum
            block_sum = tl.zeros((LANES, HEAD_DIM), tl.float32)
        if states is not None:
            phi = tl.exp2((wide - tl.max(wide, 1)[:, None]) * LOG2E)
            is_key = tl.arange(0, AT_A_TIME) < tokens - start
            phi = phi * tl.where(is_key, PHI_SCALE / tl.sum(phi, 1), 0.0)[:, None]
            phi_sum += tl.sum(phi.reshape(PARTS, LANES, HEAD_DIM), 0)
        if v_maxima is not None:
            magnitude = tl.abs(v_tile.to(tl.float32)).reshape(PARTS, LANES, HEAD_DIM)
            v_maximum = tl.maximum(v_maximum, tl.max(magnitude, 0))
        if states is not None:
            if TRANSPOSED:
                state = tl.dot(v_tile.T, phi.to(v_tile.dtype), state, input_precision="ieee")
            else:
                state = tl.dot(phi.to(v_tile.dtype).T, v_tile, state, input_precision="ieee")
    row = of_head * tl.num_programs(0) + program
    tl.store(k_sums + row * HEAD_DIM + columns, tl.sum(k_sum, 0))
    if v_maxima is not None:
        tl.store(v_maxima + row * HEAD_DIM + columns, tl.max(v_maximum, 0))
    if states is not None:
        tl.store(phi_sums + row * HEAD_DIM + columns, tl.sum(phi_sum, 0))
        STRIDE_0: tl.constexpr = 1 if TRANSPOSED else HEAD_DIM
        STRIDE_1: tl.constexpr = HEAD_DIM if TRANSPOSED else 1
        places = columns[:, None] * STRIDE_0 + columns[None, :] * STRIDE_1
        tl.store(states + row * (HEAD_DIM * HEAD_DIM) + places, state)


@triton.jit(do_not_specialize=["tokens", "heads", "programs"])
def _fold_projection_kernel(
    k_sums, states, phi_sums, v_maxima, weight, state, key_weight, k_mean, v_scale, tokens, heads, programs,
    weight_stride_o, weight_stride_i,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SUMMARIES: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """One program computes ROWS rows of one head's state from all programs' summaries. v_maxima and v_scale may be
    None, and so may states, phi_sums, weight, state and key_weight."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    of_head = tl.program_id(2).to(tl.int64) * heads + tl.program_id(1)
    first = of_head * programs * HEAD_DIM
    phi_sum = tl.zeros((ROWS,), tl.float32)
    k_sum = tl.zeros((ROWS,), tl.float32)
    v_maximum = tl.zeros((ROWS,), tl.float32)
    for program in tl.range(0, programs, SUMMARIES):
        some = program + tl.arange(0, SUMMARIES)
        offsets = first + some[:, None] * HEAD_DIM + rows[None, :]
        mask = (some < programs)[:, None]
        if states is not None:
            phi_sum += tl.sum(tl.load(phi_sums + offsets, mask=mask, other=0.0), 0)
        k_sum += tl.sum(tl.load(k_sums + offsets, mask=mask, other=0.0), 0)
        if v_maxima is not None:
            v_maximum = tl.maximum(v_maximum, tl.max(tl.load(v_maxima + offsets, mask=mask, other=0.0), 0))
    tl.store(k_mean + of_head * HEAD_DIM + rows, k_sum / tokens)
    if v_maxima is not None:
        tl.store(v_scale + of_head * HEAD_DIM + rows, tl.maximum(v_maximum / 448.0, FLOOR))
    if states is not None:
        tl.store(key_weight + of_head * HEAD_DIM + rows, phi_sum / PHI_SCALE)
        projected = tl.zeros((ROWS, HEAD_DIM), tl.float32)
        outputs = tl.arange(0, HEAD_DIM)
        for column in tl.range(0, HEAD_DIM, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            part = tl.zeros((ROWS, COLUMNS), tl.float32)
            for program in tl.range(0, programs, SUMMARIES):
                some = program + tl.arange(0, SUMMARIES)
                row = first + some[:, None, None] * HEAD_DIM + rows[None, :, None]
                mask = (some < programs)[:, None, None]
                part += tl.sum(tl.load(states + row * HEAD_DIM + columns[None, None, :], mask=mask, other=0.0), 0)
            part = part / tl.maximum(phi_sum, TINY)[:, None]
            transposed = tl.load(weight + outputs[None, :] * weight_stride_o + columns[:, None] * weight_stride_i)
            projected = tl.dot(part, transposed.to(tl.float32), projected, input_precision="ieee")
        corner = state + of_head * (HEAD_DIM * HEAD_DIM)
        tl.store(corner + rows[:, None] * HEAD_DIM + outputs[None, :], projected.to(state.dtype.element_ty))
