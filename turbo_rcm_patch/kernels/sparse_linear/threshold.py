"""A threshold in a row that is in registers, found bit by bit: for the lists of blocks that sparse attention keeps."""

from __future__ import annotations

import triton
import triton.language as tl

FIRST_BIT = tl.constexpr(1 << 30)


@triton.jit
def largest_threshold(order, weight, wanted, lowest):
    """The largest int32 from `lowest` on (-2³¹ or 0) such that the weights where order is not below it sum to wanted or
    more; `lowest` where not even all of them do. Or a lower one, once it is found that its sum is wanted exactly: that
    has the same weights."""
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
