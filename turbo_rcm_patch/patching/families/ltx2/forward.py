"""The forward that the patch binds on LTX-2's blocks."""

from __future__ import annotations

import functools
from functools import partial
from typing import NamedTuple

import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformerBlock

from ....kernels import Runs
from ....plain import is_autocast
from ...steps.plan import Stream, call_of, state_of
from ...steps.residual import warn_of_saturation
from ..ahead import compile_ahead, is_due
from ..token_runs import gate_varies_by
from .block import decide
from .call import NEEDS_PERTURBATION, LTX2Call, Prompt
from .modulation import prompt_rows, rows_between_streams, stream_rows
from .repeatable import why_not_repeatable
from .rope import tables_of, why_not_read
from .sub_layers import NO_MODULATION, SUB_LAYERS, Given, Inputs, Modulation, Rotary


class Arguments(NamedTuple):
    """The arguments of LTX2VideoTransformerBlock.forward: B samples, S video and A audio tokens, L of a prompt.

    temb [B, 1|S, 6·C or 9·C], temb_ca_scale_shift [B, 1|S, 4·C], temb_ca_gate [B, 1|S, C], temb_prompt [B, 1, 2·C];
    those of the audio likewise. Masks are added to scores: [B, 1, L] of a prompt, [B, S, S] of a self-attention.
    perturbation_mask [B, 1, 1]: 0 where a self-attention gives its values alone.
    """

    hidden_states: torch.Tensor  # [B, S, C]
    audio_hidden_states: torch.Tensor  # [B, A, C']
    encoder_hidden_states: torch.Tensor  # [B|1, L, C]
    audio_encoder_hidden_states: torch.Tensor  # [B|1, L', C']
    temb: torch.Tensor
    temb_audio: torch.Tensor
    temb_ca_scale_shift: torch.Tensor
    temb_ca_audio_scale_shift: torch.Tensor
    temb_ca_gate: torch.Tensor
    temb_ca_audio_gate: torch.Tensor
    temb_prompt: torch.Tensor | None = None
    temb_prompt_audio: torch.Tensor | None = None
    video_rotary_emb: Rotary | None = None
    audio_rotary_emb: Rotary | None = None
    ca_video_rotary_emb: Rotary | None = None
    ca_audio_rotary_emb: Rotary | None = None
    encoder_attention_mask: torch.Tensor | None = None
    audio_encoder_attention_mask: torch.Tensor | None = None
    self_attention_mask: torch.Tensor | None = None
    audio_self_attention_mask: torch.Tensor | None = None
    a2v_cross_attention_mask: torch.Tensor | None = None
    v2a_cross_attention_mask: torch.Tensor | None = None
    use_a2v_cross_attention: bool = True
    use_v2a_cross_attention: bool = True
    perturbation_mask: torch.Tensor | None = None
    all_perturbed: bool | torch.Tensor | None = None


@functools.wraps(LTX2VideoTransformerBlock.forward, assigned=())  # for code that reads the signature
def block_forward(
    self: LTX2VideoTransformerBlock, *args: object, **kwargs: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run LTX2VideoTransformerBlock.forward with fused ops. Bound on instances. Return both streams' hidden states."""
    arguments = Arguments(*args, **kwargs)
    if is_autocast(arguments.hidden_states.device):
        return type(self).forward(self, *arguments)
    return run_block(self, arguments, block_inputs(self, *arguments))


def block_inputs(block: LTX2VideoTransformerBlock, *args: object, **kwargs: object) -> Inputs:
    """Return what the plan runs on, for the arguments of the block's forward."""
    given = Arguments(*args, **kwargs)
    x, audio, shared = given.hidden_states, given.audio_hidden_states, state_of(block).shared
    video_self, video_ff, video_text = stream_rows(block.scale_shift_table, given.temb, x, shared)
    audio_self, audio_ff, audio_text = stream_rows(block.audio_scale_shift_table, given.temb_audio, audio, shared)
    prompt = audio_prompt = NO_MODULATION
    if block.cross_attn_adaln:
        prompt = prompt_rows(block.prompt_scale_shift_table, given.temb_prompt, x)
        audio_prompt = prompt_rows(block.audio_prompt_scale_shift_table, given.temb_prompt_audio, audio)
    tables = block.video_a2v_cross_attn_scale_shift_table, block.audio_a2v_cross_attn_scale_shift_table
    between = given.temb_ca_scale_shift, given.temb_ca_gate, x, shared
    a2v, v2a = rows_between_streams(tables[0], *between)
    between = given.temb_ca_audio_scale_shift, given.temb_ca_audio_gate, audio, shared
    audio_a2v, audio_v2a = rows_between_streams(tables[1], *between)
    perturbed = {"perturbation_mask": given.perturbation_mask, "all_perturbed": given.all_perturbed}
    perturbed = perturbed if block.perturbed_attn else None
    rotary = given.ca_video_rotary_emb, given.ca_audio_rotary_emb
    video, sound = (given.video_rotary_emb,), (given.audio_rotary_emb,)
    masks = given.self_attention_mask, given.audio_self_attention_mask
    masks_between = given.a2v_cross_attention_mask, given.v2a_cross_attention_mask
    return Inputs(
        x,
        audio,
        given.encoder_hidden_states,
        given.audio_encoder_hidden_states,
        _given(block.attn1, video_self, video, masks[0], x, beside=perturbed),
        _given(block.audio_attn1, audio_self, sound, masks[1], audio, beside=perturbed),
        Given(video_text, prompt, mask=given.encoder_attention_mask),
        Given(audio_text, audio_prompt, mask=given.audio_encoder_attention_mask),
        _given(block.audio_to_video_attn, a2v, rotary, masks_between[0], x, audio, audio_a2v),
        _given(block.video_to_audio_attn, audio_v2a, rotary[::-1], masks_between[1], audio, x, v2a),
        Given(video_ff),
        Given(audio_ff),
    )


def _given(
    attn: torch.nn.Module,
    own: Modulation,
    rotary: tuple[Rotary | None, ...],
    mask: torch.Tensor | None,
    x: torch.Tensor,
    source: torch.Tensor | None = None,
    modulation_of_source: Modulation = NO_MODULATION,
    beside: dict[str, object] | None = None,
) -> Given:
    """Return the inputs of an attention of x, over a source if there is one.

    rotary: the tables of queries, and those of keys if they have their own. beside: as in `Given`.
    """
    keys = x if source is None else source
    query_rotary, key_rotary = rotary[0], rotary[-1]
    reason = why_not_read(query_rotary, x, attn) or why_not_read(key_rotary, keys, attn)
    if beside is not None and beside["perturbation_mask"] is not None:
        reason = NEEDS_PERTURBATION
    tables = (None, None) if reason else (tables_of(query_rotary, attn), tables_of(key_rotary, attn))
    given_keys = key_rotary if len(rotary) > 1 else None
    return Given(own, modulation_of_source, query_rotary, given_keys, *tables, mask, beside, reason)


def run_block(block: LTX2VideoTransformerBlock, given: Arguments, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a block by its plan."""
    state = state_of(block)
    plan = state.plans.get(block, _call_of(block, given, inputs), decide)
    if is_due(state.shared):
        values = (part for value in given for part in (value if isinstance(value, tuple) else (value,)))
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        compile_ahead(state.shared, block, partial(plan.run, inputs), tensors, why_not_repeatable)
    if torch.compiler.is_compiling():
        return plan.run(inputs)
    with state.shared.saturation.listening():
        out = plan.run(inputs)
    warn_of_saturation(state.shared)
    return out


def _call_of(block: LTX2VideoTransformerBlock, given: Arguments, inputs: Inputs) -> LTX2Call:
    x, audio = inputs.x, inputs.audio
    sub_layers = [(name, getattr(inputs, name)) for name, _, group in SUB_LAYERS if group != "feed_forward"]
    gates = (inputs.video_self.own.gate, inputs.audio_self.own.gate)
    rows = (gate.values if isinstance(gate, Runs) else gate for gate in gates)
    return LTX2Call(
        call_of(state_of(block), block, x, audio, inputs.context, inputs.audio_context, *rows),
        Stream(x.shape[0], x.shape[0] * x.shape[1], gate_varies_by(gates[0])),
        Stream(audio.shape[0], audio.shape[0] * audio.shape[1], gate_varies_by(gates[1])),
        Prompt(*inputs.context.shape[:2]),
        Prompt(*inputs.audio_context.shape[:2]),
        gate_varies_by(inputs.audio_to_video.own.gate) if given.use_a2v_cross_attention else None,
        gate_varies_by(inputs.video_to_audio.own.gate) if given.use_v2a_cross_attention else None,
        tuple(name for name, one in sub_layers if one.mask is not None),
        tuple((name, one.why_whole) for name, one in sub_layers if one.why_whole is not None),
    )
