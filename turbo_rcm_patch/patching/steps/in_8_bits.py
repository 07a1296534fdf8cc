"""The steps of a block in 8 bits: each runs one fused op on weights and activations in 8 bits, or, with the reason, the
module, whose forward multiplies by the same weights.

What comes in the format that a step takes is used as it is; anything else is quantised in a pass of its own first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from ... import kernels
from ...config import Exact, Sparse
from ...kernels import FP8, INT8, Quantized
from ...kernels.attention.attention_tiles import LOG2_E
from ...kernels.choice.registry import Op, Pick
from ...kernels.coefficient import PER_CHANNEL, values_and_starts
from ...kernels.linear.linear import LINEAR_8BIT, project_down
from ...kernels.linear.linear_gelu import LINEAR_GELU, LINEAR_GELU_QUANTIZED
from ...kernels.linear.linear_qkv import LINEAR_QKV
from ...kernels.linear.linear_skip import LINEAR_SKIP
from ...kernels.linear.spec import LinearSpec
from ...kernels.rows.quantize_rows import QUANTIZE_ROWS
from ..lora.inside_projections import Linears
from ..weights.convert import DTYPES, bias_bound, quantized_weight, why_not_read
from .plan import MODULE, Call, Step, Stream

if TYPE_CHECKING:
    from .residual import Storage

NAMES = {FP8: "e4m3", INT8: "int8", torch.float16: "fp16"}
Activation = torch.Tensor | Quantized


def _in_8_bits(quantize: Callable, x: Activation, format: torch.dtype, *, with_norm: bool = False) -> Quantized:
    """x [..., K] in a format; with_norm: with the norms of its rows, if it is quantised here by a launch."""
    return x if isinstance(x, Quantized) else Quantized(*quantize(x, format, with_norm))


def qkv_projection(read: Linears, by_modules: Callable, tokens: int, call: Call) -> Step:
    """q, k and v of a self-attention to so many tokens in all: x [B, S, C] -> three [B, S, C] in the call's dtype."""
    reason = next(filter(None, (_why_not(linear, call) for linear in read.linears)), None)
    formats = {quantized_weight(linear).format for linear in read.linears}
    if reason is None and not (read.are_alike and len(formats) == 1):
        reason = "unequal projections"
    if reason is not None:
        return Step(by_modules, MODULE, reason)
    return _step(_qkv, _pick(LINEAR_QKV, read.first, read, tokens, call, weights=3), read, call, call.dtype)


def _qkv(launch, quantize, read, implementation, dtype, x):
    weights = [quantized_weight(linear) for linear in read.linears]
    x = _in_8_bits(quantize, x, weights[0].format)
    values, scales = [weight.values for weight in weights], [weight.scale for weight in weights]
    second = project_down(x, read.low_rank(), implementation)
    return launch(x.values, *values, *read.biases(), x.scale, *scales, dtype, *second)


def kv_projection(read: Linears, by_modules: Callable, tokens: int, call: Call) -> Step:
    """k and v of a cross-attention: a context [B|1, L, C] of so many tokens in all, quantised once -> two [B|1, L, C]
    in the call's dtype."""
    reason = next(filter(None, (_why_not(linear, call) for linear in read.linears)), None)
    if reason is None and len({quantized_weight(linear).format for linear in read.linears}) > 1:
        reason = "unequal projections"
    if reason is not None:
        return Step(by_modules, MODULE, reason)
    return _each_step(_each_linear, read, tokens, call)


def _each_step(run: Callable, read: Linears, tokens: int, call: Call) -> Step:
    """A step that launches every linear by itself. run: as of `_step`, with a launch for each linear."""
    picks = [_pick(LINEAR_8BIT, linear, read, tokens, call) for linear in read.linears]
    return _step(run, picks[0], read, call, call.dtype, launch=[pick.launch for pick in picks])


def _each_linear(launches, quantize, read, implementation, dtype, x):
    x = _in_8_bits(quantize, x, quantized_weight(read.first).format)
    results = []
    for launch, linear, bias, factors in zip(launches, read.linears, read.biases(), read.low_ranks(), strict=True):
        weight, second = quantized_weight(linear), project_down(x, factors, implementation)
        results.append(launch(x.values, weight.values, bias, x.scale, weight.scale, dtype, *second))
    return results


def projection(read: Linears, by_module: Callable, tokens: int, call: Call) -> Step:
    """A lone linear on so many tokens in all: x [B, S, K] -> [B, S, C] in the call's dtype."""
    reason = _why_not(read.first, call)
    if reason is not None:
        return Step(by_module, MODULE, reason)
    return _each_step(_only_linear, read, tokens, call)


def _only_linear(*arguments):
    return _each_linear(*arguments)[0]


def projection_with_skip(
    read: Linears,
    storages: tuple[Storage, Storage],
    fields: dict[str, object],
    apart: Step,
    tokens: int,
    call: Call,
    reason: str | None,
) -> Step:
    """``residual + gate · linear(a)``: (a [B, S, K], residual [B, S, C], gate or None) -> [B, S, C].

    storages: how the residual is stored, and the result is to be. fields: of the LinearSpec, about the skip. apart: the
    same with the module called. reason: why the module must be called, or None.
    """
    reason = reason or _why_not(read.first, call)
    if reason is not None:
        return apart._replace(reason=reason)
    return _step(_linear_skip, _pick(LINEAR_SKIP, read.first, read, tokens, call, **fields), read, call, *storages)


def why_not_beside_lora(linear: nn.Module, residual: torch.dtype, stream: Stream, call: Call) -> str | None:
    """The reason why a linear with a gated skip would lose the kernel for sm_90 to its LoRA if the residual had this
    dtype and not the call's, or None if it would not."""
    read = call.read(linear)
    if not (read.are_quantized and read.has_lora) or stream.gate != "sample":
        return None
    fields = {"samples": stream.samples, "c_out": PER_CHANNEL}
    in_each = (
        _pick(LINEAR_SKIP, read.first, read, stream.tokens, call, residual=dtype, result=dtype, **fields).name
        for dtype in (call.dtype, residual)
    )
    return None if len(set(in_each)) == 1 else "for LoRA's kernel on sm_90"


def _linear_skip(launch, quantize, read, implementation, stored, result, a, residual, gate=None):
    weight, (bias,) = quantized_weight(read.first), read.biases()
    a, (gate, starts) = _in_8_bits(quantize, a, weight.format), values_and_starts(gate)
    second = project_down(a, read.low_rank(), implementation)
    skip = (residual, None, gate, result.dtype, stored.scale, result.scale, starts)
    return launch(a.values, weight.values, bias, *skip, a.scale, weight.scale, *second)


def projection_with_gelu(
    read: Linears, by_module: Callable, tokens: int, call: Call, quantized: torch.dtype | None, reason: str | None
) -> Step:
    """``gelu(linear(x))``: x [B, S, C] -> [B, S, ffn_dim], in e4m3 if that is wanted. reason: why the module must be
    called, or None."""
    reason = reason or _why_not(read.first, call)
    if reason is not None:
        return Step(by_module, MODULE, reason)
    if quantized == FP8:
        pick = _pick(LINEAR_GELU_QUANTIZED, read.first, read, tokens, call, result=FP8)
        return _step(_linear_gelu_quantized, pick, read, call)._replace(gives=FP8)
    # To int8 in a pass of its own: it needs the largest value of a row, which no column tile knows.
    return _step(_linear_gelu, _pick(LINEAR_GELU, read.first, read, tokens, call), read, call, call.dtype)


def _linear_gelu(launch, quantize, read, implementation, dtype, x):
    weight, (bias,) = quantized_weight(read.first), read.biases()
    x = _in_8_bits(quantize, x, weight.format)
    second = project_down(x, read.low_rank(), implementation)
    return launch(x.values, weight.values, bias, dtype, x.scale, weight.scale, *second)


def _linear_gelu_quantized(launch, quantize, read, implementation, x):
    weight, (bias,), low_rank = quantized_weight(read.first), read.biases(), read.low_rank()
    x = _in_8_bits(quantize, x, weight.format, with_norm=True)
    norm = weight.norm if low_rank is None else weight.norm + low_rank.norm
    bound = x.norm.new_zeros(()) if bias is None else bias_bound(bias)
    second = project_down(x, low_rank, implementation)
    return Quantized(*launch(x.values, weight.values, bias, x.scale, weight.scale, x.norm, norm, bound, *second))


def _pick(op: Op, linear: nn.Module, read: Linears, tokens: int, call: Call, **fields: object) -> Pick:
    """The kernel of an op on so many tokens, for the 8-bit weight of a linear. fields: others of the LinearSpec."""
    weight = quantized_weight(linear)
    N, K = weight.values.shape
    own = {"dtype": weight.format, "eight_bits": (weight.format,), "others": (call.dtype,), "op": "linear_8bit"}
    own |= {"result": call.dtype, "rows": tokens, "N": N, "K": K, **read.second_product}
    return call.pick(op, LinearSpec, **{**own, **fields})


def _step(run: Callable, pick: Pick, read: Linears, call: Call, *options: object, launch: object = None) -> Step:
    """A step by a pick. run: (launch, what quantises an input, read, implementation, *options, *inputs), with the
    pick's launch unless another is given."""
    format = quantized_weight(read.first).format
    quantize = call.pick(QUANTIZE_ROWS, result=format).launch
    run = partial(run, launch or pick.launch, quantize, read, call.config.implementation, *options)
    name = f"{pick.label} {NAMES[format]}" if pick.kernel.is_fused else pick.label
    return Step(run, read.named(name), pick.reason, takes=format, pick=pick)


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
