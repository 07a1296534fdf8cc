"""Attention of 8-bit q, k and v whose only store may end in the skip, or in 8 bits for the next linear.

    F   = softmax(q kᵀ) v                      q, k, v of a QuantizedQKV: its scales hold the softmax's
    out = c_skip · residual + c_out · F        residual, out [B, S, H, D]; coefficients over the H·D channels

qkᵀ is exact in int32. The softmax's weights are rounded to e4m3 (fp16 with an fp16 v) relative to their row's maximum,
and PV is summed in fp32 from one block of keys to the next (Zhang et al. 2024, SageAttention2, section 3.4). On sm_90
the kernel is attention_8bit_sm90's, else the portable one. No gradient: under autograd the reference runs.
"""

from __future__ import annotations

import torch

from ..attention.attention import is_one
from ..coefficient import Coefficient, canonical_coefficient
from ..dispatch import KERNEL_DTYPES, kernel_op, use_triton
from ..quantized import FP8, Quantized
from . import attention_8bit_reference as reference
from . import attention_8bit_sm90
from .attention_8bit_portable import attention_forward
from .quantize_qkv import QuantizedQKV, why_no_kernel


def attention_8bit(
    qkv: QuantizedQKV,
    *,
    residual: torch.Tensor | None = None,
    c_skip: Coefficient = 1.0,
    c_out: Coefficient = 1.0,
    result: torch.dtype | None = None,
    implementation: str = "auto",
) -> torch.Tensor | Quantized:
    """F, or ``c_skip * residual + c_out * F`` when a residual is given, of what `quantize_qkv` made.

    residual: [B, S, H, D], any strides. Coefficients: a number, [B], [C], [B, 1, C] or [B, S, C] with C = H·D channels.
    result: float32, float16, bfloat16, or None for what q, k and v were before, or the residual's dtype if there is
    one: [B, S, H, D]. With float8_e4m3fn, which takes no residual, it is a Quantized [B, S, H·D] with one scale per
    sample, from a bound that v's scales give, expanded to [B, S].
    implementation: "auto", "triton" or "torch" (see dispatch.py).
    Raises ValueError for shapes, dtypes, devices or coefficients that do not fit together.
    """
    _check(qkv, residual, c_skip, c_out, result)
    batch, tokens, heads, head_dim = qkv.q.shape
    c_skip = canonical_coefficient("c_skip", c_skip, batch, tokens, heads * head_dim, qkv.q.device)
    c_out = canonical_coefficient("c_out", c_out, batch, tokens, heads * head_dim, qkv.q.device)
    dtype = result or (qkv.dtype if residual is None else residual.dtype)
    out_scale = reference.output_scale(qkv.v_scale) if dtype == FP8 else None
    wide = (qkv.q_scale, qkv.k_scale, qkv.v_scale, residual, c_skip, c_out)
    fused = use_triton(implementation, *wide, has_gradient=False, result=result)
    reason = why_no_kernel(qkv.q.device, qkv.v.dtype, head_dim) if fused else None
    if reason is not None and implementation == "triton":
        raise ValueError(f"attention_8bit: the kernel cannot take {reason}; use implementation='auto'.")
    op = _attention_8bit if fused and reason is None and qkv.q.numel() > 0 else reference.attention_8bit
    out = op(*qkv[:6], residual, c_skip, c_out, dtype, out_scale)
    return out if out_scale is None else reference.quantized_values(out, out_scale)


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
            raise ValueError("attention_8bit: c_skip or c_out is given without a residual; give it, or leave both.")
        return
    if result == FP8:
        raise ValueError("attention_8bit: a residual is given with result=float8_e4m3fn; the sum is not bounded.")
    if residual.shape != q.shape:
        raise ValueError(
            f"attention_8bit: residual has shape {list(residual.shape)}; it must have q's, {list(q.shape)}."
        )


@kernel_op("attention_8bit")
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
    out = q.new_empty(q.shape, dtype=dtype)
    operands = (q, q_scale, k, k_scale, v, v_scale)
    on_sm90 = attention_8bit_sm90.why_not(q, v, dtype) is None
    forward = attention_8bit_sm90.attention_forward if on_sm90 else attention_forward
    forward(*operands, residual, c_skip, c_out, out, out_scale)
    return out


@_attention_8bit.register_fake
def _(q, q_scale, k, k_scale, v, v_scale, residual, c_skip, c_out, dtype, out_scale):
    return q.new_empty(q.shape, dtype=dtype)
