"""Modules that are safe to run once more, or to replay: no side effects and no hooks.

A CUDA graph replays the kernels of modules without calling them, and a block's first call runs modules an extra time to
compile their kernels.
"""

from __future__ import annotations

import torch
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from diffusers.models.embeddings import PixArtAlphaTextProjection, TimestepEmbedding, Timesteps
from torch import nn

from ...plain import function_bound_to, is_lora_layer, is_original, linear_of, why_not_read
from ..journal import forward_below_hooks
from ..lora.inside_projections import why_not_inside
from ..steps.attention import why_not_own_attention
from ..steps.context_parallel import only_shares_tokens
from ..steps.plan import active_backend
from ..weights.linear_8bit import QuantizedLinear

# Classes whose outputs depend on their inputs, tensors and attributes alone (dropout draws only in training).
COMMON = (
    nn.Conv3d,
    nn.Dropout,
    nn.GELU,
    nn.Identity,
    nn.Linear,
    nn.ModuleDict,
    nn.ModuleList,
    nn.ParameterDict,
    nn.Sequential,
    nn.SiLU,
    FeedForward,
    GELU,
    PixArtAlphaTextProjection,
    QuantizedLinear,
    TimestepEmbedding,
    Timesteps,
)


def why_not_repeatable(
    module: nn.Module, device: torch.device, known: tuple[type, ...], forward: object | None = None
) -> str | None:
    """Return why it would have a visible effect to run this module once more, or to replay it. Return None if not.

    Hooks and unknown layers may have side effects, and dropout draws random numbers. The hooks of context parallelism
    have none if all GPUs run them. Submodules are not checked.
    device: of the inputs. known: a family's classes beside COMMON. forward: the patch's own forward on the instance.
    """
    if module._compiled_call_impl is not None:
        return "torch.compile"
    if isinstance(module, nn.Dropout) and module.training and module.p > 0:
        return "dropout"
    if is_lora_layer(module):
        reason = None if linear_of(module) is not module else why_not_inside(module)
        return None if reason is None else f"LoRA layer: {reason}"
    return why_not_read(module, (*COMMON, *known), device, forward, is_known=_only_shares_tokens(module, forward))


def _only_shares_tokens(module: nn.Module, forward: object | None) -> bool:
    """True if a module has hooks, all of context parallelism, around the class's own forward or the patch's."""
    if not only_shares_tokens(module):
        return False
    cls, below = type(module), forward_below_hooks(module)
    return below is forward or (function_bound_to(module, below) is cls.forward and is_original(cls.forward, cls))


def why_not_repeatable_attention(attn: nn.Module) -> str | None:
    """Return the reason why a fused attention may not be replayed, or None."""
    return why_not_own_attention(attn, active_backend())
