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
from ..token_runs import gate_varies_by
from .block import WanBlock, WanCall, angles, call_cross_attention, call_self_attention, is_shared
from .modulation import modulation
from .repeatable import why_not_repeatable
from .sub_layers import Inputs, Rotary


def block_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    *args: object,
    **kwargs: object,
) -> torch.Tensor:
    """Run the forward of a block of Wan's kind with fused ops. Bound on instances.

    It takes what the forward of the block's class takes, first hidden_states [B, S, C] and encoder_hidden_states
    [B|1, L, C], and returns [B, S, C]. cache-dit caches only blocks whose forward has parameters of these names.
    """
    inputs = (hidden_states, encoder_hidden_states, *args)
    if is_autocast(hidden_states.device):
        return type(self).forward(self, *inputs, **kwargs)
    kind: WanBlock = state_of(self).kind
    return run_block(self, kind.inputs(self, *inputs, **kwargs))


def block_inputs(
    block: nn.Module,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    rotary_emb: Rotary,
) -> Inputs:
    """Return what the plan runs on, for the arguments of WanTransformerBlock.forward.

    hidden_states [B, S, C], encoder_hidden_states [B|1, L, C], temb [B, 6, C] or per token [B, S, 6, C], rotary_emb cos
    and sin [1, S, 1, D].
    """
    rows = modulation(block.scale_shift_table, temb, hidden_states, state_of(block).shared)
    return Inputs(hidden_states, encoder_hidden_states, rows, rotary_emb)


def wan_block(attention_class: type[nn.Module], inputs: Callable[..., Inputs] = block_inputs) -> WanBlock:
    """Return the kind of a block that copies Wan's, with an attention of this class. inputs: as in `WanBlock`."""
    processor = attention_class._default_processor_cls
    calls = angles, is_shared, call_self_attention, call_cross_attention
    return WanBlock(attention_class, processor, processor, *calls, inputs)


def run_block(block: nn.Module, inputs: Inputs) -> torch.Tensor:
    """Run a block by its plan."""
    x, context, modulation, rotary, beside, skipped = inputs
    state = state_of(block)
    kind: WanBlock = state.kind
    reason = kind.why_whole(rotary, beside)
    stream = Stream(x.shape[0], x.shape[0] * x.shape[1], gate_varies_by(modulation[2]))
    shift = modulation[0].values if isinstance(modulation[0], kernels.Runs) else modulation[0]
    image_tokens = kind.image_tokens(context.shape[1], beside)
    call = call_of(state, block, x, context, shift)
    call = WanCall(call, stream, *context.shape[:2], reason, skipped, image_tokens)
    plan = state.plans.get(block, call, kind.plan_for)
    if is_due(state.shared):
        tensors = x, context, *kind.angles(rotary)
        compile_ahead(state.shared, block, partial(plan.run, *inputs), tensors, partial(why_not_repeatable, kind=kind))
    if torch.compiler.is_compiling():
        return plan.run(*inputs)
    with state.shared.saturation.listening():
        out = plan.run(*inputs)
    warn_of_saturation(state.shared)
    return out
