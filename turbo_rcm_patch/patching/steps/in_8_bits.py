"""The steps of a block in 8 bits.

Each step runs one fused op on 8-bit weights and activations. Otherwise it calls the module, whose forward multiplies by
the same weights, and states the reason. An input in the format that a step takes is used directly. Any other input is
quantised in a separate pass first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from ...kernels.dispatch import is_gpu
from ...kernels.linear.gemm_portable import NO_PAIR
from ...kernels.linear.linear import LINEAR_8BIT, project_down
from ...kernels.linear.linear_gelu import LINEAR_GELU, LINEAR_GELU_QUANTIZED
from ...kernels.linear.linear_qkv import LINEAR_QKV
from ...kernels.linear.linear_skip import LINEAR_SKIP
from ...kernels.linear.spec import LinearSpec
from ...kernels.rows.quantize_rows import QUANTIZE_ROWS
from ..lora.inside_projections import Linears
from ..weights.brought import between_hooks
from ..weights.quantize_linears import DTYPES, bias_bound, why_not_read
from .context_parallel import OwnTokens, own_tokens, own_tokens_in_8_bits
from .plan import MODULE, Call, Step, Stream

if TYPE_CHECKING:
    from .residual import Storage

NAMES = {FP8: "e4m3", INT8: "int8", torch.float16: "fp16"}
Activation = torch.Tensor | Quantized


def _in_8_bits(quantize: Callable, x: Activation, format: torch.dtype, *, with_norm: bool = False) -> Quantized:
    """Return x [..., K] in a format. with_norm: also compute the norms of its rows if x is quantised here."""
    return x if isinstance(x, Quantized) else Quantized(*quantize(x, format, with_norm))


def qkv_projection(read: Linears, by_modules: Callable, tokens: int, call: Call) -> Step:
    """Return a self-attention's Q, K and V projections: x [B, S, C] -> three [B, S, C] in the call's dtype."""
    reason = next(filter(None, (_why_not(linear, call) for linear in read.linears)), None)
    formats = {linear.quantized().format for linear in read.linears}
    if reason is None and not (read.are_alike and len(formats) == 1):
        reason = "unequal projections"
    if reason is not None:
        return Step(by_modules, MODULE, reason)
    return _step(_qkv, _pick(LINEAR_QKV, read.first, read, tokens, call, weights=3), read, tokens, call, call.dtype)


def _qkv(launch, quantize, read, down, dtype, x):
    weights = [linear.quantized() for linear in read.linears]
    x = _in_8_bits(quantize, x, weights[0].format)
    values, scales = [weight.values for weight in weights], [weight.scale for weight in weights]
    second = read.second_pair(x, down)
    return launch(x.values, *values, *read.biases(), x.scale, *scales, dtype, *second)


def kv_projection(read: Linears, by_modules: Callable, tokens: int, call: Call) -> Step:
    """Return a cross-attention's K and V projections, whose context is quantised once.

    Step: context [B|1, L, C] -> two [B|1, L, C] in the call's dtype. tokens: the context's, over all samples.
    """
    reason = next(filter(None, (_why_not(linear, call) for linear in read.linears)), None)
    if reason is None and len({linear.quantized().format for linear in read.linears}) > 1:
        reason = "unequal projections"
    if reason is not None:
        return Step(by_modules, MODULE, reason)
    return _each_step(_each_linear, read, tokens, call)


def _each_step(run: Callable, read: Linears, tokens: int, call: Call) -> Step:
    """Return a step that launches every linear separately. run: as in `_step`, but it gets a launch for each linear."""
    picks = [_pick(LINEAR_8BIT, linear, read, tokens, call) for linear in read.linears]
    return _step(run, picks[0], read, tokens, call, call.dtype, launches=[pick.launch for pick in picks])


def _each_linear(launches, quantize, read, down, dtype, x):
    x = _in_8_bits(quantize, x, read.first.quantized().format)
    results = []
    for launch, linear, bias, factors in zip(launches, read.linears, read.biases(), read.low_ranks(), strict=True):
        weight = linear.quantized()
        second = NO_PAIR if factors is None else project_down(x, factors, down)
        results.append(launch(x.values, weight.values, bias, x.scale, weight.scale, dtype, *second))
    return results


def projection(read: Linears, by_module: Callable, tokens: int, call: Call) -> Step:
    """Return a lone linear: x [B, S, K] -> [B, S, C] in the call's dtype. tokens: B·S."""
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
    """Return ``residual + gate · linear(a)``: (a [B, S, K], residual [B, S, C], gate or None) -> [B, S, C].

    storages: the storage of the residual and of the result. fields: the skip's fields of the LinearSpec. apart: the
    step that calls the module instead. reason: the reason why the module must be called, or None.
    """
    reason = reason or _why_not(read.first, call)
    if reason is not None:
        return apart._replace(reason=reason)
    return _step(
        _linear_skip, _pick(LINEAR_SKIP, read.first, read, tokens, call, **fields), read, tokens, call, *storages
    )


def why_not_beside_lora(linear: nn.Module, residual: torch.dtype, stream: Stream, call: Call) -> str | None:
    """Return the reason against a residual of this dtype beside a linear with a LoRA and a gated skip, or None.

    The reason is that the linear's kernel would differ from the one for the call's dtype.
    """
    read = call.read(linear)
    if not (read.are_quantized and read.has_lora) or stream.gate != "sample":
        return None
    fields = {"samples": stream.samples, "c_out": PER_CHANNEL}
    in_each = (
        _pick(LINEAR_SKIP, read.first, read, stream.tokens, call, residual=dtype, result=dtype, **fields).name
        for dtype in (call.dtype, residual)
    )
    return None if len(set(in_each)) == 1 else "for LoRA's kernel on sm_90"


def _linear_skip(launch, quantize, read, down, stored, result, a, residual, gate=None):
    weight, (bias,) = read.first.quantized(), read.biases()
    a, (gate, starts) = _in_8_bits(quantize, a, weight.format), values_and_starts(gate)
    second = read.second_pair(a, down)
    skip = (residual, None, gate, result.dtype, stored.scale, result.scale, starts)
    return launch(a.values, weight.values, bias, *skip, a.scale, weight.scale, *second)


def projection_with_gelu(
    read: Linears, by_module: Callable, tokens: int, call: Call, quantized: torch.dtype | None, reason: str | None
) -> Step:
    """Return ``gelu(linear(x))``: x [B, S, C] -> [B, S, ffn_dim].

    quantized: the format that the next step takes; only for e4m3 does this step quantise its result. reason: the reason
    why the module must be called, or None.
    """
    reason = reason or _why_not(read.first, call)
    if reason is not None:
        return Step(by_module, MODULE, reason)
    if quantized == FP8:
        pick = _pick(LINEAR_GELU_QUANTIZED, read.first, read, tokens, call, result=FP8)
        return _step(_linear_gelu_quantized, pick, read, tokens, call)._replace(gives=FP8)
    # Quantising to int8 is a separate pass. It needs a row's largest value, which no column tile knows.
    return _step(_linear_gelu, _pick(LINEAR_GELU, read.first, read, tokens, call), read, tokens, call, call.dtype)


def _linear_gelu(launch, quantize, read, down, dtype, x):
    weight, (bias,) = read.first.quantized(), read.biases()
    x = _in_8_bits(quantize, x, weight.format)
    second = read.second_pair(x, down)
    return launch(x.values, weight.values, bias, dtype, x.scale, weight.scale, *second)


def _linear_gelu_quantized(launch, quantize, read, down, x):
    weight, (bias,), low_rank = read.first.quantized(), read.biases(), read.low_rank()
    x = _in_8_bits(quantize, x, weight.format, with_norm=True)
    norm = weight.norm if low_rank is None else weight.norm + low_rank.norm
    bound = x.norm.new_zeros(()) if bias is None else bias_bound(bias)
    second = NO_PAIR if low_rank is None else project_down(x, low_rank, down)
    return Quantized(*launch(x.values, weight.values, bias, x.scale, weight.scale, x.norm, norm, bound, *second))


def _pick(op: Op, linear: nn.Module, read: Linears, tokens: int, call: Call, **fields: object) -> Pick:
    """Return an op's kernel for this many tokens and a linear's 8-bit weight. fields: others of the LinearSpec."""
    weight = linear.quantized()
    N, K = weight.values.shape
    own = {"dtype": weight.format, "eight_bits": (weight.format,), "others": (call.dtype,), "op": "linear_8bit"}
    own |= {"result": call.dtype, "rows": tokens, "N": N, "K": K, **read.second_product}
    return call.pick(op, LinearSpec, **{**own, **fields})


def _step(
    run: Callable,
    pick: Pick,
    read: Linears,
    tokens: int,
    call: Call,
    *options: object,
    launches: Sequence[Callable] | None = None,
) -> Step:
    """Return the step that runs a pick.

    run: (launch, quantize, read, down, *options, *inputs). launches: one launch per linear if each is
    launched separately. They then replace the pick's launch.
    """
    format = read.first.quantized().format
    quantize = call.pick(QUANTIZE_ROWS, result=format).launch
    down = _pick_down(read, tokens, call, at_once=len(read.linears) if launches is None else 1)
    run = between_hooks(
        partial(run, launches or pick.launch, quantize, read, down, *options), read.linears, call.device
    )
    name = f"{pick.label} {NAMES[format]}" if pick.kernel.is_fused else pick.label
    return Step(run, read.named(name), pick.reason, takes=format, pick=pick)


def _pick_down(read: Linears, tokens: int, call: Call, at_once: int) -> Callable | None:
    """Return the launch that multiplies the input by LoRA's first matrices (`project_down`), or None without LoRA.

    at_once: the number of linears whose matrices are multiplied together.
    """
    if not read.has_lora:
        return None
    low, rank = read.second_product["low"], read.second_product["rank"]
    fields = {"others": (), "result": low, "N": at_once * rank, "low": None, "rank": 0}
    return _pick(LINEAR_8BIT, read.first, read, tokens, call, **fields).launch


def _why_not(linear: nn.Linear, call: Call) -> str | None:
    """Return the reason why a linear's module must be called, or None.

    Examples: a hook on the module, a derivative, fp64 inputs, or a GPU without the weight's 8-bit format.
    """
    reason = _why_not_call(call) or why_not_read(linear, call.device)
    if reason is None and call.config.implementation == "auto" and is_gpu(call.device):
        reason = QUANTIZE_ROWS.why_not_fused(call.spec(result=linear.quantized().format))
    return reason


def _why_not_call(call: Call) -> str | None:
    if call.derivative is not None:
        return "autograd"
    return None if call.dtype in DTYPES else f"{str(call.dtype).removeprefix('torch.')} tensors"


def tokens_after_exchange(format: torch.dtype | None, call: Call) -> OwnTokens:
    """Return the function that makes a GPU's tokens of what arrives: in an 8-bit format, or in their dtype for None."""
    if format is None:
        return own_tokens
    return partial(own_tokens_in_8_bits, call.pick(QUANTIZE_ROWS, result=format).launch, format)


def why_not_attention(attn: nn.Module, call: Call) -> str | None:
    """Return the reason why a self-attention runs in the model's dtype, or None if it runs in 8 bits.

    attention.py decides about diffusers' dispatch and several GPUs.
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
    """Return one step for QK-norm over all heads, RoPE, and the quantisation of q, k and v.

    Step: (q, k, v [B, S, C], tables) -> QuantizedQKV.
    """
    fields = _attention_fields(attn, call)
    pick = call.pick(kernels.QUANTIZE_QKV, kernels.Attention8BitSpec, **fields)
    run = partial(_quantize_qkv, attn, pick.launch, fields["v_format"])
    return Step(between_hooks(run, (attn.norm_q, attn.norm_k), call.device), pick.label, pick.reason)


def _quantize_qkv(attn, launch, v_format, q, k, v, tables):
    eps = torch.finfo(q.dtype).eps if attn.norm_q.eps is None else attn.norm_q.eps
    scale = (q.shape[2] // attn.heads) ** -0.5 * LOG2_E
    weights = attn.norm_q.weight, attn.norm_k.weight
    return kernels.QuantizedQKV(*launch(q, k, v, *weights, *tables, attn.heads, eps, scale, v_format), q.dtype)


def quantize_heads(attn: nn.Module, call: Call) -> Step:
    """Return the quantisation of q, k and v after QK-norm and RoPE, which ran in a pass of their own.

    Step: (q, k [B, S, H, D], v [B, S, C] or [B, S, H, D]) -> QuantizedQKV. H may be a part of the attention's heads.
    """
    fields = _attention_fields(attn, call)
    pick = call.pick(kernels.QUANTIZE_QKV, kernels.Attention8BitSpec, **fields)
    return Step(partial(_quantize_heads, pick.launch, fields["v_format"]), pick.label, pick.reason)


def _quantize_heads(launch, v_format, q, k, v):
    heads, head_dim = q.shape[2:]
    norms_and_tables = (None,) * 4
    q, k, v = (x.flatten(2) for x in (q, k, v))
    quantized = launch(q, k, v, *norms_and_tables, heads, 0.0, head_dim**-0.5 * LOG2_E, v_format)
    return kernels.QuantizedQKV(*quantized, q.dtype)


def attention(attn: nn.Module, call: Call, result: torch.dtype | None) -> Step:
    """Return attention: QuantizedQKV -> [B, S, H, D] in the call's dtype, or a Quantized [B, S, C] in e4m3."""
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
