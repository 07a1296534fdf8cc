"""The GEMM of the linear ops on sm_90: the inputs it takes, and its launch.

    c_skip ⊙ residual + c_out ⊙ f(a Wᵀ + low upᵀ + b)        f: GELU (tanh) or the identity; low and up are optional

a and W are bf16, fp16, or one 8-bit format with scales for their rows. residual and result are each bf16 or fp16. The
result of linear_gelu may also be fp8.

a [samples·M, K], W [N, K], b [N]; residual and result [samples·M, N]. The kernel is in gemm_sm90_kernel.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..coefficient import (
    ONE,
    PER_CHANNEL,
    PER_RUN,
    PER_SAMPLE,
    PER_TOKEN,
    count_runs,
    kind_and_strides,
)
from ..dispatch import SM90_DTYPES, device_properties, why_not_sm90
from ..launch import launch_kernel
from ..quantized import FP8, INT8
from ..sizes import cdiv
from ..tma import descriptor_of, matrix_fits_tma
from .gemm_portable import NO_PAIR, PLAIN, Bound, Scales, SecondPair
from .low_rank import RANK_STEP

if TYPE_CHECKING:
    from .spec import LinearSpec

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .gemm_sm90_kernel import gemm_kernel, gemm_of_three_kernel
except (ImportError, AttributeError) as error:
    GLUON_ERROR = str(error)
else:
    GLUON_ERROR = None

ROWS = 128
COLUMNS, TAIL = 128, 64  # 192 columns in two parts: the compiler's tensors have power-of-two sizes only
LINE = 128  # bytes of a row of a step along K, the width of the shared-memory swizzle
STAGES = 4  # steps along K whose operands are in shared memory at a time
# Columns that the epilogue handles at once, by the bytes of an operand's element. With scales, more would spill.
CHUNKS = {2: 64, 1: 32}


def why_not_on(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why the kernel cannot run on this device and dtype, or None if it can."""
    return why_not_sm90(device, dtype, GLUON_ERROR, (*SM90_DTYPES, INT8, FP8))


def why_not(spec: LinearSpec) -> str | None:
    """Return the reason why the kernel cannot run for a spec, or would leave multiprocessors idle, or None if it should
    run. The launch checks only addresses and strides (`fits_tma`)."""
    reason = why_not_on(spec.device, spec.dtype) or _why_not_sizes(spec) or _why_not_dtypes(spec)
    if reason is not None:
        return reason
    if spec.c_skip not in (ONE, PER_SAMPLE):
        return "c_skip per channel or token"  # would spill registers: 192 hold the sums
    if spec.c_out == PER_RUN and spec.c_skip != ONE:
        return "c_skip beside runs"  # would spill registers too
    if spec.c_out == PER_TOKEN:
        return "c_out per token"
    return None if spec.low is None else _why_not_low_rank(spec)


def _why_not_sizes(spec: LinearSpec) -> str | None:
    result = spec.result or spec.dtype
    if result not in (*SM90_DTYPES, FP8):
        return f"{str(result).removeprefix('torch.')} result"
    if spec.N * result.itemsize % 16 or spec.K * spec.dtype.itemsize % 16:
        return "rows or addresses that are no multiple of 16 bytes"
    tiles = spec.weights * count_tiles(spec.samples, spec.rows // spec.samples, spec.N)
    return "fewer tiles than multiprocessors" if tiles < device_properties(spec.device)[1] else None


def _why_not_dtypes(spec: LinearSpec) -> str | None:
    if spec.residual is None:
        return None
    for name, dtype in (("residual", spec.residual), ("result", spec.result or spec.dtype)):
        if dtype not in SM90_DTYPES:
            return f"{str(dtype).removeprefix('torch.')} {name}"
    return None


def _why_not_low_rank(spec: LinearSpec) -> str | None:
    in_8_bits = spec.dtype.itemsize == 1
    if spec.low != (torch.bfloat16 if in_8_bits else spec.dtype):
        return f"{str(spec.low).removeprefix('torch.')} low"
    if spec.rank % RANK_STEP:
        return f"a rank that is no multiple of {RANK_STEP}"
    gated = spec.residual is not None and spec.c_out == PER_CHANNEL
    if gated and in_8_bits and torch.float16 in (spec.residual, spec.result):
        return "low rank beside 8 bits, a gate and fp16"  # would spill registers
    return None


def fits_tma(*matrices: torch.Tensor | None) -> bool:
    """True if TMA can read all of these matrices without a copy."""
    return all(matrix is None or matrix_fits_tma(matrix) for matrix in matrices)


def count_tiles(samples: int, M: int, N: int) -> int:
    """Return the number of tiles of an output [samples·M, N]. No tile has rows of two samples."""
    return samples * cdiv(M, ROWS) * cdiv(N, COLUMNS + TAIL)


def launch(
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    samples: int = 1,
    gelu: bool = False,
    residual: torch.Tensor | None = None,
    c_skip: torch.Tensor | None = None,
    c_out: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    factors: tuple[float, float] = (1.0, 1.0),
    flag: torch.Tensor | None = None,
    scales: Scales = PLAIN,
    bound: Bound | None = None,
    second: SecondPair = NO_PAIR,
) -> None:
    """Write ``c_skip ⊙ residual + c_out ⊙ f(a Wᵀ + low upᵀ + b)`` to out. f is GELU or the identity.
    `why_not` must have returned None.

    a: [samples·M, K]. weight: [N, K]. bias: [N], contiguous. out, residual: [samples·M, N], contiguous.
    c_skip, c_out: canonical coefficients (coefficient.py) per sample, c_out also per channel, or None for 1. starts:
        the starts of c_out's runs, or None.
    factors: further factors of the two terms, used if there is a residual. flag: from saturation.py, or None.
    scales: those of an 8-bit a and weight. bound: for an fp8 result. second: low and up.
    """
    (rows, K), N = a.shape, weight.shape[0]
    M, depth, chunk = rows // samples, LINE // a.element_size(), CHUNKS[a.element_size()]
    _, (skip_stride_b, _, _) = kind_and_strides(c_skip)
    kind, (out_stride_b, _, out_stride_c) = kind_and_strides(c_out, starts)
    launch_kernel(
        gemm_kernel,
        _grid(a, count_tiles(samples, M, N)),
        _descriptor(a, ROWS, depth),
        _descriptor(weight, COLUMNS, depth),
        _descriptor(weight, TAIL, depth),
        None if residual is None else _descriptor(residual.view(samples, M, N), 1, ROWS, chunk),
        _descriptor(out.view(samples, M, N), 1, ROWS, chunk),
        bias,
        *(c_skip, skip_stride_b),
        *(c_out, out_stride_b, out_stride_c, starts, count_runs(starts)),
        *factors,
        flag,
        *scales,
        *(bound or (None,) * 4),
        *_second_descriptors(second),
        *(samples, M, N, K),
        STAGES=STAGES,
        KIND=kind,
        GELU=gelu,
        num_warps=4,
    )


def launch_three(
    a: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    outs: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor | None] = (None,) * 4,
    second: SecondPair = NO_PAIR,
) -> None:
    """Write ``a Wᵀ + low upᵀ + b`` for three W, up and b to three outs. `why_not` must have returned None.

    a: [M, K]. weights: three [N, K]. biases: three [N], contiguous, or all None. outs: three [M, N], contiguous.
    scales: the scales of a and of each weight, None without 8 bits. second: low [M, 3R] and up [3N, R].
    """
    (M, K), N = a.shape, weights[0].shape[0]
    depth, chunk = LINE // a.element_size(), CHUNKS[a.element_size()]
    launch_kernel(
        gemm_of_three_kernel,
        _grid(a, 3 * count_tiles(1, M, N)),
        _descriptor(a, ROWS, depth),
        *(_descriptor(weight, COLUMNS, depth) for weight in weights),
        *(_descriptor(weight, TAIL, depth) for weight in weights),
        *(_descriptor(out[None], 1, ROWS, chunk) for out in outs),
        *biases,
        *scales,
        *_second_descriptors(second),
        *(M, N, K),
        STAGES=STAGES,
        num_warps=4,
    )


def _second_descriptors(second: SecondPair) -> tuple:
    """Return descriptors of low, of up, and of up for the tail columns of a tile; and the rank."""
    if second.low is None:
        return (None,) * 4
    low, up = second
    return *(_descriptor(*box, RANK_STEP) for box in ((low, ROWS), (up, COLUMNS), (up, TAIL))), up.shape[1]


def _grid(a: torch.Tensor, tiles: int) -> tuple[int]:
    return (min(tiles, device_properties(a.device)[1]),)


def _descriptor(tensor: torch.Tensor, *box: int) -> TensorDescriptor:
    layout = _layout(len(box), box[-1], tensor.element_size())
    return descriptor_of(TensorDescriptor, tensor, tensor.shape, tensor.stride(), block_shape=list(box), layout=layout)


@functools.cache
def _layout(rank: int, columns: int, element_size: int) -> gl.NVMMASharedLayout:
    """Return the swizzled shared-memory layout of a box whose lines have `columns` elements."""
    width = columns * element_size
    return gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=8 * element_size, rank=rank)
