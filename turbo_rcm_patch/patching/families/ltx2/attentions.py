"""The steps of LTX-2's six attentions: of each stream to itself, to its prompt, and to the other stream."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_ltx2 import (
    LTX2Attention,
    LTX2AudioVideoAttnProcessor,
    LTX2PerturbedAttnProcessor,
    LTX2VideoTransformerBlock,
)
from torch import nn

from ....config import Exact
from ....plain import is_original, why_not_plain
from ...steps import in_8_bits
from ...steps.attention import attention, why_not_quantized_attention
from ...steps.layers import (
    FEW_TOKENS,
    by_token,
    head_norm,
    kv_projection,
    layer_norm_by_module,
    projection,
    projection_with_skip,
    qkv_projection,
    skip_after,
    why_not_brought_norm,
)
from ...steps.plan import MODULE, Call, Step
from ...steps.sparse_linear import attention as sparse_attention
from ...steps.sparse_linear import is_sparse
from ..token_runs import Row
from ..wan.block import quantized_attention, quantized_attention_between_all_to_alls, wide_attention
from .call import LTX2Call, Norm, Place, Prompt, norm_of
from .rope import SPLIT
from .sub_layers import CrossAttention, Given, SelfAttention, Storages, Whole

PROCESSORS = (LTX2AudioVideoAttnProcessor, LTX2PerturbedAttnProcessor)  # whose work the steps do; others are called
PYTORCH, NEEDS_MASK = "PyTorch ops", "attention mask"
SELF_STEPS = ("QKV projection", "QK-norm + RoPE", "attention", "projection + skip")
CROSS_STEPS = ("Q projection", "K and V projections", "QK-norm + RoPE", "attention", "projection + skip")


class Source(NamedTuple):
    """The tokens that an attention attends to, those of a prompt or of the other stream.

    name: of the step that makes it. norm: this step, or None for a prompt as it is. tokens: over all samples.
    """

    name: str
    norm: Norm | None
    tokens: int

    def step(self, takes: torch.dtype | None) -> Step | None:
        """Return the step that makes the source. takes: the 8-bit format that the next step takes, or None."""
        return None if self.norm is None else self.norm(takes)


def self_attention(attn: nn.Module, norm: nn.Module, ltx2_call: LTX2Call, place: Place) -> SelfAttention | Whole:
    """Return a stream's attention to itself."""
    call, stream, asked = ltx2_call.call, place.stream, ltx2_call.why_not_asked("self_attention")
    norm = norm_of(norm, place.stored, call, asked)
    reason = asked or _why_whole(attn, ltx2_call, place)
    if is_sparse(attn) and place.name in ltx2_call.masked:
        reason = reason or NEEDS_MASK  # the processor refuses it
    if reason is not None:
        return _whole(attn, norm, Source("", None, 0), place, call, reason, SELF_STEPS)
    qkv, gates = qkv_projection(attn, stream.tokens, call), _head_gates(attn)
    normed = norm(qkv.takes if gates is None else None)
    out = projection_with_skip(list(attn.to_out)[:2], place.stored, place.result, stream, call, gated=True)
    quantize, attended = _attention_within(attn, ltx2_call, place, out.takes if gates is None else None)
    return SelfAttention(
        attn.heads,
        normed,
        qkv.fed_by(normed),
        *_head_norms(attn, call),
        quantize,
        attended,
        gates,
        out.fed_by(attended if gates is None else gates),
    )


def _attention_within(
    attn: nn.Module, ltx2_call: LTX2Call, place: Place, result: torch.dtype | None
) -> tuple[Step | None, Step]:
    """Return the steps of a self-attention that put q, k and v in 8 bits, or None, and that attend."""
    call = ltx2_call.call
    if is_sparse(attn):
        return None, sparse_attention(attn, place.stream, call, result)
    if place.name in ltx2_call.masked:
        return None, _masked_attention(attn)
    if place.name != "video_self":  # a second of sound has 26 tokens
        attended = attention(attn, call)
        few = None if isinstance(call.config, Exact) else "the audio's few tokens"
        return None, attended._replace(reason=attended.reason or few)
    reason = why_not_quantized_attention(attn, nn.RMSNorm, call)
    if reason is not None:
        return None, wide_attention(attn, place.stream, call, reason, result)
    if attn.processor._parallel_config is not None:
        return None, quantized_attention_between_all_to_alls(attn, place.stream, call, result)
    return in_8_bits.quantize_heads(attn, call), quantized_attention(attn, place.stream, call, result)


def prompt_attention(
    attn: nn.Module,
    norm: nn.Module,
    ltx2_call: LTX2Call,
    place: Place,
    prompt: Prompt,
    *,
    modulated: bool,
    gated: bool,
) -> CrossAttention | Whole:
    """Return a stream's attention to its prompt.

    modulated: True if the prompt is. gated: True if the skip has a gate.
    """
    by_pytorch = Step(_modulate, PYTORCH, FEW_TOKENS)
    source = Source("prompt modulation", (lambda _: by_pytorch) if modulated else None, prompt.samples * prompt.tokens)
    norm = norm_of(norm, place.stored, ltx2_call.call, ltx2_call.why_not_asked("cross_attention"))
    return _cross_attention(attn, norm, source, ltx2_call, place, gated=gated)


def norms_between(block: LTX2VideoTransformerBlock, ltx2_call: LTX2Call, kept: Storages) -> tuple[Step, Step] | None:
    """Return the norms that both attentions between the streams share, or None if kernels compute them.

    A module is called once, as diffusers does, because a hook on it may have an effect.
    """
    call, asked = ltx2_call.call, ltx2_call.why_not_asked("cross_attention")
    norms = block.audio_to_video_norm, block.video_to_audio_norm
    reasons = [asked or why_not_brought_norm(norm, RMSNorm, call.device) for norm in norms]
    reason = next(filter(None, reasons), None)
    if reason is None:
        return None
    video, audio = (layer_norm_by_module(norm, stored, call, reason) for norm, stored in zip(norms, kept, strict=True))
    return video, audio


def attentions_between(
    block: LTX2VideoTransformerBlock,
    ltx2_call: LTX2Call,
    kept: Storages,
    norms: tuple[Step, Step] | None,
) -> tuple[CrossAttention | Whole | None, CrossAttention | Whole | None]:
    """Return the attentions of the video to the audio, and of the audio to the video; None for one that does not run.

    norms: the steps of `norms_between`, which norm the streams before, so that the attentions only modulate them.
    """
    video, audio, call = ltx2_call.stream, ltx2_call.audio, ltx2_call.call
    if norms is None:
        of_video, of_audio = (
            norm_of(norm, stored, call, None)
            for norm, stored in zip((block.audio_to_video_norm, block.video_to_audio_norm), kept, strict=True)
        )
    else:
        modulate = Step(_modulate, MODULE, norms[0].reason)
        of_video = of_audio = lambda takes: modulate
    to_video = to_audio = None
    name = "the other stream's norm + modulation"
    if ltx2_call.gate_of_video is not None:
        place = Place("audio_to_video", video._replace(gate=ltx2_call.gate_of_video), kept.video, kept.video)
        source = Source(name, of_audio, audio.tokens)
        to_video = _cross_attention(block.audio_to_video_attn, of_video, source, ltx2_call, place, gated=True)
    if ltx2_call.gate_of_audio is not None:
        place = Place("video_to_audio", audio._replace(gate=ltx2_call.gate_of_audio), kept.audio, kept.audio)
        source = Source(name, of_video, video.tokens)
        to_audio = _cross_attention(block.video_to_audio_attn, of_audio, source, ltx2_call, place, gated=True)
    return to_video, to_audio


def _cross_attention(
    attn: nn.Module, norm: Norm, source: Source, ltx2_call: LTX2Call, place: Place, *, gated: bool
) -> CrossAttention | Whole:
    """Return an attention to a source. gated: True if the skip has a gate."""
    call, stream = ltx2_call.call, place.stream
    reason = ltx2_call.why_not_asked("cross_attention") or _why_whole(attn, ltx2_call, place)
    if reason is not None:
        return _whole(attn, norm, source, place, call, reason, CROSS_STEPS)
    q, kv = projection(attn.to_q, stream.tokens, call), kv_projection(attn, source.tokens, call)
    gates, made = _head_gates(attn), source.step(kv.takes)
    normed = norm(q.takes if gates is None else None)
    out = projection_with_skip(list(attn.to_out)[:2], place.stored, place.result, stream, call, gated=gated)
    if place.name in ltx2_call.masked:
        attended = _masked_attention(attn)
    else:  # under context parallelism diffusers exchanges the tokens of these attentions too
        alone = attn.processor._parallel_config is None
        # For e4m3 the values are scaled in passes of their own, which only more queries than keys repay.
        result = out.takes if alone and gates is None and stream.tokens > source.tokens else None
        attended = attention(attn, call, crossing=alone, result=result)
    norm_q, norm_k = _head_norms(attn, call)
    return CrossAttention(
        attn.heads,
        normed,
        made,
        source.name,
        q.fed_by(normed),
        norm_q,
        kv.fed_by(made),
        norm_k,
        attended,
        gates,
        out.fed_by(attended if gates is None else gates),
    )


def _whole(
    attn: nn.Module, norm: Norm, source: Source, place: Place, call: Call, reason: str, names: tuple[str, ...]
) -> Whole:
    """Return an attention by its module."""
    module = Step(partial(_call_attention, attn), MODULE, reason)
    skip = skip_after(place.stored, place.result, call)
    return Whole(norm(None), source.step(None), source.name, module, skip, names)


def _call_attention(attn: nn.Module, normed: torch.Tensor, source: torch.Tensor | None, given: Given) -> torch.Tensor:
    """Call an attention as LTX2VideoTransformerBlock does."""
    options = {"query_rotary_emb": given.rotary, "attention_mask": given.mask, **(given.beside or {})}
    if given.key_rotary is not None:
        options["key_rotary_emb"] = given.key_rotary
    return attn(normed, encoder_hidden_states=source, **options)


def _head_norms(attn: nn.Module, call: Call) -> tuple[Step, Step]:
    """Return the norms of queries and keys, with RoPE."""
    halves = attn.rope_type == SPLIT
    norms = (head_norm(norm, nn.RMSNorm, attn.heads, call, halves=halves) for norm in (attn.norm_q, attn.norm_k))
    return tuple(norms)


def _modulate(x: torch.Tensor, scale: Row, shift: Row) -> torch.Tensor:
    """Modulate a prompt or a normed stream, as LTX2VideoTransformerBlock does. The result has its dtype."""
    return (x * (1 + by_token(scale, x)) + by_token(shift, x)).to(x.dtype)


def _head_gates(attn: nn.Module) -> Step | None:
    """Return LTX-2.3's factors of heads, or None: (attended [B, S, H, D], normed) -> [B, S, H, D]."""
    if attn.to_gate_logits is None:
        return None
    return Step(partial(_gate_heads, attn.to_gate_logits), PYTORCH, "no kernel for gates of heads")


def _gate_heads(to_gate_logits: nn.Module, attended: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    return attended * (2.0 * torch.sigmoid(to_gate_logits(normed)))[..., None]


def _masked_attention(attn: nn.Module) -> Step:
    """Return attention with a mask: (q, k, v, mask [B, 1|S, L]) -> [B, S, H, D]."""
    return Step(partial(_attend_with_mask, attn), "diffusers' attention", NEEDS_MASK)


def _attend_with_mask(attn, q, k, v, mask):
    """Attend as LTX-2's processors do."""
    mask = attn.prepare_attention_mask(mask, k.shape[1], k.shape[0])
    mask = mask.view(k.shape[0], attn.heads, -1, mask.shape[-1])
    options = {"backend": attn.processor._attention_backend, "parallel_config": attn.processor._parallel_config}
    return dispatch_attention_fn(q, k, v, attn_mask=mask, **options).type_as(q)


def _why_whole(attn: nn.Module, ltx2_call: LTX2Call, place: Place) -> str | None:
    """Return why an attention's module must be called as a whole, or None."""
    return why_not_fused_attention(attn) or dict(ltx2_call.whole).get(place.name)


def why_not_fused_attention(attn: nn.Module) -> str | None:
    """Return why the attention module must be called as a whole, or None: a hook, or a processor of another class."""
    if type(attn) is LTX2Attention:
        processor = type(attn.processor)
        if processor not in PROCESSORS and not is_sparse(attn):
            return f"processor {processor.__name__}"
        if not is_original(processor.__call__, processor):
            return f"{processor.__name__} changed by a program"
    return why_not_plain(attn, LTX2Attention)
