"""A convolution in Gluon for sm_90 that loads each row of pixels once for the three rows of the window.

A program walks tiles: ROWS rows of BOX_W pixels of one frame for each of two consumer warpgroups × all columns. A step
multiplies, over `depth` channels, the pixels at one frame and one column of W's window. So it has the three positions
of the window that lie one below the other. The 2 · ROWS + 2 rows of x that it loads serve them all, where
conv_sm90_kernel.py loads each row of a tile three times. A consumer reads its ROWS + 2 rows into registers, each for up
to three rows of sums: tensor cores would read them from shared memory again for each product. The consumers take turns:
one multiplies while the other reads the rows of its next step.

The barriers are:

    full[slot]   operands of a step arrived
    empty[slot]  both consumers are done with them
    turns[c]     consumer c may start the products of a step
    staged[c]    consumer c's part of the staging buffer is free, with the residual in it
    free[c]      that part has been stored
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
from ..linear.gemm_sm90_epilogue import sum_layout
from .conv_sm90_kernel import _as_box, _count_tiles, _locate, _matrix_layout, _store

ROWS = gl.constexpr(3)  # of a consumer
WINDOW = gl.constexpr(3)  # rows and columns
LOADED = gl.constexpr(2 * ROWS.value + WINDOW.value - 1)  # rows of x in a step


@jit(do_not_specialize=("boxes", "T", "H", "W", "N"))
def conv_rows_kernel(
    x, front, weight, tail, residual, out, bias, boxes, T, H, W, N,
    C: gl.constexpr, KT: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute tiles of the convolution. x to out are TMA descriptors: x and front of a step's LOADED rows of pixels,
    residual and out of one row. residual and bias may be None.

    front: the KT − 1 frames before x, or None if x begins with them. T, H, W: x's sizes without these frames.
    weight: [N, KT · 3 · 3 · C]. tail: the same, for the TAIL columns of a tile past a power of two.
    boxes: the number of boxes of 2 · ROWS rows in all frames.
    """
    DTYPE: gl.constexpr = x.dtype
    BOX_W: gl.constexpr = x.block_type.shape[2]
    DEPTH: gl.constexpr = x.block_type.shape[3]
    COLUMNS: gl.constexpr = weight.block_type.shape[0]
    CHUNK: gl.constexpr = out.block_type.shape[4]
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    a_rows = gl.allocate_shared_memory(DTYPE, [STAGES * LOADED, BOX_W, DEPTH], weight.layout)
    w_tiles = gl.allocate_shared_memory(DTYPE, [STAGES * WINDOW, COLUMNS, DEPTH], weight.layout)
    tail_tiles = gl.allocate_shared_memory(DTYPE, [STAGES * WINDOW, TAIL, DEPTH], weight.layout)
    STAGING: gl.constexpr = _matrix_layout(CHUNK)
    staging = gl.allocate_shared_memory(out.dtype, [2 * ROWS * ((COLUMNS + TAIL) // CHUNK), BOX_W, CHUNK], STAGING)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    staged = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    for consumer in gl.static_range(2):
        mbarrier.init(turns.index(consumer), count=1)
        mbarrier.init(staged.index(consumer), count=1)
        mbarrier.init(free.index(consumer), count=1)
    fence_async_shared()
    operands = (a_rows, w_tiles, tail_tiles, full, empty)
    hand_over = (staging, staged, free)
    sizes = (boxes, T, H, W, N)
    K: gl.constexpr = KT * WINDOW * WINDOW * C
    epilogue = (residual, out, bias, sizes)
    gl.warp_specialize(
        [
            (_consume, (0, operands, turns, hand_over, epilogue, K)),
            (_consume, (1, operands, turns, hand_over, epilogue, K)),
            (_load_operands, (x, front, weight, tail, operands, sizes, C, KT)),
            (_load_residuals, (residual, hand_over, sizes, K)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


@gluon.jit
def _load_operands(x, front, weight, tail, operands, sizes, C: gl.constexpr, KT: gl.constexpr):
    """Load the operands of every step, in one warp."""
    a_rows, w_tiles, tail_tiles, full, empty = operands
    _, T, _, _, _ = sizes
    BOX_W: gl.constexpr = x.block_type.shape[2]
    DEPTH: gl.constexpr = x.block_type.shape[3]
    COLUMNS: gl.constexpr = w_tiles.shape[1]
    TAIL: gl.constexpr = tail_tiles.shape[1]
    STAGES: gl.constexpr = w_tiles.shape[0] // WINDOW
    CHUNKS: gl.constexpr = C // DEPTH
    FRONT: gl.constexpr = 0 if front is None else KT - 1
    K: gl.constexpr = KT * WINDOW * WINDOW * C
    frames_of_x = T + KT - 1 - FRONT
    boxes = reinterpret(a_rows, x.dtype, [STAGES, 1, LOADED, BOX_W, DEPTH], x.layout)  # all rows of a step
    step = 0
    for tile in range(gl.program_id(0), _count_tiles(sizes, COLUMNS + TAIL), gl.num_programs(0)):
        sample, frame, top, left, _, _, column = _locate(tile, sizes, K, False, 2 * ROWS, BOX_W, COLUMNS + TAIL, 1, 0)
        for k in range(KT * WINDOW * CHUNKS):
            c = k % CHUNKS * DEPTH
            window_x = k // CHUNKS % WINDOW
            window_t = k // (CHUNKS * WINDOW)
            source_frame = frame + window_t  # counted over front and x
            in_front = source_frame < FRONT
            image = sample * FRONT + source_frame if in_front else sample * frames_of_x + source_frame - FRONT
            slot = step % STAGES
            arrived = full.index(slot)
            mbarrier.wait(empty.index(slot), (step // STAGES) & 1 ^ 1)
            mbarrier.expect(arrived, (LOADED * BOX_W + WINDOW * (COLUMNS + TAIL)) * DEPTH * 2)
            place = [image, top - 1, left + window_x - 1, c]
            # Two predicated loads, because a branch would make the consumers spill registers.
            if front is not None:
                tma_load(front, place, arrived, boxes.index(slot), pred=in_front)
            tma_load(x, place, arrived, boxes.index(slot), pred=not in_front)
            for window_y in gl.static_range(WINDOW):
                of_window = ((window_t * WINDOW + window_y) * WINDOW + window_x) * C + c
                tma_load(weight, [column, of_window], arrived, w_tiles.index(slot * WINDOW + window_y))
                tma_load(tail, [column + COLUMNS, of_window], arrived, tail_tiles.index(slot * WINDOW + window_y))
            step += 1


@gluon.jit
def _load_residuals(residual, hand_over, sizes, K: gl.constexpr):
    """Hand each consumer its part of the staging buffer, with the residual loaded if there is one, in one warp."""
    staging, staged, free = hand_over
    _, T, _, _, _ = sizes
    BOX_W: gl.constexpr = staging.shape[1]
    CHUNK: gl.constexpr = staging.shape[2]
    CHUNKS: gl.constexpr = staging.shape[0] // (2 * ROWS)
    count = 0
    for tile in range(gl.program_id(0), _count_tiles(sizes, CHUNKS * CHUNK), gl.num_programs(0)):
        sample, frame, top, left, _, _, column = _locate(tile, sizes, K, False, 2 * ROWS, BOX_W, CHUNKS * CHUNK, 1, 0)
        for consumer in gl.static_range(2):
            mbarrier.wait(free.index(consumer), count & 1 ^ 1)
            arrived = staged.index(consumer)
            if residual is None:
                mbarrier.arrive(arrived)
            else:
                mbarrier.expect(arrived, ROWS * BOX_W * CHUNKS * CHUNK * 2)
                for i in gl.static_range(ROWS * CHUNKS):
                    row = consumer * ROWS + i // CHUNKS
                    place = [sample * T + frame, top + row, 0, left, column + i % CHUNKS * CHUNK]
                    tma_load(residual, place, arrived, _as_box(staging, consumer * ROWS * CHUNKS + i, residual))
        count += 1  # noqa: SIM113


@gluon.jit
def _consume(CONSUMER: gl.constexpr, operands, turns, hand_over, epilogue, K: gl.constexpr):
    """Compute ROWS rows of every tile in one warpgroup."""
    _, w_tiles, tail_tiles, _, empty = operands
    staging, staged, free = hand_over
    residual, out, bias, sizes = epilogue
    BOX_W: gl.constexpr = staging.shape[1]
    CHUNKS: gl.constexpr = staging.shape[0] // (2 * ROWS)
    COLUMNS: gl.constexpr = w_tiles.shape[1]
    TAIL: gl.constexpr = tail_tiles.shape[1]
    FIRST: gl.constexpr = CONSUMER * ROWS * CHUNKS  # of the consumer's chunks in the staging buffer
    OF_TAIL: gl.constexpr = FIRST + COLUMNS // staging.shape[2]
    STAGES: gl.constexpr = w_tiles.shape[0] // WINDOW
    STEPS: gl.constexpr = K // (WINDOW * w_tiles.shape[2])
    _, T, _, _, _ = sizes
    step = 0
    count = 0
    for tile in range(gl.program_id(0), _count_tiles(sizes, COLUMNS + TAIL), gl.num_programs(0)):
        zeros = gl.zeros([BOX_W, COLUMNS], gl.float32, sum_layout(COLUMNS, 16))
        of_tail = gl.zeros([BOX_W, TAIL], gl.float32, sum_layout(TAIL, 16))
        sums = (zeros, zeros, zeros, of_tail, of_tail, of_tail)
        for _ in range(STEPS):
            rows = _read_rows(operands, step, CONSUMER)
            mbarrier.wait(turns.index(CONSUMER), step & 1 ^ (1 - CONSUMER))
            sums = _start(operands, rows, sums, step)
            mbarrier.arrive(turns.index(1 - CONSUMER))
            sums = warpgroup_mma_wait(0, deps=sums)
            mbarrier.arrive(empty.index(step % STAGES))
            step += 1
        sample, frame, top, left, _, _, column = _locate(tile, sizes, K, False, 2 * ROWS, BOX_W, COLUMNS + TAIL, 1, 0)
        mbarrier.wait(staged.index(CONSUMER), count & 1)
        for row in gl.static_range(ROWS):
            place = (sample * T + frame, top + CONSUMER * ROWS + row, 0, left, column, column)
            _store(sums[row], place, 0, staging, FIRST + row * CHUNKS, residual, out, None, bias, sizes)
            _store(sums[ROWS + row], place, COLUMNS, staging, OF_TAIL + row * CHUNKS, residual, out, None, bias, sizes)
        tma.store_wait(0)  # until the stores have read the staging buffer
        mbarrier.arrive(free.index(CONSUMER))
        count += 1  # noqa: SIM113
    tma.store_wait(0)


@gluon.jit
def _read_rows(operands, step, CONSUMER: gl.constexpr):
    """Wait for a step's operands, and return the rows of pixels that a consumer multiplies."""
    a_rows, w_tiles, _, full, _ = operands
    STAGES: gl.constexpr = w_tiles.shape[0] // WINDOW
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, sum_layout(w_tiles.shape[1], 16), 2)
    mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
    first = step % STAGES * LOADED + CONSUMER * ROWS
    return (
        a_rows.index(first).load(OPERAND),
        a_rows.index(first + 1).load(OPERAND),
        a_rows.index(first + 2).load(OPERAND),
        a_rows.index(first + 3).load(OPERAND),
        a_rows.index(first + 4).load(OPERAND),
    )


@gluon.jit
def _start(operands, rows, sums, step):
    """Start a step's products."""
    _, w_tiles, tail_tiles, _, _ = operands
    row_0, row_1, row_2, tail_0, tail_1, tail_2 = sums
    row_0 = _multiply(w_tiles, rows, row_0, step, 0)
    row_1 = _multiply(w_tiles, rows, row_1, step, 1)
    row_2 = _multiply(w_tiles, rows, row_2, step, 2)
    tail_0 = _multiply(tail_tiles, rows, tail_0, step, 0)
    tail_1 = _multiply(tail_tiles, rows, tail_1, step, 1)
    tail_2 = _multiply(tail_tiles, rows, tail_2, step, 2)
    return row_0, row_1, row_2, tail_0, tail_1, tail_2


@gluon.jit
def _multiply(w_tiles, rows, acc, step, ROW: gl.constexpr):
    """Start acc + the products of the rows of pixels from ROW on with the rows of the window."""
    slot = step % (w_tiles.shape[0] // WINDOW)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, sum_layout(w_tiles.shape[1], 16), 2)
    for window_y in gl.static_range(WINDOW):
        pixels = gl.convert_layout(rows[ROW + window_y], OPERAND, assert_trivial=True)
        of_window = w_tiles.index(slot * WINDOW + window_y).permute((1, 0))
        acc = warpgroup_mma(pixels, of_window, acc, is_async=True)
    return acc
