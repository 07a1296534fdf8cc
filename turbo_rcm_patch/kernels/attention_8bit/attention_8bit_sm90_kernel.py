"""The 8-bit attention forward in Gluon for sm_90: the programs and barriers of attention_sm90_kernel, with
int8 queries and keys, e4m3 values and weights, and two levels of accumulation. Given lists of key tiles, it is
block-sparse.

A consumer's step over a tile of keys. Every value stays in the registers of the thread that needs it next:

    scores   int32, from a product that starts at the bits of 1.5 · 2^23. Its bits are the float 1.5 · 2^23 + q kᵀ
    weights  exp2(scores · unit - c), in e4m3, scaled so that the row's maximum so far is 448
    output   output · correction + weights v. The product has sums of its own: tensor cores add e4m3 with 14 bits

Values are stored in key_order (attention_8bit_reference.py). A thread's weights are then its operand of the product
with v, so that no weight moves between threads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..attention.attention_sm90_kernel import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    K_EMPTY,
    KEYS,
    PRODUCER_REGISTERS,
    QUERIES,
    V_EMPTY,
    fill_q,
    items_of_program,
    locate,
    make_barriers,
    opaque,
    release,
    wait_until_empty,
)
from ..gluon_releases import jit, tma_load, tma_store

STAGES = gl.constexpr(3)  # of K, and of V; their named barriers are K_EMPTY to K_EMPTY + 2 and V_EMPTY to V_EMPTY + 2
MAGIC = gl.constexpr(12582912.0)  # 1.5 · 2^23
MAGIC_BITS = gl.constexpr(0x4B400000)
LOG2_LARGEST = gl.constexpr(8.807354922057604)  # log2 of 448


@jit(do_not_specialize=["tokens", "heads", "items", "whole", "parts"])
def attention_8bit_kernel(
    q, q_scale, k, k_scale, v, v_scale, out, out_scale, partial_out, partial_lse, tokens, heads, items, whole, parts,
    block_map, counts, kept_share, left_value, mean_count, dense_from,
    residual, residual_stride_b, residual_stride_s, residual_stride_h,
    c_skip, c_skip_stride_b, c_skip_stride_s, c_skip_stride_c, c_out, c_out_stride_b, c_out_stride_s, c_out_stride_c,
    SKIP_KIND: gl.constexpr, OUT_KIND: gl.constexpr,
):  # fmt: skip
    """Compute attention in 8 bits. attention_sm90_kernel.py explains items, whole and parts.

    q, out: descriptors over [B, H, S, D] with blocks [1, 1, QUERIES, D]. k: the same with blocks [1, 1, KEYS, D].
    v: a descriptor over [B, H, D, T] with blocks [1, 1, D, KEYS].
    q_scale: [B, S, H]. k_scale: [B, H, ⌈S / KEYS⌉]. v_scale: [B, H, D].
    out_scale: [B], by which the result is divided, or None.
    residual: [B, S, H, D], or None for no skip. For items in parts, the kernel that joins them adds the skip.
    SKIP_KIND, OUT_KIND: how the coefficients vary (coefficient.py).

    The next four are None to attend to all keys. They exclude parts.

    block_map: [B, H, ⌈S / (CONSUMERS · QUERIES)⌉, ⌈S / KEYS⌉], the ascending list of key tiles that a tile of queries
        attends to.
    counts: the length of each list. kept_share: the factor of its attention output. Both are shaped like block_map
        without the last dimension.
    left_value: [B, H, ..., D], added to the output after the factor (block_sparse_reference.py).

    mean_count: the mean of counts, a scalar in fp32, if attention is launched twice: with lists and without. From a
        mean of ``dense_from`` on, the launch with lists does nothing, and below it the one without. Else None.
    """
    if mean_count is not None:
        is_dense = gl.load(mean_count) >= dense_from
        items = gl.where(is_dense, items, 0) if block_map is None else gl.where(is_dense, 0, items)
    HEAD_DIM: gl.constexpr = q.block_type.shape[3]
    q_smem = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, QUERIES, HEAD_DIM], q.layout)
    k_smem = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, KEYS, HEAD_DIM], k.layout)
    v_smem = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, HEAD_DIM, KEYS], v.layout)
    out_smem = gl.allocate_shared_memory(out.dtype, [CONSUMERS, 1, 1, QUERIES, HEAD_DIM], out.layout)
    q_full = make_barriers(CONSUMERS)
    q_empty = make_barriers(CONSUMERS)
    k_full = make_barriers(STAGES)
    v_full = make_barriers(STAGES)
    fence_async_shared()
    buffers = (q_smem, k_smem, v_smem, out_smem, q_full, q_empty, k_full, v_full)
    sizes = (tokens, tokens, heads, items, whole, parts)
    outputs = (out, out_scale, partial_out, partial_lse)
    skip = (
        (residual, residual_stride_b, residual_stride_s, residual_stride_h),
        (c_skip, c_skip_stride_b, c_skip_stride_s, c_skip_stride_c),
        (c_out, c_out_stride_b, c_out_stride_s, c_out_stride_c),
    )
    scales = (q_scale, k_scale, v_scale)
    lists = (block_map, counts, kept_share, left_value)
    gl.warp_specialize(
        [
            (_consume, (0, outputs, buffers, sizes, scales, lists, skip, SKIP_KIND, OUT_KIND)),
            (_consume, (1, outputs, buffers, sizes, scales, lists, skip, SKIP_KIND, OUT_KIND)),
            (_consume, (2, outputs, buffers, sizes, scales, lists, skip, SKIP_KIND, OUT_KIND)),
            (_produce, (q, k, v, buffers, sizes, lists)),
        ],
        [4, 4, 1],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _parity(i):
    return (i // STAGES) & 1


@gluon.jit
def _list_of(item, lists, kv_tokens):
    """Return a pointer to an item's list of key tiles, and the list's length."""
    return lists[0] + gl.cast(item, gl.int64) * gl.cdiv(kv_tokens, KEYS), gl.load(lists[1] + item)


@gluon.jit
def _produce(q, k, v, buffers, sizes, lists):
    q_smem, k_smem, v_smem, _out_smem, q_full, q_empty, k_full, v_full = buffers
    filled = 0
    for use in range(items_of_program(sizes[3])):
        item, sample, head, row, first, end = locate(use, sizes)
        if lists[0] is not None:
            kept, end = _list_of(item, lists, sizes[1])
        # Load in the order of use: consumer 0 starts on its queries and the first keys while the others are still busy.
        fill_q(q, q_smem, q_full, q_empty, sample, head, row, 0, use)
        key = (end - 1) * KEYS
        if lists[0] is not None:
            key = gl.load(kept + (end - 1)) * KEYS
        _fill(k, k_smem, k_full, [sample, head, key, 0], filled, K_EMPTY)
        for i in gl.static_range(1, CONSUMERS):
            fill_q(q, q_smem, q_full, q_empty, sample, head, row, i, use)
        _fill(v, v_smem, v_full, [sample, head, 0, key], filled, V_EMPTY)
        filled += 1
        for done in range(end - 1 - first):
            key -= KEYS
            if lists[0] is not None:
                key = gl.load(kept + (end - 2 - done)) * KEYS
            _fill(k, k_smem, k_full, [sample, head, key, 0], filled, K_EMPTY)
            _fill(v, v_smem, v_full, [sample, head, 0, key], filled, V_EMPTY)
            filled += 1
    for stage in gl.static_range(STAGES):
        if filled > stage:
            wait_until_empty(K_EMPTY + stage)
            wait_until_empty(V_EMPTY + stage)


@gluon.jit
def _fill(x, smem, full, corner, filled, EMPTY: gl.constexpr):
    stage = filled % STAGES
    if filled >= STAGES:
        wait_until_empty(EMPTY + stage)
    mbarrier.expect(full.index(stage), x.block_type.nbytes)
    tma_load(x, corner, full.index(stage), smem.index(stage))


@gluon.jit
def _consume(
    INDEX: gl.constexpr, outputs, buffers, sizes, scales, lists, skip, SKIP_KIND: gl.constexpr, OUT_KIND: gl.constexpr
):  # fmt: skip
    out, out_scale, partial_out, partial_lse = outputs
    q_smem, k_smem, v_smem, out_smem, q_full, q_empty, k_full, v_full = buffers
    q_scale, k_scale, v_scale = scales
    tokens, kv_tokens, heads, items, whole, _parts = sizes
    HEAD_DIM: gl.constexpr = out.block_type.shape[3]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 32])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 32]
    )
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    no_output = gl.zeros([QUERIES, HEAD_DIM], gl.float32, OUTPUT)
    i = 0  # key tiles so far, over all items
    for use in range(items_of_program(items)):
        item, sample, head, row, first, end = locate(use, sizes)
        key_tiles = end - first
        if lists[0] is not None:
            kept, key_tiles = _list_of(item, lists, kv_tokens)
            end = gl.load(kept + (key_tiles - 1)) + 1
        partial = gl.where(end * KEYS > kv_tokens, key_tiles, 0)  # the last tile, which comes first
        rows = row + INDEX * QUERIES + opaque(gl.arange(0, QUERIES, layout=ROWS))
        row_scales = q_scale + (gl.cast(sample, gl.int64) * tokens + rows) * heads + head
        row_scale = gl.load(row_scales, mask=rows < tokens, other=1)
        key_scales = (sample * heads + head) * gl.cdiv(kv_tokens, KEYS) + first - 1
        mbarrier.wait(q_full.index(INDEX), use & 1)
        queries = q_smem.index(INDEX).reshape([QUERIES, HEAD_DIM])
        row_max = gl.full([QUERIES], float("-inf"), gl.float32, ROWS)
        row_sum = sum_in_threads(gl.zeros([QUERIES, KEYS], gl.float32, SCORES))
        acc = gl.zeros([QUERIES, HEAD_DIM], gl.float32, OUTPUT)
        for rest in range(key_tiles, 0, -1):
            stage = i % STAGES
            start = gl.full([QUERIES, KEYS], MAGIC_BITS, gl.int32, SCORES)
            mbarrier.wait(k_full.index(stage), _parity(i))
            keys_t = k_smem.index(stage).reshape([KEYS, HEAD_DIM]).permute((1, 0))
            scores = warpgroup_mma(queries, keys_t, start, is_async=True)
            place = rest
            if lists[0] is not None:
                place = gl.load(kept + (rest - 1)) + 1
            key_scale = gl.load(k_scale + key_scales + place)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            release(K_EMPTY + stage)
            scores = scores.to(gl.float32, bitcast=True)
            if rest == partial:  # this branch also keeps ptxas from moving the release below the softmax
                scores = mask_scores(scores, kv_tokens % KEYS)
            weights, row_max, row_sum, correction = weigh(scores, row_scale * key_scale, row_max, row_sum)
            p = weights_operand(weights, OUTPUT)
            mbarrier.wait(v_full.index(stage), _parity(i))
            values = v_smem.index(stage).reshape([HEAD_DIM, KEYS]).permute((1, 0))
            product = warpgroup_mma(p, values, no_output, use_acc=False, is_async=True)
            product = warpgroup_mma_wait(0, deps=(product,))
            release(V_EMPTY + stage)
            acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, OUTPUT))[:, None] + product
            i += 1
        mbarrier.arrive(q_empty.index(INDEX))

        # Computed again, and opaque: the loop above then holds none of it in registers.
        item, sample, head, row, _first, _end = locate(opaque(use), sizes)
        row_sum = gl.convert_layout(gl.sum(row_sum, 1), ROWS)
        acc = acc * gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, OUTPUT))[:, None]
        columns = opaque(gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, OUTPUT)))
        channel_scale = gl.load(v_scale + (sample * heads + head) * HEAD_DIM + columns)
        if out_scale is not None:
            channel_scale *= 1.0 / gl.load(out_scale + sample)
        acc = acc * channel_scale[None, :]
        if lists[0] is not None:
            left = gl.load(lists[3] + gl.cast(item, gl.int64) * HEAD_DIM + columns)
            if out_scale is not None:
                left *= 1.0 / gl.load(out_scale + sample)
            acc = acc * gl.load(lists[2] + item) + left[None, :]
        if partial_out is None or item < whole:
            value = acc
            if skip[0][0] is not None:
                value = add_skip(acc, skip, sample, head, row + INDEX * QUERIES, tokens, SKIP_KIND, OUT_KIND)
            tma.store_wait(0)  # the previous tile's output has left the buffer
            staged = out_smem.index(INDEX)
            staged.reshape([QUERIES, HEAD_DIM]).store(value.to(out.dtype))
            fence_async_shared()
            tma_store(out, [sample, head, row + INDEX * QUERIES, 0], staged)
        if partial_out is not None and item >= whole:
            corner = (item - whole).to(gl.int64) * (CONSUMERS * QUERIES) + INDEX * QUERIES
            part_rows = opaque(gl.arange(0, QUERIES, layout=ROWS))
            gl.store(partial_lse + corner + part_rows, row_max + gl.log2(row_sum))
            part_rows = opaque(gl.arange(0, QUERIES, layout=gl.SliceLayout(1, OUTPUT)))[:, None]
            gl.store(partial_out + corner * HEAD_DIM + part_rows * HEAD_DIM + columns[None, :], acc)
    tma.store_wait(0)


@gluon.jit
def add_skip(acc, skip, sample, head, row, tokens, SKIP_KIND: gl.constexpr, OUT_KIND: gl.constexpr):
    """Return c_skip · residual + c_out · acc for the queries of a head from ``row`` on."""
    HEAD_DIM: gl.constexpr = acc.shape[1]
    residual, stride_b, stride_s, stride_h = skip[0]
    rows = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    columns = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, acc.type.layout))
    mask = rows < tokens
    corner = residual + sample.to(gl.int64) * stride_b + head * stride_h
    kept = gl.load(corner + (rows.to(gl.int64) * stride_s)[:, None] + columns[None, :], mask=mask[:, None], other=0.0)
    kept = kept.to(gl.float32)
    channels = head * HEAD_DIM + columns
    if SKIP_KIND != 0:
        kept *= _load_coefficient(skip[1], sample, rows, channels, mask, SKIP_KIND)
    if OUT_KIND != 0:
        acc *= _load_coefficient(skip[2], sample, rows, channels, mask, OUT_KIND)
    return kept + acc


@gluon.jit
def _load_coefficient(coefficient, sample, rows, channels, mask, KIND: gl.constexpr):
    """Load a tile's coefficient in fp32: one value, one per channel, or one per element, by KIND (coefficient.py)."""
    pointer, stride_b, stride_s, stride_c = coefficient
    corner = pointer + sample.to(gl.int64) * stride_b
    if KIND == 1:
        return gl.load(corner).to(gl.float32)
    elif KIND == 2:
        return gl.load(corner + channels * stride_c).to(gl.float32)[None, :]
    else:
        offsets = (rows.to(gl.int64) * stride_s)[:, None] + (channels * stride_c)[None, :]
        return gl.load(corner + offsets, mask=mask[:, None], other=0.0).to(gl.float32)


@gluon.jit
def weigh(scores, unit, row_max, row_sum):
    """Return the weights of scores that start at MAGIC_BITS and have this unit, the new maximum and sum, and the
    correction factor of earlier tiles."""
    new_max = gl.maximum(row_max, (gl.max(scores, 1) - MAGIC) * unit)
    weights = gl.exp2(scores * unit[:, None] - (unit * MAGIC + (new_max - LOG2_LARGEST))[:, None])
    correction = gl.exp2(row_max - new_max)
    row_correction = gl.convert_layout(correction, gl.SliceLayout(1, row_sum.type.layout))[:, None]
    return weights, new_max, row_sum * row_correction + sum_in_threads(weights), correction


@gluon.jit
def sum_in_threads(x):
    """Sum [rows, columns] to [rows, 4] within each thread. The threads of a row add up their sums only at the end."""
    return gl.sum(gl.sum(x.reshape([x.shape[0], x.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def mask_scores(scores, keys):
    """Set the scores to -inf from column ``keys`` on. `opaque` keeps the comparisons inside the loop over items:
    outside they would hold registers."""
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, scores.type.layout))
    return gl.where((column < opaque(keys))[None, :], scores, float("-inf"))


@gluon.jit
def weights_operand(weights, OUTPUT: gl.constexpr):
    """Return weights [QUERIES, KEYS] in e4m3 as the operand of the product with values in key_order. No weight moves
    between threads."""
    p = weights.reshape([QUERIES, KEYS // 32, 2, 2, 4, 2]).permute([0, 1, 2, 4, 3, 5]).reshape([QUERIES, KEYS])
    p = gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
        "mov.b32 $0, {low, high}; }",
        "=r,r,r,r,r",
        [p],
        dtype=gl.float8e4nv,
        is_pure=True,
        pack=4,
    )
    return gl.convert_layout(p, gl.DotOperandLayout(operand_index=0, parent=OUTPUT, k_width=4), assert_trivial=True)
