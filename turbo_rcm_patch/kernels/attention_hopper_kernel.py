"""The attention forward in Gluon for sm_90: one producer warp, two or three consumer warpgroups, persistent programs.

A program walks items: a tile of CONSUMERS · 64 queries of one head, with all keys or, of the tiles that would leave
most programs idle at the end, with a part of them. The producer streams Q, K and V through TMA into rings of shared
memory and runs ahead into the next item; each consumer owns 64 of the queries and takes the keys from the last tile to
the first, with an online softmax in base 2 (FlashAttention-3, Shah et al. 2024).

Barriers, for use n = 0, 1, ... of a slot (key tile i, counted over all items, is use i // STAGES of slot i % STAGES; a
query slot is used once per item):

    full   mbarrier of one arrival, the producer's, and the bytes it expects. Use n has landed when phase n ends, so
           consumers wait for parity n & 1.
    empty  one arrival per consumer that reads the slot, after its last read of use n. The producer waits for it before
           it fills use n + 1. As an mbarrier: before use n it waits for phase n - 1, of parity (n & 1) ^ 1, which
           passes at once for n = 0. As a named barrier, which consumers arrive at and the producer joins: not before
           use 0, and once more per slot at the end, so that none is left half full. No consumer can arrive twice in
           between: it arrives for use n + 1 only after that has landed, hence after the producer has joined for use n.
    turn   named barrier c, of two warpgroups: consumer c joins it before it issues its matmuls, its predecessor
           arrives after its own. All consumers take equally many turns, and the last one starts by handing consumer 0
           its first: between two joins there is exactly one arrival. The one left over is consumer 0's to join.
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

WARPGROUP = gl.constexpr(128)  # threads
# Named barriers. Triton takes 0 to 4: one per partition, and one for the start and the end of all of them.
TURN = gl.constexpr(7)
K_EMPTY = gl.constexpr(10)
V_EMPTY = gl.constexpr(13)
# When a turn ends: after the consumer's PV is issued, or already after its QK.
TURN_OF_BOTH = gl.constexpr(1)
TURN_OF_QK = gl.constexpr(2)
# A row's maximum may outgrow the one in use by this power of two before the output is rescaled (FlashAttention-4).
LAZY_GROWTH = gl.constexpr(8.0)
# 2^f for |f| <= 0.5, within 8e-5 relative: bf16 rounds by up to 4e-3.
EXP2_POLYNOMIAL = gl.constexpr((0.99992809, 0.69326099, 0.24261081, 0.05517144))


@gluon.jit(do_not_specialize=["tokens", "kv_tokens", "heads", "items", "whole", "parts"])
def attention_kernel(
    q, k, v, out, lse, partial_out, partial_lse, tokens, kv_tokens, heads, items, whole, parts, scale_log2,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr, OVERLAP: gl.constexpr, TURNS: gl.constexpr,
    NAMED: gl.constexpr, Q_REGISTERS: gl.constexpr, LAZY: gl.constexpr, POLYNOMIAL: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """q, k, v, out: descriptors over [B, H, S, D] of blocks [1, 1, 64, D] (q, out) and [1, 1, keys, D].

    lse: fp32 [B, H, S], the logsumexp in base 2, or None. items: the first ``whole`` are tiles of queries, the others
    are ``parts`` parts of the keys of each further tile, whose output and logsumexp go to partial_out fp32
    [items - whole, CONSUMERS · 64, D] and partial_lse (None where there are no parts).
    MASK: whether the last tile of keys is a partial one. OVERLAP: one tile's QK beside the previous tile's PV.
    TURNS: consumers issue matmuls in turn (TURN_OF_BOTH, TURN_OF_QK), or 0. NAMED: "empty" as named barriers.
    Q_REGISTERS: queries are held there. LAZY: rescale the output only where a maximum has grown a lot. POLYNOMIAL:
    every n-th exponential is one, 0 for none. REGISTERS: of a thread of the consumers.
    """
    QUERIES: gl.constexpr = q.block_type.shape[2]
    HEAD_DIM: gl.constexpr = q.block_type.shape[3]
    KEYS: gl.constexpr = k.block_type.shape[2]
    q_smem = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, QUERIES, HEAD_DIM], q.layout)
    k_smem = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, KEYS, HEAD_DIM], k.layout)
    v_smem = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, KEYS, HEAD_DIM], v.layout)
    out_smem = gl.allocate_shared_memory(out.dtype, [CONSUMERS, 1, 1, QUERIES, HEAD_DIM], out.layout)
    q_full = _barriers(CONSUMERS, 1)
    q_empty = _barriers(CONSUMERS, 1)
    k_full = _barriers(STAGES, 1)
    v_full = _barriers(STAGES, 1)
    k_empty = _barriers(STAGES, CONSUMERS)
    v_empty = _barriers(STAGES, CONSUMERS)
    fence_async_shared()
    buffers = (q_smem, k_smem, v_smem, out_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes = (tokens, kv_tokens, heads, items, whole, parts)
    # Each tuple is spelled out: a constexpr in a tuple that has a name is a constexpr no more.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (
                0, k, v, out, lse, partial_out, partial_lse, buffers, sizes, scale_log2,
                CONSUMERS, STAGES, MASK, OVERLAP, TURNS, NAMED, Q_REGISTERS, LAZY, POLYNOMIAL,
            )),
            (_consume, (
                1, k, v, out, lse, partial_out, partial_lse, buffers, sizes, scale_log2,
                CONSUMERS, STAGES, MASK, OVERLAP, TURNS, NAMED, Q_REGISTERS, LAZY, POLYNOMIAL,
            )),
            (_produce, (q, k, v, buffers, sizes, CONSUMERS, STAGES, NAMED)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (
                0, k, v, out, lse, partial_out, partial_lse, buffers, sizes, scale_log2,
                CONSUMERS, STAGES, MASK, OVERLAP, TURNS, NAMED, Q_REGISTERS, LAZY, POLYNOMIAL,
            )),
            (_consume, (
                1, k, v, out, lse, partial_out, partial_lse, buffers, sizes, scale_log2,
                CONSUMERS, STAGES, MASK, OVERLAP, TURNS, NAMED, Q_REGISTERS, LAZY, POLYNOMIAL,
            )),
            (_consume, (
                2, k, v, out, lse, partial_out, partial_lse, buffers, sizes, scale_log2,
                CONSUMERS, STAGES, MASK, OVERLAP, TURNS, NAMED, Q_REGISTERS, LAZY, POLYNOMIAL,
            )),
            (_produce, (q, k, v, buffers, sizes, CONSUMERS, STAGES, NAMED)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip


@gluon.jit
def _barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def _items_of_program(items):
    return gl.cdiv(items - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def _locate(use, sizes, ROWS: gl.constexpr, KEYS: gl.constexpr):
    """The program's item number ``use``: the item, its sample, head, first query, first and end of its key tiles.

    Programs that run together share a head, whose K and V stay in L2.
    """
    tokens, kv_tokens, heads, _items, whole, parts = sizes
    item = gl.program_id(0) + use * gl.num_programs(0)
    split = gl.maximum(item - whole, 0)
    tile = gl.minimum(item, whole + split // parts)
    end = gl.cdiv(kv_tokens, KEYS)
    first = 0
    if item >= whole:
        keys_per_part = gl.cdiv(end, parts)
        first = split % parts * keys_per_part
        end = gl.minimum(end, first + keys_per_part)
    row_tiles = gl.cdiv(tokens, ROWS)
    sample_head = tile // row_tiles
    return item, sample_head // heads, sample_head % heads, tile % row_tiles * ROWS, first, end


@gluon.jit
def _parity(i, STAGES: gl.constexpr):
    return (i // STAGES) & 1


# ---------------------------------------------------------------------------------------------------------------------
# Producer
# ---------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _produce(q, k, v, buffers, sizes, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, NAMED: gl.constexpr):
    q_smem, k_smem, v_smem, _out_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty = buffers
    QUERIES: gl.constexpr = q.block_type.shape[2]
    KEYS: gl.constexpr = k.block_type.shape[2]
    THREADS: gl.constexpr = CONSUMERS * WARPGROUP + 32
    filled = 0
    for use in range(_items_of_program(sizes[3])):
        _item, sample, head, row, first, end = _locate(use, sizes, CONSUMERS * QUERIES, KEYS)
        # In the order of need: consumer 0 starts on its queries and the first keys while the others are still busy.
        _fill_q(q, q_smem, q_full, q_empty, sample, head, row, 0, use)
        key = (end - 1) * KEYS
        _fill(k, k_smem, k_full, k_empty, sample, head, key, filled, K_EMPTY, STAGES, NAMED, THREADS)
        for i in gl.static_range(1, CONSUMERS):
            _fill_q(q, q_smem, q_full, q_empty, sample, head, row, i, use)
        _fill(v, v_smem, v_full, v_empty, sample, head, key, filled, V_EMPTY, STAGES, NAMED, THREADS)
        filled += 1
        for _rest in range(end - 1 - first):
            key -= KEYS
            _fill(k, k_smem, k_full, k_empty, sample, head, key, filled, K_EMPTY, STAGES, NAMED, THREADS)
            _fill(v, v_smem, v_full, v_empty, sample, head, key, filled, V_EMPTY, STAGES, NAMED, THREADS)
            filled += 1
    if NAMED:
        for stage in gl.static_range(STAGES):
            if filled > stage:
                _named_barrier("sync", K_EMPTY + stage, THREADS)
                _named_barrier("sync", V_EMPTY + stage, THREADS)


@gluon.jit
def _fill_q(q, smem, full, empty, sample, head, row, INDEX: gl.constexpr, use):
    mbarrier.wait(empty.index(INDEX), (use & 1) ^ 1)
    mbarrier.expect(full.index(INDEX), q.block_type.nbytes)
    start = row + INDEX * q.block_type.shape[2]
    tma.async_copy_global_to_shared(q, [sample, head, start, 0], full.index(INDEX), smem.index(INDEX))


@gluon.jit
def _fill(
    x, smem, full, empty, sample, head, start, filled,
    EMPTY: gl.constexpr, STAGES: gl.constexpr, NAMED: gl.constexpr, THREADS: gl.constexpr,
):  # fmt: skip
    stage = filled % STAGES
    if NAMED:
        if filled >= STAGES:
            _named_barrier("sync", EMPTY + stage, THREADS)
    else:
        mbarrier.wait(empty.index(stage), _parity(filled, STAGES) ^ 1)
    mbarrier.expect(full.index(stage), x.block_type.nbytes)
    tma.async_copy_global_to_shared(x, [sample, head, start, 0], full.index(stage), smem.index(stage))


# ---------------------------------------------------------------------------------------------------------------------
# Consumers
# ---------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _consume(
    INDEX: gl.constexpr, k, v, out, lse, partial_out, partial_lse, buffers, sizes, scale_log2,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr, OVERLAP: gl.constexpr, TURNS: gl.constexpr,
    NAMED: gl.constexpr, Q_REGISTERS: gl.constexpr, LAZY: gl.constexpr, POLYNOMIAL: gl.constexpr,
):  # fmt: skip
    q_smem, k_smem, v_smem, out_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty = buffers
    tokens, kv_tokens, heads, items, whole, _parts = sizes
    KEYS: gl.constexpr = k.block_type.shape[2]
    QUERIES: gl.constexpr = out.block_type.shape[2]
    HEAD_DIM: gl.constexpr = out.block_type.shape[3]
    DTYPE: gl.constexpr = out.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16]
    )
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SCORES, k_width=2)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUTPUT, k_width=2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    no_scores = gl.zeros([QUERIES, KEYS], gl.float32, SCORES)
    i = 0  # the key tile whose PV is next
    if TURNS != 0 and INDEX == CONSUMERS - 1:
        _end_turn(INDEX, CONSUMERS)
    for use in range(_items_of_program(items)):
        item, sample, head, row, first, end = _locate(use, sizes, CONSUMERS * QUERIES, KEYS)
        row += INDEX * QUERIES
        key_tiles = end - first
        keys = kv_tokens - (end - 1) * KEYS  # from the last tile on; at least KEYS where it is a whole one
        mbarrier.wait(q_full.index(INDEX), use & 1)
        queries = q_smem.index(INDEX).reshape([QUERIES, HEAD_DIM])
        if Q_REGISTERS:
            queries = queries.load(Q_LAYOUT)
            mbarrier.arrive(q_empty.index(INDEX), count=1)
        row_max = gl.full([QUERIES], float("-inf"), gl.float32, ROWS)
        row_sum = _sum_in_threads(no_scores)
        acc = gl.zeros([QUERIES, HEAD_DIM], gl.float32, OUTPUT)

        if OVERLAP:
            mbarrier.wait(k_full.index(i % STAGES), _parity(i, STAGES))
            if TURNS != 0:
                _begin_turn(INDEX)
            scores = warpgroup_mma(queries, _keys(k_smem, i % STAGES), no_scores, use_acc=False, is_async=True)
            if TURNS != 0:
                _end_turn(INDEX, CONSUMERS)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            _release(k_empty, i % STAGES, K_EMPTY, CONSUMERS, NAMED)
            if MASK:
                scores = _mask(scores, keys)
            weights, row_max, row_sum, correction = _softmax(scores, row_max, row_sum, scale_log2, LAZY, POLYNOMIAL)
            p = gl.convert_layout(weights.to(DTYPE), P_LAYOUT)
            grown = row_max > float("-inf")
            mbarrier.wait(k_full.index((i + 1) % STAGES), _parity(i + 1, STAGES), pred=key_tiles > 1)
            # Invariant: p is tile i's and has no PV yet; acc is still to be corrected; tile i + 1's keys have landed.
            for rest in range(key_tiles - 1, 0, -1):
                if TURNS != 0:
                    _begin_turn(INDEX)
                scores = warpgroup_mma(
                    queries, _keys(k_smem, (i + 1) % STAGES), no_scores, use_acc=False, is_async=True
                )
                if TURNS == TURN_OF_QK:
                    _end_turn(INDEX, CONSUMERS)
                mbarrier.wait(v_full.index(i % STAGES), _parity(i, STAGES))
                acc = _rescale(acc, _opaque(correction), grown, LAZY)  # while the tensor cores have QK to do
                acc = warpgroup_mma(p, _values(v_smem, i % STAGES), acc, is_async=True)
                if TURNS == TURN_OF_BOTH:
                    _end_turn(INDEX, CONSUMERS)
                scores = warpgroup_mma_wait(1, deps=(scores,))
                _release(k_empty, (i + 1) % STAGES, K_EMPTY, CONSUMERS, NAMED)
                if NAMED:
                    # Never waits. It ends a basic block, or ptxas would move the release below the softmax.
                    mbarrier.wait(q_full.index(INDEX), 0, pred=tokens < 0)
                old_max = row_max
                weights, row_max, row_sum, correction = _softmax(scores, row_max, row_sum, scale_log2, LAZY, POLYNOMIAL)
                grown = row_max > old_max
                p = gl.convert_layout(weights.to(DTYPE), P_LAYOUT)
                # Between the exponentials and the wait for PV, or ptxas would move that wait above them.
                mbarrier.wait(k_full.index((i + 2) % STAGES), _parity(i + 2, STAGES), pred=rest > 1)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                _release(v_empty, i % STAGES, V_EMPTY, CONSUMERS, NAMED)
                i += 1
            if not Q_REGISTERS:
                mbarrier.arrive(q_empty.index(INDEX), count=1)
            acc = _rescale(acc, correction, grown, LAZY)
            mbarrier.wait(v_full.index(i % STAGES), _parity(i, STAGES))
            acc = warpgroup_mma(p, _values(v_smem, i % STAGES), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            _release(v_empty, i % STAGES, V_EMPTY, CONSUMERS, NAMED)
            i += 1
        else:
            for rest in range(key_tiles, 0, -1):
                mbarrier.wait(k_full.index(i % STAGES), _parity(i, STAGES))
                if TURNS != 0:
                    _begin_turn(INDEX)
                scores = warpgroup_mma(queries, _keys(k_smem, i % STAGES), no_scores, use_acc=False, is_async=True)
                if TURNS != 0:
                    _end_turn(INDEX, CONSUMERS)
                scores = warpgroup_mma_wait(0, deps=(scores,))
                _release(k_empty, i % STAGES, K_EMPTY, CONSUMERS, NAMED)
                if MASK and rest == key_tiles:
                    scores = _mask(scores, keys)
                old_max = row_max
                weights, row_max, row_sum, correction = _softmax(scores, row_max, row_sum, scale_log2, LAZY, POLYNOMIAL)
                p = gl.convert_layout(weights.to(DTYPE), P_LAYOUT)
                acc = _rescale(acc, correction, row_max > old_max, LAZY)
                mbarrier.wait(v_full.index(i % STAGES), _parity(i, STAGES))
                acc = warpgroup_mma(p, _values(v_smem, i % STAGES), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                _release(v_empty, i % STAGES, V_EMPTY, CONSUMERS, NAMED)
                i += 1
            if not Q_REGISTERS:
                mbarrier.arrive(q_empty.index(INDEX), count=1)

        row_sum = gl.convert_layout(gl.sum(row_sum, 1), ROWS)
        acc = acc * gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, OUTPUT))[:, None]
        if partial_out is None or item < whole:
            tma.store_wait(0)  # the previous tile's output has left the buffer
            staged = out_smem.index(INDEX)
            staged.reshape([QUERIES, HEAD_DIM]).store(acc.to(DTYPE))
            fence_async_shared()
            tma.async_copy_shared_to_global(out, [sample, head, row, 0], staged)
            if lse is not None:
                rows = row + gl.arange(0, QUERIES, layout=ROWS)
                head_rows = lse + (sample.to(gl.int64) * heads + head) * tokens
                gl.store(head_rows + rows, row_max + gl.log2(row_sum), mask=rows < tokens)
        if partial_out is not None and item >= whole:
            start = (item - whole).to(gl.int64) * (CONSUMERS * QUERIES) + INDEX * QUERIES
            gl.store(partial_lse + start + gl.arange(0, QUERIES, layout=ROWS), row_max + gl.log2(row_sum))
            rows = gl.arange(0, QUERIES, layout=gl.SliceLayout(1, OUTPUT))[:, None]
            columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, OUTPUT))[None, :]
            gl.store(partial_out + start * HEAD_DIM + rows * HEAD_DIM + columns, acc)
    if TURNS != 0 and INDEX == 0:
        _begin_turn(INDEX)
    tma.store_wait(0)


@gluon.jit
def _keys(smem, stage):
    """Kᵀ of a stage, [D, keys]."""
    KEYS: gl.constexpr = smem.shape[3]
    HEAD_DIM: gl.constexpr = smem.shape[4]
    return smem.index(stage).reshape([KEYS, HEAD_DIM]).permute((1, 0))


@gluon.jit
def _values(smem, stage):
    """V of a stage, [keys, D]."""
    KEYS: gl.constexpr = smem.shape[3]
    HEAD_DIM: gl.constexpr = smem.shape[4]
    return smem.index(stage).reshape([KEYS, HEAD_DIM])


@gluon.jit
def _mask(scores, keys):
    """-inf from column ``keys`` on. The comparisons must not leave the loop over items: they would hold registers."""
    column = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))
    return gl.where((column < _opaque(keys))[None, :], scores, float("-inf"))


@gluon.jit
def _softmax(scores, row_max, row_sum, scale_log2, LAZY: gl.constexpr, POLYNOMIAL: gl.constexpr):
    """2^(scores · scale - maximum), the maximum and sum so far, and the factor for what came before."""
    tile_max = gl.max(scores, 1) * scale_log2
    new_max = gl.where(tile_max > row_max + LAZY_GROWTH, tile_max, row_max) if LAZY else gl.maximum(row_max, tile_max)
    weights = _exp2(scores * scale_log2 - new_max[:, None], POLYNOMIAL)
    correction = gl.exp2(row_max - new_max)
    row_correction = gl.convert_layout(correction, gl.SliceLayout(1, row_sum.type.layout))[:, None]
    return weights, new_max, row_sum * row_correction + _sum_in_threads(weights), correction


@gluon.jit
def _sum_in_threads(x):
    """[rows, columns] to [rows, 8]: what one thread has of a row. The threads of a row meet only at the end."""
    return gl.sum(x.reshape([x.shape[0], x.shape[1] // 8, 8]), 1)


@gluon.jit
def _rescale(acc, correction, grown, LAZY: gl.constexpr):
    correction = gl.convert_layout(correction, gl.SliceLayout(1, acc.type.layout))[:, None]
    if LAZY:
        if gl.max(grown.to(gl.int32), 0) > 0:
            acc = acc * correction
    else:
        acc = acc * correction
    return acc


@gluon.jit
def _exp2(x, POLYNOMIAL: gl.constexpr):
    if POLYNOMIAL == 0:
        return gl.exp2(x)
    else:
        asm: gl.constexpr = _exp2_asm(POLYNOMIAL)
        operands: gl.constexpr = _exp2_operands(POLYNOMIAL)
        return gl.inline_asm_elementwise(asm, operands, [x], dtype=gl.float32, is_pure=True, pack=POLYNOMIAL)


@gluon.constexpr_function
def _exp2_asm(n):
    """PTX of 2^x for n values, the last one as a polynomial."""
    lines = [f"ex2.approx.ftz.f32 ${i}, ${n + i};" for i in range(n - 1)]
    # x = e + f with an integer e, which adding 1.5 · 2^23 rounds into the low bits, and |f| <= 0.5; 2^f is a
    # polynomial, to whose exponent e is added.
    c0, c1, c2, c3 = EXP2_POLYNOMIAL
    lines.append(
        "{ .reg .f32 x, r, f, p; .reg .b32 e, b; "
        f"max.f32 x, ${2 * n - 1}, -126.0; "
        "add.rn.f32 r, x, 12582912.0; sub.rn.f32 f, r, 12582912.0; sub.rn.f32 f, x, f; "
        f"fma.rn.f32 p, f, {c3}, {c2}; fma.rn.f32 p, p, f, {c1}; fma.rn.f32 p, p, f, {c0}; "
        f"mov.b32 e, r; shl.b32 e, e, 23; mov.b32 b, p; add.s32 b, b, e; mov.b32 ${n - 1}, b; }}"
    )
    return " ".join(lines)


@gluon.constexpr_function
def _exp2_operands(n):
    return ",".join(["=f"] * n + ["f"] * n)


@gluon.jit
def _opaque(x):
    """x, through assembly that LLVM neither moves nor looks into."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


# ---------------------------------------------------------------------------------------------------------------------
# Named barriers
# ---------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _release(empty, stage, EMPTY: gl.constexpr, CONSUMERS: gl.constexpr, NAMED: gl.constexpr):
    if NAMED:
        _named_barrier("arrive", EMPTY + stage, CONSUMERS * WARPGROUP + 32)
    else:
        mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def _begin_turn(INDEX: gl.constexpr):
    _named_barrier("sync", TURN + INDEX, 2 * WARPGROUP)


@gluon.jit
def _end_turn(INDEX: gl.constexpr, CONSUMERS: gl.constexpr):
    _named_barrier("arrive", TURN + (INDEX + 1) % CONSUMERS, 2 * WARPGROUP)


@gluon.jit
def _named_barrier(KIND: gl.constexpr, barrier, THREADS: gl.constexpr):
    asm: gl.constexpr = _barrier_asm(KIND, THREADS)
    gl.inline_asm_elementwise(asm, "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _barrier_asm(kind, threads):
    """PTX that joins, or arrives at, the barrier in $1; $0 is the result that Triton asks for."""
    return f"bar.{kind} $1, {threads}; mov.u32 $0, 0;"
