"""Wan-Animate-2: a first pass over a driving video keeps its keys and values, which each frame of a new video reads.

The block is Wan's with its authors' names. Text and image are separate tensors, and the feed-forward is a sequence of
layers. RoPE's angles come as a table by position, with the video's grid.

In diffusers a mask of FlexAttention says which keys a frame reads: all of the new video, and those of the frame before
it in the driving video. Here each frame attends to them without a mask, in a buffer whose end has the driving frame.
Without torch.compile, diffusers computes all scores at once, for which there is no memory at usual sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from diffusers.models.transformers.transformer_wan_animate_2 import (
    WanAnimate2Attention,
    WanAnimate2AttnProcessor,
    WanAnimate2CrossAttnProcessor,
    WanAnimate2KVLayerCache,
    WanAnimate2Transformer3DModel,
    WanAnimate2TransformerBlock,
)
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.weak import WeakTensorKeyDictionary

from ...checkpoints.names import Names
from ...plain import is_autocast
from ..steps.layers import Tables
from ..steps.plan import state_of
from ..steps.sparse_linear import rotate
from ..weights.quantize_linears import ROWS_KNOWN
from .family import Blocks, Family, Measured, RandomWeights
from .wan import block as wan
from .wan.forward import run_block
from .wan.measured import sub_layer_terms
from .wan.modulation import modulation
from .wan.parts import FIRST_LAYER
from .wan.random_weights import sharpen_attention
from .wan.sizes import SIZES
from .wan.sub_layers import BlockPlan, Inputs, SelfAttention, Whole

EXTRACT, CACHED = "extract", "cached"  # the passes over the driving video and over the new one
MODULES = {"self_attention": "self_attn", "cross_attention": "cross_attn", "feed_forward": "ffn"}
NAMES = Names(
    "Wan-Animate-2",
    "blocks",
    (
        (r"^(blocks\.\d+)\.", r"\1.block."),
        (r"\.to_([qkv])$", r".\1"),
        (r"\.to_out\.0$", ".o"),
        (r"\.add_([kv])_proj$", r".\1_img"),
        (r"\.norm_added_k$", ".norm_k_img"),
    ),
    ("self_attn",),
)
_tables = WeakTensorKeyDictionary()  # the latest grid, and RoPE tables for it, by a table of frequencies


class Rope(NamedTuple):
    """Angles of RoPE: freqs complex [P, D/2] by position, the grid of a video's tokens, and the step between frames.

    grid: frames, height and width, or None if the samples have several grids.
    """

    freqs: torch.Tensor
    grid: tuple[int, int, int] | None
    stride: int

    @property
    def tokens_of_a_frame(self) -> int:
        """The tokens of a frame."""
        return self.grid[1] * self.grid[2]


class Beside(NamedTuple):
    """Other arguments of the attentions.

    arguments: of the self-attention. reference: the angles of the driving video, for the pass over the new one.
    image_tokens: the tokens of the image, or None without one. why_whole: why the self-attention is called as a whole.
    """

    arguments: dict[str, object]
    reference: Rope | None
    image_tokens: int | None
    why_whole: str | None


@dataclass(frozen=True)
class ReferenceAttention(SelfAttention):
    """x + gate · attention of the normed x over its own tokens and, for a new video, those of the driving video."""

    def run(self, x, shift, scale, gate, rotary: Rope, beside: Beside) -> torch.Tensor:
        """Return the sum. The pass over the driving video keeps its keys and values."""
        q, k, v = self.qkv.run(self.norm.run(x, scale, shift))
        v = v.unflatten(2, (self.heads, -1))
        cache: WanAnimate2KVLayerCache = beside.arguments["kv_cache"]
        if beside.arguments["kv_cache_mode"] == EXTRACT:
            q, k = self.norm_q.run(q, self.half_tables(rotary)), self.norm_k.run(k)
            cache.store(k, v)
            attended = self.attention.run(q, rotate(k, *angles(rotary)), v)
        else:
            q, k = (norm.run(x, self.half_tables(rotary)) for norm, x in ((self.norm_q, q), (self.norm_k, k)))
            attended = self._attend_by_frame(q, k, v, cache, rotary, beside)
        del q, k, v  # before the result is allocated
        return self.out.run(attended.flatten(2), x, gate)

    def _attend_by_frame(self, q, k, v, cache: WanAnimate2KVLayerCache, rotary: Rope, beside: Beside) -> torch.Tensor:
        """Return attention of q, k and v [B, S, H, D] of a new video, [B, S, H, D].

        The full video has more frames and larger ones. Keys of zeros stand for tokens that are not there, as in
        diffusers.
        """
        key, value = cache.get()
        frames, own = rotary.grid[0], rotary.tokens_of_a_frame
        of_reference, given = beside.reference.grid[0], beside.reference.tokens_of_a_frame
        key = rotate(key[:, : of_reference * given], *angles(beside.reference))
        all_frames, slot = beside.arguments["origin_latent_frames"], beside.arguments["origin_latent_hw"]
        total = (all_frames + 1) * slot
        keys, values = (x.new_zeros(x.shape[0], total + slot, *x.shape[2:]) for x in (k, v))
        for padded, x in ((keys, k), (values, v)):
            padded[:, : frames * slot].unflatten(1, (frames, slot))[:, :, :own] = x.unflatten(1, (frames, own))
        attended = []
        for frame, rows in enumerate(q.unflatten(1, (frames, own)).unbind(1)):
            used = total
            if 0 < frame <= all_frames:
                used += slot
                for padded, x in ((keys, key), (values, value)):
                    if frame <= of_reference:
                        padded[:, total : total + given] = x[:, (frame - 1) * given : frame * given]
                    else:
                        padded[:, total:] = 0
            q_k_v = (x.contiguous() for x in (rows, keys[:, :used], values[:, :used]))
            attended.append(self.attention.run(*q_k_v))
        return torch.cat(attended, 1)


@dataclass(frozen=True)
class AnimatePlan(BlockPlan):
    """The steps of a block. The self-attention runs in the model's dtype over all its keys, in every tier."""

    attends = None


@dataclass(frozen=True)
class AnimateBlock(wan.WanBlock):
    """The differences between Wan-Animate-2's block and Wan's."""

    def plan_for(self, block: nn.Module, wan_call: wan.WanCall) -> BlockPlan:
        """Return the plan of a block for one kind of call."""
        if wan_call.call.derivative is not None:  # autograd would keep the buffer, whose end each frame writes
            wan_call = wan_call._replace(why_whole=wan_call.why_whole or "autograd")
        plan = super().plan_for(block, wan_call)
        attention = plan.self_attention
        if not isinstance(attention, Whole):
            attention = ReferenceAttention(**vars(attention))
        return AnimatePlan(**{**vars(plan), "self_attention": attention})

    def parts_of(self, block: nn.Module) -> wan.Parts:
        """Return a block's parts under the names that they have in Wan's."""
        return wan.Parts(block.norm1, block.self_attn, block.norm3, block.cross_attn, block.norm2, block.ffn)

    def why_whole(self, rotary: Rope, beside: Beside) -> str | None:
        """Return why a self-attention with these inputs is called as a whole, or None."""
        return beside.why_whole

    def image_tokens(self, context_tokens: int, beside: Beside) -> int:
        """Return the tokens of an image that come first in a context."""
        return beside.image_tokens or 0


def block_forward(
    self: WanAnimate2TransformerBlock, hidden_states: torch.Tensor, *args: object, **kwargs: object
) -> torch.Tensor:
    """Run WanAnimate2TransformerBlock.forward with fused ops. Bound on instances.

    It takes what that forward takes, first hidden_states [B, S, C], and returns [B, S, C].
    """
    if is_autocast(hidden_states.device):
        return type(self).forward(self, hidden_states, *args, **kwargs)
    return run_block(self, block_inputs(self, hidden_states, *args, **kwargs))


def block_inputs(
    block: WanAnimate2TransformerBlock,
    hidden_states: torch.Tensor,
    temb: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    kv_cache: WanAnimate2KVLayerCache,
    kv_cache_mode: str,
    rotary_emb: torch.Tensor,
    grid_sizes: torch.Tensor,
    encoder_hidden_states_image: torch.Tensor | None = None,
    reference_rotary_emb: torch.Tensor | None = None,
    reference_grid_sizes: torch.Tensor | None = None,
    attention_mask: BlockMask | None = None,
    origin_latent_frames: int | None = None,
    origin_latent_hw: int | None = None,
) -> Inputs:
    """Return what the plan runs on, for the arguments of WanAnimate2TransformerBlock.forward.

    hidden_states [B, S, C], temb [B, 6, C], encoder_hidden_states [B|1, L, C] and of an image [B|1, L', C], rotary_emb
    and reference_rotary_emb complex [P, D/2], grid_sizes and reference_grid_sizes [B, 3] on the CPU.
    """
    text, image = encoder_hidden_states, encoder_hidden_states_image
    stride = block.refer_stride if kv_cache_mode == EXTRACT else 1
    rope, reference = Rope(rotary_emb, _grid(grid_sizes), stride), None
    if reference_grid_sizes is not None:
        reference = Rope(reference_rotary_emb, _grid(reference_grid_sizes), block.refer_stride)
    arguments = {
        "rotary_emb": rotary_emb,
        "grid_sizes": grid_sizes,
        "kv_cache": kv_cache,
        "kv_cache_mode": kv_cache_mode,
        "rope_stride": stride,
        "reference_rotary_emb": reference_rotary_emb,
        "reference_grid_sizes": reference_grid_sizes,
        "reference_rope_stride": block.refer_stride,
        "attention_mask": attention_mask,
        "origin_latent_frames": origin_latent_frames,
        "origin_latent_hw": origin_latent_hw,
    }
    why_whole = _why_whole(hidden_states, rope, reference, arguments)
    beside = Beside(arguments, reference, None if image is None else image.shape[1], why_whole)
    context = text if image is None else torch.cat([image.expand(text.shape[0], -1, -1), text], 1)
    rows = modulation(block.modulation, temb, hidden_states, state_of(block).shared)
    return Inputs(hidden_states, context, rows, rope, beside)


def _grid(sizes: torch.Tensor) -> tuple[int, int, int] | None:
    grids = {tuple(grid) for grid in sizes.tolist()}
    return grids.pop() if len(grids) == 1 else None


def _why_whole(x: torch.Tensor, rope: Rope, reference: Rope | None, given: dict[str, object]) -> str | None:
    """Return the reason why a self-attention with these arguments is called as a whole, or None."""
    if torch.compiler.is_compiling():
        return "FlexAttention of torch.compile"
    if given["kv_cache_mode"] not in (EXTRACT, CACHED):
        return "unknown kv_cache_mode"
    if given["kv_cache_mode"] == CACHED:
        if reference is None or not _is_the_models_own(given["attention_mask"], given):
            return "attention mask"
        if reference.grid is None:
            return "RoPE tables by sample or head"
    if rope.grid is None:
        return "RoPE tables by sample or head"
    return None if math.prod(rope.grid) == x.shape[1] else "tokens beyond the grid"


def _is_the_models_own(mask: object, given: dict[str, object]) -> bool:
    """True for the mask that the transformer makes for a video of this size."""
    frames, slot = given["origin_latent_frames"], given["origin_latent_hw"]
    function = getattr(mask, "mask_mod", None)
    code = getattr(function, "__code__", None)
    if None in (code, frames, slot) or code not in WanAnimate2Transformer3DModel.create_mask.__code__.co_consts:
        return False
    values = {name: cell.cell_contents for name, cell in zip(code.co_freevars, function.__closure__, strict=True)}
    limits = {"hw": slot, "q_limit": (frames + 1) * slot, "k_limit": frames * slot}
    return limits.items() <= values.items()


def angles(rope: Rope) -> Tables:
    """Return cos and sin in fp32, [1, S, 1, D/2]. Without a grid they are those of all positions."""
    if rope.grid is None:
        return rope.freqs.real.float(), rope.freqs.imag.float()
    known = None if torch.compiler.is_compiling() else _tables.get(rope.freqs)
    if known is not None and known[:2] == rope[1:]:
        return known[2]
    frames, height, width = rope.grid
    third = rope.freqs.shape[1] // 3
    of_frames, of_height, of_width = rope.freqs.split([rope.freqs.shape[1] - 2 * third, third, third], 1)
    axes = (
        of_frames[: frames * rope.stride : rope.stride, None, None],
        of_height[None, :height, None],
        of_width[None, None, :width],
    )
    table = torch.cat([axis.expand(frames, height, width, -1) for axis in axes], -1).flatten(0, 2)[None, :, None]
    tables = table.real.float(), table.imag.float()
    if not torch.compiler.is_compiling():
        _tables[rope.freqs] = *rope[1:], tables
    return tables


def is_shared(rope: Rope) -> bool:
    """True if all samples have the same angles."""
    return rope.grid is not None


def call_self_attention(attn: nn.Module, x: torch.Tensor, rope: Rope, beside: Beside) -> torch.Tensor:
    """Call a self-attention as WanAnimate2TransformerBlock does."""
    return attn(x, **beside.arguments)


def call_cross_attention(attn: nn.Module, x: torch.Tensor, context: torch.Tensor, beside: Beside) -> torch.Tensor:
    """Call a cross-attention as WanAnimate2TransformerBlock does."""
    tokens = beside.image_tokens
    image, text = (None, context) if tokens is None else (context[:, :tokens], context[:, tokens:])
    return attn(x, encoder_hidden_states=text, encoder_hidden_states_image=image)


def strengthen_gates(block: nn.Module) -> None:
    """Draw the modulation N(0, 0.5²), as for Wan's blocks."""
    nn.init.normal_(block.modulation, std=0.5)


def undo_outliers(block: nn.Module, channels: torch.Tensor, size: float) -> None:
    """Divide these channels of the normed hidden states by a size, as for Wan's blocks."""
    block.modulation[0, 1::3, channels] = 1 / size - 1  # the scales
    block.norm3.weight[channels] = 1 / size


BLOCK = AnimateBlock(
    WanAnimate2Attention,
    WanAnimate2AttnProcessor,
    WanAnimate2CrossAttnProcessor,
    angles,
    is_shared,
    call_self_attention,
    call_cross_attention,
    block_inputs,
    ffn_class=nn.Sequential,
    why_dense="keys of a driving video",
)
PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")
BLOCKS = Blocks(
    name="blocks",
    block_class=WanAnimate2TransformerBlock,
    forward=block_forward,
    kind=BLOCK,
    parts={"self_attn": WanAnimate2Attention, "cross_attn": WanAnimate2Attention, "ffn": nn.Module},
    decide=BLOCK.plan_for,
    usual_call=wan.usual_call,
    linears={
        "self_attention": tuple(f"self_attn.{name}" for name in PROJECTIONS),
        "cross_attention": tuple(f"cross_attn.{name}" for name in (*PROJECTIONS, "add_k_proj", "add_v_proj")),
        "feed_forward": ("ffn.0", "ffn.2"),
    },
    self_attention="self_attn",
    measured=Measured(block_inputs, partial(sub_layer_terms, modules=MODULES), None),
    sizes=SIZES,
    random_weights=RandomWeights(strengthen_gates, undo_outliers, sharpen_attention),
)
WAN_ANIMATE_2 = Family(
    WanAnimate2Transformer3DModel,
    "Wan-Animate-2",
    (BLOCKS,),
    FIRST_LAYER,
    NAMES,
    rows_known=(*ROWS_KNOWN, "ffn.0"),
    notes=lambda transformer: ["each frame of a new video attends in a call of its own; no CUDA graphs"],
)
