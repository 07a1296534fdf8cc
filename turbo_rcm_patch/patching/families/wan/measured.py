"""Measurements of `verify` within Wan's blocks: each sub-layer's contribution, and the self-attention's inputs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from ...steps.layers import by_token
from ...steps.sparse_linear import rotate
from ..family import Outputs
from .block import WanBlock
from .sub_layers import BlockPlan, Inputs, Whole

MODULES = {"self_attention": "attn1", "cross_attention": "attn2", "feed_forward": "ffn"}


def sub_layer_terms(
    block: nn.Module, plan: BlockPlan, inputs: Inputs, outputs: Outputs, modules: Mapping[str, str] = MODULES
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the name of each sub-layer, what the plan's adds to the hidden states, and what the oracle's adds.

    outputs: of the oracle's modules. modules: each sub-layer's path. One that is called as a whole is left out.
    """
    x = inputs.x
    shift, scale, gate, c_shift, c_scale, c_gate = inputs.modulation
    arguments = {
        "self_attention": (shift, scale, gate, inputs.rotary, inputs.beside),
        "cross_attention": (inputs.context,),
        "feed_forward": (c_shift, c_scale, c_gate),
    }
    gates = {"self_attention": gate, "cross_attention": 1.0, "feed_forward": c_gate}
    kept = x.float()
    for name, module in modules.items():
        sub_layer = getattr(plan, name)
        skipped = inputs.skipped if name == "cross_attention" else 0
        output = outputs[module].view(x.shape[0], x.shape[1] - skipped, x.shape[2])
        added = by_token(gates[name], x) * nn.functional.pad(output, (0, 0, skipped, 0))
        if not isinstance(sub_layer, Whole):
            stored = x if name == "self_attention" else (kept / plan.residual.scale).to(plan.residual.dtype)
            stored = stored[:, skipped:].contiguous()
            result = on_the_norm_of(stored, sub_layer).run(torch.zeros_like(stored), *arguments[name])
            scale_of_result = 1.0 if name == "feed_forward" else plan.residual.scale
            yield name, result.float() * scale_of_result, added[:, skipped:]
        kept = kept + added


def on_the_norm_of(stored: torch.Tensor, sub_layer):
    """Return a sub-layer whose norm is that of these hidden states, whatever residual it adds to.

    On a residual of zeros, its result is its term alone, which a sum with large hidden states would round.
    """
    norm = sub_layer.norm
    return replace(sub_layer, norm=norm._replace(run=lambda _, *rest: norm.run(stored, *rest)))


def self_attention_qkv(
    kind: WanBlock, oracle: nn.Module, args: tuple, kwargs: Mapping[str, object], outputs: Outputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the q, k and v [B, S, H, D] of the oracle's self-attention, after norms and rotation."""
    q, k, v = (outputs[f"attn1.{name}"].unflatten(2, (oracle.attn1.heads, -1)) for name in ("norm_q", "norm_k", "to_v"))
    call = inspect.signature(type(oracle).forward).bind(oracle, *args, **kwargs)
    cos, sin = kind.angles(call.arguments["rotary_emb"])
    return rotate(q, cos, sin), rotate(k, cos, sin), v
