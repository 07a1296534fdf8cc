"""The ping-pong convolution in Gluon for sm_90: ``residual + (x ∗ W + b)``, built like gemm_sm90_kernel.py.

A program walks tiles: boxes of pixels of one frame × columns. It has one warp that loads operands, one that loads
residuals, and two consumer warpgroups with a tile each, which take turns at the tensor cores. A step multiplies the box
of x at one position of W's window, over `depth` channels; 96 channels are 64 and a rest of 32. TMA gives zeros outside
the image. The barriers are those of the GEMM:

    full[slot]   operands of a step arrived
    empty[slot]  their reader is done
    turns[c]     consumer c may start its main loop
    staged[c]    the staging buffer is consumer c's, residual included
    free         the staging buffer has been stored

If x is upsampled, residual and result are viewed as [B · frames, H, 2, W, 2 · N]. One 2 is for the phases of the rows,
the other for those of the columns. So the pixels of one phase are a box of the view. Otherwise the view is
[B · frames, H, 1, W, N]. If a residual's rows or columns count twice, both phases read the same ones.

Operands of 8 bits are summed in int32, and their images have a pixel around them (conv_8bit.py).

With BOXES = 2 a tile has more columns and two boxes of half as many pixels, one for each consumer. The consumers share
the rows of the weight and multiply at the same time. A slot is empty when both are done, there are no turns, and each
consumer has its own part of the staging buffer.
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

from ..gluon_releases import jit, reinterpret, tma_load, tma_store
from ..linear.gemm_portable import locate_tile
from ..linear.gemm_sm90_epilogue import part_of, sum_layout
from ..linear.gemm_sm90_kernel import multiply
from .conv_tiles import find_shift, locate_box, repeated_image

_locate_in_group = gluon.jit(locate_tile.fn)
_locate_box = gluon.jit(locate_box.fn)
_find_shift = gluon.jit(find_shift.fn)
_repeated_image = gluon.jit(repeated_image.fn)


@jit(do_not_specialize=("boxes", "T", "H", "W", "N"))
def conv_kernel(
    x, x_rest, front, front_rest, weight, weight_rest, tail, tail_rest, residual, out, factor, bias,
    boxes, T, H, W, N,
    C: gl.constexpr, KT: gl.constexpr, KH: gl.constexpr, UPSAMPLE: gl.constexpr, INTERLEAVE: gl.constexpr,
    REPEATS: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr, BOXES: gl.constexpr,
):  # fmt: skip
    """Compute tiles of the convolution. x to out are TMA descriptors. residual, factor and bias may be None.

    front: the KT − 1 frames before x, or None if x begins with them. T, H, W: x's sizes without these frames.
    weight: [N, KT · KH · KH · C], where N counts the rows of all interleaved frames. A window of 2×2 that upsamples has
    [N, 4 · KH · KH · C], for the phases of the result (conv_fold.py).
    tail: the weight for the TAIL columns of a tile past a power of two, or None.
    x_rest, front_rest, weight_rest, tail_rest: for the rest of a step's channels past a power of two, or None.
    factor: [N] fp32 for operands in int8.
    boxes: the number of boxes in all frames and phases, divided by BOXES.
    """
    DTYPE: gl.constexpr = x.dtype
    BOX_H: gl.constexpr = x.block_type.shape[1]
    BOX_W: gl.constexpr = x.block_type.shape[2]
    DEPTH: gl.constexpr = x.block_type.shape[3]
    ROWS: gl.constexpr = BOX_H * BOX_W
    COLUMNS: gl.constexpr = weight.block_type.shape[0]
    CHUNK: gl.constexpr = out.block_type.shape[4]
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    a_tiles = gl.allocate_shared_memory(DTYPE, [STAGES * BOXES, ROWS, DEPTH], weight.layout)
    w_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, COLUMNS, DEPTH], weight.layout)
    REST: gl.constexpr = 0 if x_rest is None else x_rest.block_type.shape[3]
    tail_tiles = w_tiles  # not used without a tail; the next three not without a rest
    a_rest, w_rest, tail_rest_tiles = a_tiles, w_tiles, w_tiles
    if TAIL:
        tail_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, TAIL, DEPTH], weight.layout)
    if REST:
        a_rest = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, REST], weight_rest.layout)
        w_rest = gl.allocate_shared_memory(DTYPE, [STAGES, COLUMNS, REST], weight_rest.layout)
        if TAIL:
            tail_rest_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, TAIL, REST], weight_rest.layout)
    STAGING: gl.constexpr = _matrix_layout(CHUNK)
    staging = gl.allocate_shared_memory(out.dtype, [BOXES * ((COLUMNS + TAIL) // CHUNK), ROWS, CHUNK], STAGING)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    staged = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [BOXES, 1], BARRIER)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=BOXES)
    for consumer in gl.static_range(2):
        mbarrier.init(turns.index(consumer), count=1)
        mbarrier.init(staged.index(consumer), count=1)
    for part in gl.static_range(BOXES):
        mbarrier.init(free.index(part), count=1)
    fence_async_shared()
    sources = (x, front, weight, tail)
    rests = (x_rest, front_rest, weight_rest, tail_rest)
    operands = ((a_tiles, w_tiles, tail_tiles), (a_rest, w_rest, tail_rest_tiles), full, empty)
    hand_over = (staging, staged, free)
    sizes = (boxes, T, H, W, N)
    K: gl.constexpr = KT * KH * KH * C
    STEPS: gl.constexpr = KT * KH * KH * (C // DEPTH)
    epilogue = (residual, out, factor, bias, sizes, K)
    gl.warp_specialize(
        [
            (_consume, (0, operands, turns, hand_over, epilogue, STEPS, REST, TAIL, UPSAMPLE, INTERLEAVE, BOXES)),
            (_consume, (1, operands, turns, hand_over, epilogue, STEPS, REST, TAIL, UPSAMPLE, INTERLEAVE, BOXES)),
            (_load_operands, (sources, rests, operands, sizes, C, KT, KH, REST, TAIL, UPSAMPLE, BOXES)),
            (_load_residuals, (residual, out, hand_over, sizes, K, UPSAMPLE, INTERLEAVE, REPEATS, BOXES)),
        ],
        [4, 1, 1],
        [240, 24, 24] if BOXES == 1 else [208, 64, 32],
    )


@gluon.constexpr_function
def _matrix_layout(columns):
    """Return the shared-memory layout of a matrix of 16-bit elements with swizzled rows."""
    return gl.NVMMASharedLayout(swizzle_byte_width=2 * columns, element_bitwidth=16, rank=2)


@gluon.jit
def _count_tiles(sizes, COLUMNS: gl.constexpr):
    boxes, _, _, _, N = sizes
    return boxes * gl.cdiv(N, COLUMNS)


@gluon.jit
def _locate(
    tile, sizes, K: gl.constexpr, UPSAMPLE: gl.constexpr, BOX_H: gl.constexpr, BOX_W: gl.constexpr,
    COLUMNS: gl.constexpr, BOXES: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Return the sample, frame, top, left and phases of a tile's box, and the tile's first column.

    K: the number of products in a result's sum. PART: the index of the box in the tile.
    """
    boxes, T, H, W, N = sizes
    ROWS: gl.constexpr = BOXES * BOX_H * BOX_W
    _, box, column_tile = _locate_in_group(tile, boxes, gl.cdiv(N, COLUMNS), 2 * ROWS * K, 2 * COLUMNS * K)
    PHASES: gl.constexpr = 4 if UPSAMPLE else 1
    box = (box // PHASES * BOXES + PART) * PHASES + box % PHASES  # the boxes of a tile have one phase
    sample, frame, top, left, phase_y, phase_x = _locate_box(box, T, H, W, UPSAMPLE, BOX_H, BOX_W)
    return sample, frame, top, left, phase_y, phase_x, column_tile * COLUMNS


@gluon.jit
def _locate_result(
    tile, sizes, K: gl.constexpr, UPSAMPLE: gl.constexpr, INTERLEAVE: gl.constexpr, REPEATS: gl.constexpr,
    BOX_H: gl.constexpr, BOX_W: gl.constexpr, COLUMNS: gl.constexpr, BOXES: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Return where a tile's result begins in the five dimensions of residual and result, and its first column.

    No tile has columns of two interleaved frames. REPEATS: how often the residual's frames, rows and columns count.
    """
    _, T, _, _, N = sizes
    sample, frame, top, left, phase_y, phase_x, column = _locate(
        tile, sizes, K, UPSAMPLE, BOX_H, BOX_W, COLUMNS, BOXES, PART
    )
    channels = N // INTERLEAVE
    part = column // channels if INTERLEAVE > 1 else 0
    image = _repeated_image(sample, frame, T, REPEATS[0]) * INTERLEAVE + part
    phase_y = phase_y // REPEATS[1]
    return image, top, phase_y, left, phase_x // REPEATS[2] * channels + column - part * channels, column


@gluon.jit
def _load_operands(
    sources, rests, operands, sizes, C: gl.constexpr, KT: gl.constexpr, KH: gl.constexpr,
    REST: gl.constexpr, TAIL: gl.constexpr, UPSAMPLE: gl.constexpr, BOXES: gl.constexpr,
):  # fmt: skip
    """Load the operands of every step, in one warp."""
    tiles, rest_tiles, full, empty = operands
    x, front, _, _ = sources
    w_tiles = tiles[1]
    _, T, _, _, _ = sizes
    BOX_H: gl.constexpr = x.block_type.shape[1]
    BOX_W: gl.constexpr = x.block_type.shape[2]
    DEPTH: gl.constexpr = x.block_type.shape[3]
    COLUMNS: gl.constexpr = w_tiles.shape[1]
    STAGES: gl.constexpr = w_tiles.shape[0]
    CHUNKS: gl.constexpr = C // DEPTH
    TAPS: gl.constexpr = KT * KH * KH
    FRONT: gl.constexpr = 0 if front is None else KT - 1
    BYTES: gl.constexpr = x.dtype.primitive_bitwidth // 8
    frames_of_x = T + KT - 1 - FRONT
    step = 0
    for tile in range(gl.program_id(0), _count_tiles(sizes, COLUMNS + TAIL), gl.num_programs(0)):
        box = _locate(tile, sizes, TAPS * C, UPSAMPLE, BOX_H, BOX_W, COLUMNS + TAIL, BOXES, 0)
        other = _locate(tile, sizes, TAPS * C, UPSAMPLE, BOX_H, BOX_W, COLUMNS + TAIL, BOXES, BOXES - 1)
        column = box[6]
        of_phase = (2 * box[4] + box[5]) * (TAPS * C) if UPSAMPLE and KH == 2 else 0
        for k in range(TAPS * CHUNKS):
            tap = k // CHUNKS
            slot = step % STAGES
            arrived = full.index(slot)
            mbarrier.wait(empty.index(slot), (step // STAGES) & 1 ^ 1)
            mbarrier.expect(arrived, (BOXES * BOX_H * BOX_W + COLUMNS + TAIL) * (DEPTH + REST) * BYTES)
            place = _place_in_window(box, tap, frames_of_x, KH, UPSAMPLE, FRONT, 2 - BYTES)
            c = k % CHUNKS * DEPTH
            _load_box(sources, place, c, arrived, tiles[0], slot * BOXES)
            if BOXES > 1:
                of_other = _place_in_window(other, tap, frames_of_x, KH, UPSAMPLE, FRONT, 2 - BYTES)
                _load_box(sources, of_other, c, arrived, tiles[0], slot * BOXES + 1)
            _load_rows(sources, column, of_phase + tap * C + c, arrived, tiles, slot, TAIL)
            if REST:
                c += DEPTH
                _load_box(rests, place, c, arrived, rest_tiles[0], slot)
                _load_rows(rests, column, of_phase + tap * C + c, arrived, rest_tiles, slot, TAIL)
            step += 1


@gluon.jit
def _place_in_window(
    box, tap, frames_of_x, KH: gl.constexpr, UPSAMPLE: gl.constexpr, FRONT: gl.constexpr, BORDER: gl.constexpr
):
    """Return the box of the input that belongs to a box of the result and a position in the window.

    It is four values: True if the box lies in front, its image in front or x, its top and its left.
    """
    sample, frame, top, left, phase_y, phase_x, _ = box
    y = top + BORDER + _find_shift(tap // KH % KH, phase_y, KH, UPSAMPLE)
    left_of_tap = left + BORDER + _find_shift(tap % KH, phase_x, KH, UPSAMPLE)
    source_frame = frame + tap // (KH * KH)  # counted over front and x
    in_front = source_frame < FRONT
    image = sample * FRONT + source_frame if in_front else sample * frames_of_x + source_frame - FRONT
    return in_front, image, y, left_of_tap


@gluon.jit
def _load_box(sources, place, c, arrived, a_tiles, index):
    """Load a box of x or front, with the channels from c on."""
    x, front, _, _ = sources
    in_front, image, y, left = place
    DEPTH: gl.constexpr = x.block_type.shape[3]
    SHAPE: gl.constexpr = [1, x.block_type.shape[1], x.block_type.shape[2], DEPTH]
    a_tile = reinterpret(a_tiles.index(index), x.dtype, SHAPE, x.layout)
    # Two predicated loads, because a branch would make the consumers spill registers.
    if front is not None:
        tma_load(front, [image, y, left, c], arrived, a_tile, pred=in_front)
    tma_load(x, [image, y, left, c], arrived, a_tile, pred=not in_front)


@gluon.jit
def _load_rows(sources, column, k, arrived, tiles, slot, TAIL: gl.constexpr):
    """Load a tile's rows of the weight from k on."""
    _, _, weight, tail = sources
    _, w_tiles, tail_tiles = tiles
    tma_load(weight, [column, k], arrived, w_tiles.index(slot))
    if TAIL:
        tma_load(tail, [column + w_tiles.shape[1], k], arrived, tail_tiles.index(slot))


@gluon.jit
def _load_residuals(
    residual, out, hand_over, sizes, K: gl.constexpr, UPSAMPLE: gl.constexpr, INTERLEAVE: gl.constexpr,
    REPEATS: gl.constexpr, BOXES: gl.constexpr,
):  # fmt: skip
    """Hand the staging buffer to the consumers in turn, with the residual loaded if there is one, in one warp."""
    staging, staged, free = hand_over
    BOX_H: gl.constexpr = out.block_type.shape[1]
    BOX_W: gl.constexpr = out.block_type.shape[3]
    CHUNKS: gl.constexpr = staging.shape[0] // BOXES
    CHUNK: gl.constexpr = staging.shape[2]
    count = 0
    for tile in range(gl.program_id(0), _count_tiles(sizes, CHUNKS * CHUNK), gl.num_programs(0)):
        for part in gl.static_range(BOXES):
            image, top, phase_y, left, place, _ = _locate_result(
                tile, sizes, K, UPSAMPLE, INTERLEAVE, REPEATS, BOX_H, BOX_W, CHUNKS * CHUNK, BOXES, part
            )
            mbarrier.wait(free.index(part), count & 1 ^ 1)
            arrived = staged.index(part if BOXES > 1 else count % 2)
            if residual is None:
                mbarrier.arrive(arrived)
            else:
                mbarrier.expect(arrived, BOX_H * BOX_W * CHUNKS * CHUNK * 2)
                for i in gl.static_range(CHUNKS):
                    buffer = _as_box(staging, part * CHUNKS + i, residual)
                    tma_load(residual, [image, top, phase_y, left, place + i * CHUNK], arrived, buffer)
        count += 1  # noqa: SIM113


@gluon.jit
def _as_box(staging, index, descriptor):
    """Return a chunk of the staging buffer as a box of a descriptor."""
    BOX_H: gl.constexpr = descriptor.block_type.shape[1]
    BOX_W: gl.constexpr = descriptor.block_type.shape[3]
    CHUNK: gl.constexpr = descriptor.block_type.shape[4]
    return reinterpret(staging.index(index), descriptor.dtype, [1, BOX_H, 1, BOX_W, CHUNK], descriptor.layout)


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr, operands, turns, hand_over, epilogue,
    STEPS: gl.constexpr, REST: gl.constexpr, TAIL: gl.constexpr, UPSAMPLE: gl.constexpr, INTERLEAVE: gl.constexpr,
    BOXES: gl.constexpr,
):  # fmt: skip
    """Compute every second tile of the program, or one of the two boxes of every tile, in one warpgroup."""
    tiles, rests, full, empty = operands
    a_tiles, w_tiles, tail_tiles = tiles
    a_rest, w_rest, tail_rest = rests
    staging, staged, free = hand_over
    residual, out, factor, bias, sizes, K = epilogue
    # Products that a step starts. They are waited for after the next step has started its own.
    PRODUCTS: gl.constexpr = (2 if TAIL else 1) * (2 if REST else 1)
    ROWS: gl.constexpr = a_tiles.shape[1]
    COLUMNS: gl.constexpr = w_tiles.shape[1]
    STAGES: gl.constexpr = w_tiles.shape[0]
    CHUNK: gl.constexpr = staging.shape[2]
    BITS: gl.constexpr = a_tiles.dtype.primitive_bitwidth
    SUM: gl.constexpr = gl.int32 if BITS == 8 else gl.float32
    BOX_H: gl.constexpr = out.block_type.shape[1]
    BOX_W: gl.constexpr = out.block_type.shape[3]
    PART: gl.constexpr = CONSUMER if BOXES > 1 else 0
    TURN: gl.constexpr = CONSUMER if BOXES == 1 else 0  # tiles of the other consumer before the first
    INDEX: gl.constexpr = PART * (staging.shape[0] // BOXES)
    first = gl.program_id(0) + TURN * gl.num_programs(0)
    step = TURN * STEPS
    count = 0
    for tile in range(first, _count_tiles(sizes, COLUMNS + TAIL), (3 - BOXES) * gl.num_programs(0)):
        if BOXES == 1:
            # Without turns a consumer could wait for a phase of full that is two ahead, which would read as complete.
            mbarrier.wait(turns.index(CONSUMER), count & 1 ^ (1 - CONSUMER))
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
        zeros = gl.zeros([ROWS, COLUMNS], SUM, sum_layout(COLUMNS, BITS))
        acc = multiply(a_tiles, w_tiles, zeros, step, False, PART)
        if REST:
            acc = multiply(a_rest, w_rest, acc, step, True)
        if TAIL:
            zeros = gl.zeros([ROWS, TAIL], SUM, sum_layout(TAIL, BITS))
            acc_tail = multiply(a_tiles, tail_tiles, zeros, step, False)
            if REST:
                acc_tail = multiply(a_rest, tail_rest, acc_tail, step, True)
            acc, acc_tail = warpgroup_mma_wait(PRODUCTS, deps=(acc, acc_tail))
        else:
            acc = warpgroup_mma_wait(PRODUCTS, deps=(acc,))
        for _ in range(1, STEPS):
            step += 1
            mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
            token = multiply(a_tiles, w_tiles, acc, step, True, PART)
            if REST:
                token = multiply(a_rest, w_rest, token, step, True)
            if TAIL:
                token_tail = multiply(a_tiles, tail_tiles, acc_tail, step, True)
                if REST:
                    token_tail = multiply(a_rest, tail_rest, token_tail, step, True)
                acc, acc_tail = warpgroup_mma_wait(PRODUCTS, deps=(token, token_tail))  # all but this step's
            else:
                acc = warpgroup_mma_wait(PRODUCTS, deps=(token,))
            mbarrier.arrive(empty.index((step - 1) % STAGES))
        if BOXES == 1:
            mbarrier.arrive(turns.index(1 - CONSUMER))
        place = _locate_result(
            tile, sizes, K, UPSAMPLE, INTERLEAVE, (1, 1, 1), BOX_H, BOX_W, COLUMNS + TAIL, BOXES, PART
        )
        if TAIL:
            acc, acc_tail = warpgroup_mma_wait(0, deps=(acc, acc_tail))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(step % STAGES))
        step += 1 + (2 - BOXES) * STEPS  # skip the other consumer's steps
        mbarrier.wait(staged.index(CONSUMER), count & 1)
        _store(acc, place, 0, staging, INDEX, residual, out, factor, bias, sizes)
        if TAIL:
            _store(acc_tail, place, COLUMNS, staging, COLUMNS // CHUNK, residual, out, factor, bias, sizes)
        tma.store_wait(0)  # until the stores have read the staging buffer
        mbarrier.arrive(free.index(PART))
        count += 1  # noqa: SIM113
    tma.store_wait(0)


@gluon.jit
def _store(acc, place, OFFSET: gl.constexpr, staging, INDEX: gl.constexpr, residual, out, factor, bias, sizes):
    """Run the epilogue for a tile's columns from OFFSET on, one chunk at a time, and store from the staging buffers
    from INDEX on."""
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    CHUNK: gl.constexpr = staging.shape[2]
    if COLUMNS > CHUNK:
        HALF: gl.constexpr = COLUMNS // 2
        left, right = acc.reshape([ROWS, 2, HALF]).permute([0, 2, 1]).split()
        left = gl.convert_layout(left, part_of(acc.type.layout, HALF), assert_trivial=True)
        right = gl.convert_layout(right, part_of(acc.type.layout, HALF), assert_trivial=True)
        NEXT: gl.constexpr = INDEX + HALF // CHUNK
        _store(left, place, OFFSET, staging, INDEX, residual, out, factor, bias, sizes)
        _store(right, place, OFFSET + HALF, staging, NEXT, residual, out, factor, bias, sizes)
    else:
        image, top, phase_y, left_of_box, channel, column = place
        _, _, _, _, N = sizes
        columns = column + OFFSET + gl.arange(0, COLUMNS, gl.SliceLayout(0, acc.type.layout))
        if factor is not None:
            acc = acc.to(gl.float32) * gl.load(factor + columns, mask=columns < N, other=0.0)[None, :]
        if bias is not None:
            acc += gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
        buffer = staging.index(INDEX)
        if residual is not None:
            acc += buffer.load(acc.type.layout).to(gl.float32)
        buffer.store(acc.to(out.dtype))
        fence_async_shared()
        tma_store(out, [image, top, phase_y, left_of_box, channel + OFFSET], _as_box(staging, INDEX, out))
