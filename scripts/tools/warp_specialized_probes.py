"""Warp-specialised kernels that compute nothing, and one with a race.

They show racecheck's reports about Triton itself, and that racecheck finds a real race (sanitize_kernels.py).
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier


def launch_probes() -> None:
    """Launch every kernel of this file. Needs a GPU of sm_90."""
    out = torch.zeros(128, dtype=torch.int64, device="cuda")
    for kernel in (*EMPTY_KERNELS, racy_kernel):
        kernel[(1,)](out, num_warps=4)


# ---------------------------------------------------------------------------------------------------------------------
# Empty, with the warps and registers of the package's attention and of its GEMM
# ---------------------------------------------------------------------------------------------------------------------


@gluon.jit
def empty_attention(out):
    gl.warp_specialize(
        [(_mark, (out, 0)), (_mark, (out, 1)), (_mark, (out, 2)), (_mark, (out, 3))], [4, 4, 1], [160, 160, 24]
    )


@gluon.jit
def empty_gemm(out):
    gl.warp_specialize(
        [(_mark, (out, 0)), (_mark, (out, 1)), (_mark, (out, 2)), (_mark, (out, 3))], [4, 1, 1], [240, 24, 24]
    )


@gluon.jit
def empty_attention_with_mbarrier(out):
    barrier = _make_mbarrier()
    gl.warp_specialize(
        [(_arrive, (barrier, out)), (_wait, (barrier, out, 1)), (_wait, (barrier, out, 2)), (_wait, (barrier, out, 3))],
        [4, 4, 1],
        [160, 160, 24],
    )


@gluon.jit
def empty_gemm_with_mbarrier(out):
    barrier = _make_mbarrier()
    gl.warp_specialize(
        [(_arrive, (barrier, out)), (_wait, (barrier, out, 1)), (_wait, (barrier, out, 2)), (_wait, (barrier, out, 3))],
        [4, 1, 1],
        [240, 24, 24],
    )


EMPTY_KERNELS = (empty_attention, empty_gemm, empty_attention_with_mbarrier, empty_gemm_with_mbarrier)


@gluon.jit
def _make_mbarrier():
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    fence_async_shared()
    return barrier


@gluon.jit
def _arrive(barrier, out):
    mbarrier.arrive(barrier, count=1)
    _mark(out, 0)


@gluon.jit
def _wait(barrier, out, PARTITION: gl.constexpr):
    mbarrier.wait(barrier, 0)
    _mark(out, PARTITION)


@gluon.jit
def _mark(out, PARTITION: gl.constexpr):
    gl.store(out + PARTITION, 1)  # the compiler would drop a partition without effects, and with it the hand-over


# ---------------------------------------------------------------------------------------------------------------------
# With a race
# ---------------------------------------------------------------------------------------------------------------------


@gluon.jit
def racy_kernel(out):
    """Let one partition write what the other reads, without any order between them."""
    memory = gl.allocate_shared_memory(gl.int64, [128], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    gl.warp_specialize([(_write, (memory,)), (_read, (memory, out))], [4], [160])


@gluon.jit
def _write(memory):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    memory.store(gl.arange(0, 128, LAYOUT).to(gl.int64))


@gluon.jit
def _read(memory, out):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    value = memory.load(LAYOUT)
    gl.store(out + gl.arange(0, 128, LAYOUT), value)
