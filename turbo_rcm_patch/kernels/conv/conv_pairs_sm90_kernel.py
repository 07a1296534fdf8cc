"""The convolution of pairs of frames in Gluon for sm_90: four products for two frames of the result (conv_pairs.py).

A program walks tiles: two boxes of pixels of a pair of frames × columns, a box for each of two consumer warpgroups. A
consumer has the sums of both frames in its registers. It computes them in two phases, each over all positions of the
window and all channels:

    p = Σ plane 0 ∗ weight 0,  q = Σ plane 1 ∗ weight 1      then y0 = p + q + residual 0,  y1 = p − q
    y0 += Σ plane 2 ∗ weight 2,  y1 += Σ plane 3 ∗ weight 3   then y1 += residual 1

A step multiplies one plane at one position of the window, over `depth` channels. The steps of the two sums alternate.
TMA gives zeros outside the image. The barriers are:

    full[slot]   operands of a step arrived
    empty[slot]  both consumers are done with them
    staged[c]    consumer c's part of the staging buffer is free, with a frame's residual in it
    free[c]      that part has been read, or stored

The residual of the first frame arrives during the first phase, that of the second during the second. Then the staging
buffer holds the results on their way to memory, the second frame first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from ..gluon_releases import jit, tma_load
from ..linear.gemm_sm90_epilogue import part_of, sum_layout
from ..linear.gemm_sm90_kernel import multiply
from .conv_sm90_kernel import _as_box, _count_tiles, _load_box, _load_rows, _locate, _matrix_layout, _store

WINDOW = gl.constexpr(9)  # positions in a plane
PLANES = gl.constexpr(4)
CONSUMERS = gl.constexpr(2)


@jit(do_not_specialize=("boxes", "pairs", "T", "H", "W", "N"))
def conv_pairs_kernel(
    planes, weight, tail, residual, out, bias, boxes, pairs, T, H, W, N,
    C: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Compute tiles of the convolution. planes to out are TMA descriptors. tail and bias may be None.

    planes: [B · pairs · 4, H, W, C]. weight: [N, 4 · 9 · C], of the planes in their order.
    tail: the weight for the TAIL columns of a tile past a power of two, or None.
    residual: [B · T, H, 1, W, N]. It is not read without HAS_RESIDUAL. out: [B · pairs · 2, H, 1, W, N].
    boxes: the number of boxes in all pairs of frames, divided by the consumers.
    """
    DTYPE: gl.constexpr = planes.dtype
    ROWS: gl.constexpr = planes.block_type.shape[1] * planes.block_type.shape[2]
    DEPTH: gl.constexpr = planes.block_type.shape[3]
    COLUMNS: gl.constexpr = weight.block_type.shape[0]
    CHUNK: gl.constexpr = out.block_type.shape[4]
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    a_tiles = gl.allocate_shared_memory(DTYPE, [STAGES * CONSUMERS, ROWS, DEPTH], weight.layout)
    w_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, COLUMNS, DEPTH], weight.layout)
    tail_tiles = w_tiles  # not used without a tail
    if TAIL:
        tail_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, TAIL, DEPTH], weight.layout)
    STAGING: gl.constexpr = _matrix_layout(CHUNK)
    staging = gl.allocate_shared_memory(out.dtype, [CONSUMERS * ((COLUMNS + TAIL) // CHUNK), ROWS, CHUNK], STAGING)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    staged = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    for consumer in gl.static_range(CONSUMERS):
        mbarrier.init(staged.index(consumer), count=1)
        mbarrier.init(free.index(consumer), count=1)
    fence_async_shared()
    operands = (a_tiles, w_tiles, tail_tiles, full, empty)
    hand_over = (staging, staged, free)
    sizes = (boxes, pairs, H, W, N)
    epilogue = (residual, out, bias, sizes)
    gl.warp_specialize(
        [
            (_consume, (0, operands, hand_over, epilogue, C, TAIL)),
            (_consume, (1, operands, hand_over, epilogue, C, TAIL)),
            (_load_operands, (planes, weight, tail, operands, sizes, C, TAIL)),
            (_load_residuals, (residual, hand_over, sizes, T, C, HAS_RESIDUAL)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


@gluon.jit
def _load_operands(planes, weight, tail, operands, sizes, C: gl.constexpr, TAIL: gl.constexpr):
    """Load the operands of every step, in one warp."""
    a_tiles, w_tiles, tail_tiles, full, empty = operands
    _, pairs, _, _, _ = sizes
    BOX_H: gl.constexpr = planes.block_type.shape[1]
    BOX_W: gl.constexpr = planes.block_type.shape[2]
    DEPTH: gl.constexpr = planes.block_type.shape[3]
    COLUMNS: gl.constexpr = w_tiles.shape[1]
    STAGES: gl.constexpr = w_tiles.shape[0]
    CHUNKS: gl.constexpr = C // DEPTH
    K: gl.constexpr = PLANES * WINDOW * C
    sources = (planes, None, weight, tail)
    step = 0
    for tile in range(gl.program_id(0), _count_tiles(sizes, COLUMNS + TAIL), gl.num_programs(0)):
        one = _locate(tile, sizes, K, False, BOX_H, BOX_W, COLUMNS + TAIL, CONSUMERS, 0)
        other = _locate(tile, sizes, K, False, BOX_H, BOX_W, COLUMNS + TAIL, CONSUMERS, 1)
        for k in range(PLANES * WINDOW * CHUNKS):
            # Both planes of a phase alternate at each position and depth.
            plane = k // (2 * WINDOW * CHUNKS) * 2 + k % 2
            position = k // 2 % (WINDOW * CHUNKS)
            tap = position // CHUNKS
            c = position % CHUNKS * DEPTH
            slot = step % STAGES
            arrived = full.index(slot)
            mbarrier.wait(empty.index(slot), (step // STAGES) & 1 ^ 1)
            mbarrier.expect(arrived, (CONSUMERS * BOX_H * BOX_W + COLUMNS + TAIL) * DEPTH * 2)
            _load_box(sources, _place(one, plane, tap, pairs), c, arrived, a_tiles, slot * CONSUMERS)
            _load_box(sources, _place(other, plane, tap, pairs), c, arrived, a_tiles, slot * CONSUMERS + 1)
            of_weight = (plane * WINDOW + tap) * C + c
            _load_rows(sources, one[6], of_weight, arrived, (a_tiles, w_tiles, tail_tiles), slot, TAIL)
            step += 1


@gluon.jit
def _place(box, plane, tap, pairs):
    """Return the box of a plane at a position in the window, as `_load_box` takes it."""
    sample, pair, top, left, _, _, _ = box
    return False, (sample * pairs + pair) * PLANES + plane, top + tap // 3 - 1, left + tap % 3 - 1


@gluon.jit
def _locate_result(
    tile, sizes, frames, FRAME: gl.constexpr, K: gl.constexpr, BOX_H: gl.constexpr, BOX_W: gl.constexpr,
    COLUMNS: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Return where a frame of a tile's pair begins in a tensor with `frames` frames, and its first column."""
    sample, pair, top, left, _, _, column = _locate(tile, sizes, K, False, BOX_H, BOX_W, COLUMNS, CONSUMERS, CONSUMER)
    return sample * frames + 2 * pair + FRAME, top, 0, left, column, column


@gluon.jit
def _load_residuals(residual, hand_over, sizes, T, C: gl.constexpr, HAS_RESIDUAL: gl.constexpr):
    """Hand each consumer its part of the staging buffer with the residual of each frame of its tiles, in one warp.

    Without a residual TMA writes zeros, as for all that lies outside a tensor. A kernel that adds nothing would need
    more registers than there are: ptxas then computes all sums of the first frame before those of the second.
    """
    staging, staged, free = hand_over
    BOX_H: gl.constexpr = residual.block_type.shape[1]
    BOX_W: gl.constexpr = residual.block_type.shape[3]
    CHUNKS: gl.constexpr = staging.shape[0] // CONSUMERS
    CHUNK: gl.constexpr = staging.shape[2]
    K: gl.constexpr = PLANES * WINDOW * C
    for tile in range(gl.program_id(0), _count_tiles(sizes, CHUNKS * CHUNK), gl.num_programs(0)):
        for frame in gl.static_range(2):
            for consumer in gl.static_range(CONSUMERS):
                mbarrier.wait(free.index(consumer), 1 ^ frame)
                arrived = staged.index(consumer)
                image, top, _, left, column, _ = _locate_result(
                    tile, sizes, T, frame, K, BOX_H, BOX_W, CHUNKS * CHUNK, consumer
                )
                if not HAS_RESIDUAL:
                    image = -1
                mbarrier.expect(arrived, BOX_H * BOX_W * CHUNKS * CHUNK * 2)
                for i in gl.static_range(CHUNKS):
                    buffer = _as_box(staging, consumer * CHUNKS + i, residual)
                    tma_load(residual, [image, top, 0, left, column + i * CHUNK], arrived, buffer)


@gluon.jit
def _consume(CONSUMER: gl.constexpr, operands, hand_over, epilogue, C: gl.constexpr, TAIL: gl.constexpr):
    """Compute one of the two boxes of every tile, in one warpgroup."""
    a_tiles, w_tiles, _, _, _ = operands
    staging, staged, free = hand_over
    residual, out, bias, sizes = epilogue
    _, pairs, _, _, _ = sizes
    ROWS: gl.constexpr = a_tiles.shape[1]
    COLUMNS: gl.constexpr = w_tiles.shape[1]
    CHUNK: gl.constexpr = staging.shape[2]
    BOX_H: gl.constexpr = out.block_type.shape[1]
    BOX_W: gl.constexpr = out.block_type.shape[3]
    INDEX: gl.constexpr = CONSUMER * (staging.shape[0] // CONSUMERS)
    STEPS: gl.constexpr = WINDOW * (C // a_tiles.shape[2])  # of a phase and a sum
    K: gl.constexpr = PLANES * WINDOW * C
    step = 0
    for tile in range(gl.program_id(0), _count_tiles(sizes, COLUMNS + TAIL), gl.num_programs(0)):
        p = gl.zeros([ROWS, COLUMNS], gl.float32, sum_layout(COLUMNS, 16))
        q = gl.zeros([ROWS, COLUMNS], gl.float32, sum_layout(COLUMNS, 16))
        p_tail = p
        q_tail = q
        if TAIL:
            p_tail = gl.zeros([ROWS, TAIL], gl.float32, sum_layout(TAIL, 16))
            q_tail = gl.zeros([ROWS, TAIL], gl.float32, sum_layout(TAIL, 16))
        p, p_tail, q, q_tail, step = _multiply_phase(p, p_tail, q, q_tail, operands, step, STEPS, CONSUMER, TAIL)
        mbarrier.wait(staged.index(CONSUMER), 0)
        p, q = _combine(p, q, staging, INDEX)
        if TAIL:
            p_tail, q_tail = _combine(p_tail, q_tail, staging, INDEX + COLUMNS // CHUNK)
        fence_async_shared()  # TMA writes to what was read
        mbarrier.arrive(free.index(CONSUMER))
        p, p_tail, q, q_tail, step = _multiply_phase(p, p_tail, q, q_tail, operands, step, STEPS, CONSUMER, TAIL)
        mbarrier.wait(staged.index(CONSUMER), 1)
        second = _locate_result(tile, sizes, 2 * pairs, 1, K, BOX_H, BOX_W, COLUMNS + TAIL, CONSUMER)
        _store(q, second, 0, staging, INDEX, residual, out, None, bias, sizes)
        if TAIL:
            _store(q_tail, second, COLUMNS, staging, INDEX + COLUMNS // CHUNK, residual, out, None, bias, sizes)
        tma.store_wait(0)  # until the stores have read the staging buffer
        first = _locate_result(tile, sizes, 2 * pairs, 0, K, BOX_H, BOX_W, COLUMNS + TAIL, CONSUMER)
        _store(p, first, 0, staging, INDEX, None, out, None, bias, sizes)
        if TAIL:
            _store(p_tail, first, COLUMNS, staging, INDEX + COLUMNS // CHUNK, None, out, None, bias, sizes)
        tma.store_wait(0)
        mbarrier.arrive(free.index(CONSUMER))


@gluon.jit
def _multiply_phase(
    p, p_tail, q, q_tail, operands, step, STEPS: gl.constexpr, CONSUMER: gl.constexpr, TAIL: gl.constexpr
):  # fmt: skip
    """Add the products of a phase's two planes to the sums p and q. Return the sums and the next step."""
    a_tiles, w_tiles, tail_tiles, full, empty = operands
    STAGES: gl.constexpr = w_tiles.shape[0]
    PRODUCTS: gl.constexpr = 2 if TAIL else 1
    for i in range(STEPS):
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
        p = multiply(a_tiles, w_tiles, p, step, True, CONSUMER)
        if TAIL:
            p_tail = multiply(a_tiles, tail_tiles, p_tail, step, True, CONSUMER)
            p, p_tail, q, q_tail = warpgroup_mma_wait(PRODUCTS, deps=(p, p_tail, q, q_tail))
        else:
            p, q = warpgroup_mma_wait(PRODUCTS, deps=(p, q))
        # The products of the step before are done. Those of the phase before were waited for at its end.
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=i > 0)
        step += 1
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
        q = multiply(a_tiles, w_tiles, q, step, True, CONSUMER)
        if TAIL:
            q_tail = multiply(a_tiles, tail_tiles, q_tail, step, True, CONSUMER)
            p, p_tail, q, q_tail = warpgroup_mma_wait(PRODUCTS, deps=(p, p_tail, q, q_tail))
        else:
            p, q = warpgroup_mma_wait(PRODUCTS, deps=(p, q))
        mbarrier.arrive(empty.index((step - 1) % STAGES))
        step += 1
    if TAIL:
        p, p_tail, q, q_tail = warpgroup_mma_wait(0, deps=(p, p_tail, q, q_tail))
    else:
        p, q = warpgroup_mma_wait(0, deps=(p, q))
        p_tail, q_tail = p, q
    mbarrier.arrive(empty.index((step - 1) % STAGES))
    return p, p_tail, q, q_tail, step


@gluon.jit
def _combine(p, q, staging, INDEX: gl.constexpr):
    """Return ``p + q + residual`` and ``p − q``, for sums whose residual begins in the staging buffer at INDEX."""
    second = p - q
    return _add(p + q, staging, INDEX), second


@gluon.jit
def _add(acc, staging, INDEX: gl.constexpr):
    """Return sums plus the part of the staging buffer from INDEX on."""
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    CHUNK: gl.constexpr = staging.shape[2]
    if COLUMNS > CHUNK:
        HALF: gl.constexpr = COLUMNS // 2
        left, right = acc.reshape([ROWS, 2, HALF]).permute([0, 2, 1]).split()
        left = gl.convert_layout(left, part_of(acc.type.layout, HALF), assert_trivial=True)
        right = gl.convert_layout(right, part_of(acc.type.layout, HALF), assert_trivial=True)
        left = _add(left, staging, INDEX)
        right = _add(right, staging, INDEX + HALF // CHUNK)
        joined = gl.join(left, right).permute([0, 2, 1]).reshape([ROWS, COLUMNS])
        return gl.convert_layout(joined, acc.type.layout, assert_trivial=True)
    else:
        return acc + staging.index(INDEX).load(acc.type.layout).to(gl.float32)
