"""Which modules of a WanTransformer3DModel get which forward, and the check that they are the modules meant."""

from __future__ import annotations

from types import MethodType

import torch
from diffusers.models.attention import FeedForward
from diffusers.models.transformers.transformer_wan import (
    WanAttention,
    WanRotaryPosEmbed,
    WanTimeTextImageEmbedding,
    WanTransformer3DModel,
    WanTransformerBlock,
)

from ...config import PatchConfig
from ...plain import hook_on
from ..journal import slot_below_hooks
from .block import block_forward
from .graph import GRAPH, WanGraph, transformer_forward
from .state import STATE, WanState

SUPPORTED = (
    "diffusers' WanTransformer3DModel (Wan 2.1 T2V and I2V, Wan 2.2 A14B, TI2V-5B); "
    "VACE, Animate, SkyReels and other families are not supported"
)


def rotary_forward(self: WanRotaryPosEmbed, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [1, S, 1, D] for latents [B, C, F, H, W], kept between steps."""
    if type(self) is not WanRotaryPosEmbed:
        return type(self).forward(self, hidden_states)
    return getattr(self, STATE).rotary(self, hidden_states)


def condition_forward(
    self: WanTimeTextImageEmbedding,
    timestep: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    encoder_hidden_states_image: torch.Tensor | None = None,
    timestep_seq_len: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """temb, its projection, and the projected prompt kept between steps, image tokens already in front of the text.

    The image comes back as None: the model would otherwise concatenate it into a new tensor on every step.
    """
    state = getattr(self, STATE)
    text, image = encoder_hidden_states, encoder_hidden_states_image
    if not state.keeps(text.device) or _is_changed(self) or state.why_not_context(text.device):
        return type(self).forward(self, timestep, text, image, timestep_seq_len)
    temb, timestep_proj, _, _ = type(self).forward(self, timestep, text[:, :0], None, timestep_seq_len)
    return temb, timestep_proj, state.context(text, image), None


def _is_changed(embedder: WanTimeTextImageEmbedding) -> bool:
    """Whether a subclass or a hook may see or change what the embedder takes and returns."""
    hooked = embedder._forward_hooks or embedder._forward_pre_hooks
    return bool(hooked) or type(embedder) is not WanTimeTextImageEmbedding


def check_supported(name: str, transformer: torch.nn.Module) -> list[str]:
    """Everything that stands against patching this model, as sentences; empty when it can be patched."""
    if type(transformer) is not WanTransformer3DModel:
        compiled = hasattr(transformer, "_orig_mod")
        remedy = "patch the model before compiling it" if compiled else f"supported: {SUPPORTED}"
        return [f"{name} is a {_path(transformer)}; {remedy}."]
    problems = [
        f"{name}.blocks.{i} is a {_path(block)}, not diffusers' block of Wan; supported: {SUPPORTED}."
        for i, block in enumerate(transformer.blocks)
        if type(block) is not WanTransformerBlock or not _is_wan_block(block)
    ]
    if problems:
        return problems
    for path, module, _ in _targets(transformer):
        hook = hook_on(module)
        if hook and slot_below_hooks(module) is None:
            problems.append(
                f"{name}.{path} has a {hook} that holds its old forward; patch first, then add hooks "
                "(such as sequential offload)."
            )
    return problems


def bindings(transformer: WanTransformer3DModel, config: PatchConfig) -> list[tuple[torch.nn.Module, str, object]]:
    """The (module, attribute, value) triples that make up the patch of one transformer."""
    state = WanState(transformer, config)
    forwards = {module: MethodType(forward, module) for _, module, forward in _targets(transformer)}
    # Under a hook, such as model offloading, that holds the old forward, the model goes without graphs.
    if config.cuda_graph != "off" and not hook_on(transformer):
        forwards[transformer] = MethodType(transformer_forward, transformer)
    triples = [(transformer, GRAPH, WanGraph(transformer, state, forwards))]
    triples += [(module, STATE, state) for module in dict.fromkeys((transformer, *forwards))]
    return triples + [(module, "forward", forward) for module, forward in forwards.items()]


def _path(module: torch.nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__name__}"


def _targets(transformer: WanTransformer3DModel) -> list[tuple[str, torch.nn.Module, object]]:
    blocks = [(f"blocks.{i}", block, block_forward) for i, block in enumerate(transformer.blocks)]
    return [
        ("rope", transformer.rope, rotary_forward),
        ("condition_embedder", transformer.condition_embedder, condition_forward),
        *blocks,
    ]


def _is_wan_block(block: WanTransformerBlock) -> bool:
    attentions = isinstance(block.attn1, WanAttention) and isinstance(block.attn2, WanAttention)
    return attentions and isinstance(block.ffn, FeedForward)
