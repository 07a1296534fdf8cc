"""Numbers of a launch, computed on the host: Triton's own functions, which kernels can call as well, take microseconds
there, and a block asks dozens of times."""

import functools


def cdiv(size: int, part: int) -> int:
    """Parts of this size that hold it all."""
    return -(-size // part)


@functools.cache
def next_power_of_2(size: int) -> int:
    """The smallest that is no smaller, for a size from 1 on."""
    return 1 << (size - 1).bit_length()
