"""linear_gelu: a projection with GELU in its epilogue, ``gelu_tanh(a Wᵀ + b)``, in one GEMM.

a [..., K], W [C, K], b [C] have one dtype (fp32, fp16, bf16), or a and W have 8 bits (quantized.py) and b one of these.
The result [..., C] has the same dtype, or for 8-bit operands one of these or e4m3, and is rounded once. No gradient:
under autograd the reference runs. The tanh approximation of Hendrycks and Gimpel, Gaussian Error Linear Units, sect. 2.

A product of low rank may be added before the GELU (low_rank.py).
A result in e4m3 is scaled before its largest value is known, with a bound on its row (reference.linear_gelu_quantized).
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from .. import reference
from ..choice.registry import GLUON, PORTABLE, REFERENCE, Kernel, Op, why_not_reference
from ..dispatch import kernels_op
from ..quantized import FP8, INT8, Quantized, QuantizedWeight
from ..rows.gelu import gelu, gelu_tanh
from . import gemm_sm90
from .gemm_portable import (
    Bound,
    bound_scale,
    check_dtype,
    check_linear,
    flat_scales,
    gemm,
    launch,
    second_pair,
    split_scales,
    tile_candidates,
)
from .linear import pick_and_project_down
from .low_rank import LowRank, check_low_rank
from .spec import LINEAR, spec_of, why_not_gluon, why_not_portable, why_not_pytorch


def linear_gelu(
    a: torch.Tensor | Quantized,
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None,
    *,
    low_rank: LowRank | None = None,
    dtype: torch.dtype | None = None,
    result: torch.dtype | None = None,
    bias_bound: torch.Tensor | None = None,
    implementation: str = "auto",
) -> torch.Tensor | Quantized:
    """Return ``gelu_tanh(a Wᵀ + b)``, [..., C].

    a: [..., K]. weight: [C, K]. bias: [C] or None. a and weight are a Quantized and a QuantizedWeight of one format, or
        neither.
    low_rank: the factors of another product that is added before the GELU, or None.
    dtype: the result's dtype for a Quantized a: fp32, fp16 or bf16; None: bf16. Other results have a's dtype.
    result: FP8 to return a Quantized in that format, without norm; a, weight and low_rank must then have norms. None to
        return a tensor.
    bias_bound: max|b|, 0-d fp32, for an FP8 result; None to compute it.
    implementation: "auto", "triton" or "torch" (see dispatch.py).
    Raises ValueError for shapes, dtypes or devices that do not fit together, and for a result in another format.
    """
    check_linear("linear_gelu", a, weight, bias)
    values, weight_values, scales = split_scales(a, weight)
    check_low_rank("linear_gelu", a, weight_values.shape[0], low_rank)
    if result is not None:
        return _quantized_linear_gelu(a, weight, bias, low_rank, result, bias_bound, implementation)
    dtype = check_dtype("linear_gelu", dtype, a)
    second = pick_and_project_down(a, low_rank, implementation)
    spec = spec_of("linear_gelu", implementation, values, weight_values, bias, *scales, result=dtype, second=second)
    return LINEAR_GELU.pick(spec).launch(values, weight_values, bias, dtype, *scales, *second)


def _quantized_linear_gelu(
    a: Quantized,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    low_rank: LowRank | None,
    result: torch.dtype,
    bias_bound: torch.Tensor | None,
    implementation: str,
) -> Quantized:
    if result == INT8:
        raise ValueError(
            "linear_gelu: result=torch.int8; int8 needs the largest value of a row, which a tile does not know. Use "
            "a bf16 result, then quantize_rows."
        )
    if result != FP8:
        raise ValueError(f"linear_gelu: result={result}; accepted are {FP8} and None.")
    if not isinstance(a, Quantized) or a.norm is None:
        raise ValueError("linear_gelu: a result in fp8 needs a Quantized a that has its norm.")
    if weight.norm is None:
        raise ValueError("linear_gelu: a result in fp8 needs a weight that has its norm, as quantize_weight gives it.")
    if low_rank is not None:
        if low_rank.norm is None:
            raise ValueError("linear_gelu: a result in fp8 needs a low_rank that has its norm.")
        weight = weight._replace(norm=weight.norm + low_rank.norm)
    second = pick_and_project_down(a, low_rank, implementation)
    if bias_bound is None:
        bias_bound = a.norm.new_zeros(()) if bias is None else bias.abs().amax().float()
    tensors = (a.values, weight.values, bias, a.scale, weight.scale, a.norm, weight.norm, bias_bound)
    spec = spec_of("linear_gelu", implementation, *tensors, result=result, second=second)
    return Quantized(*LINEAR_GELU_QUANTIZED.pick(spec).launch(*tensors, *second))


@kernels_op("linear_gelu")
def _linear_gelu(
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    a_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    low: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
) -> torch.Tensor:
    return a.new_empty(*a.shape[:-1], weight.shape[0], dtype=dtype)


def _launch(gluon, candidates, a, weight, bias, dtype, a_scale=None, weight_scale=None, low=None, up=None, bound=None):
    """Launch the GEMM and return [..., C].

    gluon: True for the GEMM for sm_90. Unaligned operands take the portable one nevertheless.
    candidates: returns the tiles of the portable GEMM. bound: the bound on each row, for a result in e4m3.
    a to up: the custom op's arguments.
    """
    out = a.new_empty(*a.shape[:-1], weight.shape[0], dtype=dtype)
    if out.numel() == 0:
        return out
    a = a.reshape(-1, a.shape[-1])
    bias = None if bias is None else bias.contiguous()
    pairs = {"scales": flat_scales(a_scale, weight_scale), "second": second_pair(low, up)}
    if gluon and gemm_sm90.fits_tma(a, weight, *pairs["second"]):
        gemm_sm90.launch(a, weight, bias, out.view(a.shape[0], -1), gelu=True, bound=bound, **pairs)
    else:
        arguments = (bias, out, *(bound or (None,) * 4))
        launch(_linear_gelu_kernel, a, weight, 1, *arguments, **pairs, candidates=candidates)
    return out


@kernels_op("linear_gelu_quantized")
def _linear_gelu_quantized(
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    a_norm: torch.Tensor,
    weight_norm: torch.Tensor,
    bias_bound: torch.Tensor,
    low: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = a.new_empty(*a.shape[:-1], weight.shape[0], dtype=FP8)
    return out, a.new_empty(a.shape[:-1], dtype=torch.float32)


def _launch_quantized(
    gluon, candidates, a, weight, bias, a_scale, weight_scale, a_norm, weight_norm, bias_bound, low=None, up=None
):
    """Do what `_launch` does, with a result in e4m3 and its scales."""
    scale = a.new_empty(a.shape[:-1], dtype=torch.float32)
    bound = Bound(a_norm.reshape(-1).contiguous(), weight_norm, bias_bound, scale)
    return _launch(gluon, candidates, a, weight, bias, FP8, a_scale, weight_scale, low, up, bound), scale


def _by_pytorch(a, weight, bias, dtype, _, __, low, up):
    """Run PyTorch's linear, then GELU in a pass of its own."""
    return gelu(reference.linear(a, weight, bias, low, up))


def _by_reference(a, weight, bias, dtype, a_scale, weight_scale, low, up):
    if a_scale is not None:
        a, weight = Quantized(a, a_scale), QuantizedWeight(weight, weight_scale)
    return reference.linear_gelu(a, weight, bias, dtype, low, up)


def _quantized_by_reference(a, weight, bias, a_scale, weight_scale, a_norm, weight_norm, bias_bound, low, up):
    a, weight = Quantized(a, a_scale, a_norm), QuantizedWeight(weight, weight_scale, weight_norm)
    values, scale, _ = reference.linear_gelu_quantized(a, weight, bias, bias_bound, low, up)
    return values, scale


LINEAR_GELU = Op(
    "linear_gelu",
    (
        Kernel(GLUON, why_not_gluon, _linear_gelu.launch(GLUON, partial(_launch, True, tile_candidates))),
        Kernel(PORTABLE, why_not_portable, _linear_gelu.launch(PORTABLE, partial(_launch, False, tile_candidates))),
        Kernel(LINEAR, why_not_pytorch, _by_pytorch, is_fused=False),
        Kernel(REFERENCE, why_not_reference, _by_reference, is_fused=False),
    ),
    name_in_8_bits="linear_gelu_8bit",
)
_launch_gluon, _launch_portable = (partial(_launch_quantized, gluon, tile_candidates) for gluon in (True, False))
LINEAR_GELU_QUANTIZED = Op(
    "linear_gelu",
    (
        Kernel(GLUON, why_not_gluon, _linear_gelu_quantized.launch(GLUON, _launch_gluon)),
        Kernel(PORTABLE, why_not_portable, _linear_gelu_quantized.launch(PORTABLE, _launch_portable)),
        Kernel(REFERENCE, why_not_reference, _quantized_by_reference, is_fused=False),
    ),
    name_in_8_bits="linear_gelu_8bit",
)


@triton.jit
def _linear_gelu_kernel(
    a, weight, samples, M, N, K, stride_a, stride_w, a_scale, w_scale,
    low, up, R, stride_low, stride_up,
    bias, out, a_norm, w_norm, bias_bound, result_scale,
    DESCRIPTORS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    arguments = (bias, out, a_norm, w_norm, bias_bound, result_scale)
    gemm(
        a, weight, samples, M, N, K, stride_a, stride_w, (a_scale, w_scale),
        (low, up, R, stride_low, stride_up), _store_gelu, arguments, None,
        DESCRIPTORS, ROWS, COLUMNS, DEPTH,
    )  # fmt: skip


@triton.jit
def _store_gelu(acc, sample, rows, columns, M, N, arguments, KINDS: tl.constexpr):
    bias, out, a_norm, w_norm, bias_bound, result_scale = arguments
    row_mask = rows < M
    column_mask = columns < N
    if bias is not None:
        acc += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    acc = gelu_tanh(acc)
    tokens = sample.to(tl.int64) * M + rows
    if result_scale is not None:
        scale = bound_scale(tl.load(a_norm + tokens, mask=row_mask, other=0.0), tl.load(w_norm), tl.load(bias_bound))
        if tl.min(columns, 0) == 0:
            tl.store(result_scale + tokens, scale, mask=row_mask)
        acc *= (1 / scale)[:, None]
    offsets = tokens[:, None] * N + columns[None, :]
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])
