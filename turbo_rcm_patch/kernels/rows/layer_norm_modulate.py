"""layer_norm_modulate: ``(LayerNorm(x) · weight + bias) · (1 + scale) + shift``, reading x once and writing once.

x is [B, S, C], weight and bias [C], scale and shift [B|1, C], [B|1, S|1, C] or by runs of tokens. Both pairs are
optional. Each tensor is fp32, fp16 or bf16. The result has one of these dtypes, or 8 bits with a scale and a norm for
each row (quantized.py). With ``centred=False`` the norm is RMSNorm, which subtracts no mean. Statistics and arithmetic
are fp32. The variance is summed over centred values. The result is rounded once. A program walks many rows and keeps
the values that these share in registers. If it read fp32 scale and shift again for each row, these would be four times
the row's bytes. No gradient: under autograd the reference runs. The modulation is adaLN of Peebles and Xie 2022,
Scalable Diffusion Models with Transformers, section 3.2.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .. import reference
from ..choice.registry import spec_of, triton_or_reference
from ..coefficient import (
    PER_TOKEN,
    Runs,
    check_runs,
    count_runs,
    kind_and_strides,
    load_coefficient,
)
from ..dispatch import check_result, kernel_op
from ..launch import launch_kernel
from ..quantized import Quantized, check_format, quantize_reference
from ..sizes import next_power_of_2
from .quantize_rows import new_quantized, store_quantized
from .row_tiles import row_grid, row_tile

LONG = 8192  # rows this long leave no registers for a second copy of their values


def layer_norm_modulate(
    x: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | Runs | None = None,
    shift: torch.Tensor | Runs | None = None,
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
    quantized: torch.dtype | None = None,
    centred: bool = True,
    implementation: str = "auto",
) -> torch.Tensor | Quantized:
    """Return ``(LayerNorm(x) · weight + bias) · (1 + scale) + shift``, [B, S, C]. The norm is over the channels.

    x: [B, S, C]. weight, bias: [C] or None.
    scale, shift: both None, or each [B|1, C] or [B|1, S|1, C], or both Runs that share one tensor of starts.
    dtype: the result's dtype, fp32, fp16 or bf16; None: x's.
    quantized: INT8 or FP8 to return a Quantized in that format, with norm; dtype is then ignored.
    centred: False for RMSNorm in place of LayerNorm.
    implementation: "auto", "triton" or "torch" (see dispatch.py).
    Raises ValueError for other dtypes or formats, and for shapes or devices that do not fit together.
    """
    if x.dim() != 3:
        raise ValueError(f"layer_norm_modulate: x has shape {list(x.shape)}; it must be [B, S, C].")
    if (scale is None) != (shift is None):
        raise ValueError("layer_norm_modulate: give scale and shift together, or neither.")
    for name, affine in (("weight", weight), ("bias", bias)):
        if affine is not None and affine.shape != x.shape[2:]:
            raise ValueError(f"layer_norm_modulate: {name} has shape {list(affine.shape)}, not [C={x.shape[2]}].")
    check_result("layer_norm_modulate", dtype, x.dtype)
    if quantized is not None:
        check_format("layer_norm_modulate", quantized)
    scale, shift, starts = _canonical_modulations(scale, shift, x)
    tensors = (x, weight, bias, scale, shift)
    spec = spec_of(implementation, *tensors, result=quantized)
    if quantized is not None:
        launch = LAYER_NORM_MODULATE_QUANTIZED.pick(spec).launch
        return Quantized(*launch(*tensors, eps, quantized, starts, centred))
    return LAYER_NORM_MODULATE.pick(spec).launch(*tensors, eps, dtype or x.dtype, starts, centred)


def _canonical_modulations(
    scale: torch.Tensor | Runs | None, shift: torch.Tensor | Runs | None, x: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Return scale, shift and starts: [B|1, S|1, C] and None, or for Runs [R, 1, C] and their starts."""
    if not isinstance(scale, Runs) and not isinstance(shift, Runs):
        return _canonical_modulation("scale", scale, x), _canonical_modulation("shift", shift, x), None
    if not (isinstance(scale, Runs) and isinstance(shift, Runs) and scale.starts is shift.starts):
        raise ValueError("layer_norm_modulate: give scale and shift both as Runs that share one starts tensor.")
    for name, runs in (("scale", scale), ("shift", shift)):
        check_runs(f"layer_norm_modulate: {name}", runs, x.shape[2], x.device)
    return scale.values[:, None], shift.values[:, None], scale.starts.contiguous()


def _canonical_modulation(name: str, value: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """Return scale or shift as [B|1, S|1, C]."""
    if value is None:
        return None
    B, S, C = x.shape
    canonical = value[:, None] if value.dim() == 2 else value
    fits = canonical.dim() == 3 and canonical.shape[0] in (1, B) and canonical.shape[1] in (1, S)
    if not fits or canonical.shape[2] != C:
        raise ValueError(
            f"layer_norm_modulate: {name} has shape {list(value.shape)}; accepted are [B, C], [1, C], [B, 1, C], "
            f"[1, 1, C] and [B, S, C] with B={B}, S={S}, C={C}."
        )
    return canonical


@kernel_op("layer_norm_modulate")
def _layer_norm_modulate(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
    starts: torch.Tensor | None = None,
    centred: bool = True,
) -> torch.Tensor:
    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    if out.numel() > 0:
        _launch(x, weight, bias, scale, shift, eps, starts, centred, out, None, None)
    return out


@_layer_norm_modulate.register_fake
def _(x, weight, bias, scale, shift, eps, dtype, starts=None, centred=True):
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


@kernel_op("layer_norm_modulate_quantized")
def _layer_norm_modulate_quantized(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    eps: float,
    format: torch.dtype,
    starts: torch.Tensor | None = None,
    centred: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values, row_scale, norm = new_quantized(x, format, with_norm=True)
    if values.numel() > 0:
        _launch(x, weight, bias, scale, shift, eps, starts, centred, values, row_scale, norm)
    return values, row_scale, norm


@_layer_norm_modulate_quantized.register_fake
def _(x, weight, bias, scale, shift, eps, format, starts=None, centred=True):
    return new_quantized(x, format, with_norm=True)


def _quantized_by_reference(x, weight, bias, scale, shift, eps, format, starts=None, centred=True):
    wide = reference.layer_norm_modulate(x, weight, bias, scale, shift, eps, torch.float32, starts, centred)
    return quantize_reference(wide, format, with_norm=True)


LAYER_NORM_MODULATE = triton_or_reference("layer_norm_modulate", _layer_norm_modulate, reference.layer_norm_modulate)
LAYER_NORM_MODULATE_QUANTIZED = triton_or_reference(
    "layer_norm_modulate", _layer_norm_modulate_quantized, _quantized_by_reference
)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    eps: float,
    starts: torch.Tensor | None,
    centred: bool,
    out: torch.Tensor,
    row_scale: torch.Tensor | None,
    norm: torch.Tensor | None,
) -> None:
    if starts is not None:
        x = x.reshape(1, -1, x.shape[2])  # runs continue from one sample to the next
    if x.stride(2) != 1:
        x = x.contiguous()
    B, S, C = x.shape
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    scale_kind, scale_strides = kind_and_strides(scale)
    shift_kind, shift_strides = kind_and_strides(shift)
    varies = PER_TOKEN in (scale_kind, shift_kind)
    tile = _tile(C, x.element_size(), varies, quantized=row_scale is not None)
    launch_kernel(
        _layer_norm_modulate_kernel,
        row_grid(x.device, tile["ROWS"], S, B),
        x,
        out,
        row_scale,
        norm,
        weight,
        bias,
        scale,
        shift,
        starts,
        count_runs(starts),
        S,
        C,
        x.stride(0),
        x.stride(1),
        *scale_strides,
        *shift_strides,
        eps,
        SCALE=scale_kind,
        SHIFT=shift_kind,
        CENTRED=centred,
        **tile,
    )


@functools.cache
def _tile(C: int, element_size: int, varies: bool, quantized: bool) -> dict[str, int]:
    """Return the tile for rows of C elements.

    varies: True if the modulation varies by token. Loading it ahead would take shared memory of its own.
    quantized: True if the result is. Its values are then in registers twice.
    """
    block = next_power_of_2(C)
    spread = quantized and (varies or block >= LONG)
    return {"BLOCK": block, **row_tile(block, block * element_size, in_flight=not varies, spread=spread)}


@triton.jit(do_not_specialize=("runs",))
def _layer_norm_modulate_kernel(
    x, out, row_scale, norm, weight, bias, scale, shift, starts, runs, S, C, x_stride_b, x_stride_s,
    scale_stride_b, scale_stride_s, scale_stride_c, shift_stride_b, shift_stride_s, shift_stride_c, eps,
    SCALE: tl.constexpr, SHIFT: tl.constexpr, CENTRED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    sample = tl.program_id(1)
    x += sample.to(tl.int64) * x_stride_b
    out += sample.to(tl.int64) * S * C
    if row_scale is not None:
        row_scale += sample.to(tl.int64) * S
        norm += sample.to(tl.int64) * S
    scale_strides = (scale_stride_b, scale_stride_s, scale_stride_c)
    shift_strides = (shift_stride_b, shift_stride_s, shift_stride_c)
    modulation = (weight, bias, scale, shift, scale_strides, shift_strides)
    if starts is None:
        _norm_rows(
            x, out, row_scale, norm, program * ROWS, S, programs * ROWS, C, x_stride_s, sample, modulation, eps,
            SCALE, SHIFT, CENTRED, ROWS, BLOCK, STAGES,
        )  # fmt: skip
    else:
        # Each program takes consecutive rows, which belong to few runs.
        share = tl.cdiv(tl.cdiv(S, programs), ROWS) * ROWS
        for run in range(runs):
            first = tl.maximum(tl.load(starts + run), program * share)
            end = tl.minimum(tl.load(starts + run + 1), tl.minimum(program * share + share, S))
            if first < end:
                _norm_rows(
                    x, out, row_scale, norm, first, end, ROWS, C, x_stride_s, tl.cast(run, tl.int32), modulation, eps,
                    SCALE, SHIFT, CENTRED, ROWS, BLOCK, STAGES,
                )  # fmt: skip


@triton.jit
def _norm_rows(
    x, out, row_scale, norm, start, end, step, C, x_stride_s, sample, modulation, eps,
    SCALE: tl.constexpr, SHIFT: tl.constexpr, CENTRED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Normalise rows from start to end of one sample or run. Read the modulation once unless it varies by token."""
    weight, bias, scale, shift, scale_strides, shift_strides = modulation
    columns = tl.arange(0, BLOCK)
    column_mask = columns < C
    VARIES: tl.constexpr = SCALE == 3 or SHIFT == 3  # by token
    gain = 1.0
    offset = 0.0
    if weight is not None:
        gain = tl.load(weight + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        offset = tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    if scale is not None and not VARIES:
        factor = 1 + load_coefficient(scale, sample, 0, columns, True, column_mask, *scale_strides, SCALE)
        gain = gain * factor
        offset = offset * factor
        offset += load_coefficient(shift, sample, 0, columns, True, column_mask, *shift_strides, SHIFT)
    for first in tl.range(start, end, step, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        row_mask = rows < end
        mask = row_mask[:, None] & column_mask[None, :]
        x_rows = x + rows.to(tl.int64)[:, None] * x_stride_s
        values = tl.load(x_rows + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        if CENTRED:
            mean = tl.sum(values, 1) / C
            values = tl.where(column_mask[None, :], values - mean[:, None], 0.0)
        variance = tl.sum(values * values, 1) / C
        y = values * tl.rsqrt(variance + eps)[:, None] * gain + offset
        if VARIES:
            y *= 1 + load_coefficient(scale, sample, rows, columns, row_mask, column_mask, *scale_strides, SCALE)
            y += load_coefficient(shift, sample, rows, columns, row_mask, column_mask, *shift_strides, SHIFT)
        if row_scale is not None:
            store_quantized(y, rows, columns, mask, out, row_scale, norm, end, C)
        else:
            out_rows = out + rows.to(tl.int64)[:, None] * C
            tl.store(out_rows + columns[None, :], y.to(out.dtype.element_ty), mask=mask)
