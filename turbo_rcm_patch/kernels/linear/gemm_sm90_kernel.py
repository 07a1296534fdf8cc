"""The ping-pong GEMM in Gluon for sm_90: ``c_skip ⊙ residual + c_out ⊙ f(a Wᵀ + low upᵀ + b)`` for one weight or three.

A program walks tiles of the output. It has one warp that loads operands, one that loads residuals, and two consumer
warpgroups with a tile each. The consumers take turns at the main loop: the tensor cores work for one consumer while the
other runs its epilogue. Residual and result share a buffer, the staging: filled by TMA, updated in place, stored by
TMA. The epilogue is fp32 and rounds once. Operands of 8 bits come with a scale for each row of a and of W. The epilogue
applies these first. low and up, if given, come through the same buffers after a and W, in steps of their own.

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

from ..gluon_releases import jit, reinterpret, tma_load, tma_store
from ..saturation import saturate
from .gemm_portable import bound_scale, locate_tile
from .low_rank import RANK_STEP

LOW_DEPTH = gl.constexpr(RANK_STEP)

_locate_in_group = gluon.jit(locate_tile.fn)
_bound_scale = gluon.jit(bound_scale.fn)
_saturate = gluon.jit(saturate.fn)


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
                buffer = _view(staging, i, residual.dtype)
                tma_load(residual, [sample, row, column + i * CHUNK], arrived, buffer)
            count += 1  # noqa: SIM113


@gluon.jit
def _view(staging, index, DTYPE: gl.constexpr):
    """Return a chunk of the staging buffer as DTYPE. Residual and result may have different 16-bit dtypes."""
    ROWS: gl.constexpr = staging.shape[2]
    CHUNK: gl.constexpr = staging.shape[3]
    return reinterpret(staging.index(index), DTYPE, [1, ROWS, CHUNK], staging.layout)


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
                to_result = _divide_by_bound(sample * M + rows, rows < M, column == 0, epilogue[5][2])
        acc, acc_tail = warpgroup_mma_wait(0, deps=(acc, acc_tail))
        mbarrier.arrive(empty.index(step % STAGES))
        step += 1 + steps  # skip the other consumer's steps
        if SHARED:
            # With a residual the buffer is filled for each consumer. Without one the consumers pass it on; 0 has it
            # first.
            mbarrier.wait(staged.index(CONSUMER), count & 1 if RESIDUAL else count & 1 ^ (1 - CONSUMER))
        _store(acc, a_scale, to_result, sample, row, weight, column, M, N, staging, FIRST, epilogue, KIND, GELU)
        NEXT: gl.constexpr = FIRST + COLUMNS // staging.shape[3]
        _store(
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


@gluon.constexpr_function
def sum_layout(columns, bits):
    """Return the layout of the sums for operands of this many bits. An instruction multiplies 32 bytes along K."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 256 // bits])


@gluon.constexpr_function
def part_of(layout, columns):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, layout.instr_shape[2]])


@gluon.jit
def multiply(a_tiles, w_tiles, acc, step, USE_ACC: gl.constexpr, PART: gl.constexpr = 0):
    """Start a step's product: acc + a wᵀ, or a wᵀ without USE_ACC. PART: the index of a, if a step has several."""
    slot = step % w_tiles.shape[0]
    w_tile = w_tiles.index(slot).permute((1, 0))
    a_tile = a_tiles.index(slot * (a_tiles.shape[0] // w_tiles.shape[0]) + PART)
    return warpgroup_mma(a_tile, w_tile, acc, use_acc=USE_ACC, is_async=True)


@gluon.jit
def _store(
    acc, a_scale, to_result, sample, row, weight, column, M, N, staging, INDEX: gl.constexpr, epilogue,
    KIND: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    """Run the epilogue one chunk of columns at a time, and store from the staging buffers from INDEX on."""
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    CHUNK: gl.constexpr = staging.shape[3]
    if COLUMNS > CHUNK:
        HALF: gl.constexpr = COLUMNS // 2
        left, right = acc.reshape([ROWS, 2, HALF]).permute([0, 2, 1]).split()
        left = gl.convert_layout(left, part_of(acc.type.layout, HALF), assert_trivial=True)
        right = gl.convert_layout(right, part_of(acc.type.layout, HALF), assert_trivial=True)
        NEXT: gl.constexpr = INDEX + HALF // CHUNK
        _store(left, a_scale, to_result, sample, row, weight, column, M, N, staging, INDEX, epilogue, KIND, GELU)
        _store(right, a_scale, to_result, sample, row, weight, column + HALF, M, N, staging, NEXT, epilogue, KIND, GELU)
    else:
        columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, acc.type.layout))
        residual, outs = epilogue[0], epilogue[1]
        value = _apply_epilogue(acc, a_scale, sample, row, weight, columns, M, N, epilogue, KIND, GELU)
        if residual is not None:
            # Loaded only now: earlier it would take registers beside the gates.
            kept = _view(staging, INDEX, residual.dtype).reshape([ROWS, COLUMNS]).load(acc.type.layout)
            value = _add_residual(value, kept, sample, epilogue[3])
        if to_result is not None:
            value *= to_result[:, None]
        if epilogue[4] is not None:
            rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout))
            value = _saturate(value, rows < M, epilogue[4])
        buffer = _view(staging, INDEX, outs[0].dtype)
        buffer.reshape([ROWS, COLUMNS]).store(value.to(outs[0].dtype))
        fence_async_shared()
        for i in gl.static_range(len(outs)):
            if len(outs) == 1 or weight == i:
                tma_store(outs[i], [sample, row, column], buffer)


@gluon.jit
def _divide_by_bound(rows, mask, first, bound):
    """Return the factor for each row's results before they are rounded to 8 bits. The tile of the first columns stores
    its inverse, the row's scale."""
    a_norm, w_norm, bias_bound, result_scale = bound
    scale = _bound_scale(gl.load(a_norm + rows, mask=mask, other=0.0), gl.load(w_norm), gl.load(bias_bound))
    gl.store(result_scale + rows, scale, mask=mask & first)
    return 1 / scale


@gluon.jit
def _apply_epilogue(acc, a_scale, sample, row, weight, columns, M, N, epilogue, KIND: gl.constexpr, GELU: gl.constexpr):
    """Return c_out ⊙ f(acc · scales + b)."""
    biases, coefficients, scales = epilogue[2], epilogue[3], epilogue[5]
    _, _, c_out, out_stride_b, out_stride_c, starts, runs, _, _ = coefficients
    mask = columns < N
    if a_scale is not None:
        w_scale = gl.load(_of_weight(scales[1], weight) + columns, mask=mask, other=0.0)
        acc = acc.to(gl.float32) * w_scale[None, :] * a_scale[:, None]
    if biases[0] is not None:
        acc += gl.load(_of_weight(biases, weight) + columns, mask=mask, other=0.0).to(gl.float32)[None, :]
    if GELU:
        acc = _gelu(acc)
    if KIND == 1:
        acc *= gl.load(c_out + sample.to(gl.int64) * out_stride_b).to(gl.float32)
    elif KIND == 2:
        gate = c_out + sample.to(gl.int64) * out_stride_b + columns * out_stride_c
        acc *= gl.load(gate, mask=mask, other=0.0).to(gl.float32)[None, :]
    elif KIND == 4:
        acc = _gate_by_run(acc, sample * M + row, c_out + columns * out_stride_c, out_stride_b, mask, starts, runs)
    return acc


@gluon.jit
def _of_weight(pointers, weight):
    """Return the pointer that belongs to the weight."""
    pointer = pointers[0]
    for i in gl.static_range(1, len(pointers)):
        pointer = gl.where(weight == i, pointers[i], pointer)
    return pointer


@gluon.jit
def _gate_by_run(acc, token, gates, stride, mask, starts, runs):
    """Return acc, whose rows are the tokens from `token` on, times the gates of each token's run.

    Taken run by run, the gates are one row in registers. Gathered by token they would take as many registers as acc.
    """
    ROWS: gl.constexpr = acc.shape[0]
    tokens = token + gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout))
    for run in range(runs):
        begin = gl.load(starts + run)
        end = gl.load(starts + run + 1)
        if (begin < token + ROWS) & (end > token):
            gate = gl.load(gates + run * stride, mask=mask, other=0.0).to(gl.float32)
            within = (tokens >= begin) & (tokens < end)
            acc *= gl.where(within[:, None], gate[None, :], 1.0)
    return acc


@gluon.jit
def _add_residual(value, kept, sample, coefficients):
    c_skip, skip_stride_b, _, _, _, _, _, skip_factor, out_factor = coefficients
    kept = kept.to(gl.float32)
    if c_skip is not None:
        kept *= gl.load(c_skip + sample.to(gl.int64) * skip_stride_b).to(gl.float32)
    return value * out_factor + kept * skip_factor


@gluon.jit
def _gelu(x):
    """x / (1 + exp(-2u)) with u = √(2/π) (x + 0.044715 x³) as in linear_gelu, in few instructions: exp(-2u) is
    2 to the power x (c + d x²), and the division is a product with an approximate reciprocal."""
    e = gl.exp2(x * (-2.302208198144325 - 0.1029432395800185 * x * x))
    return x * gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1 + e], gl.float32, is_pure=True, pack=1
    )
