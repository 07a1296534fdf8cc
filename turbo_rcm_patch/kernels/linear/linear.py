"""A linear with nothing to fuse behind it, in one GEMM, where PyTorch has none for it:

    linear_8bit       a Wᵀ + b                      of operands in 8 bits
    linear_low_rank   a Wᵀ + (a downᵀ) upᵀ + b      of others, as LoRA has it (low_rank.py)

a [..., K], W [N, K], b [N]; result [..., N], rounded once. 8-bit operands are of one format, with a scale for each row
(quantized.py); a product of low rank may be added there too. Sums are int32 or fp32; scales and bias are applied in
fp32. No gradient: under autograd the reference runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import reference
from ..dispatch import kernel_op, use_triton
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


def linear_8bit(
    a: Quantized,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    low_rank: LowRank | None = None,
    dtype: torch.dtype | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """``a Wᵀ + b`` for a [..., K], weight [N, K] of a's format, bias [N] or None; returns [..., N].

    low_rank: of another product that is added.
    dtype: of the result, fp32, fp16 or bf16; None: bf16.
    implementation: "auto", "triton" or "torch" (see dispatch.py).
    Raises ValueError for operands that are not quantised, for other dtypes, and for shapes, formats or devices that do
    not fit together.
    """
    if not isinstance(a, Quantized):
        raise ValueError(f"linear_8bit: a is a {type(a).__name__}; it must be a Quantized.")
    check_linear("linear_8bit", a, weight, bias)
    check_low_rank("linear_8bit", a, weight.values.shape[0], low_rank)
    dtype = check_dtype("linear_8bit", dtype, a)
    second = project_down(a, low_rank, implementation)
    tensors = (a.values, weight.values, bias, a.scale, weight.scale)
    if use_triton(implementation, *tensors, *second, has_gradient=False, formats=(a.values.dtype,)):
        return _linear_8bit(*tensors, dtype, *second)
    return reference.linear(a, weight, bias, *second).to(dtype)


def linear_low_rank(
    a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, low_rank: LowRank, *, implementation: str = "auto"
) -> torch.Tensor:
    """``a Wᵀ + (a downᵀ) upᵀ + b`` for a [..., K], weight [N, K] and bias [N] or None of one dtype; returns [..., N].

    implementation: "auto", "triton" or "torch" (see dispatch.py).
    Raises ValueError for operands in 8 bits, and for shapes, dtypes or devices that do not fit together.
    """
    if isinstance(a, Quantized):
        raise ValueError("linear_low_rank: a is a Quantized; linear_8bit takes such, with low_rank.")
    check_linear("linear_low_rank", a, weight, bias)
    check_low_rank("linear_low_rank", a, weight.shape[0], low_rank)
    second = project_down(a, low_rank, implementation)
    if use_triton(implementation, a, weight, bias, *second, has_gradient=False):
        return _linear_low_rank(a, weight, bias, *second)
    return reference.linear(a, weight, bias, *second)


def project_down(a: torch.Tensor | Quantized, low_rank: LowRank | None, implementation: str) -> SecondPair:
    """``a downᵀ`` [..., G·R], of a Quantized in units of its rows' scales, and up; None both without them."""
    if low_rank is None:
        return NO_PAIR
    if isinstance(a, Quantized):
        unscaled = Quantized(a.values, torch.ones_like(a.scale))
        low = linear_8bit(unscaled, low_rank.down, dtype=low_rank.up.dtype, implementation=implementation)
    else:
        low = torch.nn.functional.linear(a, low_rank.down)
    return SecondPair(low, low_rank.up)


@kernel_op("linear_8bit")
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
    return _run(a, weight, bias, dtype, flat_scales(a_scale, weight_scale), second_pair(low, up))


@_linear_8bit.register_fake
def _(a, weight, bias, a_scale, weight_scale, dtype, *_):
    return a.new_empty(*a.shape[:-1], weight.shape[0], dtype=dtype)


@kernel_op("linear_low_rank")
def _linear_low_rank(
    a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, low: torch.Tensor, up: torch.Tensor
) -> torch.Tensor:
    return _run(a, weight, bias, a.dtype, PLAIN, second_pair(low, up))


@_linear_low_rank.register_fake
def _(a, weight, *_):
    return a.new_empty(*a.shape[:-1], weight.shape[0])


def _run(a, weight, bias, dtype: torch.dtype, scales: Scales, second: SecondPair) -> torch.Tensor:
    out = a.new_empty(*a.shape[:-1], weight.shape[0], dtype=dtype)
    if out.numel() == 0:
        return out
    matrix = a.reshape(-1, a.shape[-1])
    bias = None if bias is None else bias.contiguous()
    if gemm_sm90.why_not(matrix, weight, dtype=dtype, second=second) is None:
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
