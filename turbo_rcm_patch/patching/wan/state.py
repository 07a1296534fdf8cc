"""What the patched modules of one transformer share: the configuration, and what stays the same over a generation.

RoPE tables, the projected prompt and its cross-attention K/V are computed once and kept for as long as the bits they
depend on stay the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from diffusers.models.embeddings import PixArtAlphaTextProjection
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers.transformer_wan import WanAttention, WanImageEmbedding, WanTransformer3DModel
from torch import nn

from ...config import PatchConfig
from ...plain import why_not_read
from ..cache import ContentCache, caching_allowed
from ..snapshot import WhileUnchanged
from .layers import normed_heads

# WanAttention takes the last 512 context tokens as text and those before them as image tokens.
TEXT_TOKENS = 512

# Modules whose outputs depend on their inputs, parameters and eps alone (dropout only draws in training).
DEPENDS_ON_PARAMETERS = (
    nn.Linear,
    nn.RMSNorm,
    nn.Dropout,
    nn.GELU,
    nn.ModuleList,
    FP32LayerNorm,
    GELU,
    FeedForward,
    PixArtAlphaTextProjection,
    WanAttention,
    WanImageEmbedding,
)

STATE = "_turbo_rcm_patch"  # the attribute of every patched module that holds its transformer's WanState

_PROMPTS = 2  # the conditional and the unconditional one
_SIZES = 2


class KeysValues(NamedTuple):
    """K and V [B, L, H, D] of the text, and of the image where the attention has image projections."""

    key: torch.Tensor
    value: torch.Tensor
    image_key: torch.Tensor | None = None
    image_value: torch.Tensor | None = None


@dataclass
class Context:
    """A projected prompt [B, L, C] and, per cross-attention, its keys and values."""

    tensor: torch.Tensor
    keys_values: dict[nn.Module, KeysValues] = field(default_factory=dict)

    def __post_init__(self):
        self._version = None if self.tensor.is_inference() else self.tensor._version

    @property
    def intact(self) -> bool:
        """Whether nobody wrote into the tensor since; inference tensors do not tell."""
        return not self.tensor.is_inference() and self.tensor._version == self._version


class RotaryTables:
    """RoPE tables: full cos and sin [1, S, 1, D] as diffusers makes them, half [S, D/2] as the kernel reads them.

    diffusers repeats each pair's angle in both columns and reads cos from the even, sin from the odd ones.
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor):
        self.full = (cos, sin)
        self.half = (cos[0, :, 0, 0::2].contiguous(), sin[0, :, 0, 1::2].contiguous())


class PromptPath(NamedTuple):
    """The modules between a prompt and its keys and values, and why these may not be kept; None when they may."""

    modules: list[nn.Module]
    why_not_kept: str | None


class WanState:
    """One transformer's PatchConfig and the constants of its generations."""

    def __init__(self, transformer: WanTransformer3DModel, config: PatchConfig):
        self.config = config
        self.compiles_ahead = True  # until a block's forward first comes to where it may
        self._transformer = transformer
        self._contexts = ContentCache(_PROMPTS)
        self._rotary = ContentCache(_SIZES)
        self._keeping_nothing = False
        self._tables_of_call: RotaryTables | None = None  # while keeping nothing
        self._prompt_path = WhileUnchanged(self._objects_around_prompt, self._find_prompt_path)

    def fresh(self) -> WanState:
        """One of the same transformer and configuration, with nothing kept."""
        return WanState(self._transformer, self.config)

    @contextlib.contextmanager
    def keeping_nothing(self) -> Iterator[None]:
        """Calls within compute everything anew, as what a CUDA graph replays must; the RoPE tables once per call."""
        self._keeping_nothing = True
        try:
            yield
        finally:
            self._keeping_nothing, self._tables_of_call = False, None

    def keeps(self, device: torch.device) -> bool:
        """Whether what this call computes may be kept, or come from what was kept."""
        return not self._keeping_nothing and caching_allowed(device)

    def rotary(self, rope: nn.Module, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The full RoPE tables for latents [B, C, F, H, W]."""
        if not self.keeps(latents.device):
            return type(rope).forward(rope, latents)
        sources = [rope.freqs_cos, rope.freqs_sin]
        key = (latents.shape[2:], rope.freqs_cos.dtype)
        return self._rotary.get(sources, key, lambda: RotaryTables(*type(rope).forward(rope, latents))).full

    def half_rotary(self, full: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The tables that the kernel reads, of full ones."""
        kept = self._rotary.values() if self.keeps(full[0].device) else [self._tables_of_call]
        for known in kept:
            if known is not None and known.full[0] is full[0] and known.full[1] is full[1]:
                return known.half
        tables = RotaryTables(*full)
        if self._keeping_nothing:
            self._tables_of_call = tables
        return tables.half

    def why_not_context(self, device: torch.device) -> str | None:
        """Why the prompt's constants are computed anew on each call; None when they are kept."""
        return self._prompt_path.get(device).why_not_kept

    def context(self, text: torch.Tensor, image: torch.Tensor | None) -> torch.Tensor:
        """The projected prompt, image tokens first, for text [B, L, text_dim] and image [B, L', image_dim]."""
        inputs = [text] if image is None else [text, image]
        modules = self._prompt_path.get(text.device).modules
        eps = [module.__dict__.get("eps") for module in modules]
        key = (*((tensor.shape, tensor.dtype) for tensor in inputs), *eps)
        weights = (parameter for module in modules for parameter in module._parameters.values())
        sources = [*inputs, *(weight for weight in weights if weight is not None)]
        known = self._contexts.get(sources, key, lambda: Context(self._project(text, image)))
        return known.tensor if known.intact else self._project(text, image)

    def keys_values(self, attn: WanAttention, context: torch.Tensor) -> KeysValues:
        """K/V of a context [B, L, C] under one cross-attention, kept with the context if it is one of ours."""
        if self.keeps(context.device):
            for known in self._contexts.values():
                if known.tensor is context and known.intact:
                    if attn not in known.keys_values:
                        known.keys_values[attn] = _keys_values(attn, context, self.config.implementation)
                    return known.keys_values[attn]
        return _keys_values(attn, context, self.config.implementation)

    def _project(self, text: torch.Tensor, image: torch.Tensor | None) -> torch.Tensor:
        embedder = self._transformer.condition_embedder
        projected = embedder.text_embedder(text)
        return projected if image is None else torch.concat([embedder.image_embedder(image), projected], dim=1)

    def _find_prompt_path(self, device: torch.device) -> PromptPath:
        modules = [module for part in _embedders(self._transformer) for module in part.modules()]
        attentions = [block.attn2 for block in self._transformer.blocks]
        for attn in attentions:
            modules += _key_value_modules(attn)
        reasons = (why_not_read(m, DEPENDS_ON_PARAMETERS, device) for m in [*modules, *attentions])
        return PromptPath(modules, next(filter(None, reasons), None))

    def _objects_around_prompt(self) -> list[nn.Module]:
        """The modules between a prompt and its keys and values, and those whose attributes they are."""
        blocks = self._transformer.blocks
        holders = [self._transformer, self._transformer.condition_embedder, blocks, *blocks]
        attentions = [block.attn2 for block in blocks]
        parts = [*_embedders(self._transformer), *(m for attn in attentions for m in _key_value_modules(attn))]
        return [*holders, *attentions, *(module for part in parts for module in part.modules())]


def _embedders(transformer: WanTransformer3DModel) -> list[nn.Module]:
    embedder = transformer.condition_embedder
    return [module for module in (embedder.text_embedder, embedder.image_embedder) if module is not None]


def _key_value_modules(attn: WanAttention) -> list[nn.Module]:
    """The modules between a context and its keys and values."""
    fused = getattr(attn, "fused_projections", False)
    modules = [attn.to_kv] if fused else [attn.to_k, attn.to_v]
    modules.append(attn.norm_k)
    if attn.add_k_proj is not None:
        modules += [attn.to_added_kv] if fused else [attn.add_k_proj, attn.add_v_proj]
        modules.append(attn.norm_added_k)
    return modules


def _keys_values(attn: WanAttention, context: torch.Tensor, implementation: str) -> KeysValues:
    fused = getattr(attn, "fused_projections", False)
    image, text = None, context
    if attn.add_k_proj is not None:
        image_tokens = context.shape[1] - TEXT_TOKENS
        image, text = context[:, :image_tokens], context[:, image_tokens:]
    key, value = attn.to_kv(text).chunk(2, dim=-1) if fused else (attn.to_k(text), attn.to_v(text))
    text_kv = normed_heads(attn.norm_k, key, attn.heads, None, implementation), value.unflatten(2, (attn.heads, -1))
    if image is None:
        return KeysValues(*text_kv)
    key, value = attn.to_added_kv(image).chunk(2, dim=-1) if fused else (attn.add_k_proj(image), attn.add_v_proj(image))
    image_key = normed_heads(attn.norm_added_k, key, attn.heads, None, implementation)
    return KeysValues(*text_kv, image_key, value.unflatten(2, (attn.heads, -1)))
