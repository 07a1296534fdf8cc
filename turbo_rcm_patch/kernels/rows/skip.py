"""skip: ``c_skip ⊙ residual + c_out ⊙ F`` as a pass of its own, for when no epilogue can do it.

residual, F: [B, S, C] in fp32, fp16 or bf16. Coefficients: over [B|1, S|1, C|1]. Arithmetic is fp32. The result is
rounded once, to the residual's dtype or another one. This pass reads two tensors and writes one. The fused ops of this
package save that. Every tensor has a gradient.
Eq. 7 of Karras et al. 2022, Elucidating the Design Space of Diffusion-Based Generative Models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .. import reference
from ..choice.registry import Spec, spec_of, triton_or_reference
from ..coefficient import (
    Coefficient,
    Runs,
    canonical_coefficient,
    count_runs,
    find_runs,
    kind_and_strides,
    load_coefficient,
    search_steps,
    split_runs,
)
from ..dispatch import check_result, kernel_op
from ..launch import launch_kernel
from ..saturation import flag_for, saturate
from ..sizes import cdiv

ROWS, COLUMNS, NUM_WARPS = 8, 512, 4


@dataclass(frozen=True, kw_only=True)
class SkipSpec(Spec):
    """The spec of a skip.

    runs: True if c_out varies by run. The kernel has no backward for runs.
    """

    runs: bool = False

    @property
    def has_backward(self) -> bool:
        return not self.runs


def skip(
    residual: torch.Tensor,
    output: torch.Tensor,
    *,
    c_skip: Coefficient = 1.0,
    c_out: Coefficient | Runs = 1.0,
    dtype: torch.dtype | None = None,
    residual_scale: float = 1.0,
    result_scale: float = 1.0,
    implementation: str = "auto",
) -> torch.Tensor:
    """Return ``c_skip ⊙ residual + c_out ⊙ output``, [B, S, C].

    residual, output: [B, S, C].
    c_skip, c_out: a number, 0-d, per sample [B], per channel [C] or [B, 1, C], per token [B, S, C]. c_out may be Runs.
    dtype: the result's dtype, fp32, fp16 or bf16; None: the residual's.
    residual_scale: positive. The given residual was divided by it.
    result_scale: positive. The result is divided by it, to make room for large values in fp16. An fp16 result saturates
        unless this is 1 (see saturation.py).
    implementation: "auto", "triton" or "torch" (see dispatch.py).

    Every tensor has a gradient. With Runs the reference computes it. Raises ValueError for other dtypes and scales, and
    for shapes or devices that do not fit together.
    """
    if residual.dim() != 3 or output.shape != residual.shape:
        raise ValueError(
            f"skip: residual has shape {list(residual.shape)} and output {list(output.shape)}; both must be [B, S, C]."
        )
    check_result("skip", dtype, residual.dtype, residual_scale=residual_scale, result_scale=result_scale)
    c_skip = canonical_coefficient("c_skip", c_skip, *residual.shape, residual.device)
    c_out, starts = split_runs("c_out", c_out, *residual.shape, residual.device)
    tensors = (residual, output, c_skip, c_out)
    spec = spec_of(implementation, *tensors, kind=SkipSpec, runs=starts is not None)
    return SKIP.pick(spec).launch(*tensors, dtype or residual.dtype, residual_scale, result_scale, starts)


@kernel_op("skip")
def _skip(
    residual: torch.Tensor,
    output: torch.Tensor,
    c_skip: torch.Tensor | None,
    c_out: torch.Tensor | None,
    dtype: torch.dtype,
    residual_scale: float,
    result_scale: float,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    B, S, C = residual.shape
    out = torch.empty_like(residual, dtype=dtype, memory_format=torch.contiguous_format)
    if out.numel() > 0:
        skip_kind, skip_strides = kind_and_strides(c_skip)
        out_kind, out_strides = kind_and_strides(c_out, starts)
        launch_kernel(
            _skip_kernel,
            (cdiv(S, ROWS), cdiv(C, COLUMNS), B),
            residual.contiguous(),
            output.contiguous(),
            c_skip,
            c_out,
            starts,
            count_runs(starts),
            out,
            flag_for(dtype, result_scale, out.device),
            residual_scale / result_scale,
            1 / result_scale,
            S,
            C,
            *skip_strides,
            *out_strides,
            SKIP=skip_kind,
            OUT=out_kind,
            STEPS=search_steps(starts),
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=NUM_WARPS,
        )
    return out


@_skip.register_fake
def _(residual, output, c_skip, c_out, dtype, residual_scale, result_scale, starts=None):
    return torch.empty_like(residual, dtype=dtype, memory_format=torch.contiguous_format)


def _setup_context(ctx, inputs, output):
    residual, raw, c_skip, c_out, _, *ctx.scales, _ = inputs
    _, _, needs_c_skip, needs_c_out = ctx.needs_input_grad[:4]
    ctx.save_for_backward(residual if needs_c_skip else None, raw if needs_c_out else None, c_skip, c_out)
    ctx.residual_dtype, ctx.output_dtype = residual.dtype, raw.dtype


def _backward(ctx, grad):
    residual, raw, c_skip, c_out = ctx.saved_tensors
    needs_residual, needs_output, needs_c_skip, needs_c_out = ctx.needs_input_grad[:4]
    residual_scale, result_scale = ctx.scales
    wide = grad.float() if result_scale == 1 else grad.float() / result_scale
    d_residual = d_output = d_c_skip = d_c_out = None
    if needs_residual:
        if c_skip is None and residual_scale == result_scale:
            d_residual = grad.to(ctx.residual_dtype)
        else:
            d_residual = (wide * (residual_scale if c_skip is None else residual_scale * c_skip)).to(ctx.residual_dtype)
    if needs_output:
        d_output = (wide if c_out is None else wide * c_out).to(ctx.output_dtype)
    if needs_c_skip:
        d_c_skip = (residual_scale * (wide * residual).sum_to_size(c_skip.shape)).to(c_skip.dtype)
    if needs_c_out:
        d_c_out = (wide * raw).sum_to_size(c_out.shape).to(c_out.dtype)
    return d_residual, d_output, d_c_skip, d_c_out, None, None, None, None


_skip.register_autograd(_backward, setup_context=_setup_context)
SKIP = triton_or_reference("skip", _skip, reference.skip)


@triton.jit(do_not_specialize=("runs",))
def _skip_kernel(
    residual, output, c_skip, c_out, starts, runs, out, flag, skip_factor, out_factor, S, C,
    skip_stride_b, skip_stride_s, skip_stride_c, out_stride_b, out_stride_s, out_stride_c,
    SKIP: tl.constexpr, OUT: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(2)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_mask = rows < S
    column_mask = columns < C
    mask = row_mask[:, None] & column_mask[None, :]
    offsets = (sample.to(tl.int64) * S + rows)[:, None] * C + columns[None, :]
    kept = tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    added = tl.load(output + offsets, mask=mask, other=0.0).to(tl.float32)
    if SKIP != 0:
        kept *= load_coefficient(
            c_skip, sample, rows, columns, row_mask, column_mask, skip_stride_b, skip_stride_s, skip_stride_c, SKIP
        )
    if OUT != 0:
        chosen = sample
        if OUT == 4:
            chosen = find_runs(sample * S + rows, starts, runs, STEPS)
        added *= load_coefficient(
            c_out, chosen, rows, columns, row_mask, column_mask, out_stride_b, out_stride_s, out_stride_c, OUT
        )
    result = kept * skip_factor + added * out_factor
    if flag is not None:
        result = saturate(result, row_mask, flag)
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=mask)
