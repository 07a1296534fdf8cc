"""What the general code asks of a transformer of Wan's kind: its blocks' parts, and what is bound beside them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ....config import PatchConfig
from ...steps.plan import SHARED, Shared
from ...weights.weights_written import with_weights_up_to_date
from ..family import Blocks, Targets
from .block import WanBlock, decide, usual_call

FIRST_LAYER = "patch_embedding"


def wan_blocks(name: str, block_class: type[nn.Module], kind: WanBlock, forward: Callable) -> Blocks:
    """Return what a family states about a list of blocks of Wan's kind."""
    parts = {"attn1": kind.attention_class, "attn2": kind.attention_class, "ffn": nn.Module}
    return Blocks(name, block_class, forward, kind, parts, decide, usual_call)


def embedder_forward(self: nn.Module, timestep: torch.Tensor, *args: object, **kwargs: object) -> object:
    """The forward of a transformer's condition embedder, which runs before the blocks; bound on instances."""
    shared: Shared = getattr(self, SHARED)
    shared.begin_forward()
    return type(self).forward(self, with_weights_up_to_date(timestep, shared.config), *args, **kwargs)


def embedder(transformer: nn.Module, config: PatchConfig) -> Targets:
    """Return the condition embedder with its forward, for `Family.more`."""
    return [("condition_embedder", transformer.condition_embedder, embedder_forward)]
