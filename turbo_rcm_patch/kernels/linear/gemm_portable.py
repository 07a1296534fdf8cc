"""The persistent GEMM ``a Wᵀ``. linear_skip, linear_gelu and linear add their own epilogues.

a is [samples·M, K], W [N, K], both row-major. A tile belongs to one sample, so that its per-channel coefficients are
vectors. Rows of a tile that reach into the next sample are not stored.
8-bit operands are multiplied directly, with sums in int32 or fp32. Their scales, one per row of a and of W, are applied
to the sums before the epilogue. A second pair, low [samples·M, R] and up [N, R], may be added to the same sums
(low_rank.py).
On sm_90 and newer, tiles are read through TMA descriptors. On older GPUs, and if an address or a row is not a multiple
of 16 bytes, they are read through pointers: there Triton's rewriting of descriptors neither vectorises nor pipelines.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..dispatch import check_result, device_properties
from ..launch import launch_kernel, register_options
from ..quantized import FP8, INT8, Quantized, QuantizedWeight
from ..quantized import LARGEST as _LARGEST
from ..quantized import TINY as _TINY
from ..sizes import cdiv
from ..tma import TMA_CAPABILITY, descriptor_of, matrix_fits_tma

# Tiles are numbered so that programs that run together share operands, which L2 then reads once. If the weight fits in
# L2 or has few column tiles, tiles are taken one row of tiles after the other. A larger weight is read once per group
# of row tiles. A group has as many row tiles as fit in L2, but at least as many as make the tiles that run together
# square.
L2_BYTES = tl.constexpr(16 << 20)  # less than the L2 of every GPU since sm_80
NARROW = tl.constexpr(16)  # column tiles
SQUARE_ROW_TILES = tl.constexpr(14)
# Columns that the epilogue handles at once. A whole tile would need more registers and shared memory than there are.
EPILOGUE_COLUMNS = tl.constexpr(64)
LARGEST_FP8 = tl.constexpr(_LARGEST[FP8])
TINY = tl.constexpr(_TINY)


class Scales(NamedTuple):
    """The scales of 8-bit operands: a's [samples·M] and the weight's [N], fp32. None for other operands."""

    a: torch.Tensor | None
    weight: torch.Tensor | None


PLAIN = Scales(None, None)


class SecondPair(NamedTuple):
    """The second pair of operands, whose product ``low upᵀ`` is added to the sums. Both are None without a second pair.

    low: [samples·M, R]. up: [N, R]. They have a's dtype, or 16 or 32 bits if a has 8.
    """

    low: torch.Tensor | None
    up: torch.Tensor | None


NO_PAIR = SecondPair(None, None)


class Bound(NamedTuple):
    """The terms of the bound on each row of an fp8 result, and the output for the row's scale (`bound_scale`). All are
    fp32."""

    a_norm: torch.Tensor  # [samples·M]
    weight_norm: torch.Tensor  # 0-d
    bias: torch.Tensor  # 0-d
    scale: torch.Tensor  # [samples·M]


@dataclass(frozen=True)
class Tiles:
    """The tiling of the output: rows × columns per tile, depth per step along K, programs per multiprocessor."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    programs: int = 1

    @functools.cached_property
    def options(self) -> dict[str, int]:
        """The constexprs and options of a launch."""
        return {
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "DEPTH": self.depth,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }

    def count(self, samples: int, M: int, N: int) -> int:
        return samples * -(-M // self.rows) * -(-N // self.columns)


# Each is ordered from large to small.
_TILES_TMA = (
    Tiles(128, 256, 64, num_warps=8, num_stages=3),
    Tiles(128, 128, 64, num_warps=8, num_stages=4),
    Tiles(64, 128, 64, num_warps=4, num_stages=4, programs=2),
    Tiles(64, 64, 64, num_warps=4, num_stages=4, programs=3),
)
_TILES_TMA_SMALL_MEMORY = (
    Tiles(128, 128, 64, num_warps=8, num_stages=3),
    Tiles(64, 128, 64, num_warps=4, num_stages=3),
    Tiles(64, 64, 64, num_warps=4, num_stages=3, programs=2),
)
_TILES_POINTER = (
    Tiles(128, 128, 32, num_warps=8, num_stages=4),
    Tiles(64, 128, 32, num_warps=4, num_stages=4, programs=2),
    Tiles(64, 64, 32, num_warps=4, num_stages=4, programs=3),
)
# Exact fp32 uses no tensor cores: every operand passes through registers, which limits the tile.
_TILES_FP32 = (
    Tiles(64, 64, 16, num_warps=8, num_stages=3, programs=2),
    Tiles(32, 32, 32, num_warps=4, num_stages=3, programs=4),
)


@functools.cache
def tile_candidates(capability: tuple[int, int], dtype: torch.dtype, descriptors: bool) -> tuple[Tiles, ...]:
    """Return the tiles for a compute capability, from large to small. All fit its shared memory."""
    if dtype == torch.float32:
        return _TILES_FP32
    tiles = _TILES_TMA if capability < (12, 0) else _TILES_TMA_SMALL_MEMORY
    tiles = tiles if descriptors else _TILES_POINTER
    return tuple(replace(tile, depth=2 * tile.depth) for tile in tiles) if dtype.itemsize == 1 else tiles


def choose_tiles(candidates: tuple[Tiles, ...], samples: int, M: int, N: int, multiprocessors: int) -> Tiles:
    """Return the largest tiles of which every multiprocessor gets one, or the smallest tiles if none are that many."""
    for tiles in candidates:
        if tiles.count(samples, M, N) >= multiprocessors:
            return tiles
    return candidates[-1]


def launch(
    kernel,
    a: torch.Tensor,
    weight: torch.Tensor,
    samples: int,
    *arguments,
    scales: Scales = PLAIN,
    second: SecondPair = NO_PAIR,
    candidates: Callable = tile_candidates,
    **constants,
) -> None:
    """Run a kernel that calls ``gemm`` on a [samples·M, K], weight [N, K] and an optional second pair.

    candidates: a function that returns the tiles to choose from, like `tile_candidates`.

    The kernel takes a, weight, samples, M, N, K, stride_a, stride_w, a_scale, w_scale, the second pair, R, stride_low,
    stride_up, the arguments, the constants, and the constexprs DESCRIPTORS, ROWS, COLUMNS, DEPTH.
    """
    a = a if a.stride(1) == 1 else a.contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    if a.element_size() == 1 and not (matrix_fits_tma(a) and matrix_fits_tma(weight) and a.shape[1] % 16 == 0):
        a, weight = _pad_rows(a), _pad_rows(weight)
    (rows, K), N = a.shape, weight.shape[0]
    M = rows // samples
    capability, multiprocessors = device_properties(a.device)
    descriptors = capability >= TMA_CAPABILITY and matrix_fits_tma(a) and matrix_fits_tma(weight)
    if second.low is not None:
        second = SecondPair(*(part if part.stride(1) == 1 else part.contiguous() for part in second))
        descriptors = descriptors and matrix_fits_tma(second.low) and matrix_fits_tma(second.up)
    tiles = choose_tiles(candidates(capability, a.dtype, descriptors), samples, M, N, multiprocessors)
    operands = _operands(a, weight, tiles, tiles.depth, descriptors)
    sizes = (samples, M, N, K, a.stride(0), weight.stride(0))
    pair = (None,) * 5
    if second.low is not None:
        depth = tiles.depth * a.element_size() // second.low.element_size()
        pair = (*_operands(*second, tiles, depth, descriptors), second.low.shape[1])
        pair += (second.low.stride(0), second.up.stride(0))
    programs = min(tiles.count(samples, M, N), multiprocessors * tiles.programs)
    launch_kernel(
        kernel,
        (programs,),
        *operands,
        *sizes,
        *scales,
        *pair,
        *arguments,
        **constants,
        DESCRIPTORS=descriptors,
        **tiles.options,
        **register_options(capability),
    )


def _operands(a: torch.Tensor, weight: torch.Tensor, tiles: Tiles, depth: int, descriptors: bool) -> tuple:
    """Return both operands as the kernel takes them: tensors, or descriptors of boxes with `depth` columns."""
    if not descriptors:
        return a, weight
    return (
        descriptor_of(TensorDescriptor, a, a.shape, a.stride(), block_shape=[tiles.rows, depth]),
        descriptor_of(TensorDescriptor, weight, weight.shape, weight.stride(), block_shape=[tiles.columns, depth]),
    )


def _pad_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Copy an 8-bit matrix [rows, K] and pad it with zeros to a multiple of 16 columns.

    Unaligned rows are read byte by byte, and such tiles would need more registers than there are. No known model has
    such rows.
    """
    rows, K = matrix.shape
    padded = matrix.new_zeros(rows, cdiv(K, 16) * 16, dtype=torch.uint8)
    padded[:, :K] = matrix.view(torch.uint8)
    return padded.view(matrix.dtype)


@triton.jit
def gemm(
    a, weight, samples, M, N, K, stride_a, stride_w, scales, second, EPILOGUE: tl.constexpr, arguments,
    KINDS: tl.constexpr, DESCRIPTORS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute this program's share of the tiles of a Wᵀ, and pass each to the epilogue in parts.

    The call is ``EPILOGUE(part, sample, rows, columns, M, N, arguments, KINDS)``. Rows are counted within the sample.
    scales: a's and the weight's, or two None. second: low, up, R and their strides, or None for each. KINDS: the
    epilogue's constexprs, which would become runtime values as members of the tuple of arguments.
    """
    OPERAND: tl.constexpr = a.dtype if DESCRIPTORS else a.dtype.element_ty
    SUM: tl.constexpr = tl.int32 if tl.int8 == OPERAND else tl.float32
    BYTES: tl.constexpr = OPERAND.primitive_bitwidth // 8
    low, up, R, stride_low, stride_up = second
    row_tiles = tl.cdiv(M, ROWS)
    column_tiles = tl.cdiv(N, COLUMNS)
    ONE_LOOP: tl.constexpr = low is None  # Triton cannot flatten two inner loops
    for tile in tl.range(tl.program_id(0), samples * row_tiles * column_tiles, tl.num_programs(0), flatten=ONE_LOOP):
        sample, row_tile, column_tile = locate_tile(
            tile, row_tiles, column_tiles, ROWS * BYTES * K, COLUMNS * BYTES * K
        )
        row = row_tile * ROWS
        column = column_tile * COLUMNS
        acc = tl.zeros((ROWS, COLUMNS), SUM)
        acc = add_products(
            acc, a, weight, sample, row, column, samples, M, N, K, stride_a, stride_w, DESCRIPTORS, DEPTH
        )
        if low is not None:
            LOW: tl.constexpr = low.dtype if DESCRIPTORS else low.dtype.element_ty
            LOW_DEPTH: tl.constexpr = DEPTH * OPERAND.primitive_bitwidth // LOW.primitive_bitwidth
            acc = add_products(
                acc.to(tl.float32), low, up, sample, row, column, samples, M, N, R, stride_low, stride_up, DESCRIPTORS,
                LOW_DEPTH,
            )  # fmt: skip
        epilogue_in_parts(acc, scales, sample, row, column, M, N, EPILOGUE, arguments, KINDS, ROWS, COLUMNS)


@triton.jit
def add_products(
    acc, a, weight, sample, row, column, samples, M, N, K, stride_a, stride_w, DESCRIPTORS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Return acc plus the tile of a Wᵀ that begins at this row of the sample and this column."""
    ROWS: tl.constexpr = acc.shape[0]
    COLUMNS: tl.constexpr = acc.shape[1]
    SUM: tl.constexpr = acc.dtype
    if DESCRIPTORS:
        for k in range(0, K, DEPTH):
            a_tile = a.load([sample * M + row, k])
            w_tile = weight.load([column, k])
            acc = tl.dot(a_tile, w_tile.T, acc, input_precision="ieee", out_dtype=SUM)
    else:
        # Rows past the end wrap around, which keeps them in bounds. Their results are not stored.
        a_rows = (sample * M + row + tl.arange(0, ROWS)) % (samples * M)
        w_rows = (column + tl.arange(0, COLUMNS)) % N
        depth = tl.arange(0, DEPTH)
        a_tiles = a + a_rows.to(tl.int64)[:, None] * stride_a + depth[None, :]
        w_tiles = weight + w_rows.to(tl.int64)[:, None] * stride_w + depth[None, :]
        for k in range(0, K, DEPTH):
            mask = (depth < K - k)[None, :]
            a_tile = tl.load(a_tiles + k, mask=mask, other=0.0)
            w_tile = tl.load(w_tiles + k, mask=mask, other=0.0)
            acc = tl.dot(a_tile, w_tile.T, acc, input_precision="ieee", out_dtype=SUM)
    return acc


@triton.jit
def locate_tile(tile, row_tiles, column_tiles, row_bytes, column_bytes):
    """Return the sample, row tile and column tile of a tile number. Within a group of row tiles, numbers run down
    before across. row_bytes, column_bytes: the bytes of a for a row tile, and of the weight for a column tile."""
    group = tl.cast(L2_BYTES, tl.int32) // tl.maximum(row_bytes, 1)
    group = tl.maximum(group, SQUARE_ROW_TILES)
    if (column_tiles <= NARROW) | (column_tiles * column_bytes <= L2_BYTES):
        group = tl.cast(1, tl.int32)
    sample = tile // (row_tiles * column_tiles)
    within_sample = tile % (row_tiles * column_tiles)
    first_row = within_sample // (group * column_tiles) * group
    group_rows = min(row_tiles - first_row, group)
    within_group = within_sample % (group * column_tiles)
    return sample, first_row + within_group % group_rows, within_group // group_rows


@triton.jit
def epilogue_in_parts(
    acc, scales, sample, row, column, M, N, EPILOGUE: tl.constexpr, arguments, KINDS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # A c_skip per token takes as many registers as the residual.
    PER_TOKEN: tl.constexpr = KINDS is not None and KINDS[0] == 3
    AT_ONCE: tl.constexpr = EPILOGUE_COLUMNS // 4 if PER_TOKEN else EPILOGUE_COLUMNS
    if COLUMNS > AT_ONCE:
        HALF: tl.constexpr = COLUMNS // 2
        left, right = tl.split(acc.reshape(ROWS, 2, HALF).permute(0, 2, 1))
        epilogue_in_parts(left, scales, sample, row, column, M, N, EPILOGUE, arguments, KINDS, ROWS, HALF)
        epilogue_in_parts(right, scales, sample, row, column + HALF, M, N, EPILOGUE, arguments, KINDS, ROWS, HALF)
    else:
        rows = row + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        a_scale, w_scale = scales
        if a_scale is not None:
            by_row = tl.load(a_scale + sample * M + rows, mask=rows < M, other=0.0)
            acc = acc.to(tl.float32) * by_row[:, None]
            acc *= tl.load(w_scale + columns, mask=columns < N, other=0.0)[None, :]
        EPILOGUE(acc, sample, rows, columns, M, N, arguments, KINDS)


def split_scales(
    a: torch.Tensor | Quantized, weight: torch.Tensor | QuantizedWeight
) -> tuple[torch.Tensor, torch.Tensor, Scales]:
    """Return the values that are multiplied, and their scales."""
    if isinstance(a, Quantized):
        return a.values, weight.values, Scales(a.scale, weight.scale)
    return a, weight, PLAIN


def second_pair(low: torch.Tensor | None, up: torch.Tensor | None) -> SecondPair:
    """Return low [..., R] as a matrix, and up, as the kernels read them."""
    return NO_PAIR if low is None else SecondPair(low.reshape(-1, low.shape[-1]), up)


def flat_scales(a: torch.Tensor | None, weight: torch.Tensor | None) -> Scales:
    """Return the scales as contiguous vectors, as the kernels read them."""
    return PLAIN if a is None else Scales(a.reshape(-1).contiguous(), weight.contiguous())


def check_dtype(op: str, dtype: torch.dtype | None, a: torch.Tensor | Quantized) -> torch.dtype:
    """Return the dtype of ``a Wᵀ``: a's dtype, or for a Quantized the given one, bf16 for None. Raises ValueError for
    another dtype."""
    if isinstance(a, Quantized):
        check_result(op, dtype, torch.bfloat16)
        return dtype or torch.bfloat16
    if dtype not in (None, a.dtype):
        raise ValueError(f"{op}: dtype={dtype}, but with a in {a.dtype} the result has a's dtype; give None.")
    return a.dtype


@triton.jit
def bound_scale(a_norm, w_norm, bias_bound):
    """Return the scale of an e4m3 row whose values are at most ‖a‖ ‖w‖ + |b|, by Cauchy-Schwarz."""
    return tl.maximum((a_norm * w_norm + bias_bound) / LARGEST_FP8, TINY)


def check_linear(
    op: str,
    a: torch.Tensor | Quantized,
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None,
) -> None:
    """Raise ValueError unless a [..., K], weight [C, K] and bias [C] fit together, and C, K > 0. 8-bit
    operands must be a Quantized and a QuantizedWeight of one format."""
    if isinstance(a, Quantized) or isinstance(weight, QuantizedWeight):
        _check_8bit_linear(op, a, weight, bias)
        return
    _check_linear_shapes(op, a, weight, bias)
    if weight.dtype != a.dtype or (bias is not None and bias.dtype != a.dtype):
        dtypes = sorted({str(tensor.dtype) for tensor in (a, weight, bias) if tensor is not None})
        raise ValueError(f"{op}: a, weight and bias have the dtypes {', '.join(dtypes)}; cast them to one.")


def _check_8bit_linear(
    op: str,
    a: torch.Tensor | Quantized,
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None,
) -> None:
    if not (isinstance(a, Quantized) and isinstance(weight, QuantizedWeight)):
        raise ValueError(
            f"{op}: a is a {type(a).__name__} and weight a {type(weight).__name__}; give a Quantized and a "
            "QuantizedWeight, or neither."
        )
    formats = a.values.dtype, weight.values.dtype
    if formats[0] != formats[1] or formats[0] not in (INT8, FP8):
        raise ValueError(f"{op}: a is in {formats[0]} and weight in {formats[1]}; they must be of one 8-bit format.")
    _check_linear_shapes(op, a.values, weight.values, bias)
    for name, scale, values in (("a", a.scale, a.values), ("weight", weight.scale, weight.values)):
        if scale.shape != values.shape[:-1] or scale.dtype != torch.float32:
            raise ValueError(
                f"{op}: {name} has values {list(values.shape)} and scales {list(scale.shape)} {scale.dtype}; there "
                "must be one fp32 scale per row."
            )


def _check_linear_shapes(op: str, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if weight.dim() != 2 or a.dim() < 1 or a.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{op}: a has shape {list(a.shape)} and weight {list(weight.shape)}; they must be [..., K] and [C, K]."
        )
    if 0 in weight.shape:
        raise ValueError(f"{op}: weight has shape {list(weight.shape)}; it must have elements.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{op}: bias has shape {list(bias.shape)}; it must be [C={weight.shape[0]}] or None.")
