"""`decide` chooses the steps of an LTX-2 block's sub-layers (sub_layers.py), for one kind of call (call.py)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from diffusers.models.attention import FeedForward
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformerBlock
from torch import nn

from ....plain import why_not_plain
from ...steps.layers import projection_with_gelu, projection_with_skip, skip_after
from ...steps.plan import MODULE, Step
from ...steps.residual import Storage, residual_between_skips
from .attentions import attentions_between, norms_between, prompt_attention, self_attention, why_not_fused_attention
from .call import LTX2Call, Place, norm_of
from .sub_layers import BlockPlan, FeedForwardWithSkip, Storages, Whole


def decide(block: LTX2VideoTransformerBlock, ltx2_call: LTX2Call) -> BlockPlan:
    """Return the plan of a block for one kind of call."""
    call, video, audio = ltx2_call.call, ltx2_call.stream, ltx2_call.audio
    given = Storage(call.dtype)
    of_video, of_audio = (block.attn1, block.ff), (block.audio_attn1, block.audio_ff)
    kept = Storages(
        residual_between_skips(video, call, _linears_with_a_gated_skip(*of_video, ltx2_call)),
        residual_between_skips(audio, call, _linears_with_a_gated_skip(*of_audio, ltx2_call)),
    )
    norms = norms_between(block, ltx2_call, kept)
    to_itself = partial(self_attention, ltx2_call=ltx2_call)
    to_prompt = partial(prompt_attention, ltx2_call=ltx2_call, modulated=block.cross_attn_adaln)
    text, audio_text = Place("video_text", video, *2 * (kept.video,)), Place("audio_text", audio, *2 * (kept.audio,))
    gated, audio_gated = block.video_cross_attn_adaln, block.audio_cross_attn_adaln
    return BlockPlan(
        to_itself(block.attn1, block.norm1, place=Place("video_self", video, given, kept.video)),
        to_itself(block.audio_attn1, block.audio_norm1, place=Place("audio_self", audio, given, kept.audio)),
        to_prompt(block.attn2, block.norm2, place=text, prompt=ltx2_call.prompt, gated=gated),
        to_prompt(
            block.audio_attn2, block.audio_norm2, place=audio_text, prompt=ltx2_call.audio_prompt, gated=audio_gated
        ),
        *attentions_between(block, ltx2_call, kept, norms),
        _feed_forward(block.ff, block.norm3, ltx2_call, Place("video_ff", video, kept.video, given)),
        _feed_forward(block.audio_ff, block.audio_norm3, ltx2_call, Place("audio_ff", audio, kept.audio, given)),
        kept,
        norms,
    )


def _linears_with_a_gated_skip(attn: nn.Module, ff: nn.Module, ltx2_call: LTX2Call) -> Iterator[nn.Module]:
    """Yield the linears with a gated skip in a stream's own sub-layers that are not called as a whole."""
    if ltx2_call.why_not_asked("self_attention") is None and why_not_fused_attention(attn) is None:
        yield attn.to_out[0]
    if ltx2_call.why_not_asked("feed_forward") is None and why_not_plain(ff, FeedForward) is None:
        yield ff.net[2]


def _feed_forward(ff: nn.Module, norm: nn.Module, ltx2_call: LTX2Call, place: Place) -> FeedForwardWithSkip | Whole:
    call, asked = ltx2_call.call, ltx2_call.why_not_asked("feed_forward")
    norm = norm_of(norm, place.stored, call, asked)
    reason = asked or why_not_plain(ff, FeedForward)
    if reason is not None:
        module = Step(lambda normed, source, given: ff(normed), MODULE, reason)
        skip = skip_after(place.stored, place.result, call)
        return Whole(norm(None), None, "", module, skip, ("linear + GELU", "linear + skip"))
    down = projection_with_skip(list(ff.net[2:]), place.stored, place.result, place.stream, call, gated=True)
    up = projection_with_gelu(ff, place.stream.tokens, call, down.takes)
    normed = norm(up.takes)
    return FeedForwardWithSkip(normed, up.fed_by(normed), down.fed_by(up))
