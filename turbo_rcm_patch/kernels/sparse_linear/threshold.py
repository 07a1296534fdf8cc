"""Find a threshold in a row of registers bit by bit, to list the blocks that sparse attention keeps."""

from __future__ import annotations

import triton
import triton.language as tl

FIRST_BIT = tl.constexpr(1 << 30)


@triton.jit
def largest_threshold(order, weight, wanted, lowest):
    """Return the largest int32 threshold, from `lowest` (-2³¹ or 0) on, such that the weights with ``order >=
    threshold`` sum to wanted or more. Return `lowest` if all weights together sum to less.

    The search stops early if a sum equals wanted exactly. The threshold may then be lower, but selects the same
    weights.
    """
    threshold = lowest
    total = tl.sum(tl.where(order >= lowest, weight, 0))
    bit = tl.full((), FIRST_BIT, tl.int32)
    while (bit > 0) & (total != wanted):
        higher = threshold + bit
        sum_above = tl.sum(tl.where(order >= higher, weight, 0))
        enough = sum_above >= wanted
        threshold = tl.where(enough, higher, threshold)
        total = tl.where(enough, sum_above, total)
        bit = bit >> 1
    return threshold
