"""The memory of a model's call, from a run without values: the bytes of the tensors that are alive at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .empty_models import cast_as_loaded

ROOM = 1.1  # times the tensors, for workspaces and for gaps in the allocator's memory

_KNOWN: dict[Hashable, int] = {}  # by what was asked


def traced_bytes(model: nn.Module, run: Callable[[nn.Module], object], asked: Hashable) -> int:
    """Return the bytes that ``run(model)`` computes with beside the weights, for a diffusers model of the same config.

    A convolution counts with a copy of its input and of its result, which cuDNN lays out anew. run: makes its inputs on
    the default device. asked: tells runs of the same class and config apart. The result of each is kept.
    """
    key = type(model), str(dict(model.config)), model.dtype, asked
    if key not in _KNOWN:
        with torch.device("meta"):
            twin = cast_as_loaded(type(model).from_config(model.config), model.dtype)
            with torch.no_grad(), _Peak(twin) as peak:
                run(twin)
        _KNOWN[key] = round(ROOM * peak.bytes)
    return _KNOWN[key]


class _Peak(TorchDispatchMode):
    """Counts the bytes of tensors that ops made and that live together, without a model's weights and their views."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.bytes = self._alive = 0
        self._seen = {weight.untyped_storage()._cdata for weight in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        results = op(*args, **(kwargs or {}))
        tensors = [one for one in tree_leaves(results) if isinstance(one, torch.Tensor)]
        for tensor in tensors:
            self._count(tensor.untyped_storage())
        if op is torch.ops.aten.convolution.default:
            self.bytes = max(self.bytes, self._alive + args[0].nbytes + sum(tensor.nbytes for tensor in tensors))
        return results

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._seen:
            return
        self._seen.add(storage._cdata)
        self._alive += storage.nbytes()
        self.bytes = max(self.bytes, self._alive)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, address: int, size: int) -> None:
        self._seen.discard(address)
        self._alive -= size
