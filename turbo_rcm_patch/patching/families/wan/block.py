"""The block that all of Wan's kind share: h = norm(x); x = x + gate · F(h), for self-attention, cross-attention and
feed-forward. `WanBlock` states the differences, and `decide` chooses the steps of the sub-layers (sub_layers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from diffusers.models.attention import FeedForward
from torch import nn

from ....config import BlockSparse, Exact
from ....plain import is_original, why_not_plain
from ...steps import block_sparse, in_8_bits
from ...steps.attention import attention, why_not_own_attention, why_not_quantized_attention
from ...steps.context_parallel import ulysses_attention
from ...steps.layers import (
    Tables,
    head_norm,
    kv_projection,
    layer_norm,
    layer_norm_by_module,
    projection,
    projection_with_gelu,
    projection_with_skip,
    qkv_projection,
    skip_after,
)
from ...steps.plan import MODULE, Call, Step, Stream
from ...steps.residual import Storage, residual_between_skips
from ...steps.sparse_linear import attention as sparse_attention
from ...steps.sparse_linear import is_sparse
from .sub_layers import (
    TEXT_TOKENS,
    BlockPlan,
    CrossAttention,
    FeedForwardWithSkip,
    Inputs,
    QuantizedSelfAttention,
    Rotary,
    SelfAttention,
    Whole,
)

NOT_ASKED = "not in fuse"
# The steps of a cross-attention that is called as a whole.
CROSS_STEPS = ("Q projection", "K and V projections", "QK-norm", "attention", "projection + skip")
CROSS_STEPS_WITH_IMAGE = (
    "Q projection",
    "K and V projections",
    "image K and V projections",
    "QK-norm",
    "attention",
    "image attention",
    "projection + skip",
)
TOKENS = 32760  # a video of 81 frames at 832×480


class Parts(NamedTuple):
    """The parts of a block of Wan's kind: the norm before each sub-layer, and the sub-layers."""

    norm1: nn.Module
    attn1: nn.Module
    norm2: nn.Module
    attn2: nn.Module
    norm3: nn.Module
    ffn: nn.Module


@dataclass(frozen=True)
class WanBlock:
    """The differences between blocks of Wan's kind.

    Attributes:
        attention_class: the class of both attentions.
        self_processor, cross_processor: the processors whose work the steps do; any other one is called.
        angles: (rotary) -> cos and sin [1, S, 1, D/2], one angle for each pair of channels. rotary is what the block's
            own forward hands to its self-attention.
        is_shared: (rotary) -> True if all samples and heads have the same angles.
        call_self: (attn, x, rotary, beside) -> the self-attention's output, called as the block's own forward does.
            beside: what else it is called with, such as a mask.
        call_cross: (attn, x, context, beside) -> the cross-attention's output, called as the block's own forward does.
        inputs: (block, the arguments of its forward) -> what its plan runs on.
        norm_class: the class of the norms of queries and keys, an RMSNorm with a weight.
        ffn_class: the class of the feed-forward: diffusers' own, or a sequence of linear, GELU and linear.
        why_dense: why the self-attention is neither in 8 bits nor sparse in any tier, or None.
    """

    attention_class: type[nn.Module]
    self_processor: type
    cross_processor: type
    angles: Callable[[object], Tables]
    is_shared: Callable[[object], bool]
    call_self: Callable[..., torch.Tensor]
    call_cross: Callable[..., torch.Tensor]
    inputs: Callable[..., Inputs]
    norm_class: type[nn.Module] = nn.RMSNorm
    ffn_class: type[nn.Module] = FeedForward
    why_dense: str | None = None

    def plan_for(self, block: nn.Module, wan_call: WanCall) -> BlockPlan:
        """Return the plan of a block for one kind of call. A family overrides this to change what `decide` plans."""
        return decide(self, block, wan_call)

    def parts_of(self, block: nn.Module) -> nn.Module | Parts:
        """Return a block, or its parts under the names that they have in Wan's."""
        return block

    @property
    def processors(self) -> tuple[type, type]:
        """The processors of both attentions."""
        return self.self_processor, self.cross_processor

    def half_tables(self, rotary: object) -> Tables:
        """Return cos and sin as the kernels read them, [S, D/2]; views where the angles are."""
        cos, sin = self.angles(rotary)
        return cos[0, :, 0], sin[0, :, 0]

    def why_whole(self, rotary: object, beside: object) -> str | None:
        """Return why a self-attention with these inputs is called as a whole, or None."""
        if beside is not None:
            return "attention mask"
        return None if self.is_shared(rotary) else "RoPE tables by sample or head"

    def takes_image(self, attn: nn.Module) -> bool:
        """True if a cross-attention takes an image beside the text."""
        return getattr(attn, "add_k_proj", None) is not None

    def image_tokens(self, context_tokens: int, beside: object) -> int:
        """Return the tokens of an image that come first in a context. They count if an attention takes an image."""
        return context_tokens - TEXT_TOKENS


class WanCall(NamedTuple):
    """One kind of call of a block of Wan's kind.

    contexts, context_tokens: prompts, and tokens of each. why_whole: the reason why the inputs need the self-attention
    to be called as a whole, or None. skipped: the tokens of a sample that do not attend to its prompt. image_tokens: as
    `WanBlock.image_tokens`.
    """

    call: Call
    stream: Stream
    contexts: int
    context_tokens: int
    why_whole: str | None = None
    skipped: int = 0
    image_tokens: int = 0


def decide(kind: WanBlock, block: nn.Module, wan_call: WanCall) -> BlockPlan:
    """Return the plan of a block of Wan's kind for one kind of call."""
    call, stream, block = wan_call.call, wan_call.stream, kind.parts_of(block)
    gated = _linears_with_a_gated_skip(block, kind, wan_call)
    given, between = Storage(call.dtype), residual_between_skips(stream, call, gated)
    return BlockPlan(
        _self_attention(block, kind, wan_call, given, between),
        _cross_attention(block, kind, wan_call, between),
        _feed_forward(block, kind, stream, call, between, given),
        between,
    )


def _linears_with_a_gated_skip(block, kind: WanBlock, wan_call: WanCall) -> Iterator[nn.Module]:
    """Yield the linears with a gated skip, of the sub-layers that are not called as a whole."""
    fuse = wan_call.call.config.fuse
    reason = why_not_fused_attention(block.attn1, kind, kind.self_processor) or wan_call.why_whole
    if "self_attention" in fuse and reason is None:
        yield block.attn1.to_out[0]
    if "feed_forward" in fuse and _why_not_fused_ffn(block.ffn, kind) is None:
        yield _layers_of(block.ffn)[2]


def _self_attention(block, kind: WanBlock, wan_call: WanCall, stored: Storage, result: Storage):
    call, stream = wan_call.call, wan_call.stream
    attn, names = block.attn1, ("QKV projection", "QK-norm + RoPE", "attention", "projection + skip")
    asked = None if "self_attention" in call.config.fuse else NOT_ASKED
    reason = asked or why_not_fused_attention(attn, kind, kind.self_processor) or wan_call.why_whole
    if reason is not None:
        run = partial(kind.call_self, attn)
        return _whole(block.norm1, "norm + modulation", run, stored, result, call, reason, names, asked)
    qkv = qkv_projection(attn, stream.tokens, call)
    norm = layer_norm(block.norm1, stored, call, qkv.takes)
    out = projection_with_skip(list(attn.to_out)[:2], stored, result, stream, call, gated=True)
    reason = "sparse" if is_sparse(attn) else kind.why_dense
    reason = reason or why_not_quantized_attention(attn, kind.norm_class, call)
    if reason is None and attn.processor._parallel_config is None:
        attended = quantized_attention(attn, stream, call, out.takes)
        return QuantizedSelfAttention(
            kind.half_tables,
            norm,
            qkv.fed_by(norm),
            in_8_bits.quantize_qkv(attn, call),
            attended,
            out.fed_by(attended),
        )
    if is_sparse(attn):
        attended = sparse_attention(attn, stream, call, out.takes)
    elif reason is None:
        attended = quantized_attention_between_all_to_alls(attn, stream, call, out.takes)
    elif kind.why_dense is not None and not isinstance(call.config, Exact):
        attended = attention(attn, call, result=out.takes)._replace(reason=kind.why_dense)
    else:
        attended = wide_attention(attn, stream, call, reason, out.takes)
    return SelfAttention(
        kind.half_tables,
        attn.heads,
        norm,
        qkv.fed_by(norm),
        head_norm(attn.norm_q, kind.norm_class, attn.heads, call),
        head_norm(attn.norm_k, kind.norm_class, attn.heads, call),
        attended,
        out.fed_by(attended),
    )


def quantized_attention(attn, stream: Stream, call: Call, result: torch.dtype | None) -> Step:
    """Return a self-attention in 8 bits. If block-sparse attention is dense here, it has the reason."""
    reason = block_sparse.why_dense(attn, stream, call, quantized=True)
    if reason is None:
        return block_sparse.attention(attn, call, quantized=True, result=result)
    attended = in_8_bits.attention(attn, call, result)
    return attended._replace(reason=reason) if isinstance(call.config, BlockSparse) else attended


def quantized_attention_between_all_to_alls(attn, stream: Stream, call: Call, result: torch.dtype | None) -> Step:
    """Return a self-attention in 8 bits over the tokens of all GPUs: (q, k, v [B, S/W, H, D]) -> [B, S/W, H, D].

    q, k and v are put in 8 bits after they were exchanged. Then the mean of k, the scale of v and the groups of keys
    are those of one GPU. result: the format that the next step takes. If there is one, the result is a Quantized.
    """
    quantize, attended = in_8_bits.quantize_heads(attn, call), quantized_attention(attn, stream, call, None)
    attend = partial(_quantize_then_attend, quantize.run, attended.run)
    gather = in_8_bits.tokens_after_exchange(result, call)
    run = partial(ulysses_attention, attn.processor._parallel_config, attend, gather=gather)
    return Step(run, f"{attended.kernel} between all-to-alls", attended.reason or quantize.reason, gives=result)


def _quantize_then_attend(quantize, attend, q, k, v):
    return attend(quantize(q, k, v))


def wide_attention(attn, stream: Stream, call: Call, why_not_8_bits: str, result: torch.dtype | None) -> Step:
    """Return a self-attention in the model's dtype, with the reason if the tier would run another one.

    result: the format that the next step takes, or None.
    """
    if isinstance(call.config, BlockSparse):
        reason = why_not_own_attention(attn, call.backend, derivative=call.derivative)
        reason = reason or block_sparse.why_dense(attn, stream, call, quantized=False)
        if reason is not None:
            return attention(attn, call, result=result)._replace(reason=reason)
        attended = block_sparse.attention(attn, call, quantized=False, result=result)
        wanted = call.config.in_8_bits("attention") and attended.reason is None
        return attended._replace(reason=why_not_8_bits) if wanted else attended
    attended = attention(attn, call, result=result)
    return attended if isinstance(call.config, Exact) else attended._replace(reason=why_not_8_bits)


def _cross_attention(block, kind: WanBlock, wan_call: WanCall, stored: Storage):
    call, stream, attn = wan_call.call, wan_call.stream, block.attn2
    stream = stream._replace(tokens=stream.tokens - stream.samples * wan_call.skipped)
    asked = None if "cross_attention" in call.config.fuse else NOT_ASKED
    reason = asked or why_not_fused_attention(attn, kind, kind.cross_processor)
    takes_image = kind.takes_image(attn)
    if reason is not None:
        names, run = CROSS_STEPS_WITH_IMAGE if takes_image else CROSS_STEPS, partial(kind.call_cross, attn)
        return _whole(block.norm2, "norm", run, stored, stored, call, reason, names, asked)
    image, text_tokens = {}, wan_call.context_tokens
    if takes_image:
        image["image_tokens"] = wan_call.image_tokens
        image_tokens = max(0, wan_call.image_tokens)
        text_tokens -= image_tokens
        image["image_kv"] = kv_projection(attn, wan_call.contexts * image_tokens, call, added=True).fed_by(None)
        image["image_norm"] = head_norm(attn.norm_added_k, kind.norm_class, attn.heads, call)
        image["image_attention"] = attention(attn, call, crossing=True, added=True)
    q = projection(attn.to_q, stream.tokens, call)
    norm = layer_norm(block.norm2, stored, call, q.takes)
    out = projection_with_skip(list(attn.to_out)[:2], stored, stored, stream, call, gated=False)
    attended = attention(attn, call, crossing=True, result=None if image else out.takes)
    return CrossAttention(
        attn.heads,
        norm,
        q.fed_by(norm),
        head_norm(attn.norm_q, kind.norm_class, attn.heads, call),
        kv_projection(attn, wan_call.contexts * text_tokens, call).fed_by(None),
        head_norm(attn.norm_k, kind.norm_class, attn.heads, call),
        attended,
        out.fed_by(attended),
        **image,
    )


def _feed_forward(block, kind: WanBlock, stream: Stream, call: Call, stored: Storage, result: Storage):
    ffn, names = block.ffn, ("linear + GELU", "linear + skip")
    asked = None if "feed_forward" in call.config.fuse else NOT_ASKED
    reason = asked or _why_not_fused_ffn(ffn, kind)
    if reason is not None:
        return _whole(block.norm3, "norm + modulation", ffn, stored, result, call, reason, names, asked)
    down = projection_with_skip(_layers_of(ffn)[2:], stored, result, stream, call, gated=True)
    up = projection_with_gelu(ffn, stream.tokens, call, down.takes)
    norm = layer_norm(block.norm3, stored, call, up.takes)
    return FeedForwardWithSkip(norm, up.fed_by(norm), down.fed_by(up))


def _why_not_fused_ffn(ffn: nn.Module, kind: WanBlock) -> str | None:
    reason = why_not_plain(ffn, kind.ffn_class)
    changed = reason is None and isinstance(ffn, nn.Sequential) and len(ffn) != 3
    return "changed feed-forward" if changed else reason


def _layers_of(ffn: nn.Module) -> list[nn.Module]:
    return list(ffn) if isinstance(ffn, nn.Sequential) else list(ffn.net)


def _whole(norm, norm_name, run, stored, result, call: Call, reason: str, names, asked: str | None) -> Whole:
    """Return a sub-layer that calls diffusers' attention or feed-forward whole, between the norm and the skip.

    asked: the reason why its norm is not fused, or None.
    """
    normed = layer_norm(norm, stored, call) if asked is None else layer_norm_by_module(norm, stored, call, asked)
    return Whole(norm_name, normed, Step(run, MODULE, reason), skip_after(stored, result, call), names)


def why_not_fused_attention(attn: nn.Module, kind: WanBlock, processor: type) -> str | None:
    """Return why the attention module must be called as a whole, or None: a hook, or a processor of another class."""
    attention_class = kind.attention_class
    if type(attn) is attention_class and type(attn.processor) is not processor and not is_sparse(attn):
        return f"processor {type(attn.processor).__name__}"
    if not is_original(processor.__call__, processor):
        return f"{processor.__name__} changed by a program"
    return why_not_plain(attn, attention_class)


def call_self_attention(attn: nn.Module, x: torch.Tensor, rotary: Rotary, mask: object) -> torch.Tensor:
    """Call a self-attention as WanTransformerBlock does."""
    return attn(x, None, mask, rotary)


def call_cross_attention(attn: nn.Module, x: torch.Tensor, context: torch.Tensor, _beside: object) -> torch.Tensor:
    """Call a cross-attention as WanTransformerBlock does."""
    return attn(x, context, None, None)


def angles(rotary: Rotary) -> Tables:
    """Return views of Wan's tables with one angle for each pair of channels.

    diffusers repeats the angle in both columns of a pair. It reads cos from the even columns, sin from the odd ones.
    """
    cos, sin = rotary
    return cos[..., 0::2], sin[..., 1::2]


def is_shared(rotary: Rotary) -> bool:
    """True if all samples and heads have the same angles."""
    return all(table.ndim == 4 and table.shape[0] == table.shape[2] == 1 for table in rotary)


def usual_call(call: Call) -> WanCall:
    """Return the call of a video of 81 frames at 832×480 with one prompt."""
    return WanCall(call, Stream(1, TOKENS), 1, TEXT_TOKENS)
