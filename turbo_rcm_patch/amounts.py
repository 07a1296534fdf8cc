"""Amounts of memory: "8 GB" as bytes, and bytes for people."""

from __future__ import annotations

import re
from numbers import Integral

_UNITS = {"MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}
_TOO_MUCH = 2**60
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([a-z]+)\s*", re.IGNORECASE)


def parse_amount(amount: str | int) -> int:
    """Return the bytes of an amount such as "8 GB", "7.5GiB" or a whole number of bytes.

    Raises ValueError for anything else, TypeError for another type.
    """
    if isinstance(amount, Integral) and not isinstance(amount, bool):
        size = int(amount)
    elif isinstance(amount, str):
        match = _AMOUNT.fullmatch(amount)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(
                f"{amount!r} is no amount of memory; give a number with MB, GB, MiB or GiB, such as '8 GB'."
            )
        size = round(min(float(match[1]) * _UNITS[match[2].upper()], _TOO_MUCH))
    else:
        raise TypeError(
            f"{amount!r} is {type(amount).__name__}; give an amount such as '8 GB', a whole number of bytes, or None."
        )
    if size >= _TOO_MUCH:
        raise ValueError(f"{amount!r:.40} is more memory than any GPU has; give what the card has, such as '8 GB'.")
    if size <= 0:
        raise ValueError(f"{amount!r} is no memory at all; give more than 0.")
    if size < _UNITS["MB"]:
        raise ValueError(f"{amount!r} is less than 1 MB; a whole number means bytes, so give a unit, such as '8 GB'.")
    return size


def in_gb(size: int) -> str:
    """Return bytes in GB, 10^9 bytes each, as cards and hosts are sold."""
    return f"{size / 10**9:.2f}"


def enough_in_gb(size: int) -> str:
    """Return bytes in GB, rounded up, so that a card or a host with this amount suffices."""
    return in_gb(-(-size // 10**7) * 10**7)
