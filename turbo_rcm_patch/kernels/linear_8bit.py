"""linear_8bit: ``a Wᵀ + b`` of operands in 8 bits, in one GEMM: for a linear with nothing to fuse behind it.

a [..., K] and W [N, K] of one format, with a scale for each row (quantized.py); b [N]; result [..., N] in fp32, fp16 or
bf16, rounded once. Sums are int32 or fp32; scales and bias are applied in fp32. No gradient: under autograd the
reference runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import gemm_hopper, reference
from .dispatch import kernel_op, use_triton
from .gemm import check_dtype, check_linear, flat_scales, gemm, launch
from .quantized import Quantized, QuantizedWeight


def linear_8bit(
    a: Quantized,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """``a Wᵀ + b`` for a [..., K], weight [N, K] of a's format, bias [N] or None; returns [..., N].

    dtype: of the result, fp32, fp16 or bf16; None: bf16.
    implementation: "auto", "triton" or "torch" (see dispatch.py).
    Raises ValueError for operands that are not quantised, for other dtypes, and for shapes, formats or devices that do
    not fit together.
    """
    if not isinstance(a, Quantized):
        raise ValueError(f"linear_8bit: a is a {type(a).__name__}; it must be a Quantized.")
    check_linear("linear_8bit", a, weight, bias)
    dtype = check_dtype("linear_8bit", dtype, a)
    tensors = (a.values, weight.values, bias, a.scale, weight.scale)
    if use_triton(implementation, *tensors, has_gradient=False, formats=(a.values.dtype,)):
        return _linear_8bit(*tensors, dtype)
    return reference.linear(a, weight, bias).to(dtype)


@kernel_op("linear_8bit")
def _linear_8bit(
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    out = a.new_empty(*a.shape[:-1], weight.shape[0], dtype=dtype)
    if out.numel() == 0:
        return out
    matrix = a.reshape(-1, a.shape[-1])
    bias = None if bias is None else bias.contiguous()
    scales = flat_scales(a_scale, weight_scale)
    if gemm_hopper.why_not(matrix, weight, dtype=dtype) is None:
        gemm_hopper.launch(matrix, weight, bias, out.view(len(matrix), -1), scales=scales)
    else:
        launch(_linear_8bit_kernel, matrix, weight, 1, bias, out, scales=scales)
    return out


@_linear_8bit.register_fake
def _(a, weight, bias, a_scale, weight_scale, dtype):
    return a.new_empty(*a.shape[:-1], weight.shape[0], dtype=dtype)


@triton.jit
def _linear_8bit_kernel(
    a, weight, samples, M, N, K, stride_a, stride_w, a_scale, w_scale, bias, out,
    DESCRIPTORS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    gemm(
        a, weight, samples, M, N, K, stride_a, stride_w, (a_scale, w_scale), _store_sum, (bias, out), None,
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
