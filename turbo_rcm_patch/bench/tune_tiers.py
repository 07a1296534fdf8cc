"""Time the kernels of the less accurate tiers for `turbo-rcm tune`.

They run at one model's shapes, in the formats that the patch uses on this GPU. Each kernel is checked by its tier's
limits. The exact tier's time comes from the rows measured before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from ..kernels import FP8, HEAD_DIMS_8BIT
from ..patching.weights.convert import capability_of, format_of
from ..tiers import BLOCK_SPARSE, QUANTIZED, SPARSE, Tier
from . import ops_exact, ops_quantized, ops_sparse
from .ops import Contest, OpCase, OpKey, op_case

EXACT, NORMS = "exact tier", "norms"
EXACT_OPS = {
    "attention_8bit": "attention",
    "linear_skip_8bit": "linear_skip",
    "linear_gelu_8bit": "linear_gelu",
    "linear_qkv_8bit": "linear_qkv",
    "sparse_linear_attention": "attention",
    "block_sparse_attention": "attention",
}  # in whose place a tier's op runs


def tier_cases(heads: int, head_dim: int, ffn: int, tokens: int) -> Iterator[OpCase]:
    """Every op of the other tiers that an exact one runs in place of, once, where it takes longest."""
    C = heads * head_dim
    yield _case(QUANTIZED, linear_skip_8bit, tokens, C, ffn)
    yield _case(QUANTIZED, linear_gelu_8bit, tokens, ffn, C)
    yield _case(QUANTIZED, linear_qkv_8bit, tokens, C, C)
    if head_dim in HEAD_DIMS_8BIT:
        yield _case(QUANTIZED, attention_8bit, heads, tokens, head_dim)
        yield _case(SPARSE, ops_sparse.sparse_linear_attention, heads, tokens, head_dim)
        yield _case(BLOCK_SPARSE, ops_sparse.block_sparse_attention, heads, tokens, head_dim)


def _case(tier: Tier, contest: Callable[..., Contest], *sizes: int) -> OpCase:
    case = op_case(contest, *sizes, tier=tier, targets={})
    return replace(case, build=functools.partial(_without_rivals, case.build))


def _without_rivals(build: Callable[..., Contest], *arguments: object) -> Contest:
    contest = build(*arguments)
    return replace(contest, rivals={}, partial={name: run for name, run in contest.partial.items() if name == NORMS})


def attention_8bit(heads: int, tokens: int, head_dim: int, device: torch.device, compiled: Callable) -> Contest:
    """Attention in 8 bits with the norms of q and k before it: one kernel in 8 bits, two norms in the exact tier."""
    contest = ops_quantized.norms_attention_8bit(heads, tokens, head_dim, device, compiled)
    (norm,) = ops_exact.rms_norm_rope(tokens, heads, head_dim, device, compiled).ours.values()
    return replace(contest, partial={NORMS: lambda: (norm(), norm())})


def linear_skip_8bit(tokens: int, C: int, K: int, device: torch.device, compiled: Callable) -> Contest:
    """The feed-forward's second projection."""
    return ops_quantized.fed_linear_skip_8bit(tokens, C, K, device, compiled, _format("ffn.net.2", device))


def linear_gelu_8bit(tokens: int, C: int, K: int, device: torch.device, compiled: Callable) -> Contest:
    """The feed-forward's first, whose result is in 8 bits where the second takes e4m3."""
    result = FP8 if _format("ffn.net.2", device) == FP8 else None
    return ops_quantized.linear_gelu_8bit(tokens, C, K, device, compiled, _format("ffn.net.0.proj", device), result)


def linear_qkv_8bit(tokens: int, C: int, K: int, device: torch.device, compiled: Callable) -> Contest:
    """A self-attention's."""
    return ops_quantized.linear_qkv_8bit(tokens, C, K, device, compiled, _format("attn1.to_q", device))


def _format(path: str, device: torch.device) -> torch.dtype:
    return format_of(path, capability_of(device))


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
