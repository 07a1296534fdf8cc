"""The share of key blocks that block-sparse attention keeps in each block of a model."""

from __future__ import annotations

from dataclasses import dataclass

from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import nn

from .. import kernels
from ..config import BlockSparse
from ..patching.families.wan.block import QuantizedSelfAttention
from ..patching.steps.block_sparse import block_sizes, why_dense
from ..patching.steps.plan import state_of
from .parts import self_attention_inputs, trace_of


@dataclass(frozen=True)
class KeptShare:
    """The share of (query block, key block) pairs that a block of a model keeps at one step; 1.0 if it is dense."""

    block: str
    step: int
    share: float


def kept_share_of(block: nn.Module, oracle: nn.Module, args: tuple) -> float | None:
    """Return the share of key blocks that a patched block keeps, or 1.0 if it is dense.

    None means that the block did not run, has another tier than block_sparse, or is not Wan's. oracle, args: as in
    `part_errors`; they give q and k.
    """
    state = state_of(block)
    config, latest = state.shared.config, state.plans.latest
    if not isinstance(config, BlockSparse) or type(block) is not WanTransformerBlock or latest is None:
        return None
    quantized = isinstance(getattr(state.plans.ran, "self_attention", None), QuantizedSelfAttention)
    if why_dense(block.attn1, latest.stream, latest.call, quantized=quantized) is not None:
        return 1.0
    q, k, _ = self_attention_inputs(block.attn1, trace_of(oracle, args), args[3])
    block_q, block_k = block_sizes(latest.call, quantized=quantized)
    return kernels.kept_share(q, k, mass=config.mass, block_q=block_q, block_k=block_k)
