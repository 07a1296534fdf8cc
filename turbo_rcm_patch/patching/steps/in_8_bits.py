"""The steps of a block in 8 bits: each runs one fused op on weights and activations in 8 bits, or, with the reason, the
module, whose forward multiplies by the same weights.

What comes in the format that a step takes is used as it is; anything else is quantised in a pass of its own first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from ... import kernels
from ...config import Exact, Sparse
from ...kernels import FP8, INT8, Quantized
from ...kernels.attention.attention_tiles import LOG2_E
from ..lora.inside_projections import Linears
from ..weights.convert import DTYPES, bias_bound, quantized_weight, why_not_read
from .plan import MODULE, REFERENCE, Call, Step, Stream

NAMES = {FP8: "e4m3", INT8: "int8", torch.float16: "fp16"}
Activation = torch.Tensor | Quantized


def in_8_bits(x: Activation, format: torch.dtype, implementation: str, *, with_norm: bool = False) -> Quantized:
    """x [..., K] in a format; with_norm: with the norms of its rows, if it is quantised here."""
    if isinstance(x, Quantized):
        return x
    return kernels.quantize_rows(x, format, with_norm=with_norm, implementation=implementation)


def qkv_projection(read: Linears, by_modules: Callable, tokens: int, call: Call) -> Step:
    """q, k and v of a self-attention to so many tokens in all: x [B, S, C] -> three [B, S, C] in the call's dtype."""
    reason = next(filter(None, (_why_not(linear, call) for linear in read.linears)), None)
    formats = {quantized_weight(linear).format for linear in read.linears}
    if reason is None and not (read.are_alike and len(formats) == 1):
        reason = "unequal projections"
    if reason is not None:
        return Step(by_modules, MODULE, reason)
    return _step(partial(_qkv, read, call.dtype), read, tokens, call, _qkv_kernel)


def _qkv_kernel(*sizes, **options) -> str:
    return kernels.linear_qkv_kernel(*sizes, **options)[0]


def _qkv(read, dtype, implementation, x):
    weights = [quantized_weight(linear) for linear in read.linears]
    x = in_8_bits(x, weights[0].format, implementation)
    options = {"low_rank": read.low_rank(), "dtype": dtype, "implementation": implementation}
    return kernels.linear_qkv(x, weights, read.biases(), **options)


def kv_projection(read: Linears, by_modules: Callable, tokens: int, call: Call) -> Step:
    """k and v of a cross-attention: a context [B|1, L, C] of so many tokens in all, quantised once -> two [B|1, L, C]
    in the call's dtype."""
    reason = next(filter(None, (_why_not(linear, call) for linear in read.linears)), None)
    if reason is None and len({quantized_weight(linear).format for linear in read.linears}) > 1:
        reason = "unequal projections"
    if reason is not None:
        return Step(by_modules, MODULE, reason)
    return _step(partial(_each_linear, read, call.dtype), read, tokens, call)


def _each_linear(read, dtype, implementation, x):
    x = in_8_bits(x, quantized_weight(read.first).format, implementation)
    options = {"dtype": dtype, "implementation": implementation}
    each = zip(read.linears, read.biases(), read.low_ranks(), strict=True)
    return [
        kernels.linear_8bit(x, quantized_weight(linear), bias, low_rank=low_rank, **options)
        for linear, bias, low_rank in each
    ]


def projection(read: Linears, by_module: Callable, tokens: int, call: Call) -> Step:
    """A lone linear on so many tokens in all: x [B, S, K] -> [B, S, C] in the call's dtype."""
    reason = _why_not(read.first, call)
    if reason is not None:
        return Step(by_module, MODULE, reason)
    return _step(partial(_linear, read, call.dtype), read, tokens, call)


def _linear(read, dtype, implementation, x):
    return _each_linear(read, dtype, implementation, x)[0]


def projection_with_skip(
    read: Linears, skip_options: Callable, apart: Step, tokens: int, call: Call, reason: str | None, **options: object
) -> Step:
    """``residual + gate · linear(a)``: (a [B, S, K], residual [B, S, C], gate or None) -> [B, S, C].

    skip_options: of the gate. apart: the same, of the module's result. reason: why that must be, if so. options: of
    `kernels.gemm_kernel`.
    """
    reason = reason or _why_not(read.first, call)
    if reason is not None:
        return apart._replace(reason=reason)
    return _step(partial(_linear_skip, read, skip_options), read, tokens, call, **options)


def why_not_beside_lora(linear: nn.Module, residual: torch.dtype, stream: Stream, call: Call) -> str | None:
    """Why a linear with a gated skip loses the kernel for sm_90 to its LoRA where the residual has a dtype and not the
    call's, in a few words; None where it does not."""
    read = call.read(linear)
    if not (read.are_quantized and read.has_lora) or stream.gate != "sample" or call.choose()[1] is not None:
        return None
    weight = quantized_weight(read.first)
    sizes = call.device, weight.format, stream.tokens, *weight.values.shape
    in_each = (
        kernels.gemm_kernel(*sizes, samples=stream.samples, result=dtype, gated=dtype, low_rank=True)
        for dtype in (call.dtype, residual)
    )
    return None if len(set(in_each)) == 1 else "for LoRA's kernel on sm_90"


def _linear_skip(read, skip_options, implementation, a, residual, gate=None):
    weight = quantized_weight(read.first)
    a = in_8_bits(a, weight.format, implementation)
    options = {**skip_options(gate), "low_rank": read.low_rank(), "implementation": implementation}
    return kernels.linear_skip(a, weight, read.biases()[0], residual, **options)


def projection_with_gelu(
    read: Linears, by_module: Callable, tokens: int, call: Call, quantized: torch.dtype | None, reason: str | None
) -> Step:
    """``gelu(linear(x))``: x [B, S, C] -> [B, S, ffn_dim], in e4m3 where that is wanted. reason: as above."""
    reason = reason or _why_not(read.first, call)
    if reason is not None:
        return Step(by_module, MODULE, reason)
    result = FP8 if quantized == FP8 else None  # int8 needs the largest value of a row, which no column tile knows
    run = partial(_linear_gelu, read, call.dtype, result)
    return _step(run, read, tokens, call, result=result or call.dtype)._replace(gives=result)


def _linear_gelu(read, dtype, result, implementation, x):
    weight, (bias,) = quantized_weight(read.first), read.biases()
    x = in_8_bits(x, weight.format, implementation, with_norm=result is not None)
    bound = bias_bound(bias) if result is not None else None
    options = {"dtype": dtype, "result": result, "bias_bound": bound, "implementation": implementation}
    return kernels.linear_gelu(x, weight, bias, low_rank=read.low_rank(), **options)


def _step(
    run: Callable, read: Linears, tokens: int, call: Call, kernel: Callable = kernels.gemm_kernel, **options
) -> Step:
    """run: (implementation, *inputs). kernel: what names that which runs. options: of it; the result is in the call's
    dtype where they do not say."""
    implementation, reason = call.choose()
    weight = quantized_weight(read.first)
    name = REFERENCE
    if reason is None:
        options = {"result": call.dtype, **options}
        name = f"{kernel(call.device, weight.format, tokens, *weight.values.shape, **options)} "
        name += NAMES[weight.format]
    return Step(partial(run, implementation), read.named(name), reason, takes=weight.format)


def _why_not(linear: nn.Linear, call: Call) -> str | None:
    """Why a linear's module is called: its 8-bit weight may not be read past it, a derivative or fp64 is wanted, or the
    GPU is older than the one it was converted for."""
    reason = _why_not_call(call) or why_not_read(linear, call.device)
    if reason is None and call.choose() == ("auto", None):
        format = quantized_weight(linear).format
        reason = kernels.why_not_triton_on(call.device, format, (format,))
    return reason


def _why_not_call(call: Call) -> str | None:
    if call.derivative is not None:
        return "autograd"
    return None if call.dtype in DTYPES else f"{str(call.dtype).removeprefix('torch.')} tensors"


def why_not_attention(attn: nn.Module, call: Call) -> str | None:
    """Why a self-attention is computed in the model's dtype, in a few words; None when it is in 8 bits.

    What diffusers' dispatch or several GPUs do with it is another question (exact.py).
    """
    config = call.config
    if isinstance(config, (Exact, Sparse)):
        return f"{config.tier.name} tier"
    if not config.in_8_bits("attention"):
        return "not in quantize"
    head_dim = attn.inner_dim // attn.heads
    if head_dim not in kernels.HEAD_DIMS_8BIT:
        return f"head_dim {head_dim}"
    return _why_not_call(call) or call.exactly


def quantize_qkv(attn: nn.Module, call: Call) -> Step:
    """The norms over all heads of q and k, RoPE, and q, k and v in 8 bits.

    Step: (q, k, v [B, S, C], tables) -> QuantizedQKV.
    """
    fields = _attention_fields(attn, call)
    pick = call.pick(kernels.QUANTIZE_QKV, kernels.Attention8BitSpec, **fields)
    return Step(partial(_quantize_qkv, attn, pick.launch, fields["v_format"]), pick.label, pick.reason)


def _quantize_qkv(attn, launch, v_format, q, k, v, tables):
    eps = torch.finfo(q.dtype).eps if attn.norm_q.eps is None else attn.norm_q.eps
    scale = (q.shape[2] // attn.heads) ** -0.5 * LOG2_E
    weights = attn.norm_q.weight, attn.norm_k.weight
    return kernels.QuantizedQKV(*launch(q, k, v, *weights, *tables, attn.heads, eps, scale, v_format), q.dtype)


def attention(attn: nn.Module, call: Call, result: torch.dtype | None) -> Step:
    """Attention of a QuantizedQKV: -> [B, S, H, D] in the call's dtype, or quantized to e4m3 [B, S, C]."""
    dtype, fields = FP8 if result == FP8 else call.dtype, _attention_fields(attn, call)
    pick = call.pick(kernels.ATTENTION_8BIT, kernels.Attention8BitSpec, result=dtype, **fields)
    label = formats_label(pick, fields["v_format"])
    return Step(partial(_attention, pick.launch, dtype), label, pick.reason, gives=FP8 if dtype == FP8 else None)


def _attention(launch, dtype, qkv):
    return launch(qkv, None, None, None, dtype)


def _attention_fields(attn: nn.Module, call: Call) -> dict[str, object]:
    """The fields of the Attention8BitSpec."""
    v_format = kernels.default_v_format(call.device, call.config.implementation)
    return {"head_dim": attn.inner_dim // attn.heads, "v_format": v_format}


def formats_label(pick: kernels.Pick, v_format: torch.dtype) -> str:
    """Return a pick's label with the formats of 8-bit attention, if one of its kernels runs."""
    return f"{pick.label} int8, {NAMES[v_format]}" if pick.kernel.is_fused else pick.label
