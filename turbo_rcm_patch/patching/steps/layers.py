"""The norms and projections of a block: each decides between its fused op and diffusers' module, with the reason.

Modules are read when a step runs, never when it is decided: their weights may be replaced in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from diffusers.models.normalization import FP32LayerNorm, RMSNorm
from torch import nn

from ...kernels import Quantized, Runs, reference
from ...kernels.choice.registry import Op, Pick
from ...kernels.coefficient import ONE, PER_CHANNEL, PER_RUN, PER_TOKEN, values_and_starts
from ...kernels.linear.linear import LINEAR_LOW_RANK
from ...kernels.linear.linear_gelu import LINEAR_GELU
from ...kernels.linear.linear_qkv import LINEAR_QKV
from ...kernels.linear.linear_skip import LINEAR_SKIP
from ...kernels.linear.spec import LinearSpec
from ...kernels.rows.gelu import GELU_OVER_X
from ...kernels.rows.layer_norm_modulate import LAYER_NORM_MODULATE, LAYER_NORM_MODULATE_QUANTIZED
from ...kernels.rows.rms_norm_rope import RMS_NORM_ROPE
from ...kernels.rows.skip import SKIP, SkipSpec
from ...plain import hook_on, why_not_linear, why_not_norm, why_not_plain
from ..lora.inside_projections import Linears
from ..weights.brought import are_brought, between_hooks
from . import in_8_bits
from .plan import LINEAR, MODULE, NOTHING, Call, Step, Stream
from .residual import Storage

ALONE, FEW_TOKENS = "nothing to fuse", "a prompt's few tokens"  # reasons for PyTorch's linear in a projection

Tables = tuple[torch.Tensor, torch.Tensor]  # cos and sin of RoPE, each [S, D/2] or [B|1, S, H|1, D/2]


# ---------------------------------------------------------------------------------------------------------------------
# LayerNorm and RMSNorm of the hidden states
# ---------------------------------------------------------------------------------------------------------------------


def layer_norm(
    norm: nn.Module,
    stored: Storage,
    call: Call,
    quantized: torch.dtype | None = None,
    norm_class: type[nn.Module] = FP32LayerNorm,
) -> Step:
    """Return the norm of a stored x [B, S, C], modulated by scale and shift [B, 1|S, C] if they are given.

    Step: (x, scale=None, shift=None) -> [B, S, C] in the call's dtype, or quantized to an 8-bit format.
    norm_class: the norm's class in diffusers' block, FP32LayerNorm or RMSNorm.
    """
    if type(norm) is nn.Identity:
        return Step(partial(_identity, norm, stored, call.dtype), NOTHING)
    reason = why_not_brought_norm(norm, norm_class, call.device)
    if reason is not None:
        return layer_norm_by_module(norm, stored, call, reason)
    op = LAYER_NORM_MODULATE if quantized is None else LAYER_NORM_MODULATE_QUANTIZED
    pick = call.pick(op, result=quantized)
    options = norm.eps / stored.scale**2, quantized or call.dtype, norm_class is not RMSNorm
    run = partial(_layer_norm, pick.launch, norm, *options)
    if quantized is not None:
        run = partial(_as_quantized, run)
    run = between_hooks(run, (norm,), call.device)
    return Step(run, pick.label, pick.reason, gives=quantized, pick=pick)


def layer_norm_by_module(norm: nn.Module, stored: Storage, call: Call, reason: str) -> Step:
    """Return `layer_norm` by diffusers' module."""
    return Step(partial(_layer_norm_by_module, norm, stored, call.dtype), MODULE, reason)


def why_not_brought_norm(norm: nn.Module, norm_class: type[nn.Module], device: torch.device) -> str | None:
    """Return why a kernel may not read a norm's weight, or None if it may, perhaps between offloading's hooks."""
    is_brought = type(norm) is norm_class and are_brought(norm)
    return None if is_brought else why_not_norm(norm, norm_class, device)


def _identity(norm, stored, dtype, x, scale=None, shift=None):
    return _by_row(norm(stored.as_meant(x, dtype)), x)


def _by_row(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a module's output with as many rows as x [..., C], for kernels, which do not broadcast.

    A hook may give fewer, such as their mean. diffusers broadcasts them.
    """
    return y if y.shape[:-1] == x.shape[:-1] else y.expand(*x.shape[:-1], y.shape[-1]).contiguous()


def _layer_norm(launch, norm, eps, result, centred, x, scale=None, shift=None):
    starts = None
    if scale is not None:
        scale, _ = values_and_starts(scale)
        shift, starts = values_and_starts(shift)
    return launch(x, norm.weight, norm.bias, scale, shift, eps, result, starts, centred)


def _as_quantized(run, *inputs):
    return Quantized(*run(*inputs))


def _layer_norm_by_module(norm, stored, dtype, x, scale=None, shift=None):
    y = _by_row(norm(stored.as_meant(x, torch.float32)), x)
    if scale is not None:
        y = y * (1 + by_token(scale, x)) + by_token(shift, x)
    return y.to(dtype)


def by_token(row: torch.Tensor | Runs | float, x: torch.Tensor) -> torch.Tensor | float:
    """Return a row of modulation [B, 1|S, C] for x [B, S, C]. A row for runs of tokens is expanded to every token."""
    return reference.by_token(*row, *x.shape[:2]) if isinstance(row, Runs) else row


# ---------------------------------------------------------------------------------------------------------------------
# Q, K and V, and their norm with RoPE
# ---------------------------------------------------------------------------------------------------------------------


def qkv_projection(attn: nn.Module, tokens: int, call: Call) -> Step:
    """Return the Q, K and V projections of a self-attention: x [B, S, C] -> three [B, S, C]. tokens: B·S."""
    if attn.fused_projections:
        return Step(partial(_qkv_of_one_module, attn), MODULE, "fused projections")
    read = call.read(attn.to_q, attn.to_k, attn.to_v)
    if read.are_quantized:
        return in_8_bits.qkv_projection(read, partial(_qkv_of_modules, attn), tokens, call)
    reason = _why_not_read(read, call)
    if reason is None and not read.are_alike:
        reason = "unequal projections"
    if reason is not None:
        return Step(partial(_qkv_of_modules, attn), MODULE, reason)
    pick = _pick(LINEAR_QKV, "linear_qkv", read, tokens, call, weights=3)
    run = partial(_qkv, pick.launch, read)
    return Step(run, read.named(pick.label), pick.reason, pick=pick)


def _pick(op: Op, measured: str, read: Linears, tokens: int, call: Call, **fields: object) -> Pick:
    """Return an op's kernel for this many tokens and the first linear's weight.

    measured: the op whose measurements count. fields: other fields of the LinearSpec.
    """
    N, K = read.first.weight.shape
    fields = {"result": call.dtype, "linears": call.config.linears, **read.second_product, **fields}
    return call.pick(op, LinearSpec, op=measured, rows=tokens, N=N, K=K, **fields)


def _why_not_read(read: Linears, call: Call) -> str | None:
    """Return the reason why linears (not in 8 bits) must be called, or None if a kernel may read their weights."""
    reasons = (why_not_linear(linear, call.device, call.dtype) for linear in read.linears)
    return read.reason or next(filter(None, reasons), None)


def _qkv_of_one_module(attn, x):
    return _by_row(attn.to_qkv(x), x).chunk(3, dim=-1)


def _qkv_of_modules(attn, x):
    return [_by_row(module(x), x) for module in (attn.to_q, attn.to_k, attn.to_v)]


def _qkv(launch, read, x):
    weights = [linear.weight for linear in read.linears]
    second = read.second_pair(x)
    return launch(x, *weights, *read.biases(), None, None, None, None, x.dtype, *second)


def kv_projection(attn: nn.Module, tokens: int, call: Call, *, added: bool = False) -> Step:
    """Return the K and V projections of a cross-attention: context [B|1, L, C] -> two [B|1, L, C].

    tokens: the context's, over all samples. added: True for the projections of the image.
    """
    if attn.fused_projections:
        return Step(partial(_kv_of_one_module, attn.to_added_kv if added else attn.to_kv), MODULE, "fused projections")
    modules = (attn.add_k_proj, attn.add_v_proj) if added else (attn.to_k, attn.to_v)
    read = call.read(*modules)
    if read.are_quantized:
        return in_8_bits.kv_projection(read, partial(_of_each_module, modules), tokens, call)
    if read.has_lora and _why_not_read(read, call) is None:
        return Step(read.each, read.named(LINEAR), FEW_TOKENS)
    return _by_modules(partial(_of_each_module, modules), read)


def _by_modules(run, read: Linears) -> Step:
    """Return a step that calls linears with nothing to fuse beside them."""
    return Step(run, LINEAR, ALONE) if read.reason is None else Step(run, MODULE, read.reason)


def _kv_of_one_module(module, context):
    return module(context).chunk(2, dim=-1)


def _of_each_module(modules, context):
    k, v = (module(context) for module in modules)
    # A hook may add tokens to both, or give one row for all of them, which diffusers broadcasts.
    return (k, v) if k.shape == v.shape else [each.contiguous() for each in torch.broadcast_tensors(k, v)]


def head_norm(norm: nn.Module, norm_class: type[nn.Module], heads: int, call: Call, *, halves: bool = False) -> Step:
    """Return RMSNorm over all heads, then the split into heads, and RoPE if tables are given.

    Step: (x [B, S, C], tables=None) -> [B, S, H, D]. norm_class: the norm's class in diffusers' block. halves: True if
    RoPE rotates a head's first half with its second, False if it rotates neighbours.
    """
    reason = why_not_head_norm(norm, norm_class, call.device)
    if reason is not None:
        return Step(partial(_head_norm_by_module, norm, heads, halves), MODULE, reason)
    pick = call.pick(RMS_NORM_ROPE)
    eps = torch.finfo(call.dtype).eps if norm.eps is None else norm.eps
    run = between_hooks(partial(_head_norm, pick.launch, norm, heads, eps, halves), (norm,), call.device)
    return Step(run, pick.label, pick.reason, pick=pick)


def why_not_head_norm(norm: nn.Module, norm_class: type[nn.Module], device: torch.device) -> str | None:
    """Return why a kernel may not compute an RMSNorm of queries or keys, or None."""
    reason = why_not_brought_norm(norm, norm_class, device)
    if reason is None and norm.weight is None:
        return "RMSNorm without a weight"
    return "RMSNorm with a bias" if reason is None and getattr(norm, "bias", None) is not None else reason


def _head_norm(launch, norm, heads, eps, halves, x, tables: Tables | None = None):
    cos, sin = tables or (None, None)
    return launch(x, norm.weight, cos, sin, heads, eps, halves)


def _head_norm_by_module(norm, heads, halves, x, tables: Tables | None = None):
    y = _by_row(norm(x), x).type_as(x).unflatten(-1, (heads, -1))  # diffusers' norm gives its weight's dtype
    return y if tables is None else reference.rotate(y, *tables, halves)


# ---------------------------------------------------------------------------------------------------------------------
# Projections: alone, with the skip, with GELU
# ---------------------------------------------------------------------------------------------------------------------


def projection(linear: nn.Module, tokens: int, call: Call) -> Step:
    """Return a lone linear: x [B, S, K] -> [B, S, C]. tokens: B·S."""
    read, by_module = call.read(linear), partial(_of_layers, (linear,))
    if read.are_quantized:
        return in_8_bits.projection(read, by_module, tokens, call)
    if read.has_lora and _why_not_read(read, call) is None:
        return _projection_with_lora(read, tokens, call)
    return _by_modules(by_module, read)


def _projection_with_lora(read: Linears, tokens: int, call: Call) -> Step:
    """Return a lone linear with a LoRA.

    The measurements of linear_qkv, the most similar measured op, choose its kernel.
    """
    pick = _pick(LINEAR_LOW_RANK, "linear_qkv", read, tokens, call)
    run = partial(_linear_low_rank, pick.launch, read)
    return Step(run, read.named(pick.label), pick.reason, pick=pick)


def _linear_low_rank(launch, read, x):
    (bias,) = read.biases()
    return launch(x, read.first.weight, bias, *read.second_pair(x))


def projection_with_skip(
    layers: Sequence[nn.Module], stored: Storage, result: Storage, stream: Stream, call: Call, *, gated: bool
) -> Step:
    """Return a projection (a linear and perhaps a dropout) with the skip: ``residual + gate · layers(a)``.

    Step: (a [B, S, K], residual [B, S, C], gate [B, 1|S, C], Runs, or None for 1) -> [B, S, C].
    stored, result: the storage of the residual and of the result. gated: True if there will be a gate.
    """
    linear, *dropouts = layers
    read = call.read(linear)
    reason = next(filter(None, map(_why_not_left_out, dropouts)), None)
    fields = _skip_fields(stored, result, stream, gated=gated)
    skip = skip_after(stored, result, call)
    if read.are_quantized:
        apart = Step(partial(_layers_then_skip, layers, skip.run), f"{MODULE}, {skip.kernel} skip")
        return in_8_bits.projection_with_skip(read, (stored, result), fields, apart, stream.tokens, call, reason)
    unread = _why_not_read(read, call)
    reason, pick = reason or unread, None
    if reason is None:
        pick = _pick(LINEAR_SKIP, "linear_skip", read, stream.tokens, call, **fields)
        if pick.kernel.is_fused:
            run = partial(_linear_skip, pick.launch, read, stored, result)
            return Step(run, read.named(pick.label), pick=pick)
        reason = pick.reason
    kernel = LINEAR
    if read.has_lora and unread is None:
        layers, kernel = (read.only, *dropouts), read.named(LINEAR)
    run = partial(_layers_then_skip, layers, skip.run)
    return Step(run, f"{kernel}, {skip.kernel} skip", reason, pick=pick)


def _skip_fields(stored: Storage, result: Storage, stream: Stream, *, gated: bool) -> dict[str, object]:
    """Return the fields of a LinearSpec that the skip decides."""
    gate = stream.gate if gated else None
    kind = {None: ONE, "sample": PER_CHANNEL, "token": PER_TOKEN, "run": PER_RUN}[gate]
    samples = stream.samples if gate in ("sample", "token") else 1
    return {"samples": samples, "residual": stored.dtype, "result": result.dtype, "c_out": kind}


def skip_after(stored: Storage, result: Storage, call: Call) -> Step:
    """Return ``residual + gate · output`` as a separate pass.

    Step: (residual, output [B, S, C], gate or None) -> [B, S, C].
    """
    pick, with_runs = (call.pick(SKIP, SkipSpec, runs=runs) for runs in (False, True))
    run = partial(_skip, pick.launch, with_runs.launch, stored, result)
    return Step(run, pick.label, pick.reason, pick=pick)


def _why_not_left_out(layer: nn.Module) -> str | None:
    if type(layer) is nn.Identity:
        return hook_on(layer)
    return why_not_plain(layer, nn.Dropout) or ("dropout" if layer.training and layer.p > 0 else None)


def _linear_skip(launch, read, stored, result, a, residual, gate=None):
    gate, starts = values_and_starts(gate)
    (bias,) = read.biases()
    second = read.second_pair(a)
    skip = (residual, None, gate, result.dtype, stored.scale, result.scale, starts)
    return launch(a, read.first.weight, bias, *skip, None, None, *second)


def _layers_then_skip(layers, skip, a, residual, gate=None):
    return skip(residual, _of_layers(layers, a), gate)


def _skip(launch, launch_with_runs, stored, result, residual, output, gate=None):
    gate, starts = values_and_starts(gate)
    launch = launch if starts is None else launch_with_runs
    if output.shape != residual.shape:  # of a replaced module or a hook; diffusers broadcasts it
        output = output.expand_as(residual).contiguous()
    return launch(residual, output, None, gate, result.dtype, stored.scale, result.scale, starts)


def projection_with_gelu(
    ffn: FeedForward | nn.Sequential, tokens: int, call: Call, quantized: torch.dtype | None = None
) -> Step:
    """Return a feed-forward's first linear, GELU and dropout: x [B, S, C] -> [B, S, ffn_dim].

    ffn: diffusers' module, or a linear, a GELU and a linear without dropout.
    quantized: the 8-bit format that the next step takes, or None. It counts only if the linear is in 8 bits.
    """
    if isinstance(ffn, nn.Sequential):
        linear, activation, dropout = ffn[0], ffn[1], nn.Identity()
        layers, expected = (linear, activation), nn.GELU
    else:
        activation, dropout = layers = tuple(ffn.net)[:2]
        linear, expected = activation.proj, GELU
    by_module = partial(_of_layers, layers)
    if type(activation) is expected and activation.approximate != "tanh":
        reason = f"GELU {activation.approximate}"
    else:
        reason = why_not_plain(activation, expected)
        read = call.read(linear)
        if read.are_quantized:
            reason = reason or _why_not_left_out(dropout)
            return in_8_bits.projection_with_gelu(read, by_module, tokens, call, quantized, reason)
        reason = reason or _why_not_read(read, call)
    if reason is not None:
        return Step(by_module, MODULE, reason)
    pick = _pick(LINEAR_GELU, "linear_gelu", read, tokens, call)
    if pick.kernel.is_fused:
        run = partial(_linear_gelu, pick.launch, read, dropout)
        return Step(run, read.named(pick.label), pick=pick)
    gelu = call.pick(GELU_OVER_X)
    project = read.only if read.has_lora else linear
    run = partial(_linear_then_gelu, project, dropout, gelu.launch)
    return Step(run, f"{read.named(LINEAR)}, {gelu.label} GELU", pick.reason, pick=pick)


def _of_layers(layers, x):
    y = x
    for layer in layers:
        y = layer(y)
    return _by_row(y, x)


def _linear_gelu(launch, read, dropout, x):
    (bias,) = read.biases()
    second = read.second_pair(x)
    return _by_row(dropout(launch(x, read.first.weight, bias, x.dtype, None, None, *second)), x)


def _linear_then_gelu(project, dropout, gelu, x):
    return _by_row(dropout(gelu(project(x))), x)
