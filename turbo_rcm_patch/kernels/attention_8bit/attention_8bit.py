"""Attention of 8-bit q, k and v. Its only store may include the skip, or round to 8 bits for the next linear.

    F   = softmax(q kᵀ) v                      q, k, v of a QuantizedQKV, whose scales include the softmax's
    out = c_skip · residual + c_out · F        residual, out [B, S, H, D]; coefficients over the H·D channels

qkᵀ is exact in int32. The softmax's weights are rounded to e4m3 (to fp16 with an fp16 v), relative to their row's
maximum. PV is summed in fp32 from one block of keys to the next (Zhang et al. 2024, SageAttention2, section 3.4). There
is a kernel for sm_90 (attention_8bit_sm90.py) and a portable one (attention_8bit_portable.py). No gradient: under
autograd the reference runs.
"""

from __future__ import annotations

from functools import partial

import torch

from ..attention.attention import is_one
from ..choice.registry import GLUON, PORTABLE, REFERENCE, Kernel, Op, spec_of, why_not_reference
from ..coefficient import Coefficient, canonical_coefficient
from ..dispatch import KERNEL_DTYPES, kernels_op
from ..quantized import FP8, Quantized
from . import attention_8bit_portable, attention_8bit_sm90
from . import attention_8bit_reference as reference
from .quantize_qkv import QuantizedQKV
from .spec import Attention8BitSpec, why_not_fused


def attention_8bit(
    qkv: QuantizedQKV,
    *,
    residual: torch.Tensor | None = None,
    c_skip: Coefficient = 1.0,
    c_out: Coefficient = 1.0,
    result: torch.dtype | None = None,
    implementation: str = "auto",
) -> torch.Tensor | Quantized:
    """Return F, or ``c_skip * residual + c_out * F`` if a residual is given.

    qkv: from `quantize_qkv`.
    residual: [B, S, H, D] with any strides, or None.
    c_skip, c_out: a number, [B], [C], [B, 1, C] or [B, S, C], with C = H·D channels.
    result: float32, float16 or bfloat16, to return a tensor [B, S, H, D] in this dtype. None: the residual's dtype, or
        without a residual the dtype of q, k and v before they were quantised. float8_e4m3fn, only without a residual:
        to return a Quantized [B, S, H·D]. It has one scale per sample, expanded to [B, S], from a bound that v's scales
        give.
    implementation: "auto", "triton" or "torch" (see dispatch.py).
    Raises ValueError for shapes, dtypes, devices or coefficients that do not fit together.
    """
    _check(qkv, residual, c_skip, c_out, result)
    batch, tokens, heads, head_dim = qkv.q.shape
    c_skip = canonical_coefficient("c_skip", c_skip, batch, tokens, heads * head_dim, qkv.q.device)
    c_out = canonical_coefficient("c_out", c_out, batch, tokens, heads * head_dim, qkv.q.device)
    dtype = result or (qkv.dtype if residual is None else residual.dtype)
    skip = (residual, c_skip, c_out)
    if qkv.q.numel() == 0:
        out = qkv.q.new_empty(qkv.q.shape, dtype=dtype)
        return reference.quantized_values(out, qkv.v_scale.new_ones(batch)) if dtype == FP8 else out
    spec = spec_of(
        implementation,
        *(qkv.q_scale, qkv.k_scale, qkv.v_scale, *skip),
        kind=Attention8BitSpec,
        head_dim=head_dim,
        v_format=qkv.v.dtype,
        result=dtype,
    )
    return ATTENTION_8BIT.pick(spec).launch(qkv, *skip, dtype)


def _check(qkv, residual, c_skip, c_out, result):
    q = qkv.q
    if q.dim() != 4 or q.dtype != torch.int8 or qkv.k.shape != q.shape or qkv.k.dtype != q.dtype:
        raise ValueError(
            f"attention_8bit: q is {q.dtype} {list(q.shape)} and k {qkv.k.dtype} {list(qkv.k.shape)}; both must be "
            "int8 [B, S, H, D], as quantize_qkv gives them."
        )
    if result not in (None, FP8, *KERNEL_DTYPES):
        raise ValueError(
            f"attention_8bit: result={result}; accepted are float32, float16, bfloat16, float8_e4m3fn and None."
        )
    if residual is None:
        if not all(is_one(c) for c in (c_skip, c_out)):
            raise ValueError("attention_8bit: c_skip or c_out is given without a residual; give the residual.")
        return
    if result == FP8:
        raise ValueError("attention_8bit: a residual is given with result=float8_e4m3fn; the sum is not bounded.")
    if residual.shape != q.shape:
        raise ValueError(
            f"attention_8bit: residual has shape {list(residual.shape)}; it must have q's, {list(q.shape)}."
        )


@kernels_op("attention_8bit")
def _attention_8bit(
    q: torch.Tensor,
    q_scale: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    v: torch.Tensor,
    v_scale: torch.Tensor,
    residual: torch.Tensor | None,
    c_skip: torch.Tensor | None,
    c_out: torch.Tensor | None,
    dtype: torch.dtype,
    out_scale: torch.Tensor | None,
) -> torch.Tensor:
    return q.new_empty(q.shape, dtype=dtype)


def _launch(kernel, q, q_scale, k, k_scale, v, v_scale, residual, c_skip, c_out, dtype, out_scale):
    out = q.new_empty(q.shape, dtype=dtype)
    kernel.attention_forward(q, q_scale, k, k_scale, v, v_scale, residual, c_skip, c_out, out, out_scale)
    return out


def _attend(launch, qkv, residual, c_skip, c_out, dtype):
    """Run a launcher on a QuantizedQKV, a residual or None, and canonical coefficients. Return [B, S, H, D] in dtype,
    or for e4m3 a Quantized [B, S, H·D]."""
    out_scale = reference.output_scale(qkv.v_scale) if dtype == FP8 else None
    out = launch(*qkv[:6], residual, c_skip, c_out, dtype, out_scale)
    return out if out_scale is None else reference.quantized_values(out, out_scale)


def _why_not_gluon(spec: Attention8BitSpec) -> str | None:
    return why_not_fused(spec) or attention_8bit_sm90.why_not(spec.device, spec.v_format, spec.result, spec.head_dim)


_gluon = _attention_8bit.launch(GLUON, partial(_launch, attention_8bit_sm90))
_portable = _attention_8bit.launch(PORTABLE, partial(_launch, attention_8bit_portable))
ATTENTION_8BIT = Op(
    "attention_8bit",
    (
        Kernel(GLUON, _why_not_gluon, partial(_attend, _gluon)),
        Kernel(PORTABLE, why_not_fused, partial(_attend, _portable)),
        Kernel(REFERENCE, why_not_reference, partial(_attend, reference.attention_8bit), is_fused=False),
    ),
)
