"""The parts of Wan's blocks that the general code needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from ...steps.sparse_linear import SparseForm, rotate
from ..family import Blocks, Measured, Sizes
from .block import WanBlock, usual_call
from .forward import block_forward
from .measured import self_attention_qkv, sub_layer_terms
from .random_weights import RANDOM_WEIGHTS
from .sizes import SIZES

FIRST_LAYER = "patch_embedding"
OF_AN_IMAGE = ("attn2.add_k_proj", "attn2.add_v_proj")  # only in models that take one
# The linears for keys and values of a prompt see few tokens, so that 8 bits do not make them faster, but they are an
# eighth of a block's weights.
LINEARS = {
    "self_attention": ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0"),
    "cross_attention": ("attn2.to_q", "attn2.to_k", "attn2.to_v", "attn2.to_out.0", *OF_AN_IMAGE),
    "feed_forward": ("ffn.net.0.proj", "ffn.net.2"),
}


def wan_blocks(
    name: str,
    block_class: type[nn.Module],
    kind: WanBlock,
    *,
    forward: Callable = block_forward,
    can_be_sparse: bool = False,
    sizes: Sizes = SIZES,
) -> Blocks:
    """Return what a family states about a list of blocks of Wan's kind.

    forward: replaces the blocks' forward.
    can_be_sparse: True if sparse-linear attention may take the place of the self-attention.
    sizes: of the block's tensors.
    """
    parts = {"attn1": kind.attention_class, "attn2": kind.attention_class, "ffn": nn.Module}
    sparse = SparseForm(kind.self_processor, partial(_rotate, kind)) if can_be_sparse else None
    measured = Measured(kind.inputs, sub_layer_terms, partial(self_attention_qkv, kind))
    return Blocks(
        name=name,
        block_class=block_class,
        forward=forward,
        kind=kind,
        parts=parts,
        decide=kind.plan_for,
        usual_call=usual_call,
        linears=LINEARS,
        self_attention="attn1",
        measured=measured,
        sizes=sizes,
        random_weights=RANDOM_WEIGHTS,
        sparse=sparse,
    )


def linears_in_loras(transformer: nn.Module) -> set[str]:
    """Return the paths of the linears that every LoRA of a distilled Wan changes, VACE's control blocks left out."""
    names = [name for names in LINEARS.values() for name in names if name not in OF_AN_IMAGE]
    return {f"blocks.{i}.{name}" for i in range(len(transformer.blocks)) for name in names}


def _rotate(kind: WanBlock, attn: nn.Module, x: torch.Tensor, rotary: object) -> torch.Tensor:
    return rotate(x, *kind.angles(rotary))
