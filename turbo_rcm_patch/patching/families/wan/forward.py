"""The forward that the patch binds on Wan's blocks, and the part that forwards of similar blocks share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from .... import kernels
from ....plain import is_autocast
from ...steps.plan import Stream, call_of, state_of
from ...steps.residual import warn_of_saturation
from ..ahead import compile_ahead, is_due
from .block import WanBlock, WanCall, decide
from .modulation import gate_varies_by, modulation
from .repeatable import why_not_repeatable
from .sub_layers import BlockPlan, Inputs, Rotary


def block_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    rotary_emb: Rotary,
) -> torch.Tensor:
    """Run WanTransformerBlock.forward with fused ops. Bound on instances.

    hidden_states [B, S, C], encoder_hidden_states [B|1, L, C], temb [B, 6, C] or per token [B, S, 6, C], rotary_emb cos
    and sin [1, S, 1, D]; returns [B, S, C].
    """
    if is_autocast(hidden_states.device):
        return type(self).forward(self, hidden_states, encoder_hidden_states, temb, rotary_emb)
    return run_block(self, block_inputs(self, hidden_states, encoder_hidden_states, temb, rotary_emb))


def block_inputs(
    block: nn.Module,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    rotary_emb: Rotary,
) -> Inputs:
    """Return what the plan runs on, for the arguments of `block_forward`."""
    rows = modulation(block.scale_shift_table, temb, hidden_states, state_of(block).shared)
    return Inputs(hidden_states, encoder_hidden_states, rows, rotary_emb)


def run_block(block: nn.Module, inputs: Inputs, own: Callable[..., BlockPlan] | None = None) -> torch.Tensor:
    """Run a block by its plan. own: (kind, block, call) -> the plan, instead of `decide`."""
    x, context, modulation, rotary, beside, skipped = inputs
    state = state_of(block)
    kind: WanBlock = state.kind
    reason = kind.why_whole(rotary, beside)
    stream = Stream(x.shape[0], x.shape[0] * x.shape[1], gate_varies_by(modulation[2]))
    shift = modulation[0].values if isinstance(modulation[0], kernels.Runs) else modulation[0]
    image_tokens = kind.image_tokens(context.shape[1], beside)
    call = call_of(state, block, x, context, shift)
    call = WanCall(call, stream, *context.shape[:2], reason, skipped, image_tokens)
    plan = state.plans.get(block, call, partial(own or decide, kind))
    if is_due(state.shared):
        tensors = x, context, *kind.angles(rotary)
        compile_ahead(state.shared, block, partial(plan.run, *inputs), tensors, partial(why_not_repeatable, kind=kind))
    if torch.compiler.is_compiling():
        return plan.run(*inputs)
    with state.shared.saturation.listening():
        out = plan.run(*inputs)
    warn_of_saturation(state.shared)
    return out
