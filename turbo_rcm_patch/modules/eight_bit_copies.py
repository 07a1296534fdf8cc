"""8-bit copies of weights, kept until the weights change."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..kernels import QuantizedWeight


class EightBitCopies:
    """The 8-bit copies of a module's weights, by name. A replaced, moved or changed weight is converted again.

    An inference tensor is converted at each call, because PyTorch does not count writes to it. Under torch.compile or
    CUDA graph capture every weight is converted, because the conversion must run again later. Writes through ``.data``
    and by fused optimizers are not detected: call `forget` after them. A copy or pickle of this object is empty.
    """

    def __init__(self):
        self._kept: dict[str, _Kept] = {}

    def get(
        self, name: str, weight: torch.Tensor, convert: Callable[[torch.Tensor], QuantizedWeight]
    ) -> QuantizedWeight:
        """Return `convert` of a weight, from the kept copy if it is up to date."""
        if _is_recorded(weight) or weight.is_inference():
            return convert(weight)
        state, kept = _state(weight), self._kept.get(name)
        if kept is None or kept.weight() is not weight or kept.state != state:
            kept = self._kept[name] = _Kept(weakref.ref(weight), state, convert(weight))
        return kept.copy

    def forget(self) -> None:
        """Drop all copies."""
        if not torch.compiler.is_compiling():
            self._kept.clear()

    def __reduce__(self) -> tuple:
        return EightBitCopies, ()


class _Kept(NamedTuple):
    weight: weakref.ref
    state: tuple
    copy: QuantizedWeight


def _state(weight: torch.Tensor) -> tuple:
    """Return a state that changes if a weight is moved or written to.

    It holds a weak reference to the storage, not an address, which another tensor could get later.
    """
    storage = StorageWeakRef(weight.untyped_storage())
    return storage, weight._version, weight.dtype, weight.storage_offset(), weight.stride()


def _is_recorded(weight: torch.Tensor) -> bool:
    """True if operations on a weight are being traced or captured, to run again later."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()
