"""Time the kernels of the less accurate tiers for `turbo-rcm tune`.

They run at one model's shapes, in the formats that the patch uses on this GPU. Each kernel is checked by its tier's
limits. The exact tier's time comes from the rows measured before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ..kernels import FP8, HEAD_DIMS_8BIT
from ..patching.weights.quantize_linears import capability_of, format_for
from . import ops_exact, ops_quantized
from .ops import Contest, OpKey

EXACT, NORMS = "exact tier", "norms"


def sizes_in_tier(exact: OpKey) -> tuple[int, ...] | None:
    """Return the sizes of a tier's op in place of an exact op, or None if no tier replaces that."""
    if exact.op != "attention":
        return exact.shape
    heads, tokens, keys, head_dim = exact.shape  # the tiers replace self-attention
    return (heads, tokens, head_dim) if keys == tokens and head_dim in HEAD_DIMS_8BIT else None


def without_rivals(contest: Contest) -> Contest:
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


def exact_milliseconds(exact: str, key: OpKey, timings: dict[str, dict], rows: Sequence[dict]) -> float | None:
    """Return the time of the exact op in whose place a tier's op runs, or None if its row has no time.

    It is the time of the exact op's row plus the norms that were timed beside it. Raises StopIteration if there is no
    such row."""
    shape = key.shape
    if exact == "attention":
        heads, tokens, head_dim = shape
        shape = heads, tokens, tokens, head_dim
    row = next(row for row in rows if (row["op"], tuple(row["shape"])) == (exact, shape))
    times = [time for time in (row["ours"], row["rival"]) if time is not None]
    norms = timings[NORMS]["milliseconds"] if NORMS in timings else 0.0
    return min(times) + norms if times else None
