"""Measure the error of each part of a patched Wan block by itself, on the inputs of the oracle's part.

The parts are the sub-layers, whose error is that of the term gate · F(x) which they add; every linear in 8 bits; the
two matrix products of a dense attention in 8 bits (QKᵀ with the softmax, and PV); a sparse attention as a whole; and
with sparse-linear attention the choice of key blocks (sparse.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import nn

from .. import kernels
from ..kernels import reference
from ..patching.families.wan.block import BlockPlan, QuantizedSelfAttention, Rotary, SelfAttention, Whole, angles
from ..patching.families.wan.modulation import Row, modulation
from ..patching.steps.block_sparse import why_dense
from ..patching.steps.plan import state_of
from ..patching.weights.convert import is_quantized
from .metrics import relative_l2
from .sparse import choice_error, self_attention_is_sparse

CHOICE, SPARSE_ATTENTION = "choice of key blocks", "sparse-linear attention"
LEFT_OUT = "block-sparse attention"  # beside dense attention
SUB_LAYERS = {"self_attention": "attn1", "cross_attention": "attn2", "feed_forward": "ffn"}
QK, PV = "attention QKᵀ", "attention PV"

Trace = dict[str, tuple[torch.Tensor, torch.Tensor]]  # by module: its input and its output


def part_errors(block: nn.Module, oracle: nn.Module, args: tuple) -> dict[str, float]:
    """Relative L2 errors by part of a patched block that ran already; none for blocks of other classes than Wan's.

    oracle: its twin in fp32 on the device of its inputs. args: x [B, S, C], context, temb [B, 6, C], rotary.
    """
    plan = state_of(block).plans.ran if type(block) is WanTransformerBlock else None
    if not isinstance(plan, BlockPlan):
        return {}
    trace = trace_of(oracle, args)
    with torch.no_grad():
        return {
            **dict(_sub_layer_errors(block, plan, trace, args)),
            **dict(_linear_errors(block, trace, args[0].dtype)),
            **_attention_errors(block, plan, trace, args),
        }


def trace_of(oracle: nn.Module, args: tuple) -> Trace:
    """Return the inputs and outputs of the oracle's modules."""
    trace: Trace = {}

    def keep(name: str):
        def hook(_module, inputs, output):
            trace[name] = inputs[0], output

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in oracle.named_modules() if name]
    wide = [_widened(value) for value in args]
    try:
        with torch.no_grad():
            type(oracle).forward(oracle, *wide)
    finally:
        for handle in handles:
            handle.remove()
    return trace


def _widened(value):
    return tuple(map(_widened, value)) if isinstance(value, tuple) else value.float()


def _sub_layer_errors(block: nn.Module, plan: BlockPlan, trace: Trace, args: tuple) -> Iterator[tuple[str, float]]:
    x, context, temb, rotary = args
    shift, scale, gate, c_shift, c_scale, c_gate = modulation(block.scale_shift_table, temb, x, state_of(block).shared)
    inputs = {
        "self_attention": (shift, scale, gate, rotary),
        "cross_attention": (context,),
        "feed_forward": (c_shift, c_scale, c_gate),
    }
    gates = {"self_attention": gate, "cross_attention": 1.0, "feed_forward": c_gate}
    kept = x.float()
    for name, module in SUB_LAYERS.items():
        sub_layer = getattr(plan, name)
        added = _by_token(gates[name], x) * trace[module][1].view(x.shape)
        if not isinstance(sub_layer, Whole):
            stored = x if name == "self_attention" else (kept / plan.residual.scale).to(plan.residual.dtype)
            result = sub_layer.run(stored, *inputs[name])
            scale_of_result = 1.0 if name == "feed_forward" else plan.residual.scale
            yield name, relative_l2(result.float() * scale_of_result - kept, added)
        kept = kept + added


def _by_token(gate: Row | float, x: torch.Tensor) -> torch.Tensor | float:
    """A gate that runs of tokens share for each of them; others as they are."""
    return reference.by_token(*gate, *x.shape[:2]) if isinstance(gate, kernels.Runs) else gate


def _linear_errors(block: nn.Module, trace: Trace, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    for name, module in block.named_modules():
        if is_quantized(module):
            x, expected = trace[name]
            yield name, relative_l2(module(x.to(dtype)), expected)


def _attention_errors(block: nn.Module, plan: BlockPlan, trace: Trace, args: tuple) -> dict[str, float]:
    """Return the errors of the self-attention's parts.

    For a dense one in 8 bits: QKᵀ and the softmax with v unquantised, and what PV adds to that. For a sparse one: the
    whole attention, and its choice of key blocks."""
    in_8_bits = isinstance(plan.self_attention, QuantizedSelfAttention)
    if not in_8_bits and not isinstance(plan.self_attention, SelfAttention):
        return {}
    attn, attention = block.attn1, plan.self_attention.attention
    latest = state_of(block).plans.latest
    leaves_out = why_dense(attn, latest.stream, latest.call, quantized=in_8_bits) is None
    sparse_linear = self_attention_is_sparse(block)
    if not (in_8_bits or leaves_out or sparse_linear):
        return {}
    q, k, v = self_attention_inputs(attn, trace, args[3])
    low, expected = [x.to(args[0].dtype) for x in (q, k, v)], trace["attn1.to_out.0"][0]
    if sparse_linear:
        error = relative_l2(attention.run(*low).flatten(2), expected)
        return {SPARSE_ATTENTION: error, CHOICE: choice_error(block, q, k, args[0].dtype)}
    if leaves_out:
        inputs = [_in_8_bits(*low)] if in_8_bits else low
        return {LEFT_OUT: relative_l2(attention.run(*inputs).flatten(2), expected)}
    quantized = _in_8_bits(q, k, v)
    rounded_q, rounded_k = quantized.dequantize_qk()
    exact = reference.attention(q, k, v, None, None, None, q.shape[3] ** -0.5)
    rounded_scores = reference.attention(rounded_q, rounded_k, v, None, None, None, 1.0)
    ours = kernels.attention_8bit(quantized)
    return {QK: relative_l2(rounded_scores, exact), PV: relative_l2(ours, rounded_scores)}


def _in_8_bits(*qkv: torch.Tensor) -> kernels.QuantizedQKV:
    return kernels.quantize_qkv(*(x.flatten(2) for x in qkv), heads=qkv[0].shape[2])


def self_attention_inputs(attn: nn.Module, trace: Trace, rotary: Rotary) -> tuple[torch.Tensor, ...]:
    """The q, k and v [B, S, H, D] of a traced self-attention, after norms and rotation."""
    tables = [table[0, :, 0].float() for table in angles(rotary)]
    q, k, v = (trace[f"attn1.{name}"][1] for name in ("norm_q", "norm_k", "to_v"))
    q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (q, k, v))
    return *(reference.rotate(x, *tables) for x in (q, k)), v
