"""Time the kernels of the less accurate tiers for `turbo-rcm tune`.

They run at one model's shapes, in the formats that the patch uses on this GPU. Each kernel is checked by its tier's
limits. The exact tier's time comes from the rows measured before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from ..kernels import FP8, HEAD_DIMS_8BIT
from ..patching.weights.quantize_linears import capability_of, format_for
from ..tiers import BLOCK_SPARSE, QUANTIZED, SPARSE
from . import ops_exact, ops_quantized, ops_sparse
from .ops import Contest, OpCase, OpKey
from .trials import case_with_trials

EXACT, NORMS = "exact tier", "norms"
EXACT_OPS = {
    "attention_8bit": "attention",
    "linear_skip_8bit": "linear_skip",
    "linear_gelu_8bit": "linear_gelu",
    "linear_qkv_8bit": "linear_qkv",
    "sparse_linear_attention": "attention",
    "block_sparse_attention": "attention",
}  # in whose place a tier's op runs


def tier_cases(ops: Sequence[OpKey]) -> Iterator[OpCase]:
    """Every op of the other tiers that runs in place of one of these exact ones, once, where it takes longest."""
    contests = {
        linear_skip_8bit: QUANTIZED,
        linear_gelu_8bit: QUANTIZED,
        linear_qkv_8bit: QUANTIZED,
        attention_8bit: QUANTIZED,
        ops_sparse.sparse_linear_attention: SPARSE,
        ops_sparse.block_sparse_attention: BLOCK_SPARSE,
    }
    for contest, tier in contests.items():
        sizes = [sizes for op, shape in ops if (sizes := _sizes_in_tier(contest.__name__, op, shape)) is not None]
        if sizes:
            yield case_with_trials(contest, *max(sizes, key=math.prod), tier=tier, change=_without_rivals)


def _sizes_in_tier(name: str, op: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the sizes of a tier's op in place of an exact op of this shape, or None if it does not take its place."""
    if op != EXACT_OPS[name]:
        return None
    if op != "attention":
        return shape
    heads, tokens, keys, head_dim = shape  # the tiers replace self-attention
    return (heads, tokens, head_dim) if keys == tokens and head_dim in HEAD_DIMS_8BIT else None


def _without_rivals(contest: Contest) -> Contest:
    """Return a contest of ours alone, beside the norms of the exact tier."""
    return replace(contest, rivals={}, partial={name: run for name, run in contest.partial.items() if name == NORMS})


def attention_8bit(heads: int, tokens: int, head_dim: int, device: torch.device, compiled: Callable) -> Contest:
    """Attention in 8 bits with the norms of q and k before it: one kernel in 8 bits, two norms in the exact tier."""
    contest = ops_quantized.norms_attention_8bit(heads, tokens, head_dim, device, compiled)
    (norm,) = ops_exact.rms_norm_rope(tokens, heads, head_dim, device, compiled).ours.values()
    return replace(contest, partial={NORMS: lambda: (norm(), norm())})


def linear_skip_8bit(tokens: int, C: int, K: int, device: torch.device, compiled: Callable) -> Contest:
    """The feed-forward's second projection."""
    return ops_quantized.fed_linear_skip_8bit(tokens, C, K, device, compiled, _format(device, rows_known=False))


def linear_gelu_8bit(tokens: int, C: int, K: int, device: torch.device, compiled: Callable) -> Contest:
    """The feed-forward's first, whose result is in 8 bits where the second takes e4m3."""
    result = FP8 if _format(device, rows_known=False) == FP8 else None
    return ops_quantized.linear_gelu_8bit(tokens, C, K, device, compiled, _format(device, rows_known=True), result)


def linear_qkv_8bit(tokens: int, C: int, K: int, device: torch.device, compiled: Callable) -> Contest:
    """A self-attention's."""
    return ops_quantized.linear_qkv_8bit(tokens, C, K, device, compiled, _format(device, rows_known=True))


def _format(device: torch.device, *, rows_known: bool) -> torch.dtype:
    return format_for(capability_of(device), rows_known=rows_known)


def exact_milliseconds(key: OpKey, timings: dict[str, dict], rows: Sequence[dict]) -> float | None:
    """Return the exact tier's time for a tier's op and shape, or None if its row has no time.

    It is the time of the exact op's row plus the norms that were timed beside it. Raises StopIteration if there is no
    such row."""
    exact = OpKey(EXACT_OPS[key.op], key.shape)
    if exact.op == "attention":
        heads, tokens, head_dim = key.shape
        exact = exact._replace(shape=(heads, tokens, tokens, head_dim))
    row = next(row for row in rows if (row["op"], tuple(row["shape"])) == exact)
    times = [time for time in (row["ours"], row["rival"]) if time is not None]
    norms = timings[NORMS]["milliseconds"] if NORMS in timings else 0.0
    return min(times) + norms if times else None
