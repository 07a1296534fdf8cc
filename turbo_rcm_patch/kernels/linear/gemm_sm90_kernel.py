"""The ping-pong GEMM in Gluon for sm_90: ``c_skip ⊙ residual + c_out ⊙ f(a Wᵀ + low upᵀ + b)`` for one weight or three.

A program walks tiles of the output. It has one warp that loads operands, one that loads residuals, and two consumer
warpgroups with a tile each. The consumers take turns at the main loop: the tensor cores work for one consumer while the
other runs its epilogue. Residual and result share a buffer, the staging: filled by TMA, updated in place, stored by
TMA. The epilogue is fp32 and rounds once. Operands of 8 bits come with a scale for each row of a and of W. The epilogue
applies these first (gemm_sm90_epilogue.py). low and up, if given, come through the same buffers after a and W, in steps
of their own.

Gluon does not synchronise warps of different roles. Every hand-over is an mbarrier:

    full[slot]   operands of a step arrived
    empty[slot]  their reader is done
    turns[c]     consumer c may start its main loop
    staged[c]    the staging buffer is consumer c's: it holds c's residual or, without residuals, has been stored
    free         the staging buffer has been stored, and may be filled with a residual

For 8-bit results each consumer has a staging buffer of its own: the two take no more memory than one of 16 bits.
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

from ..gluon_releases import jit, reinterpret, tma_load
from .gemm_portable import locate_tile
from .gemm_sm90_epilogue import chunk_as, divide_by_bound, store_tile, sum_layout
from .low_rank import RANK_STEP

LOW_DEPTH = gl.constexpr(RANK_STEP)

_locate_in_group = gluon.jit(locate_tile.fn)


@jit(do_not_specialize=("runs", "samples", "M", "K"))
def gemm_kernel(
    a, weight, weight_tail, residual, out,
    bias, c_skip, skip_stride_b, c_out, out_stride_b, out_stride_c, starts, runs, skip_factor, out_factor, flag,
    a_scale, w_scale, a_norm, w_norm, bias_bound, result_scale, low, up, up_tail, rank,
    samples, M, N, K,
    STAGES: gl.constexpr, KIND: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    """The GEMM for one weight.

    a, weight, weight_tail, residual, out: TMA descriptors. weight_tail covers the tail columns of a tile, past a power
        of two. bias, residual, c_skip and c_out may be None.
    KIND: how c_out varies (coefficient.py). starts, runs: the starts and number of c_out's runs, or None and 0.
    GELU: True if f is GELU, else f is the identity. flag: from saturation.py, or None.
    a_scale, w_scale: None for 16-bit operands. a_norm, w_norm, bias_bound, result_scale: linear_gelu's bound, or None.
    low, up, up_tail: descriptors of the second pair, whose rank is a multiple of 64, or None.
    """
    coefficients = (c_skip, skip_stride_b, c_out, out_stride_b, out_stride_c, starts, runs, skip_factor, out_factor)
    scales = (a_scale, (w_scale,), (a_norm, w_norm, bias_bound, result_scale))
    epilogue = (residual, (out,), (bias,), coefficients, flag, scales)
    second = (low, up, up_tail, rank)
    _assign_roles(a, (weight,), (weight_tail,), second, epilogue, (samples, M, N, K), STAGES, KIND, GELU)


@jit(do_not_specialize=("M", "K"))
def gemm_of_three_kernel(
    a, weight_0, weight_1, weight_2, tail_0, tail_1, tail_2, out_0, out_1, out_2, bias_0, bias_1, bias_2,
    a_scale, scale_0, scale_1, scale_2, low, up, up_tail, rank,
    M, N, K,
    STAGES: gl.constexpr,
):  # fmt: skip
    """``a Wᵀ + low upᵀ + b`` for three W [N, K] and b [N], low [M, 3·rank] and up [3N, rank].

    All are descriptors except biases and scales. Biases, scales and the second pair may be None.
    """
    scales = (a_scale, (scale_0, scale_1, scale_2), (None, None, None, None))
    coefficients = (None, 0, None, 0, 0, None, 0, 1.0, 1.0)
    epilogue = (None, (out_0, out_1, out_2), (bias_0, bias_1, bias_2), coefficients, None, scales)
    weights = (weight_0, weight_1, weight_2)
    second = (low, up, up_tail, rank)
    _assign_roles(a, weights, (tail_0, tail_1, tail_2), second, epilogue, (1, M, N, K), STAGES, 0, False)


@gluon.jit
def _assign_roles(
    a, weights, tails, second, epilogue, sizes, STAGES: gl.constexpr, KIND: gl.constexpr, GELU: gl.constexpr
):
    outs = epilogue[1]
    DTYPE: gl.constexpr = a.dtype
    BITS: gl.constexpr = DTYPE.primitive_bitwidth
    ROWS: gl.constexpr = a.block_type.shape[0]
    DEPTH: gl.constexpr = a.block_type.shape[1]
    COLUMNS: gl.constexpr = weights[0].block_type.shape[0]
    TAIL: gl.constexpr = tails[0].block_type.shape[0]
    CHUNK: gl.constexpr = outs[0].block_type.shape[2]
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    a_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, DEPTH], a.layout)
    w_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, COLUMNS, DEPTH], weights[0].layout)
    tail_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, TAIL, DEPTH], tails[0].layout)
    BUFFERS: gl.constexpr = 16 // outs[0].dtype.primitive_bitwidth
    CHUNKS: gl.constexpr = (COLUMNS + TAIL) // CHUNK
    staging = gl.allocate_shared_memory(outs[0].dtype, [BUFFERS * CHUNKS, 1, ROWS, CHUNK], outs[0].layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    staged = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    for consumer in gl.static_range(2):
        mbarrier.init(turns.index(consumer), count=1)
        mbarrier.init(staged.index(consumer), count=1)
    mbarrier.init(free, count=1)
    fence_async_shared()
    operands = (a_tiles, w_tiles, tail_tiles, full, empty)
    hand_over = (staging, staged, free)
    gl.warp_specialize(
        [
            (_consume, (0, operands, turns, hand_over, epilogue, sizes, second[3], KIND, GELU)),
            (_consume, (1, operands, turns, hand_over, epilogue, sizes, second[3], KIND, GELU)),
            (_load_operands, (a, weights, tails, second, operands, sizes)),
            (_load_residuals, (epilogue[0], hand_over, sizes, BITS, COLUMNS + TAIL, len(weights))),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


@gluon.jit
def _count_tiles(sizes, ROWS: gl.constexpr, COLUMNS: gl.constexpr, WEIGHTS: gl.constexpr):
    samples, M, N, _ = sizes
    return samples * gl.cdiv(M, ROWS) * (WEIGHTS * gl.cdiv(N, COLUMNS))


@gluon.jit
def _locate(tile, sizes, BITS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, WEIGHTS: gl.constexpr):
    """Return the sample, row, weight and column at which a tile begins. No tile has columns of two weights. BITS: the
    bits of an operand's element."""
    _, M, N, K = sizes
    column_tiles = gl.cdiv(N, COLUMNS)
    sample, row_tile, column_tile = _locate_in_group(
        tile, gl.cdiv(M, ROWS), WEIGHTS * column_tiles, ROWS * BITS // 8 * K, COLUMNS * BITS // 8 * K
    )
    weight = column_tile // column_tiles if WEIGHTS > 1 else 0
    return sample, row_tile * ROWS, weight, (column_tile - weight * column_tiles) * COLUMNS


@gluon.jit
def _load_operands(a, weights, tails, second, operands, sizes):
    """Load the operands of every step, in one warp."""
    a_tiles, w_tiles, tail_tiles, full, empty = operands
    _, M, N, K = sizes
    low, up, up_tail, rank = second
    ROWS: gl.constexpr = a_tiles.shape[1]
    DEPTH: gl.constexpr = a_tiles.shape[2]
    COLUMNS: gl.constexpr = w_tiles.shape[1]
    TAIL: gl.constexpr = tail_tiles.shape[1]
    STAGES: gl.constexpr = w_tiles.shape[0]
    WEIGHTS: gl.constexpr = len(weights)
    BITS: gl.constexpr = a.dtype.primitive_bitwidth
    tiles = _count_tiles(sizes, ROWS, COLUMNS + TAIL, WEIGHTS)
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        sample, row, weight, column = _locate(tile, sizes, BITS, ROWS, COLUMNS + TAIL, WEIGHTS)
        for k in range(0, K, DEPTH):
            slot = step % STAGES
            arrived = full.index(slot)
            mbarrier.wait(empty.index(slot), (step // STAGES) & 1 ^ 1)
            mbarrier.expect(arrived, (ROWS + COLUMNS + TAIL) * DEPTH * BITS // 8)
            tma_load(a, [sample * M + row, k], arrived, a_tiles.index(slot))
            for i in gl.static_range(WEIGHTS):
                if WEIGHTS == 1 or weight == i:
                    tma_load(weights[i], [column, k], arrived, w_tiles.index(slot))
                    tma_load(tails[i], [column + COLUMNS, k], arrived, tail_tiles.index(slot))
            step += 1
        if low is not None:
            for k in range(0, rank, LOW_DEPTH):
                slot = step % STAGES
                arrived = full.index(slot)
                mbarrier.wait(empty.index(slot), (step // STAGES) & 1 ^ 1)
                mbarrier.expect(arrived, (ROWS + COLUMNS + TAIL) * DEPTH * BITS // 8)
                tma_load(low, [sample * M + row, weight * rank + k], arrived, _as_16_bits(a_tiles, slot, low.dtype))
                up_row = weight * N + column
                tma_load(up, [up_row, k], arrived, _as_16_bits(w_tiles, slot, up.dtype))
                tma_load(up_tail, [up_row + COLUMNS, k], arrived, _as_16_bits(tail_tiles, slot, up.dtype))
                step += 1


@gluon.jit
def _load_residuals(residual, hand_over, sizes, BITS: gl.constexpr, COLUMNS: gl.constexpr, WEIGHTS: gl.constexpr):
    """Load residuals into the staging buffer for the consumers in turn, in one warp."""
    staging, staged, free = hand_over
    CHUNKS: gl.constexpr = staging.shape[0]
    ROWS: gl.constexpr = staging.shape[2]
    CHUNK: gl.constexpr = staging.shape[3]
    if residual is not None:
        count = 0
        for tile in range(gl.program_id(0), _count_tiles(sizes, ROWS, COLUMNS, WEIGHTS), gl.num_programs(0)):
            sample, row, _, column = _locate(tile, sizes, BITS, ROWS, COLUMNS, WEIGHTS)
            mbarrier.wait(free, count & 1 ^ 1)
            arrived = staged.index(count % 2)
            mbarrier.expect(arrived, ROWS * COLUMNS * 2)
            for i in gl.static_range(CHUNKS):
                buffer = chunk_as(staging, i, residual.dtype)
                tma_load(residual, [sample, row, column + i * CHUNK], arrived, buffer)
            count += 1  # noqa: SIM113


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr, operands, turns, hand_over, epilogue, sizes, rank, KIND: gl.constexpr, GELU: gl.constexpr
):
    """Compute every second tile of the program, in one warpgroup. rank: the second pair's, or None."""
    a_tiles, w_tiles, tail_tiles, full, empty = operands
    staging, staged, free = hand_over
    _, M, N, K = sizes
    ROWS: gl.constexpr = a_tiles.shape[1]
    COLUMNS: gl.constexpr = w_tiles.shape[1]
    TAIL: gl.constexpr = tail_tiles.shape[1]
    STAGES: gl.constexpr = w_tiles.shape[0]
    WEIGHTS: gl.constexpr = len(epilogue[1])
    RESIDUAL: gl.constexpr = epilogue[0] is not None
    CHUNKS: gl.constexpr = (COLUMNS + TAIL) // staging.shape[3]
    SHARED: gl.constexpr = staging.shape[0] == CHUNKS
    FIRST: gl.constexpr = 0 if SHARED else CONSUMER * CHUNKS  # first chunk in the staging buffer
    BITS: gl.constexpr = a_tiles.dtype.primitive_bitwidth
    SUM: gl.constexpr = gl.int32 if a_tiles.dtype == gl.int8 else gl.float32
    # With 8-bit operands the second pair is bf16 and needs another instruction. With 16-bit operands it only adds
    # steps.
    CHANGES: gl.constexpr = rank is not None and BITS == 8
    RESULT_BITS: gl.constexpr = 16 if CHANGES else BITS
    tiles = _count_tiles(sizes, ROWS, COLUMNS + TAIL, WEIGHTS)
    steps = gl.cdiv(K, a_tiles.shape[2])
    if rank is not None and not CHANGES:
        steps += rank // LOW_DEPTH
    first = gl.program_id(0) + CONSUMER * gl.num_programs(0)
    step = CONSUMER * steps
    count = 0
    for tile in range(first, tiles, 2 * gl.num_programs(0)):
        if CHANGES:  # computed again: kept across tiles they would spill
            before = tile // gl.num_programs(0)  # tiles that this program has done
            step = before * (steps + rank // LOW_DEPTH)
            count = before // 2
        # Without turns a consumer could wait for a phase of full that is two ahead, which would read as complete.
        mbarrier.wait(turns.index(CONSUMER), count & 1 ^ (1 - CONSUMER))
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
        acc = gl.zeros([ROWS, COLUMNS], SUM, sum_layout(COLUMNS, BITS))
        acc = multiply(a_tiles, w_tiles, acc, step, False)
        acc_tail = gl.zeros([ROWS, TAIL], SUM, sum_layout(TAIL, BITS))
        acc_tail = multiply(a_tiles, tail_tiles, acc_tail, step, False)
        acc, acc_tail = warpgroup_mma_wait(2, deps=(acc, acc_tail))
        for _ in range(1, steps):
            step += 1
            mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
            token = multiply(a_tiles, w_tiles, acc, step, True)
            token_tail = multiply(a_tiles, tail_tiles, acc_tail, step, True)
            acc, acc_tail = warpgroup_mma_wait(2, deps=(token, token_tail))  # all but this step's
            mbarrier.arrive(empty.index((step - 1) % STAGES))
        if CHANGES:
            acc, acc_tail = warpgroup_mma_wait(0, deps=(acc, acc_tail))
            acc = gl.convert_layout(acc.to(gl.float32), sum_layout(COLUMNS, 16), assert_trivial=True)
            acc_tail = gl.convert_layout(acc_tail.to(gl.float32), sum_layout(TAIL, 16), assert_trivial=True)
            for _ in range(0, rank, LOW_DEPTH):
                step += 1
                mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
                low = _as_16_bits(a_tiles, step % STAGES, gl.bfloat16)
                up = _as_16_bits(w_tiles, step % STAGES, gl.bfloat16).permute((1, 0))
                up_tail = _as_16_bits(tail_tiles, step % STAGES, gl.bfloat16).permute((1, 0))
                token = warpgroup_mma(low, up, acc, is_async=True)
                token_tail = warpgroup_mma(low, up_tail, acc_tail, is_async=True)
                acc, acc_tail = warpgroup_mma_wait(2, deps=(token, token_tail))
                mbarrier.arrive(empty.index((step - 1) % STAGES))
        mbarrier.arrive(turns.index(1 - CONSUMER))
        sample, row, weight, column = _locate(tile, sizes, BITS, ROWS, COLUMNS + TAIL, WEIGHTS)
        a_scale = None
        to_result = None
        if epilogue[5][0] is not None:
            rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, sum_layout(staging.shape[3], RESULT_BITS)))
            a_scale = gl.load(epilogue[5][0] + sample * M + rows, mask=rows < M, other=0.0)
            if epilogue[5][2][0] is not None:
                to_result = divide_by_bound(sample * M + rows, rows < M, column == 0, epilogue[5][2])
        acc, acc_tail = warpgroup_mma_wait(0, deps=(acc, acc_tail))
        mbarrier.arrive(empty.index(step % STAGES))
        step += 1 + steps  # skip the other consumer's steps
        if SHARED:
            # With a residual the buffer is filled for each consumer. Without one the consumers pass it on; 0 has it
            # first.
            mbarrier.wait(staged.index(CONSUMER), count & 1 if RESIDUAL else count & 1 ^ (1 - CONSUMER))
        store_tile(acc, a_scale, to_result, sample, row, weight, column, M, N, staging, FIRST, epilogue, KIND, GELU)
        NEXT: gl.constexpr = FIRST + COLUMNS // staging.shape[3]
        store_tile(
            acc_tail, a_scale, to_result, sample, row, weight, column + COLUMNS, M, N, staging, NEXT, epilogue,
            KIND, GELU,
        )  # fmt: skip
        tma.store_wait(0)  # until the stores have read the staging buffer
        if SHARED:
            mbarrier.arrive(free if RESIDUAL else staged.index(1 - CONSUMER))
        count += 1
    tma.store_wait(0)


@gluon.jit
def _as_16_bits(tiles, slot, DTYPE: gl.constexpr):
    """Return the bytes of an operand slot as a tile of DTYPE, which has 16 bits."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * LOW_DEPTH, element_bitwidth=16, rank=2)
    return reinterpret(tiles.index(slot), DTYPE, [tiles.shape[1], LOW_DEPTH], layout)


@gluon.jit
def multiply(a_tiles, w_tiles, acc, step, USE_ACC: gl.constexpr, PART: gl.constexpr = 0):
    """Start a step's product: acc + a wᵀ, or a wᵀ without USE_ACC. PART: the index of a, if a step has several."""
    slot = step % w_tiles.shape[0]
    w_tile = w_tiles.index(slot).permute((1, 0))
    a_tile = a_tiles.index(slot * (a_tiles.shape[0] // w_tiles.shape[0]) + PART)
    return warpgroup_mma(a_tile, w_tile, acc, use_acc=USE_ACC, is_async=True)
