"""Copies of weights in 8 bits, kept for as long as the weights stay what they are."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..kernels import QuantizedWeight


class EightBitCopies:
    """The 8-bit copies of a module's weights, by name; made anew where a weight was replaced, moved or written to.

    Inference tensors are converted at each call, as nobody counts what is written to them, and so is whatever
    torch.compile traces or a CUDA graph captures, which runs again later. Not noticed are writes through ``.data`` and
    those of fused optimizers: `forget` before what follows them. A copy or a pickle of this is empty.
    """

    def __init__(self):
        self._kept: dict[str, _Kept] = {}

    def get(
        self, name: str, weight: torch.Tensor, convert: Callable[[torch.Tensor], QuantizedWeight]
    ) -> QuantizedWeight:
        """What `convert` makes of a weight."""
        if _is_recorded(weight) or weight.is_inference():
            return convert(weight)
        state, kept = _state(weight), self._kept.get(name)
        if kept is None or kept.weight() is not weight or kept.state != state:
            kept = self._kept[name] = _Kept(weakref.ref(weight), state, convert(weight))
        return kept.copy

    def forget(self) -> None:
        """Let go of all copies."""
        if not torch.compiler.is_compiling():
            self._kept.clear()

    def __reduce__(self) -> tuple:
        return EightBitCopies, ()


class _Kept(NamedTuple):
    weight: weakref.ref
    state: tuple
    copy: QuantizedWeight


def _state(weight: torch.Tensor) -> tuple:
    """What differs after a weight was moved or written to. The storage is no address, which could be taken again."""
    storage = StorageWeakRef(weight.untyped_storage())
    return storage, weight._version, weight.dtype, weight.storage_offset(), weight.stride()


def _is_recorded(weight: torch.Tensor) -> bool:
    """Whether what is done with a weight now is traced or captured, to run again later."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()
