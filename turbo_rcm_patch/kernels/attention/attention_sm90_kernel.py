"""The attention forward in Gluon for sm_90: one producer warp, three consumer warpgroups, persistent programs.

A program walks items. An item is a tile of CONSUMERS · QUERIES queries of one head, with all keys. Tiles that would
leave most programs idle at the end are split into items with a part of the keys each. The producer streams Q, K and V
through TMA into rings of shared memory and runs ahead into the next item. Each consumer owns QUERIES of the queries and
takes the keys from the last tile to the first, with an online softmax in base 2 (FlashAttention-2, Dao 2023). A
consumer's steps do not overlap. The tensor cores stay busy because the softmax of one of the three consumers runs
during the matmuls of the others.

Barriers are listed for use n = 0, 1, ... of a slot. Key tile i, counted over all items, is use i // STAGES of slot
i % STAGES. A query slot is used once per item.

    full   an mbarrier of one arrival, the producer's, and the expected bytes. Phase n ends when use n has landed, so
           consumers wait for parity n & 1.
    empty  one arrival per consumer that reads the slot, after its last read of use n. The producer waits for it before
           it fills use n + 1. For queries it is an mbarrier. Before use n the producer waits for phase n - 1, of parity
           (n & 1) ^ 1. For n = 0 this passes at once. For keys and values it is a named barrier: consumers arrive and
           the producer joins. The producer does not join before use 0, and joins once more per slot at the end, so that
           no barrier is left half full. No consumer can arrive twice in between: it arrives for use n + 1 only after
           that use has landed, hence after the producer has joined for use n.
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

from ..gluon_releases import jit, tma_load, tma_store

CONSUMERS = gl.constexpr(3)
QUERIES = gl.constexpr(64)  # per consumer: the rows of one wgmma
KEYS = gl.constexpr(128)  # per tile
STAGES = gl.constexpr(2)  # of K, and of V
CONSUMER_REGISTERS = gl.constexpr(160)
PRODUCER_REGISTERS = gl.constexpr(24)
WARPGROUP = gl.constexpr(128)  # threads
# Numbers of named barriers. Triton uses 0 to 4: one per partition, and one for the start and end of all partitions.
K_EMPTY = gl.constexpr(10)
V_EMPTY = gl.constexpr(13)


@jit(do_not_specialize=["tokens", "kv_tokens", "heads", "items", "whole", "parts"])
def attention_kernel(
    q, k, v, out, lse, partial_out, partial_lse, tokens, kv_tokens, heads, items, whole, parts, scale_log2
):  # fmt: skip
    """q, k, v, out: descriptors over [B, H, S, D] of blocks [1, 1, QUERIES, D] (q, out) and [1, 1, KEYS, D].

    lse: fp32 [B, H, S], the logsumexp in base 2, or None. items: the first ``whole`` are tiles of queries
    with all keys; the others are ``parts`` parts of the keys of each further tile. The output and logsumexp of parts go
    to partial_out, fp32 [items - whole, CONSUMERS · QUERIES, D], and partial_lse. Both are None if there are no parts.
    """
    HEAD_DIM: gl.constexpr = q.block_type.shape[3]
    q_smem = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, QUERIES, HEAD_DIM], q.layout)
    k_smem = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, KEYS, HEAD_DIM], k.layout)
    v_smem = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, KEYS, HEAD_DIM], v.layout)
    out_smem = gl.allocate_shared_memory(out.dtype, [CONSUMERS, 1, 1, QUERIES, HEAD_DIM], out.layout)
    q_full = make_barriers(CONSUMERS)
    q_empty = make_barriers(CONSUMERS)
    k_full = make_barriers(STAGES)
    v_full = make_barriers(STAGES)
    fence_async_shared()
    buffers = (q_smem, k_smem, v_smem, out_smem, q_full, q_empty, k_full, v_full)
    sizes = (tokens, kv_tokens, heads, items, whole, parts)
    outputs = (out, lse, partial_out, partial_lse)
    gl.warp_specialize(
        [
            (_consume, (0, outputs, buffers, sizes, scale_log2)),
            (_consume, (1, outputs, buffers, sizes, scale_log2)),
            (_consume, (2, outputs, buffers, sizes, scale_log2)),
            (_produce, (q, k, v, buffers, sizes)),
        ],
        [4, 4, 1],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def make_barriers(NUMBER: gl.constexpr):
    """Allocate NUMBER mbarriers of one arrival."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=1)
    return barriers


@gluon.jit
def items_of_program(items):
    return gl.cdiv(items - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def locate(use, sizes):
    """Return the program's item number ``use``: the item, its sample, head and first query, and the first and end of
    its key tiles.

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
    row_tiles = gl.cdiv(tokens, CONSUMERS * QUERIES)
    sample_head = tile // row_tiles
    row = tile % row_tiles * (CONSUMERS * QUERIES)
    return item, sample_head // heads, sample_head % heads, row, first, end


@gluon.jit
def _parity(i):
    return (i // STAGES) & 1


# ---------------------------------------------------------------------------------------------------------------------
# Producer
# ---------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _produce(q, k, v, buffers, sizes):
    q_smem, k_smem, v_smem, _out_smem, q_full, q_empty, k_full, v_full = buffers
    filled = 0
    for use in range(items_of_program(sizes[3])):
        _item, sample, head, row, first, end = locate(use, sizes)
        # Load in the order of use: consumer 0 starts on its queries and the first keys while the others are still busy.
        fill_q(q, q_smem, q_full, q_empty, sample, head, row, 0, use)
        key = (end - 1) * KEYS
        _fill(k, k_smem, k_full, sample, head, key, filled, K_EMPTY)
        for i in gl.static_range(1, CONSUMERS):
            fill_q(q, q_smem, q_full, q_empty, sample, head, row, i, use)
        _fill(v, v_smem, v_full, sample, head, key, filled, V_EMPTY)
        filled += 1
        for _rest in range(end - 1 - first):
            key -= KEYS
            _fill(k, k_smem, k_full, sample, head, key, filled, K_EMPTY)
            _fill(v, v_smem, v_full, sample, head, key, filled, V_EMPTY)
            filled += 1
    for stage in gl.static_range(STAGES):
        if filled > stage:
            wait_until_empty(K_EMPTY + stage)
            wait_until_empty(V_EMPTY + stage)


@gluon.jit
def fill_q(q, smem, full, empty, sample, head, row, INDEX: gl.constexpr, use):
    mbarrier.wait(empty.index(INDEX), (use & 1) ^ 1)
    mbarrier.expect(full.index(INDEX), q.block_type.nbytes)
    tma_load(q, [sample, head, row + INDEX * QUERIES, 0], full.index(INDEX), smem.index(INDEX))


@gluon.jit
def _fill(x, smem, full, sample, head, start, filled, EMPTY: gl.constexpr):
    stage = filled % STAGES
    if filled >= STAGES:
        wait_until_empty(EMPTY + stage)
    mbarrier.expect(full.index(stage), x.block_type.nbytes)
    tma_load(x, [sample, head, start, 0], full.index(stage), smem.index(stage))


# ---------------------------------------------------------------------------------------------------------------------
# Consumers
# ---------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _consume(INDEX: gl.constexpr, outputs, buffers, sizes, scale_log2):
    out, lse, partial_out, partial_lse = outputs
    q_smem, k_smem, v_smem, out_smem, q_full, q_empty, k_full, v_full = buffers
    tokens, kv_tokens, heads, items, whole, _parts = sizes
    HEAD_DIM: gl.constexpr = out.block_type.shape[3]
    DTYPE: gl.constexpr = v_smem.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16]
    )
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUTPUT, k_width=2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    no_scores = gl.zeros([QUERIES, KEYS], gl.float32, SCORES)
    i = 0  # key tiles so far, over all items
    for use in range(items_of_program(items)):
        item, sample, head, row, first, end = locate(use, sizes)
        row += INDEX * QUERIES
        key_tiles = end - first
        keys = kv_tokens - (end - 1) * KEYS  # keys in the last tile, which comes first
        partial = gl.where(keys < KEYS, key_tiles, 0)
        mbarrier.wait(q_full.index(INDEX), use & 1)
        queries = q_smem.index(INDEX).reshape([QUERIES, HEAD_DIM])
        row_max = gl.full([QUERIES], float("-inf"), gl.float32, ROWS)
        row_sum = _sum_in_threads(no_scores)
        acc = gl.zeros([QUERIES, HEAD_DIM], gl.float32, OUTPUT)
        for rest in range(key_tiles, 0, -1):
            stage = i % STAGES
            mbarrier.wait(k_full.index(stage), _parity(i))
            scores = warpgroup_mma(queries, _keys(k_smem, stage), no_scores, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            release(K_EMPTY + stage)
            if rest == partial:  # this branch also keeps ptxas from moving the release below the softmax
                scores = _mask(scores, keys)
            weights, row_max, row_sum, correction = _softmax(scores, row_max, row_sum, scale_log2)
            p = gl.convert_layout(weights.to(DTYPE), P_LAYOUT)
            acc *= gl.convert_layout(correction, gl.SliceLayout(1, OUTPUT))[:, None]
            mbarrier.wait(v_full.index(stage), _parity(i))
            acc = warpgroup_mma(p, _values(v_smem, stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            release(V_EMPTY + stage)
            i += 1
        mbarrier.arrive(q_empty.index(INDEX), count=1)

        row_sum = gl.convert_layout(gl.sum(row_sum, 1), ROWS)
        acc = acc * gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, OUTPUT))[:, None]
        row_lse = row_max + gl.log2(row_sum)
        if partial_out is None or item < whole:
            tma.store_wait(0)  # the previous tile's output has left the buffer
            staged = out_smem.index(INDEX)
            staged.reshape([QUERIES, HEAD_DIM]).store(acc.to(out.dtype))
            fence_async_shared()
            tma_store(out, [sample, head, row, 0], staged)
            if lse is not None:
                rows = row + gl.arange(0, QUERIES, layout=ROWS)
                gl.store(lse + (sample.to(gl.int64) * heads + head) * tokens + rows, row_lse, mask=rows < tokens)
        if partial_out is not None and item >= whole:
            start = (item - whole).to(gl.int64) * (CONSUMERS * QUERIES) + INDEX * QUERIES
            gl.store(partial_lse + start + gl.arange(0, QUERIES, layout=ROWS), row_lse)
            rows = gl.arange(0, QUERIES, layout=gl.SliceLayout(1, OUTPUT))[:, None]
            columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, OUTPUT))[None, :]
            gl.store(partial_out + start * HEAD_DIM + opaque(rows) * HEAD_DIM + columns, acc)
    tma.store_wait(0)


@gluon.jit
def _keys(smem, stage):
    """Return Kᵀ of a stage, [D, KEYS]."""
    return _values(smem, stage).permute((1, 0))


@gluon.jit
def _values(smem, stage):
    """Return V of a stage, [KEYS, D]."""
    HEAD_DIM: gl.constexpr = smem.shape[4]
    return smem.index(stage).reshape([KEYS, HEAD_DIM])


@gluon.jit
def _mask(scores, keys):
    """Set the scores to -inf from column ``keys`` on. `opaque` keeps the comparisons inside the loop over items:
    outside they would hold registers."""
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, scores.type.layout))
    return gl.where((column < opaque(keys))[None, :], scores, float("-inf"))


@gluon.jit
def _softmax(scores, row_max, row_sum, scale_log2):
    """Return 2^(scores · scale - maximum), the new maximum and sum, and the correction factor of earlier tiles."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    weights = gl.exp2(scores * scale_log2 - new_max[:, None])
    correction = gl.exp2(row_max - new_max)
    row_correction = gl.convert_layout(correction, gl.SliceLayout(1, row_sum.type.layout))[:, None]
    return weights, new_max, row_sum * row_correction + _sum_in_threads(weights), correction


@gluon.jit
def _sum_in_threads(x):
    """Sum [rows, columns] to [rows, 8] within each thread. The threads of a row add up their sums only at the end."""
    return gl.sum(x.reshape([x.shape[0], x.shape[1] // 8, 8]), 1)


@gluon.jit
def opaque(x):
    """Return x through inline assembly, which LLVM can neither move nor simplify."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


# ---------------------------------------------------------------------------------------------------------------------
# Named barriers
# ---------------------------------------------------------------------------------------------------------------------


@gluon.jit
def release(barrier):
    """Arrive at a slot's empty barrier, as a consumer."""
    _named_barrier("arrive", barrier, CONSUMERS * WARPGROUP + 32)


@gluon.jit
def wait_until_empty(barrier):
    """Wait until all consumers have released a slot, as the producer."""
    _named_barrier("sync", barrier, CONSUMERS * WARPGROUP + 32)


@gluon.jit
def _named_barrier(KIND: gl.constexpr, barrier, THREADS: gl.constexpr):
    asm: gl.constexpr = _barrier_asm(KIND, THREADS)
    gl.inline_asm_elementwise(asm, "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _barrier_asm(kind, threads):
    """Return PTX that syncs with, or arrives at, the barrier in $1. $0 is the result that Triton requires."""
    return f"bar.{kind} $1, {threads}; mov.u32 $0, 0;"
