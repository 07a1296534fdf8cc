"""The share of key blocks that block-sparse attention keeps in each block of a model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .. import kernels
from ..config import BlockSparse
from ..patching.families import blocks_like
from ..patching.steps.block_sparse import block_sizes, why_dense
from ..patching.steps.plan import state_of
from .parts import Trace, self_attention_inputs


@dataclass(frozen=True)
class KeptShare:
    """The share of (query block, key block) pairs that a model's block keeps at one step, 1.0 if it is dense."""

    block: str
    step: int
    share: float


def kept_share_of(block: nn.Module, trace: Trace) -> float | None:
    """Return the share of key blocks that a patched block keeps, or 1.0 if it is dense.

    None means that the block did not run, has another tier than block_sparse, or is of no known family. trace:
    of its twin in fp32, for q and k.
    """
    state, blocks = state_of(block), blocks_like(block)
    config, latest, plan = state.shared.config, state.plans.latest, state.plans.ran
    if not isinstance(config, BlockSparse) or blocks is None or plan is None:
        return None
    if plan.attends is None:
        return 1.0
    quantized = plan.attends.in_8_bits
    if why_dense(blocks.self_attention_of(block), latest.stream, latest.call, quantized=quantized) is not None:
        return 1.0
    q, k, _ = self_attention_inputs(trace)
    block_q, block_k = block_sizes(latest.call, quantized=quantized)
    return kernels.kept_share(q, k, mass=config.mass, block_q=block_q, block_k=block_k)
