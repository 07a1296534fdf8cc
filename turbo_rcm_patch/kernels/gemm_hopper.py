"""The GEMM of linear_skip and linear_gelu for sm_90, warp-specialised: ``c_skip ⊙ residual + c_out ⊙ f(a Wᵀ + b)``.

a [samples·M, K], W [N, K], b [N]; residual and result [samples·M, N], all bf16 or fp16; f is GELU (tanh) or nothing.
The epilogue is fp32 and rounds once. A program has one warp that loads operands, one that loads residuals, and two
consumer warpgroups that multiply. What keeps the tensor cores busy while an epilogue runs is the Schedule:

- ping-pong: a tile per consumer. They take turns at the main loop, so that one's epilogue runs under the other's.
- cooperative: both consumers on halves of one tile, which is larger and needs fewer bytes of operands per product. The
  residual arrives during the main loop and the result leaves during that of the next tile; the arithmetic in between
  is not hidden. As a ring, residual and result take their turn in the stages of the operands, of which there are more.

Residual and result share a buffer, the staging: filled by TMA, updated in place, stored by TMA. This is Gluon, in which
nothing synchronises warps of different roles by itself: every hand-over is an mbarrier, named in `_kernel`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .aot import AotCase
from .coefficient import ONE, PER_CHANNEL, PER_SAMPLE, PER_TOKEN, coefficient_kind, coefficient_strides
from .dispatch import device_properties, is_hopper
from .gemm import locate_tile
from .tma import matrix_fits_tma

CAPABILITY = (9, 0)
_locate = gluon.jit(locate_tile.fn)
CHUNK = gl.constexpr(64)  # columns that an epilogue takes at once: in 16 bits a line of swizzled shared memory
SHARED_MEMORY_OF_BARRIERS = 1 << 10


@dataclass(frozen=True)
class Schedule:
    """How the output is cut and what the two consumers do with it.

    rows, columns: of the output that one consumer accumulates, 64 or 128 by 64, 128, 192 or 256. depth: per step along
    K, 32 or 64. stages: steps whose operands are in shared memory. pingpong: else cooperative. ring: cooperative, with
    no buffer for staging: it takes two of the stages after the last step of a tile; for depth 64.
    """

    rows: int
    columns: int
    depth: int
    stages: int
    pingpong: bool
    ring: bool = False

    @property
    def tile_rows(self) -> int:
        return self.rows if self.pingpong else 2 * self.rows

    @property
    def shared_memory(self) -> int:
        """Bytes for 16-bit elements."""
        operands = self.stages * (self.tile_rows + self.columns) * self.depth
        staging = 0 if self.ring else self.tile_rows * self.columns
        return 2 * (operands + staging) + SHARED_MEMORY_OF_BARRIERS

    def count(self, samples: int, M: int, N: int) -> int:
        return samples * triton.cdiv(M, self.tile_rows) * triton.cdiv(N, self.columns)

    @property
    def weight_boxes(self) -> tuple[int, int]:
        """The columns as a power of two and the rest, for the compiler's tensors have powers of two only."""
        power = 1 << (self.columns.bit_length() - 1)
        return power, self.columns - power


SCHEDULES = {
    "ping-pong 128x128": Schedule(128, 128, 64, stages=6, pingpong=True),
    "ping-pong 128x192": Schedule(128, 192, 64, stages=4, pingpong=True),
    "cooperative 128x256": Schedule(64, 256, 64, stages=3, pingpong=False),
    "cooperative 128x256, depth 32": Schedule(64, 256, 32, stages=6, pingpong=False),
    "ring 128x256": Schedule(64, 256, 64, stages=4, pingpong=False, ring=True),
    "cooperative 256x128": Schedule(128, 128, 64, stages=3, pingpong=False),
    "ring 256x128": Schedule(128, 128, 64, stages=4, pingpong=False, ring=True),
    "cooperative 256x192": Schedule(128, 192, 32, stages=4, pingpong=False),
    "ring 256x192": Schedule(128, 192, 64, stages=4, pingpong=False, ring=True),
}
DEFAULT = SCHEDULES["ping-pong 128x192"]


def why_not(
    a: torch.Tensor,
    weight: torch.Tensor,
    samples: int,
    residual: torch.Tensor | None = None,
    c_skip: torch.Tensor | None = None,
    c_out: torch.Tensor | None = None,
    schedule: Schedule = DEFAULT,
) -> str | None:
    """Why `launch` cannot take these, or would leave multiprocessors idle, in a few words; None when it should."""
    if not is_hopper(a.device):
        return "not a GPU of sm_90"
    if a.dtype not in (torch.bfloat16, torch.float16):
        return f"{str(a.dtype).removeprefix('torch.')} tensors"
    if residual is not None and residual.dtype != a.dtype:
        return "residual of another dtype"
    if coefficient_kind(c_skip) not in (ONE, PER_SAMPLE):
        return "c_skip per channel or token"  # would spill registers beside 192 accumulators
    if coefficient_kind(c_out) == PER_TOKEN:
        return "c_out per token"
    if (
        not all(matrix_fits_tma(matrix) for matrix in (a, weight, residual) if matrix is not None)
        or weight.shape[0] % 8
    ):
        return "rows or addresses that are no multiple of 16 bytes"
    if schedule.count(samples, a.shape[0] // samples, weight.shape[0]) < device_properties(a.device)[1]:
        return "fewer tiles than multiprocessors"
    return None


def launch(
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    samples: int = 1,
    *,
    gelu: bool = False,
    residual: torch.Tensor | None = None,
    c_skip: torch.Tensor | None = None,
    c_out: torch.Tensor | None = None,
    schedule: Schedule = DEFAULT,
) -> None:
    """Write ``c_skip ⊙ residual + c_out ⊙ f(a Wᵀ + b)`` to out, f GELU or nothing; `why_not` must have been None.

    a: [samples·M, K]. weight: [N, K]. bias: [N], contiguous. out, residual: [samples·M, N], contiguous.
    c_skip, c_out: canonical coefficients (coefficient.py) per sample, c_out also per channel, or None for 1.
    """
    (rows, K), N = a.shape, weight.shape[0]
    M = rows // samples
    columns, tail = schedule.weight_boxes
    chunk = [1, schedule.rows, CHUNK.value]
    descriptors = (
        _descriptor(a, [schedule.rows, schedule.depth]),
        _descriptor(weight, [columns, schedule.depth]),
        _descriptor(weight, [tail, schedule.depth]) if tail else None,
        None if residual is None else _descriptor(residual.view(samples, M, N), chunk),
        _descriptor(out.view(samples, M, N), chunk),
    )
    skip_stride_b, _, _ = coefficient_strides(c_skip)
    out_stride_b, _, out_stride_c = coefficient_strides(c_out)
    _, multiprocessors = device_properties(a.device)
    with torch.cuda.device_of(a):
        _kernel[(min(schedule.count(samples, M, N), multiprocessors),)](
            *descriptors,
            bias,
            *(c_skip, skip_stride_b),
            *(c_out, out_stride_b, out_stride_c),
            *(samples, M, N, K),
            KIND=coefficient_kind(c_out),
            GELU=gelu,
            STAGES=schedule.stages,
            PINGPONG=schedule.pingpong,
            RING=schedule.ring,
            num_warps=4,
        )


def _descriptor(tensor: torch.Tensor, box: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, box, _swizzle(box))


def _swizzle(box: list[int]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=2 * box[-1], element_bitwidth=16, rank=len(box))


@gluon.jit(do_not_specialize=("samples", "M", "K"))
def _kernel(
    a, weight, weight_tail, residual, out,
    bias, c_skip, skip_stride_b, c_out, out_stride_b, out_stride_c,
    samples, M, N, K,
    KIND: gl.constexpr, GELU: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """a, weight, weight_tail, residual, out: TMA descriptors; weight_tail of the columns past a power of two, or None.

    full[slot]: operands of a step arrived. empty[slot]: its readers are done. turns[c]: consumer c may start its main
    loop. staged[c]: the staging buffer is consumer c's, residual included. free[part]: it has been stored. In a ring,
    full and empty say the last two of the slots that stage. KIND: how c_out varies (coefficient.py).
    """
    ROWS: gl.constexpr = a.block_type.shape[0]
    DEPTH: gl.constexpr = a.block_type.shape[1]
    COLUMNS: gl.constexpr = weight.block_type.shape[0]
    TAIL: gl.constexpr = 0 if weight_tail is None else weight_tail.block_type.shape[0]
    PARTS: gl.constexpr = 1 if PINGPONG else 2
    CHUNKS: gl.constexpr = PARTS * (COLUMNS + TAIL) // CHUNK
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    a_tiles = gl.allocate_shared_memory(a.dtype, [STAGES * PARTS, ROWS, DEPTH], a.layout)
    w_tiles = gl.allocate_shared_memory(a.dtype, [STAGES, COLUMNS, DEPTH], weight.layout)
    tail_tiles = w_tiles
    if TAIL > 0:
        tail_tiles = gl.allocate_shared_memory(a.dtype, [STAGES, TAIL, DEPTH], weight_tail.layout)
    if not RING:
        chunks = gl.allocate_shared_memory(a.dtype, [CHUNKS, 1, ROWS, CHUNK], out.layout)
        staging = (chunks, chunks)
    elif ROWS == 64:
        chunks = w_tiles._reinterpret(a.dtype, [STAGES * COLUMNS // ROWS, 1, ROWS, CHUNK], out.layout)
        staging = (chunks, chunks)
    else:
        a_chunks = a_tiles._reinterpret(a.dtype, [STAGES * PARTS, 1, ROWS, CHUNK], out.layout)
        w_chunks = w_tiles._reinterpret(a.dtype, [STAGES, 1, ROWS, CHUNK], out.layout)
        staging = (a_chunks, w_chunks)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    staged = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [PARTS, 1], BARRIER)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=PARTS)
    for consumer in gl.static_range(2):
        mbarrier.init(turns.index(consumer), count=1)
        mbarrier.init(staged.index(consumer), count=1)
    for part in gl.static_range(PARTS):
        mbarrier.init(free.index(part), count=1)
    fence_async_shared()
    operands = (a_tiles, w_tiles, tail_tiles, full, empty)
    hand_over = (staging, staged, free)
    epilogue = (residual, out, bias, c_skip, skip_stride_b, c_out, out_stride_b, out_stride_c)
    sizes = (samples, M, N, K)
    if RING:
        gl.warp_specialize(
            [
                (_consumer_0, (operands, turns, hand_over, epilogue, sizes, KIND, GELU, TAIL, PINGPONG, RING)),
                (_consumer_1, (operands, turns, hand_over, epilogue, sizes, KIND, GELU, TAIL, PINGPONG, RING)),
                (_load_operands, (a, weight, weight_tail, residual, operands, staging, sizes, TAIL, PINGPONG, RING)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer_0, (operands, turns, hand_over, epilogue, sizes, KIND, GELU, TAIL, PINGPONG, RING)),
                (_consumer_1, (operands, turns, hand_over, epilogue, sizes, KIND, GELU, TAIL, PINGPONG, RING)),
                (_load_operands, (a, weight, weight_tail, residual, operands, staging, sizes, TAIL, PINGPONG, RING)),
                (_load_residuals, (residual, hand_over, sizes, COLUMNS + TAIL, PINGPONG)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )


@gluon.jit
def _load_operands(
    a, weight, weight_tail, residual, operands, staging, sizes,
    TAIL: gl.constexpr, PINGPONG: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """One warp: the operands of every step, and in a ring the residuals of both consumers after those of their tile."""
    a_tiles, w_tiles, tail_tiles, full, empty = operands
    samples, M, N, K = sizes
    ROWS: gl.constexpr = a_tiles.shape[1]
    DEPTH: gl.constexpr = a_tiles.shape[2]
    COLUMNS: gl.constexpr = w_tiles.shape[1]
    STAGES: gl.constexpr = w_tiles.shape[0]
    PARTS: gl.constexpr = 1 if PINGPONG else 2
    BYTES: gl.constexpr = (PARTS * ROWS + COLUMNS + TAIL) * DEPTH * 2
    row_tiles = gl.cdiv(M, PARTS * ROWS)
    column_tiles = gl.cdiv(N, COLUMNS + TAIL)
    step = 0
    for tile in range(gl.program_id(0), samples * row_tiles * column_tiles, gl.num_programs(0)):
        sample, row_tile, column_tile = _locate(tile, row_tiles, column_tiles)
        row = row_tile * (PARTS * ROWS)
        column = column_tile * (COLUMNS + TAIL)
        for k in range(0, K, DEPTH):
            slot = step % STAGES
            arrived = full.index(slot)
            mbarrier.wait(empty.index(slot), (step // STAGES) & 1 ^ 1)
            mbarrier.expect(arrived, BYTES)
            for part in gl.static_range(PARTS):
                a_tile = a_tiles.index(slot * PARTS + part)
                tma.async_copy_global_to_shared(a, [sample * M + row + part * ROWS, k], arrived, a_tile)
            tma.async_copy_global_to_shared(weight, [column, k], arrived, w_tiles.index(slot))
            if TAIL > 0:
                tma.async_copy_global_to_shared(weight_tail, [column + COLUMNS, k], arrived, tail_tiles.index(slot))
            step += 1
        if RING:
            for part in gl.static_range(PARTS):
                slot = step % STAGES
                mbarrier.wait(empty.index(slot), (step // STAGES) & 1 ^ 1)
                _stage(
                    residual, staging, full.index(slot), sample, row + part * ROWS, column, slot, STAGES, COLUMNS + TAIL
                )
                step += 1


@gluon.jit
def _load_residuals(residual, hand_over, sizes, COLUMNS: gl.constexpr, PINGPONG: gl.constexpr):
    """One warp: the staging buffer for the consumers in turn, or its halves for both."""
    staging, staged, free = hand_over
    samples, M, N, _ = sizes
    ROWS: gl.constexpr = staging[0].shape[2]
    PARTS: gl.constexpr = 1 if PINGPONG else 2
    row_tiles = gl.cdiv(M, PARTS * ROWS)
    column_tiles = gl.cdiv(N, COLUMNS)
    count = 0
    for tile in range(gl.program_id(0), samples * row_tiles * column_tiles, gl.num_programs(0)):
        sample, row_tile, column_tile = _locate(tile, row_tiles, column_tiles)
        row = row_tile * (PARTS * ROWS)
        column = column_tile * COLUMNS
        for part in gl.static_range(PARTS):
            mbarrier.wait(free.index(part), count & 1 ^ 1)
            arrived = staged.index(count % 2 if PINGPONG else part)
            _stage(residual, staging, arrived, sample, row + part * ROWS, column, part, PARTS, COLUMNS)
        count += 1  # noqa: SIM113


@gluon.jit
def _stage(residual, staging, arrived, sample, row, column, slot, SLOTS: gl.constexpr, COLUMNS: gl.constexpr):
    """Hand a slot of staging over, with the residual if there is one."""
    if residual is None:
        mbarrier.arrive(arrived)
    else:
        mbarrier.expect(arrived, residual.block_type.shape[1] * COLUMNS * 2)
        for chunk in gl.static_range(COLUMNS // CHUNK):
            buffer = _chunk_buffer(staging, slot, chunk, SLOTS)
            tma.async_copy_global_to_shared(residual, [sample, row, column + chunk * CHUNK], arrived, buffer)


@gluon.jit
def _chunk_buffer(staging, slot, INDEX: gl.constexpr, SLOTS: gl.constexpr):
    """The buffer [1, rows, CHUNK] of a slot's chunk: the first ones lie in staging[0], the others in staging[1]."""
    FIRST: gl.constexpr = staging[0].shape[0] // SLOTS
    REST: gl.constexpr = staging[1].shape[0] // SLOTS
    if INDEX < FIRST:
        return staging[0].index(slot * FIRST + INDEX)
    else:
        return staging[1].index(slot * REST + (INDEX - FIRST))


@gluon.jit
def _consumer_0(
    operands, turns, hand_over, epilogue, sizes,
    KIND: gl.constexpr, GELU: gl.constexpr, TAIL: gl.constexpr, PINGPONG: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    _consume(0, operands, turns, hand_over, epilogue, sizes, KIND, GELU, TAIL, PINGPONG, RING)


@gluon.jit
def _consumer_1(
    operands, turns, hand_over, epilogue, sizes,
    KIND: gl.constexpr, GELU: gl.constexpr, TAIL: gl.constexpr, PINGPONG: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    _consume(1, operands, turns, hand_over, epilogue, sizes, KIND, GELU, TAIL, PINGPONG, RING)


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr, operands, turns, hand_over, epilogue, sizes,
    KIND: gl.constexpr, GELU: gl.constexpr, TAIL: gl.constexpr, PINGPONG: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    a_tiles, w_tiles, tail_tiles, full, empty = operands
    staging, staged, free = hand_over
    samples, M, N, K = sizes
    ROWS: gl.constexpr = a_tiles.shape[1]
    COLUMNS: gl.constexpr = w_tiles.shape[1]
    STAGES: gl.constexpr = w_tiles.shape[0]
    PARTS: gl.constexpr = 1 if PINGPONG else 2
    PART: gl.constexpr = 0 if PINGPONG else CONSUMER
    IN_FLIGHT: gl.constexpr = 2 if TAIL > 0 else 1  # wgmma groups of one step
    row_tiles = gl.cdiv(M, PARTS * ROWS)
    column_tiles = gl.cdiv(N, COLUMNS + TAIL)
    steps = gl.cdiv(K, a_tiles.shape[2])
    first = gl.program_id(0)
    stride = gl.num_programs(0)
    step = 0
    if PINGPONG:  # every second tile of the program, and of its steps
        first += CONSUMER * stride
        stride *= 2
        step += CONSUMER * steps
    count = 0
    for tile in range(first, samples * row_tiles * column_tiles, stride):
        if PINGPONG:
            # Without its turn a consumer could wait for a phase of full that is two ahead, which reads as complete.
            mbarrier.wait(turns.index(CONSUMER), count & 1 ^ (1 - CONSUMER))
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, _layout(COLUMNS))
        acc = _multiply(a_tiles, w_tiles, acc, step, PARTS, PART, False)
        if TAIL > 0:
            acc_tail = gl.zeros([ROWS, TAIL], gl.float32, _layout(TAIL))
            acc_tail = _multiply(a_tiles, tail_tiles, acc_tail, step, PARTS, PART, False)
            acc, acc_tail = warpgroup_mma_wait(IN_FLIGHT, deps=(acc, acc_tail))
        else:
            acc = warpgroup_mma_wait(IN_FLIGHT, deps=(acc,))
        if RING:
            _free_staging(empty.index((step + STAGES - PARTS + PART) % STAGES), count > 0)
        elif not PINGPONG:
            _free_staging(free.index(PART), count > 0)
        for _ in range(1, steps):
            step += 1
            mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
            token = _multiply(a_tiles, w_tiles, acc, step, PARTS, PART, True)
            if TAIL > 0:
                token_tail = _multiply(a_tiles, tail_tiles, acc_tail, step, PARTS, PART, True)
                acc, acc_tail = warpgroup_mma_wait(IN_FLIGHT, deps=(token, token_tail))
            else:
                acc = warpgroup_mma_wait(IN_FLIGHT, deps=(token,))
            mbarrier.arrive(empty.index((step - 1) % STAGES))
        if PINGPONG:
            mbarrier.arrive(turns.index(1 - CONSUMER))
        sample, row_tile, column_tile = _locate(tile, row_tiles, column_tiles)
        if TAIL > 0:
            acc, acc_tail = warpgroup_mma_wait(0, deps=(acc, acc_tail))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(step % STAGES))
        step += 1
        if RING:
            # The other's slot is waited for too: no phase of full may be passed over unseen.
            other = step + (1 - PART)
            mbarrier.wait(full.index(other % STAGES), (other // STAGES) & 1)
            mbarrier.arrive(empty.index(other % STAGES))
            slot = (step + PART) % STAGES
            mbarrier.wait(full.index(slot), ((step + PART) // STAGES) & 1)
            step += PARTS
        else:
            slot = gl.to_tensor(PART)
            mbarrier.wait(staged.index(CONSUMER), count & 1)
        if PINGPONG:
            step += steps
        SLOTS: gl.constexpr = STAGES if RING else PARTS
        row = row_tile * (PARTS * ROWS) + PART * ROWS
        column = column_tile * (COLUMNS + TAIL)
        _store(acc, sample, row, column, N, staging, slot, 0, SLOTS, epilogue, KIND, GELU)
        if TAIL > 0:
            INDEX: gl.constexpr = COLUMNS // CHUNK
            _store(acc_tail, sample, row, column + COLUMNS, N, staging, slot, INDEX, SLOTS, epilogue, KIND, GELU)
        if PINGPONG:
            _free_staging(free.index(PART), True)
        count += 1  # noqa: SIM113
    tma.store_wait(0)


@gluon.constexpr_function
def _layout(columns):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def _multiply(a_tiles, w_tiles, acc, step, PARTS: gl.constexpr, PART: gl.constexpr, USE_ACC: gl.constexpr):
    """Start acc + a wᵀ, or a wᵀ, of a step."""
    slot = step % w_tiles.shape[0]
    w_tile = w_tiles.index(slot).permute((1, 0))
    return warpgroup_mma(a_tiles.index(slot * PARTS + PART), w_tile, acc, use_acc=USE_ACC, is_async=True)


@gluon.jit
def _free_staging(barrier, is_used):
    """Give the staging buffer back once the stores have read it."""
    tma.store_wait(0)
    mbarrier.arrive(barrier, pred=is_used)


@gluon.jit
def _store(
    acc, sample, row, column, N, staging, slot, INDEX: gl.constexpr, SLOTS: gl.constexpr, epilogue,
    KIND: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    """The epilogue, CHUNK columns at a time, in the slot's staging buffers from INDEX on."""
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    if COLUMNS > CHUNK:
        HALF: gl.constexpr = COLUMNS // 2
        left, right = acc.reshape([ROWS, 2, HALF]).permute([0, 2, 1]).split()
        left = gl.convert_layout(left, _layout(HALF), assert_trivial=True)
        right = gl.convert_layout(right, _layout(HALF), assert_trivial=True)
        NEXT: gl.constexpr = INDEX + HALF // CHUNK
        _store(left, sample, row, column, N, staging, slot, INDEX, SLOTS, epilogue, KIND, GELU)
        _store(right, sample, row, column + HALF, N, staging, slot, NEXT, SLOTS, epilogue, KIND, GELU)
    else:
        buffer = _chunk_buffer(staging, slot, INDEX, SLOTS)
        chunk = buffer.reshape([ROWS, COLUMNS])
        columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, acc.type.layout))
        out = epilogue[1]
        value = _apply_epilogue(acc, chunk, sample, columns, N, epilogue, KIND, GELU)
        chunk.store(value.to(out.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [sample, row, column], buffer)


@gluon.jit
def _apply_epilogue(acc, chunk, sample, columns, N, epilogue, KIND: gl.constexpr, GELU: gl.constexpr):
    residual, _, bias, c_skip, skip_stride_b, c_out, out_stride_b, out_stride_c = epilogue
    mask = columns < N
    sample = sample.to(gl.int64)
    if bias is not None:
        acc += gl.load(bias + columns, mask=mask, other=0.0).to(gl.float32)[None, :]
    if GELU:
        acc = _gelu(acc)
    if KIND == 1:
        acc *= gl.load(c_out + sample * out_stride_b).to(gl.float32)
    elif KIND == 2:
        gate = c_out + sample * out_stride_b + columns * out_stride_c
        acc *= gl.load(gate, mask=mask, other=0.0).to(gl.float32)[None, :]
    if residual is not None:
        kept = chunk.load(acc.type.layout).to(gl.float32)
        if c_skip is not None:
            kept *= gl.load(c_skip + sample * skip_stride_b).to(gl.float32)
        acc += kept
    return acc


@gluon.jit
def _gelu(x):
    """x / (1 + exp(-2u)) with u = √(2/π) (x + 0.044715 x³) as in linear_gelu, in few instructions: exp(-2u) is 2 to the
    power x (c + d x²), and the quotient a product with the approximate reciprocal."""
    e = gl.exp2(x * (-2.302208198144325 - 0.1029432395800185 * x * x))
    return x * gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1 + e], gl.float32, is_pure=True, pack=1
    )


def aot_cases(capability: tuple[int, int]) -> Iterator[AotCase]:
    """What launches on this architecture: every schedule with GELU and with a gate per channel, which is a block's, and
    the default with a c_skip."""
    if capability != CAPABILITY:
        return
    for name, schedule in SCHEDULES.items():
        yield _aot_case(f"linear_skip {name}", schedule, ONE, PER_CHANNEL)
        yield _aot_case(f"linear_gelu {name}", schedule, ONE, ONE, gelu=True)
    for kind in (ONE, PER_SAMPLE, PER_CHANNEL):
        yield _aot_case(f"linear_skip skip={PER_SAMPLE} out={kind}", DEFAULT, PER_SAMPLE, kind)


def _aot_case(name: str, schedule: Schedule, skip: int, out: int, gelu: bool = False) -> AotCase:
    def descriptor(*box: int) -> str:
        return f"tensordesc<bf16{list(box)},{_swizzle(list(box))!r}>"

    columns, tail = schedule.weight_boxes
    chunk = descriptor(1, schedule.rows, CHUNK.value)
    types = {
        "a": descriptor(schedule.rows, schedule.depth),
        "weight": descriptor(columns, schedule.depth),
        "weight_tail": descriptor(tail, schedule.depth) if tail else None,
        "residual": None if gelu else chunk,
        "out": chunk,
        "bias": "*bf16",
        "c_skip": None if skip == ONE else "*fp32",
        "c_out": None if out == ONE else "*fp32",
    }
    types |= dict.fromkeys(("skip_stride_b", "out_stride_b", "samples", "M", "N", "K"), "i32")
    constants = {argument: None for argument, given in types.items() if given is None}
    constants |= {"out_stride_c": 1, "KIND": out, "GELU": gelu}
    constants |= {"STAGES": schedule.stages, "PINGPONG": schedule.pingpong, "RING": schedule.ring}
    aligned = ("bias", "c_skip", "skip_stride_b", "c_out", "out_stride_b", "N")
    return AotCase(
        name=name,
        kernel=_kernel,
        signature={argument: types.get(argument) or "constexpr" for argument in _kernel.arg_names},
        constexprs=constants,
        divisible_by_16=tuple(argument for argument in aligned if argument not in constants),
        num_warps=4,
        num_stages=schedule.stages,
    )
