"""linear_skip: a projection that ends in the skip, ``c_skip ⊙ residual + c_out ⊙ (a Wᵀ + b)``, in one GEMM.

a [B, S, K], W [C, K] and b [C] have one dtype (fp32, fp16, bf16). Or a and W have 8 bits (quantized.py), and b one of
these dtypes. The residual is [B, S, C]. The coefficients vary over [B|1, S|1, C|1].
The epilogue is fp32. The result is rounded once, to the residual's dtype or another one. Every tensor has a gradient.
A product of low rank may be added before the skip (low_rank.py).
With 8 bits, a low-rank product or runs, the reference runs under autograd.
The skip is eq. 7 of Karras et al. 2022, Elucidating the Design Space of Diffusion-Based Generative Models.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from .. import reference
from ..choice.registry import GLUON, PORTABLE, REFERENCE, Kernel, Op, why_not_reference
from ..coefficient import (
    Coefficient,
    Runs,
    canonical_coefficient,
    coefficient_kind,
    count_runs,
    find_runs,
    kind_and_strides,
    load_coefficient,
    search_steps,
    split_runs,
)
from ..dispatch import check_result, kernels_op
from ..quantized import Quantized, QuantizedWeight
from ..rows.skip import skip
from ..saturation import flag_for, saturate
from . import gemm_sm90
from .gemm_portable import check_linear, flat_scales, gemm, launch, second_pair, split_scales, tile_candidates
from .gemm_sm89 import SM89, tiles_sm89, why_not_sm89
from .linear import pick_and_project_down
from .low_rank import LowRank, check_low_rank
from .spec import LINEAR, spec_of, why_not_gluon, why_not_portable, why_not_pytorch


def linear_skip(
    a: torch.Tensor | Quantized,
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    *,
    c_skip: Coefficient = 1.0,
    c_out: Coefficient | Runs = 1.0,
    low_rank: LowRank | None = None,
    dtype: torch.dtype | None = None,
    residual_scale: float = 1.0,
    result_scale: float = 1.0,
    implementation: str = "auto",
    linears: str | None = None,
) -> torch.Tensor:
    """Return ``c_skip ⊙ residual + c_out ⊙ (a Wᵀ + b)``, shaped like the residual.

    a: [B, S, K], or [S, K] as one sample. weight: [C, K]. bias: [C] or None. residual: [B, S, C] ([S, C]).
        a and weight are a Quantized and a QuantizedWeight of one format, or neither.
    c_skip, c_out: a number, 0-d, per sample [B], per channel [C] or [B, 1, C], per token [B, S, C]. c_out may be Runs.
    low_rank: the factors of another product that is added to ``a Wᵀ``, or None.
    dtype: the result's dtype, fp32, fp16 or bf16; None: the residual's.
    residual_scale, result_scale: positive. The given residual was divided by residual_scale, and the result is divided
        by result_scale, to make room for large values in fp16. An fp16 result saturates unless its scale is 1 (see
        saturation.py).
    implementation: "auto", "triton" or "torch" (see dispatch.py).
    linears: None or "triton" for our kernel if it can run. "torch" for PyTorch's linear and a separate skip. "auto" for
        our kernel if it was measured to be as fast, else as "torch".

    Every tensor has a gradient. With Runs, 8 bits or low_rank the reference computes it. Raises ValueError for other
    dtypes and scales, and for shapes, formats, dtypes or devices that do not fit together.
    """
    check_linear("linear_skip", a, weight, bias)
    values, weight_values, scales = split_scales(a, weight)
    if values.dim() not in (2, 3):
        raise ValueError(f"linear_skip: a has shape {list(values.shape)}; accepted are [B, S, K] and [S, K].")
    expected = [*values.shape[:-1], weight_values.shape[0]]
    if list(residual.shape) != expected:
        raise ValueError(f"linear_skip: residual has shape {list(residual.shape)} but the output is {expected}.")
    check_low_rank("linear_skip", a, expected[-1], low_rank)
    check_result("linear_skip", dtype, residual.dtype, residual_scale=residual_scale, result_scale=result_scale)
    if values.dim() == 2:
        sample = Quantized(values[None], a.scale[None]) if isinstance(a, Quantized) else a[None]
        arguments = {"c_skip": c_skip, "c_out": c_out, "dtype": dtype, "implementation": implementation}
        arguments |= {"low_rank": low_rank, "linears": linears}
        arguments |= {"residual_scale": residual_scale, "result_scale": result_scale}
        return linear_skip(sample, weight, bias, residual[None], **arguments)[0]
    c_skip = canonical_coefficient("c_skip", c_skip, *residual.shape, residual.device)
    c_out, starts = split_runs("c_out", c_out, *residual.shape, residual.device)
    second = pick_and_project_down(a, low_rank, implementation)
    tensors = (values, weight_values, bias, residual, c_skip, c_out)
    spec = spec_of(
        "linear_skip",
        implementation,
        *(*tensors, *scales),
        result=dtype or residual.dtype,
        second=second,
        samples=_count_samples(residual.shape[0], c_skip, c_out, starts),
        residual=residual.dtype,
        c_skip=coefficient_kind(c_skip),
        c_out=coefficient_kind(c_out, starts),
        linears=linears,
    )
    options = (spec.result, residual_scale, result_scale, starts)
    return LINEAR_SKIP.pick(spec).launch(*tensors, *options, *scales, *second)


@kernels_op("linear_skip")
def _linear_skip(
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    c_skip: torch.Tensor | None,
    c_out: torch.Tensor | None,
    dtype: torch.dtype,
    residual_scale: float,
    result_scale: float,
    starts: torch.Tensor | None = None,
    a_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    low: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
) -> torch.Tensor:
    return torch.empty_like(residual, dtype=dtype, memory_format=torch.contiguous_format)


def _launch(
    gluon, candidates, a, weight, bias, residual, c_skip, c_out, dtype, residual_scale, result_scale,
    starts=None, a_scale=None, weight_scale=None, low=None, up=None,
):  # fmt: skip
    """Launch the GEMM and return [B, S, C].

    gluon: True for the GEMM for sm_90. Unaligned operands take the portable one nevertheless.
    candidates: returns the tiles of the portable GEMM. a to up: the custom op's arguments.
    """
    B, S, C = residual.shape
    out = torch.empty_like(residual, dtype=dtype, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    samples = _count_samples(B, c_skip, c_out, starts)
    a, residual = a.reshape(B * S, -1), residual.reshape(B * S, C).contiguous()
    bias = None if bias is None else bias.contiguous()
    factors = residual_scale / result_scale, 1 / result_scale
    flag = flag_for(dtype, result_scale, out.device)
    pairs = {"scales": flat_scales(a_scale, weight_scale), "second": second_pair(low, up)}
    if gluon and gemm_sm90.fits_tma(a, weight, residual, *pairs["second"]):
        skip = {"samples": samples, "residual": residual, "c_skip": c_skip, "c_out": c_out, "starts": starts}
        gemm_sm90.launch(a, weight, bias, out.view(B * S, C), factors=factors, flag=flag, **pairs, **skip)
    else:
        skip_kind, skip_strides = kind_and_strides(c_skip)
        out_kind, out_strides = kind_and_strides(c_out, starts)
        coefficients = (c_skip, c_out, *factors, *skip_strides, *out_strides, starts, count_runs(starts), flag)
        kinds = (skip_kind, out_kind, search_steps(starts))
        arguments = (bias, residual, out, *coefficients)
        options = {**pairs, "candidates": candidates, "KINDS": kinds}
        launch(_linear_skip_kernel, a, weight, samples, *arguments, **options)
    return out


def _count_samples(batch: int, c_skip, c_out, starts) -> int:
    """Return the number of samples that need separate tiles: all if a coefficient varies by sample or token, else 1."""
    if c_skip is not None and c_skip.shape[:2] != (1, 1):
        return max(1, batch)
    return max(1, batch) if starts is None and c_out is not None and c_out.shape[:2] != (1, 1) else 1


def _by_pytorch(a, weight, bias, residual, *options):
    """Run PyTorch's linear, then the skip in a pass of its own."""
    c_skip, c_out, dtype, residual_scale, result_scale, starts, _, _, low, up = options
    runs = c_out if starts is None else Runs(c_out[:, 0], starts)
    coefficients = {"c_skip": 1.0 if c_skip is None else c_skip, "c_out": 1.0 if c_out is None else runs}
    scales = {"residual_scale": residual_scale, "result_scale": result_scale}
    return skip(residual, reference.linear(a, weight, bias, low, up), **coefficients, dtype=dtype, **scales)


def _by_reference(a, weight, bias, residual, *options):
    *options, a_scale, weight_scale, low, up = options
    if a_scale is not None:
        a, weight = Quantized(a, a_scale), QuantizedWeight(weight, weight_scale)
    return reference.linear_skip(a, weight, bias, residual, *options, low, up)


LINEAR_SKIP = Op(
    "linear_skip",
    (
        Kernel(GLUON, why_not_gluon, _linear_skip.launch(GLUON, partial(_launch, True, tile_candidates))),
        Kernel(SM89, why_not_sm89, _linear_skip.launch(SM89, partial(_launch, False, tiles_sm89)), by_tune=True),
        Kernel(PORTABLE, why_not_portable, _linear_skip.launch(PORTABLE, partial(_launch, False, tile_candidates))),
        Kernel(LINEAR, why_not_pytorch, _by_pytorch, is_fused=False),
        Kernel(REFERENCE, why_not_reference, _by_reference, is_fused=False),
    ),
    name_in_8_bits="linear_skip_8bit",
)


def _setup_context(ctx, inputs, output):
    a, weight, bias, residual, c_skip, c_out, _, *ctx.scales = inputs[1:10]
    needs_a, needs_weight, _, _, needs_c_skip, needs_c_out = ctx.needs_input_grad[1:7]
    ctx.save_for_backward(
        a if needs_weight or needs_c_out else None,
        weight if needs_a or needs_c_out else None,
        bias if needs_c_out else None,
        residual if needs_c_skip else None,
        c_skip,
        c_out,
    )
    ctx.dtype, ctx.residual_dtype = a.dtype, residual.dtype


def _backward(ctx, grad):
    a, weight, bias, residual, c_skip, c_out = ctx.saved_tensors
    needs_a, needs_weight, needs_bias, needs_residual, needs_c_skip, needs_c_out = ctx.needs_input_grad[1:7]
    d_a = d_weight = d_bias = d_residual = d_c_skip = d_c_out = None
    residual_scale, result_scale = ctx.scales
    wide = grad.float() if result_scale == 1 else grad.float() / result_scale
    if needs_a or needs_weight or needs_bias:
        d_linear = wide if c_out is None else wide * c_out
        d_linear_low = d_linear.to(ctx.dtype)
    if needs_a:
        d_a = d_linear_low @ weight
    if needs_weight:
        d_weight = d_linear_low.flatten(0, 1).T @ a.flatten(0, 1)
    if needs_bias:
        d_bias = d_linear.sum((0, 1)).to(ctx.dtype)
    if needs_residual:
        if c_skip is None and residual_scale == result_scale:
            d_residual = grad.to(ctx.residual_dtype)
        else:
            d_residual = (wide * (residual_scale if c_skip is None else residual_scale * c_skip)).to(ctx.residual_dtype)
    if needs_c_skip:
        d_c_skip = (residual_scale * (wide * residual).sum_to_size(c_skip.shape)).to(c_skip.dtype)
    if needs_c_out:
        linear = torch.nn.functional.linear(a, weight, bias)
        d_c_out = (wide * linear).sum_to_size(c_out.shape).to(c_out.dtype)
    return None, d_a, d_weight, d_bias, d_residual, d_c_skip, d_c_out, *(None,) * 8


_linear_skip.register_autograd(_backward, setup_context=_setup_context)


@triton.jit(do_not_specialize=("runs",))
def _linear_skip_kernel(
    a, weight, samples, M, N, K, stride_a, stride_w, a_scale, w_scale,
    low, up, R, stride_low, stride_up,
    bias, residual, out, c_skip, c_out, skip_factor, out_factor,
    skip_stride_b, skip_stride_s, skip_stride_c, out_stride_b, out_stride_s, out_stride_c,
    starts, runs, flag,
    KINDS: tl.constexpr,
    DESCRIPTORS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    skip_strides = (skip_stride_b, skip_stride_s, skip_stride_c)
    out_strides = (out_stride_b, out_stride_s, out_stride_c)
    coefficients = (c_skip, c_out, skip_factor, out_factor, skip_strides, out_strides, starts, runs)
    arguments = (bias, residual, out, flag, coefficients)
    gemm(
        a, weight, samples, M, N, K, stride_a, stride_w, (a_scale, w_scale),
        (low, up, R, stride_low, stride_up), _store_skip, arguments, KINDS,
        DESCRIPTORS, ROWS, COLUMNS, DEPTH,
    )  # fmt: skip


@triton.jit
def _store_skip(acc, sample, rows, columns, M, N, arguments, KINDS: tl.constexpr):
    """Apply the skip and store. KINDS: how c_skip and c_out vary (coefficient.py), and the steps of `find_runs`."""
    bias, residual, out, flag, coefficients = arguments
    c_skip, c_out, skip_factor, out_factor, skip_strides, out_strides, starts, runs = coefficients
    SKIP: tl.constexpr = KINDS[0]
    OUT: tl.constexpr = KINDS[1]
    STEPS: tl.constexpr = KINDS[2]
    row_mask = rows < M
    column_mask = columns < N
    mask = row_mask[:, None] & column_mask[None, :]
    offsets = (sample.to(tl.int64) * M + rows)[:, None] * N + columns[None, :]
    if bias is not None:
        acc += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    if OUT != 0:
        chosen = sample
        if OUT == 4:
            chosen = find_runs(sample * M + rows, starts, runs, STEPS)
        acc *= load_coefficient(c_out, chosen, rows, columns, row_mask, column_mask, *out_strides, OUT)
    kept = tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    if SKIP != 0:
        kept *= load_coefficient(c_skip, sample, rows, columns, row_mask, column_mask, *skip_strides, SKIP)
    result = kept * skip_factor + acc * out_factor
    if flag is not None:
        result = saturate(tl.where(column_mask[None, :], result, 0.0), row_mask, flag)
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=mask)
