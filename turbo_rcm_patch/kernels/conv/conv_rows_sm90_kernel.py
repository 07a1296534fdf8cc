"""A convolution in Gluon for sm_90 that loads each row of pixels once for the three rows of the window.

It is built like conv_sm90_kernel.py, which says what the barriers are for. A tile is ROWS rows of BOX_W pixels of one
frame × all columns. A step multiplies, over `depth` channels, the pixels at one frame and one column of W's window. So
it has the rows of three positions, which lie one below the other. ROWS + 2 rows of x serve them all, where the other
kernel loads 3 · ROWS. Each row of the tile has a sum of its own, because a product's pixels must follow each other in
shared memory.

With 96 columns and 32 channels a step loads 43 KB for 6 · 128 · 96 · 32 multiplications. The other kernel loads 86 KB
for these, with tiles of 128 pixels.
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

ROWS = gl.constexpr(4)  # of a tile
WINDOW = gl.constexpr(3)  # rows and columns


@jit(do_not_specialize=("boxes", "T", "H", "W", "N"))
def conv_rows_kernel(
    x, front, weight, tail, residual, out, bias, boxes, T, H, W, N,
    C: gl.constexpr, KT: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute tiles of the convolution. x to out are TMA descriptors of a row's pixels. residual and bias may be None.

    front: the KT − 1 frames before x, or None if x begins with them. T, H, W: x's sizes without these frames.
    weight: [N, KT · 3 · 3 · C]. tail: the same, for the TAIL columns of a tile past a power of two.
    boxes: the number of boxes of ROWS rows in all frames.
    """
    DTYPE: gl.constexpr = x.dtype
    BOX_W: gl.constexpr = x.block_type.shape[2]
    DEPTH: gl.constexpr = x.block_type.shape[3]
    COLUMNS: gl.constexpr = weight.block_type.shape[0]
    CHUNK: gl.constexpr = out.block_type.shape[4]
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    a_rows = gl.allocate_shared_memory(DTYPE, [STAGES * (ROWS + WINDOW - 1), BOX_W, DEPTH], weight.layout)
    w_tiles = gl.allocate_shared_memory(DTYPE, [STAGES * WINDOW, COLUMNS, DEPTH], weight.layout)
    tail_tiles = gl.allocate_shared_memory(DTYPE, [STAGES * WINDOW, TAIL, DEPTH], weight.layout)
    STAGING: gl.constexpr = _matrix_layout(CHUNK)
    staging = gl.allocate_shared_memory(out.dtype, [ROWS * ((COLUMNS + TAIL) // CHUNK), BOX_W, CHUNK], STAGING)
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
    LOADED: gl.constexpr = ROWS + WINDOW - 1
    CHUNKS: gl.constexpr = C // DEPTH
    FRONT: gl.constexpr = 0 if front is None else KT - 1
    K: gl.constexpr = KT * WINDOW * WINDOW * C
    frames_of_x = T + KT - 1 - FRONT
    step = 0
    for tile in range(gl.program_id(0), _count_tiles(sizes, COLUMNS + TAIL), gl.num_programs(0)):
        sample, frame, top, left, _, _, column = _locate(tile, sizes, K, False, ROWS, BOX_W, COLUMNS + TAIL, 1, 0)
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
            for row in gl.static_range(LOADED):
                place = [image, top + row - 1, left + window_x - 1, c]
                pixels = reinterpret(a_rows.index(slot * LOADED + row), x.dtype, [1, 1, BOX_W, DEPTH], x.layout)
                # Two predicated loads, because a branch would make the consumers spill registers.
                if front is not None:
                    tma_load(front, place, arrived, pixels, pred=in_front)
                tma_load(x, place, arrived, pixels, pred=not in_front)
            for window_y in gl.static_range(WINDOW):
                of_window = ((window_t * WINDOW + window_y) * WINDOW + window_x) * C + c
                tma_load(weight, [column, of_window], arrived, w_tiles.index(slot * WINDOW + window_y))
                tma_load(tail, [column + COLUMNS, of_window], arrived, tail_tiles.index(slot * WINDOW + window_y))
            step += 1


@gluon.jit
def _load_residuals(residual, hand_over, sizes, K: gl.constexpr):
    """Hand the staging buffer to the consumers in turn, with the residual loaded if there is one, in one warp."""
    staging, staged, free = hand_over
    _, T, _, _, _ = sizes
    BOX_W: gl.constexpr = staging.shape[1]
    CHUNK: gl.constexpr = staging.shape[2]
    CHUNKS: gl.constexpr = staging.shape[0] // ROWS
    count = 0
    for tile in range(gl.program_id(0), _count_tiles(sizes, CHUNKS * CHUNK), gl.num_programs(0)):
        sample, frame, top, left, _, _, column = _locate(tile, sizes, K, False, ROWS, BOX_W, CHUNKS * CHUNK, 1, 0)
        mbarrier.wait(free, count & 1 ^ 1)
        arrived = staged.index(count % 2)
        if residual is None:
            mbarrier.arrive(arrived)
        else:
            mbarrier.expect(arrived, ROWS * BOX_W * CHUNKS * CHUNK * 2)
            for i in gl.static_range(ROWS * CHUNKS):
                place = [sample * T + frame, top + i // CHUNKS, 0, left, column + i % CHUNKS * CHUNK]
                tma_load(residual, place, arrived, _as_box(staging, i, residual))
        count += 1  # noqa: SIM113


@gluon.jit
def _consume(CONSUMER: gl.constexpr, operands, turns, hand_over, epilogue, K: gl.constexpr):
    """Compute every second tile of the program in one warpgroup."""
    _, w_tiles, tail_tiles, full, empty = operands
    staging, staged, free = hand_over
    residual, out, bias, sizes = epilogue
    BOX_W: gl.constexpr = staging.shape[1]
    CHUNKS: gl.constexpr = staging.shape[0] // ROWS
    COLUMNS: gl.constexpr = w_tiles.shape[1]
    TAIL: gl.constexpr = tail_tiles.shape[1]
    OF_TAIL: gl.constexpr = COLUMNS // staging.shape[2]
    STAGES: gl.constexpr = w_tiles.shape[0] // WINDOW
    STEPS: gl.constexpr = K // (WINDOW * w_tiles.shape[2])
    _, T, _, _, _ = sizes
    first = gl.program_id(0) + CONSUMER * gl.num_programs(0)
    step = CONSUMER * STEPS
    count = 0
    for tile in range(first, _count_tiles(sizes, COLUMNS + TAIL), 2 * gl.num_programs(0)):
        # Without turns a consumer could wait for a phase of full that is two ahead, which would read as complete.
        mbarrier.wait(turns.index(CONSUMER), count & 1 ^ (1 - CONSUMER))
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
        zeros = gl.zeros([BOX_W, COLUMNS], gl.float32, sum_layout(COLUMNS, 16))
        of_tail = gl.zeros([BOX_W, TAIL], gl.float32, sum_layout(TAIL, 16))
        sums = (zeros, of_tail, zeros, of_tail, zeros, of_tail, zeros, of_tail)
        sums = _start_rest(operands, _start_first(operands, sums, step, False), step, False)
        for _ in range(1, STEPS):
            step += 1
            mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
            sums = _start_first(operands, sums, step, True)
            sums = warpgroup_mma_wait(2 * WINDOW, deps=sums)  # all but this step's
            mbarrier.arrive(empty.index((step - 1) % STAGES))
            sums = _start_rest(operands, sums, step, True)
        mbarrier.arrive(turns.index(1 - CONSUMER))
        sample, frame, top, left, _, _, column = _locate(tile, sizes, K, False, ROWS, BOX_W, COLUMNS + TAIL, 1, 0)
        sums = warpgroup_mma_wait(0, deps=sums)
        mbarrier.arrive(empty.index(step % STAGES))
        step += 1 + STEPS  # skip the other consumer's steps
        mbarrier.wait(staged.index(CONSUMER), count & 1)
        for row in gl.static_range(ROWS):
            place = (sample * T + frame, top + row, 0, left, column, column)
            _store(sums[2 * row], place, 0, staging, row * CHUNKS, residual, out, None, bias, sizes)
            _store(sums[2 * row + 1], place, COLUMNS, staging, row * CHUNKS + OF_TAIL, residual, out, None, bias, sizes)
        tma.store_wait(0)  # until the stores have read the staging buffer
        mbarrier.arrive(free)
        count += 1  # noqa: SIM113
    tma.store_wait(0)


@gluon.jit
def _start_first(operands, sums, step, USE_ACC: gl.constexpr):
    """Start a step's products for the first row of the tile. They are few enough to wait for those before them."""
    a_rows, w_tiles, tail_tiles, _, _ = operands
    row_0, tail_0, row_1, tail_1, row_2, tail_2, row_3, tail_3 = sums
    row_0 = _multiply(a_rows, w_tiles, row_0, step, 0, USE_ACC)
    tail_0 = _multiply(a_rows, tail_tiles, tail_0, step, 0, USE_ACC)
    return row_0, tail_0, row_1, tail_1, row_2, tail_2, row_3, tail_3


@gluon.jit
def _start_rest(operands, sums, step, USE_ACC: gl.constexpr):
    """Start a step's products for the other rows of the tile."""
    a_rows, w_tiles, tail_tiles, _, _ = operands
    row_0, tail_0, row_1, tail_1, row_2, tail_2, row_3, tail_3 = sums
    row_1 = _multiply(a_rows, w_tiles, row_1, step, 1, USE_ACC)
    tail_1 = _multiply(a_rows, tail_tiles, tail_1, step, 1, USE_ACC)
    row_2 = _multiply(a_rows, w_tiles, row_2, step, 2, USE_ACC)
    tail_2 = _multiply(a_rows, tail_tiles, tail_2, step, 2, USE_ACC)
    row_3 = _multiply(a_rows, w_tiles, row_3, step, 3, USE_ACC)
    tail_3 = _multiply(a_rows, tail_tiles, tail_3, step, 3, USE_ACC)
    return row_0, tail_0, row_1, tail_1, row_2, tail_2, row_3, tail_3


@gluon.jit
def _multiply(a_rows, w_tiles, acc, step, ROW: gl.constexpr, USE_ACC: gl.constexpr):
    """Start acc + the products of a row of the tile with the rows of the window, or without acc if not USE_ACC."""
    slot = step % (w_tiles.shape[0] // WINDOW)
    for window_y in gl.static_range(WINDOW):
        pixels = a_rows.index(slot * (ROWS + WINDOW - 1) + ROW + window_y)
        of_window = w_tiles.index(slot * WINDOW + window_y).permute((1, 0))
        acc = warpgroup_mma(pixels, of_window, acc, use_acc=USE_ACC or window_y > 0, is_async=True)
    return acc
