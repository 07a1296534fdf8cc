"""Measure the error of each part of a patched block by itself, on the inputs of the oracle's part.

The parts are:

- each sub-layer, with the error of the term gate · F(x) that it adds
- every linear in 8 bits
- the two matrix products of a dense attention in 8 bits: QKᵀ with the softmax, and PV
- a sparse attention as a whole; for sparse-linear attention also the choice of key blocks (sparse.py)

Block-sparse attention also has the share of key blocks that it keeps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from .. import kernels
from ..config import FUSION_GROUPS, BlockSparse
from ..kernels import reference
from ..patching.families import blocks_like
from ..patching.families.family import BlockPlan, Blocks
from ..patching.steps.block_sparse import block_sizes, why_dense
from ..patching.steps.plan import state_of
from ..patching.steps.sparse_linear import is_sparse
from ..patching.weights.quantize_linears import is_quantized
from .metrics import relative_l2
from .sparse import choice_error

CHOICE, SPARSE_ATTENTION = "choice of key blocks", "sparse-linear attention"
LEFT_OUT = "block-sparse attention"  # beside dense attention
SUB_LAYERS = FUSION_GROUPS
QK, PV = "attention QKᵀ", "attention PV"


class Trace(NamedTuple):
    """One run of an oracle. arguments: of its forward. inputs, outputs: of its modules, by path."""

    oracle: nn.Module
    arguments: tuple[tuple, dict]
    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]


def part_errors(block: nn.Module, trace: Trace, args: tuple, kwargs: Mapping[str, object]) -> dict[str, float]:
    """Return relative L2 errors by part of a patched block that ran already; none for a block that no family states.

    trace: of its twin in fp32. args, kwargs: of the block's call.
    """
    blocks, plan = blocks_like(block), state_of(block).plans.ran
    if blocks is None or plan is None:
        return {}
    with torch.no_grad():
        dtype = hidden_states_of(args, kwargs).dtype
        return {
            **sub_layer_errors(block, trace, args, kwargs),
            **dict(_linear_errors(block, trace, dtype)),
            **_attention_errors(block, blocks, plan, trace, dtype),
        }


def sub_layer_errors(block: nn.Module, trace: Trace, args: tuple, kwargs: Mapping[str, object]) -> dict[str, float]:
    """Return the relative L2 errors of the sub-layers of a patched block that ran already; for others none."""
    blocks, plan = blocks_like(block), state_of(block).plans.ran
    if blocks is None or plan is None:
        return {}
    with torch.no_grad():
        inputs = blocks.measured.inputs(block, *args, **kwargs)
        terms = blocks.measured.terms(block, plan, inputs, trace.outputs)
        return {name: relative_l2(ours, expected) for name, ours, expected in terms}


def trace_of(oracle: nn.Module, args: tuple, kwargs: Mapping[str, object]) -> Trace:
    """Run an oracle in fp32 and return the inputs and outputs of its modules."""
    arguments = in_dtype(args, torch.float32), in_dtype(kwargs, torch.float32)
    trace = Trace(oracle, arguments, {}, {})

    def keep(name: str):
        def hook(_module, inputs, output):
            if inputs:
                trace.inputs[name] = inputs[0]
            trace.outputs[name] = output

        return hook

    args, kwargs = arguments
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for name, module in oracle.named_modules():
            if name:
                hooks.enter_context(module.register_forward_hook(keep(name)))
        type(oracle).forward(oracle, *args, **kwargs)
    return trace


def in_dtype(value: object, dtype: torch.dtype) -> object:
    """Return the floating-point tensors in arguments or an output in a dtype, and all else as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: in_dtype(item, dtype) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(in_dtype(item, dtype) for item in value)
    return value


def hidden_states_of(args: tuple, kwargs: Mapping[str, object]) -> torch.Tensor:
    """Return the first tensor that a block gets."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))


def _linear_errors(block: nn.Module, trace: Trace, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    for name, module in block.named_modules():
        if is_quantized(module) and name in trace.inputs:  # a call may leave out attentions
            yield name, relative_l2(module(trace.inputs[name].to(dtype)), trace.outputs[name])


def _attention_errors(
    block: nn.Module, blocks: Blocks, plan: BlockPlan, trace: Trace, dtype: torch.dtype
) -> dict[str, float]:
    """Return the errors of the self-attention's parts.

    For a dense one in 8 bits: QKᵀ and the softmax with v unquantised, and what PV adds to that. For a sparse one: the
    whole attention, and its choice of key blocks."""
    if plan.attends is None:
        return {}
    attention, in_8_bits = plan.attends
    attn = blocks.self_attention_of(block)
    latest = state_of(block).plans.latest
    leaves_out = why_dense(attn, latest.stream, latest.call, quantized=in_8_bits) is None
    sparse_linear = is_sparse(attn)
    if not (in_8_bits or leaves_out or sparse_linear):
        return {}
    q, k, v = self_attention_inputs(trace)
    low, expected = [x.to(dtype) for x in (q, k, v)], trace.inputs[f"{blocks.self_attention}.to_out.0"]
    if sparse_linear:
        error = relative_l2(_of_channels(attention.run(*low)), expected)
        return {SPARSE_ATTENTION: error, CHOICE: choice_error(attn.processor, q, k, dtype)}
    if leaves_out:
        inputs = [_in_8_bits(*low)] if in_8_bits else low
        return {LEFT_OUT: relative_l2(_of_channels(attention.run(*inputs)), expected)}
    quantized = _in_8_bits(q, k, v)
    rounded_q, rounded_k = quantized.dequantize_qk()
    exact = reference.attention(q, k, v, None, None, None, q.shape[3] ** -0.5)
    rounded_scores = reference.attention(rounded_q, rounded_k, v, None, None, None, 1.0)
    ours = kernels.attention_8bit(quantized)
    return {QK: relative_l2(rounded_scores, exact), PV: relative_l2(ours, rounded_scores)}


def kept_share(block: nn.Module, trace: Trace) -> float | None:
    """Return the share of (query block, key block) pairs that a patched block's attention keeps, 1.0 if it is dense.

    None means that the block did not run, has another tier than block_sparse, or is of no known family. trace:
    of its twin in fp32, for q and k.
    """
    state, blocks = state_of(block), blocks_like(block)
    config, latest, plan = state.shared.config, state.plans.latest, state.plans.ran
    if not isinstance(config, BlockSparse) or blocks is None or plan is None:
        return None
    if plan.attends is None:
        return 1.0
    quantized = plan.attends.in_8_bits
    if why_dense(blocks.self_attention_of(block), latest.stream, latest.call, quantized=quantized) is not None:
        return 1.0
    q, k, _ = self_attention_inputs(trace)
    block_q, block_k = block_sizes(latest.call, quantized=quantized)
    return kernels.kept_share(q, k, mass=config.mass, block_q=block_q, block_k=block_k)


def _of_channels(attended: torch.Tensor | kernels.Quantized) -> torch.Tensor:
    """Return attention's result as [B, S, C]."""
    return attended.dequantize() if isinstance(attended, kernels.Quantized) else attended.flatten(2)


def _in_8_bits(*qkv: torch.Tensor) -> kernels.QuantizedQKV:
    return kernels.quantize_qkv(*(x.flatten(2) for x in qkv), heads=qkv[0].shape[2])


def self_attention_inputs(trace: Trace) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the q, k and v [B, S, H, D] of a traced block's self-attention, after norms and rotation."""
    blocks = blocks_like(trace.oracle)
    args, kwargs = trace.arguments
    return blocks.measured.qkv(trace.oracle, args, kwargs, trace.outputs)
