"""Values that depend on the bits of some tensors alone, kept for as long as those bits stay the same."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

from .. import kernels

Value = TypeVar("Value")


class ContentCache:
    """Remembers the last few values under a checksum of what they were computed from.

    A checksum of the bits, unlike an identity or a version counter, also sees writes through ``.data``, a new prompt in
    the old tensor, and weights that were swapped out and back. It costs one read of the sources and one
    synchronisation with the GPU.
    """

    def __init__(self, size: int):
        self._size = size
        self._values: OrderedDict[Hashable, object] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, sources: list[torch.Tensor], key: Hashable, compute: Callable[[], Value]) -> Value:
        """``compute()``, or what it returned when key and the bits of all sources were last the same."""
        key = (key, sources[0].device, int(kernels.fingerprint(sources)))
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = compute()
        with self._lock:
            while len(self._values) >= self._size:
                self._values.popitem(last=False)
            self._values[key] = value
        return value

    def values(self) -> list:
        """The remembered values, oldest first."""
        with self._lock:
            return list(self._values.values())

    def __deepcopy__(self, memo) -> ContentCache:
        """Empty: what is remembered belongs to the modules that were copied from."""
        return ContentCache(self._size)


def caching_allowed(device: torch.device) -> bool:
    """Whether values may outlive this call: not under autograd or autocast, while compiling or capturing a graph."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_autocast_enabled(device.type):
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
