"""Linears without a fused epilogue, in one GEMM, for cases that PyTorch has no GEMM for:

    linear_8bit       a Wᵀ + b                      with 8-bit operands
    linear_low_rank   a Wᵀ + (a downᵀ) upᵀ + b      with other operands, as in LoRA (low_rank.py)

a [..., K], W [N, K], b [N]. The result [..., N] is rounded once. 8-bit operands have one format, with a scale for each
row (quantized.py). linear_8bit can also add a product of low rank. Sums are int32 or fp32. Scales and
bias are applied in fp32. No gradient: under autograd the reference runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

from .. import reference
from ..choice.registry import GLUON, PORTABLE, REFERENCE, Kernel, Op, why_not_reference
from ..dispatch import kernels_op
from ..quantized import Quantized, QuantizedWeight
from . import gemm_sm90
from .gemm_portable import (
    NO_PAIR,
    PLAIN,
    Scales,
    SecondPair,
    check_dtype,
    check_linear,
    flat_scales,
    gemm,
    launch,
    second_pair,
)
from .low_rank import LowRank, check_low_rank
from .spec import LINEAR, LinearSpec, spec_of, why_not_gluon, why_not_portable, why_not_pytorch_alone


def linear_8bit(
    a: Quantized,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    low_rank: LowRank | None = None,
    dtype: torch.dtype | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """Return ``a Wᵀ + b``, [..., N].

    a: [..., K]. weight: [N, K], of a's format. bias: [N] or None.
    low_rank: the factors of another product that is added, or None.
    dtype: the result's dtype, fp32, fp16 or bf16; None: bf16.
    implementation: "auto", "triton" or "torch" (see dispatch.py).
    Raises ValueError for operands that are not quantised, for other dtypes, and for shapes, formats or devices that do
    not fit together.
    """
    if not isinstance(a, Quantized):
        raise ValueError(f"linear_8bit: a is a {type(a).__name__}; it must be a Quantized.")
    check_linear("linear_8bit", a, weight, bias)
    check_low_rank("linear_8bit", a, weight.values.shape[0], low_rank)
    dtype = check_dtype("linear_8bit", dtype, a)
    second = pick_and_project_down(a, low_rank, implementation)
    tensors = (a.values, weight.values, bias, a.scale, weight.scale)
    spec = spec_of("linear_8bit", implementation, *tensors, result=dtype, second=second)
    return LINEAR_8BIT.pick(spec).launch(*tensors, dtype, *second)


def linear_low_rank(
    a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, low_rank: LowRank, *, implementation: str = "auto"
) -> torch.Tensor:
    """Return ``a Wᵀ + (a downᵀ) upᵀ + b``, [..., N].

    a: [..., K]. weight: [N, K]. bias: [N] or None. All have one dtype. low_rank: down [R, K] and up [N, R].
    implementation: "auto", "triton" or "torch" (see dispatch.py).
    Raises ValueError for operands in 8 bits, and for shapes, dtypes or devices that do not fit together.
    """
    if isinstance(a, Quantized):
        raise ValueError("linear_low_rank: a is a Quantized; use linear_8bit with low_rank.")
    check_linear("linear_low_rank", a, weight, bias)
    check_low_rank("linear_low_rank", a, weight.shape[0], low_rank)
    second = pick_and_project_down(a, low_rank, implementation)
    spec = spec_of("linear_low_rank", implementation, a, weight, bias, result=a.dtype, second=second)
    return LINEAR_LOW_RANK.pick(spec).launch(a, weight, bias, *second)


def project_down(a: torch.Tensor | Quantized, low_rank: LowRank, launch: Callable | None = None) -> SecondPair:
    """Return ``a downᵀ`` [..., G·R] and up. For a Quantized the product is in units of its rows' scales.

    launch: the launch of LINEAR_8BIT that multiplies a Quantized.
    """
    down, up, _ = low_rank
    if not isinstance(a, Quantized):
        return SecondPair(torch.nn.functional.linear(a, down), up)
    low = launch(a.values, down.values, None, torch.ones_like(a.scale), down.scale, up.dtype, *NO_PAIR)
    return SecondPair(low, up)


def pick_and_project_down(a: torch.Tensor | Quantized, low_rank: LowRank | None, implementation: str) -> SecondPair:
    """Do what `project_down` does, with the launch that fits. Return two None without a low_rank."""
    if low_rank is None:
        return NO_PAIR
    launch = None
    if isinstance(a, Quantized):
        tensors = (a.values, low_rank.down.values, None, a.scale, low_rank.down.scale)
        spec = spec_of("linear_8bit", implementation, *tensors, result=low_rank.up.dtype, second=NO_PAIR)
        launch = LINEAR_8BIT.pick(spec).launch
    return project_down(a, low_rank, launch)


@kernels_op("linear_8bit")
def _linear_8bit(
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    dtype: torch.dtype,
    low: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
) -> torch.Tensor:
    return a.new_empty(*a.shape[:-1], weight.shape[0], dtype=dtype)


def launch_8bit(gluon, a, weight, bias, a_scale, weight_scale, dtype, low=None, up=None):
    """Launch the GEMM and return [..., N].

    gluon: True for the GEMM for sm_90. Unaligned operands take the portable one nevertheless. a to up: the custom op's
    arguments.
    """
    return _run(gluon, a, weight, bias, dtype, flat_scales(a_scale, weight_scale), second_pair(low, up))


def _by_reference(a, weight, bias, a_scale, weight_scale, dtype, low, up):
    a, weight = Quantized(a, a_scale), QuantizedWeight(weight, weight_scale)
    return reference.linear(a, weight, bias, low, up).to(dtype)


LINEAR_8BIT = Op(
    "linear_8bit",
    (
        Kernel(GLUON, why_not_gluon, _linear_8bit.launch(GLUON, partial(launch_8bit, True))),
        Kernel(PORTABLE, why_not_portable, _linear_8bit.launch(PORTABLE, partial(launch_8bit, False))),
        Kernel(REFERENCE, why_not_reference, _by_reference, is_fused=False),
    ),
)


@kernels_op("linear_low_rank")
def _linear_low_rank(
    a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, low: torch.Tensor, up: torch.Tensor
) -> torch.Tensor:
    return a.new_empty(*a.shape[:-1], weight.shape[0])


def _launch_low_rank(gluon, a, weight, bias, low, up):
    return _run(gluon, a, weight, bias, a.dtype, PLAIN, second_pair(low, up))


def _why_not_portable_low_rank(spec: LinearSpec) -> str | None:
    reason = why_not_portable(spec)
    untimed = spec.linears is not None  # not timed against PyTorch's two products
    return "not for the projections of a block" if reason is None and untimed else reason


LINEAR_LOW_RANK = Op(
    "linear_low_rank",
    (
        Kernel(GLUON, why_not_gluon, _linear_low_rank.launch(GLUON, partial(_launch_low_rank, True))),
        Kernel(
            PORTABLE, _why_not_portable_low_rank, _linear_low_rank.launch(PORTABLE, partial(_launch_low_rank, False))
        ),
        Kernel(LINEAR, why_not_pytorch_alone, reference.linear, is_fused=False),
        Kernel(REFERENCE, why_not_reference, reference.linear, is_fused=False),
    ),
)


def _run(gluon: bool, a, weight, bias, dtype: torch.dtype, scales: Scales, second: SecondPair) -> torch.Tensor:
    out = a.new_empty(*a.shape[:-1], weight.shape[0], dtype=dtype)
    if out.numel() == 0:
        return out
    matrix = a.reshape(-1, a.shape[-1])
    bias = None if bias is None else bias.contiguous()
    if gluon and gemm_sm90.fits_tma(matrix, weight, *second):
        gemm_sm90.launch(matrix, weight, bias, out.view(matrix.shape[0], -1), scales=scales, second=second)
    else:
        launch(_linear_kernel, matrix, weight, 1, bias, out, scales=scales, second=second)
    return out


@triton.jit
def _linear_kernel(
    a, weight, samples, M, N, K, stride_a, stride_w, a_scale, w_scale,
    low, up, R, stride_low, stride_up, bias, out,
    DESCRIPTORS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    gemm(
        a, weight, samples, M, N, K, stride_a, stride_w, (a_scale, w_scale),
        (low, up, R, stride_low, stride_up), _store_sum, (bias, out), None,
        DESCRIPTORS, ROWS, COLUMNS, DEPTH,
    )  # fmt: skip


@triton.jit
def _store_sum(acc, sample, rows, columns, M, N, arguments, KINDS: tl.constexpr):
    bias, out = arguments
    column_mask = columns < N
    if bias is not None:
        acc += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    offsets = (sample.to(tl.int64) * M + rows)[:, None] * N + columns[None, :]
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=(rows < M)[:, None] & column_mask[None, :])
