"""The plan of an LTX-2 block: six attentions and two feed-forwards on a video and an audio stream.

Each ``run`` reads like the model. The result is diffusers' own (transformer_ltx2.py) with fewer roundings: between two
stores all stays in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...steps.layers import Tables
from ...steps.plan import Attends, Step
from ...steps.residual import Storage
from ..token_runs import Row

Rows = Iterator[tuple[str, tuple[Step, ...]]]  # the name of a step, and what it consists of
Rotary = tuple[torch.Tensor, torch.Tensor]  # cos and sin, as diffusers gives them (rope.py)

# The sub-layers in order: their attribute in a plan and in `Inputs`, their name, and their group in PatchConfig.fuse.
SUB_LAYERS = (
    ("video_self", "video", "self_attention"),
    ("audio_self", "audio", "self_attention"),
    ("video_text", "video-text", "cross_attention"),
    ("audio_text", "audio-text", "cross_attention"),
    ("audio_to_video", "audio-to-video", "cross_attention"),
    ("video_to_audio", "video-to-audio", "cross_attention"),
    ("video_ff", "video", "feed_forward"),
    ("audio_ff", "audio", "feed_forward"),
)


class Modulation(NamedTuple):
    """Rows of modulation of a stream, each [B, 1|S, C] or by runs of tokens. A sub-layer may lack some."""

    shift: Row | None = None
    scale: Row | None = None
    gate: Row | None = None


NO_MODULATION = Modulation()


class Given(NamedTuple):
    """The inputs of a sub-layer beside its stream.

    own: modulation of its stream. source: modulation of what an attention between streams or with a prompt attends to.
    rotary, key_rotary: RoPE tables as diffusers gives them. tables, key_tables: views of them, as the kernels read
    them. mask: added to the scores, [B, 1, L], or None. beside: other arguments of the attention, called as a whole.
    why_whole: why these inputs need that, or None.
    """

    own: Modulation = NO_MODULATION
    source: Modulation = NO_MODULATION
    rotary: Rotary | None = None
    key_rotary: Rotary | None = None
    tables: Tables | None = None
    key_tables: Tables | None = None
    mask: torch.Tensor | None = None
    beside: Mapping[str, object] | None = None
    why_whole: str | None = None


class Inputs(NamedTuple):
    """The inputs of a block's plan.

    x, audio: hidden states [B, S, C]. context, audio_context: prompts [B|1, L, C]. The others are of the sub-layers.
    """

    x: torch.Tensor
    audio: torch.Tensor
    context: torch.Tensor
    audio_context: torch.Tensor
    video_self: Given
    audio_self: Given
    video_text: Given
    audio_text: Given
    audio_to_video: Given
    video_to_audio: Given
    video_ff: Given
    audio_ff: Given


@dataclass(frozen=True)
class SelfAttention:
    """x + gate · attention of the normed x.

    quantize: q, k and v to 8 bits, or None. head_gates: the factors of LTX-2.3's heads, or None.
    """

    heads: int
    norm: Step
    qkv: Step
    norm_q: Step
    norm_k: Step
    quantize: Step | None
    attention: Step
    head_gates: Step | None
    out: Step

    def run(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        shift, scale, gate = given.own
        normed = self.norm.run(x, scale, shift)
        q, k, v = self.qkv.run(normed)
        q, k = self.norm_q.run(q, given.tables), self.norm_k.run(k, given.tables)
        qkv = (q, k, v.unflatten(2, (self.heads, -1))) if self.quantize is None else (self.quantize.run(q, k, v),)
        del q, k, v  # before more is allocated
        attended = _attend(self, qkv, given.mask, normed)
        del qkv
        return self.out.run(attended, x, gate)

    def rows(self) -> Rows:
        yield "norm + modulation", (self.norm,)
        yield "QKV projection", (self.qkv,)
        yield "QK-norm + RoPE", (self.norm_q, self.norm_k)
        if self.quantize is not None:
            yield "QKV to 8 bits", (self.quantize,)
        yield from _rows_of_attention(self)


@dataclass(frozen=True)
class CrossAttention:
    """x + gate · attention of the normed x over a source: a prompt or the other stream.

    source: modulates a prompt, norms and modulates the other stream, or None for a prompt as it is. Its name is
    source_name.
    """

    heads: int
    norm: Step
    source: Step | None
    source_name: str
    q: Step
    norm_q: Step
    kv: Step
    norm_k: Step
    attention: Step
    head_gates: Step | None
    out: Step

    def run(
        self, x: torch.Tensor, given: Given, source: torch.Tensor, seen: torch.Tensor | None = None
    ) -> torch.Tensor:
        """seen: the input of the norm, x if it is None."""
        shift, scale, gate = given.own
        normed = self.norm.run(x if seen is None else seen, scale, shift)
        if self.source is not None:
            source = self.source.run(source, given.source.scale, given.source.shift)
        q, (k, v) = self.q.run(normed), self.kv.run(source)
        q, k = self.norm_q.run(q, given.tables), self.norm_k.run(k, given.key_tables)
        attended = _attend(self, (q, k, v.unflatten(2, (self.heads, -1))), given.mask, normed)
        del q, k, v
        return self.out.run(attended, x, gate)

    def rows(self) -> Rows:
        yield "norm + modulation", (self.norm,)
        if self.source is not None:
            yield self.source_name, (self.source,)
        yield "Q projection", (self.q,)
        yield "K and V projections", (self.kv,)
        yield "QK-norm + RoPE", (self.norm_q, self.norm_k)
        yield from _rows_of_attention(self)


def _attend(sub_layer: SelfAttention | CrossAttention, qkv: tuple, mask: torch.Tensor | None, normed: object):
    """Return the attention's result, [B, S, C], with the factors of heads."""
    attention = sub_layer.attention
    attended = attention.run(*qkv) if mask is None else attention.run(*qkv, mask)
    if sub_layer.head_gates is not None:
        attended = sub_layer.head_gates.run(attended, normed)
    return attended if attention.gives else attended.flatten(2)


def _rows_of_attention(sub_layer: SelfAttention | CrossAttention) -> Rows:
    yield "attention", (sub_layer.attention,)
    if sub_layer.head_gates is not None:
        yield "gates of heads", (sub_layer.head_gates,)
    yield "projection + skip", (sub_layer.out,)


@dataclass(frozen=True)
class FeedForwardWithSkip:
    """x + gate · feed-forward of the normed x."""

    norm: Step
    up: Step
    down: Step

    def run(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        shift, scale, gate = given.own
        return self.down.run(self.up.run(self.norm.run(x, scale, shift)), x, gate)

    def rows(self) -> Rows:
        yield "norm + modulation", (self.norm,)
        yield "linear + GELU", (self.up,)
        yield "linear + skip", (self.down,)


@dataclass(frozen=True)
class Whole:
    """A sub-layer whose module is called as a whole, between our norms and our skip.

    module: (normed, source or None, given) -> the module's output. names: of the steps that it is.
    """

    norm: Step
    source: Step | None
    source_name: str
    module: Step
    skip: Step
    names: tuple[str, ...]

    def run(
        self, x: torch.Tensor, given: Given, source: torch.Tensor | None = None, seen: torch.Tensor | None = None
    ) -> torch.Tensor:
        """seen: as in `CrossAttention`."""
        shift, scale, gate = given.own
        normed = self.norm.run(x if seen is None else seen, scale, shift)
        if self.source is not None:
            source = self.source.run(source, given.source.scale, given.source.shift)
        return self.skip.run(x, self.module.run(normed, source, given), gate)

    def rows(self) -> Rows:
        yield "norm + modulation", (self.norm,)
        if self.source is not None:
            yield self.source_name, (self.source,)
        for name in self.names:
            yield name, (self.module,)


class Storages(NamedTuple):
    """The storage of both streams' residuals between their skips."""

    video: Storage
    audio: Storage

    def __str__(self) -> str:
        return str(self.video) if self.video == self.audio else f"video {self.video}, audio {self.audio}"


@dataclass(frozen=True)
class BlockPlan:
    """The steps of a block for one kind of call. The attentions between the streams are None if they do not run.

    norms_between: norms of the video and the audio that both of these share, without modulation. None if each has its
    own, because no module must be called.
    """

    video_self: SelfAttention | Whole
    audio_self: SelfAttention | Whole
    video_text: CrossAttention | Whole
    audio_text: CrossAttention | Whole
    audio_to_video: CrossAttention | Whole | None
    video_to_audio: CrossAttention | Whole | None
    video_ff: FeedForwardWithSkip | Whole
    audio_ff: FeedForwardWithSkip | Whole
    residual: Storages
    norms_between: tuple[Step, Step] | None = None

    @property
    def attends(self) -> Attends | None:
        """The attention within the video's self-attention, or None if that is called as a whole."""
        if isinstance(self.video_self, Whole):
            return None
        return Attends(self.video_self.attention, self.video_self.quantize is not None)

    def run(self, given: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states of both streams."""
        x = self.video_self.run(given.x, given.video_self)
        audio = self.audio_self.run(given.audio, given.audio_self)
        x = self.video_text.run(x, given.video_text, given.context)
        audio = self.audio_text.run(audio, given.audio_text, given.audio_context)
        seen_video, seen_audio = self.seen_between(x, audio)
        if self.audio_to_video is not None:
            x = self.audio_to_video.run(x, given.audio_to_video, seen_audio, seen_video)
        if self.video_to_audio is not None:
            audio = self.video_to_audio.run(audio, given.video_to_audio, seen_video, seen_audio)
        del seen_video, seen_audio
        return self.video_ff.run(x, given.video_ff), self.audio_ff.run(audio, given.audio_ff)

    def seen_between(self, x: torch.Tensor, audio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the attentions between the streams read of both, as they are before either changes."""
        if self.norms_between is None:
            return x, audio
        norm_video, norm_audio = self.norms_between
        return norm_video.run(x), norm_audio.run(audio)

    def rows(self) -> Iterator[tuple[str, str, tuple[Step, ...]]]:
        """(stream and sub-layer, step, what it consists of) in order."""
        for attribute, stream, group in SUB_LAYERS:
            sub_layer = getattr(self, attribute)
            if sub_layer is not None:
                for step, parts in sub_layer.rows():
                    yield f"{stream} {group}", step, parts
