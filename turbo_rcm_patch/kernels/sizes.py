"""Integer arithmetic for launches on the host. Triton's own functions take microseconds there, and a block needs them
dozens of times."""

import functools


def cdiv(size: int, part: int) -> int:
    """Return the number of parts of this size that cover the whole size."""
    return -(-size // part)


@functools.cache
def next_power_of_2(size: int) -> int:
    """Return the smallest power of two that is at least size, for a size of 1 or more."""
    return 1 << (size - 1).bit_length()
