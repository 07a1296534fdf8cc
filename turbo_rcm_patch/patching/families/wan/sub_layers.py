"""The plan of a block of Wan's kind: its three sub-layers, each of steps that were chosen before.

Each ``run`` reads like the model. The result is diffusers' own (transformer_wan.py) with fewer roundings: between two
stores all stays in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...steps.layers import Tables
from ...steps.plan import Attends, Step
from ...steps.residual import Storage
from ..token_runs import Row

# Attention takes the last 512 tokens of the context as text and those before them as image.
TEXT_TOKENS = 512

Rows = Iterator[tuple[str, tuple[Step, ...]]]  # the name of a step, and what it consists of
Rotary = tuple[torch.Tensor, torch.Tensor]  # cos and sin [1, S, 1, D], as diffusers gives them


class Inputs(NamedTuple):
    """The inputs of a block's plan.

    x: hidden states [B, S, C]. context: [B|1, L, C]. modulation: six rows, each [B|1, 1|S, C] or by runs of tokens.
    rotary: the RoPE argument that the block's own forward passes to its self-attention. beside: other arguments of the
    attentions, such as a mask. skipped: the number of tokens that come first and do not attend to the context.
    """

    x: torch.Tensor
    context: torch.Tensor
    modulation: list[Row]
    rotary: object
    beside: object = None
    skipped: int = 0


@dataclass(frozen=True)
class SelfAttention:
    """x + gate · attention of the normed x. half_tables: returns the RoPE tables from the block's rotary argument."""

    half_tables: Callable[[object], Tables]
    heads: int
    norm: Step
    qkv: Step
    norm_q: Step
    norm_k: Step
    attention: Step
    out: Step

    def run(self, x, shift, scale, gate, rotary: object, _beside: object = None) -> torch.Tensor:
        q, k, v = self.qkv.run(self.norm.run(x, scale, shift))
        tables = self.half_tables(rotary)
        q, k, v = self.norm_q.run(q, tables), self.norm_k.run(k, tables), v.unflatten(2, (self.heads, -1))
        attended = self.attention.run(q, k, v)
        del q, k, v  # before the result is allocated
        return self.out.run(attended if self.attention.gives else attended.flatten(2), x, gate)

    def rows(self) -> Rows:
        yield "norm + modulation", (self.norm,)
        yield "QKV projection", (self.qkv,)
        yield "QK-norm + RoPE", (self.norm_q, self.norm_k)
        yield "attention", (self.attention,)
        yield "projection + skip", (self.out,)


@dataclass(frozen=True)
class QuantizedSelfAttention:
    """x + gate · attention of the normed x, with the attention in 8 bits."""

    half_tables: Callable[[object], Tables]
    norm: Step
    qkv: Step
    quantize: Step
    attention: Step
    out: Step

    def run(self, x, shift, scale, gate, rotary: object, _beside: object = None) -> torch.Tensor:
        q, k, v = self.qkv.run(self.norm.run(x, scale, shift))
        quantized = self.quantize.run(q, k, v, self.half_tables(rotary))
        del q, k, v  # before more is allocated
        attended = self.attention.run(quantized)
        del quantized
        return self.out.run(attended if self.attention.gives else attended.flatten(2), x, gate)

    def rows(self) -> Rows:
        yield "norm + modulation", (self.norm,)
        yield "QKV projection", (self.qkv,)
        yield "QK-norm + RoPE + 8 bits", (self.quantize,)
        yield "attention", (self.attention,)
        yield "projection + skip", (self.out,)


@dataclass(frozen=True)
class CrossAttention:
    """x + attention of the normed x over the text, and over the image where the context holds one.

    image_tokens: of the image, which come first in the context.
    """

    heads: int
    norm: Step
    q: Step
    norm_q: Step
    kv: Step
    norm_k: Step
    attention: Step
    out: Step
    image_kv: Step | None = None
    image_norm: Step | None = None
    image_attention: Step | None = None
    image_tokens: int = 0

    def run(self, x, context: torch.Tensor) -> torch.Tensor:
        # In diffusers' order of modules, in which group offloading brings them ahead.
        text = context if self.image_attention is None else context[:, self.image_tokens :]
        q, (k, v) = self.q.run(self.norm.run(x)), self.kv.run(text)
        q = self.norm_q.run(q)
        attended = self.attention.run(q, self.norm_k.run(k), v.unflatten(2, (self.heads, -1)))
        if self.image_attention is not None:
            k, v = self.image_kv.run(context[:, : self.image_tokens])
            attended = self.image_attention.run(q, self.image_norm.run(k), v.unflatten(2, (self.heads, -1)), attended)
        del q
        return self.out.run(attended if self.attention.gives else attended.flatten(2), x)

    def rows(self) -> Rows:
        yield "norm", (self.norm,)
        yield "Q projection", (self.q,)
        yield "K and V projections", (self.kv,)
        if self.image_kv is not None:
            yield "image K and V projections", (self.image_kv,)
        yield "QK-norm", (self.norm_q, self.norm_k, *filter(None, (self.image_norm,)))
        yield "attention", (self.attention,)
        if self.image_attention is not None:
            yield "image attention", (self.image_attention,)
        yield "projection + skip", (self.out,)


@dataclass(frozen=True)
class FeedForwardWithSkip:
    """x + gate · feed-forward of the normed x."""

    norm: Step
    up: Step
    down: Step

    def run(self, x, shift, scale, gate) -> torch.Tensor:
        return self.down.run(self.up.run(self.norm.run(x, scale, shift)), x, gate)

    def rows(self) -> Rows:
        yield "norm + modulation", (self.norm,)
        yield "linear + GELU", (self.up,)
        yield "linear + skip", (self.down,)


@dataclass(frozen=True)
class Whole:
    """A sub-layer whose module is called as a whole, between our norm and our skip. names: of the steps that it is."""

    norm_name: str
    norm: Step
    module: Step
    skip: Step
    names: tuple[str, ...]

    def run(self, x, shift=None, scale=None, gate=None, *inputs: object) -> torch.Tensor:
        return self.skip.run(x, self.module.run(self.norm.run(x, scale, shift), *inputs), gate)

    def rows(self) -> Rows:
        yield self.norm_name, (self.norm,)
        for name in self.names:
            yield name, (self.module,)


@dataclass(frozen=True)
class BlockPlan:
    """The steps of a block for one kind of call. residual: its storage between the skips."""

    self_attention: SelfAttention | QuantizedSelfAttention | Whole
    cross_attention: CrossAttention | Whole
    feed_forward: FeedForwardWithSkip | Whole
    residual: Storage

    @property
    def attends(self) -> Attends | None:
        """The attention within the self-attention, or None if that is called as a whole."""
        if isinstance(self.self_attention, Whole):
            return None
        in_8_bits = isinstance(self.self_attention, QuantizedSelfAttention)
        return Attends(self.self_attention.attention, in_8_bits)

    def run(self, x, context, modulation, rotary: object, beside: object = None, skipped: int = 0) -> torch.Tensor:
        """Return the block's output for x [B, S, C], a context [B, L, C] and six rows of modulation, each [B, 1|S, C].

        beside, skipped: as in `Inputs`.
        """
        shift_msa, scale_msa, gate_msa, c_shift_msa, c_scale_msa, c_gate_msa = modulation
        x = self.self_attention.run(x, shift_msa, scale_msa, gate_msa, rotary, beside)
        others, x = (x[:, :skipped], x[:, skipped:].contiguous()) if skipped else (None, x)
        if isinstance(self.cross_attention, Whole):
            x = self.cross_attention.run(x, None, None, None, context, beside)
        else:
            x = self.cross_attention.run(x, context)
        x = x if others is None else torch.cat([others, x], 1)
        del others  # a view of a tensor that is not needed any more
        return self.feed_forward.run(x, c_shift_msa, c_scale_msa, c_gate_msa)

    def rows(self) -> Iterator[tuple[str, str, tuple[Step, ...]]]:
        """(sub-layer, step, what it consists of) in order."""
        for name in ("self_attention", "cross_attention", "feed_forward"):
            for step, parts in getattr(self, name).rows():
                yield name, step, parts
