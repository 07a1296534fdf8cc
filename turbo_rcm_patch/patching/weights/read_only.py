"""The read-only ``linear.weight`` of a linear that runs in 8 bits: it reads the original weight on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

RULE = (
    "this weight is read-only while its linear runs in 8 bits; call restore() first, change the weight, then patch "
    "again."
)
FREED = (
    "the values of this weight were freed: its linear runs in 8 bits, patched with restorable=False or loaded from 8 "
    "bits. Load the model again without the patch, or patch it with restorable=True, to read, save or change them. "
    "pipe.load_lora_weights reads them too: load a LoRA before the patch, or with use_distilled. "
    "accelerate's sequential offloading and device maps read them as well: take trp.fit or diffusers' group offloading."
)


class ReadOnlyWeight(torch.Tensor):
    """The original weight [N, K] of a linear in 8 bits, on the device and in the dtype that the model has.

    Reading it copies the values of the original from the CPU. Writing to it or to a view of it raises RuntimeError.
    Reading raises RuntimeError if the values were freed.
    """

    # Results of functions are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    @torch.inference_mode(False)
    def __new__(cls, original: torch.Tensor, device: torch.device, dtype: torch.dtype):
        layout = {"strides": original.stride(), "storage_offset": original.storage_offset()}
        return torch.Tensor._make_wrapper_subclass(cls, original.shape, dtype=dtype, device=device, **layout)

    def __init__(self, original: torch.Tensor, device: torch.device, dtype: torch.dtype):
        """original: a parameter or a view of one, on the CPU, or on "meta" if its values were freed."""
        self._original = original
        self._is_param = isinstance(original, nn.Parameter)  # isinstance(..., nn.Parameter) reads it

    @property
    def is_freed(self) -> bool:
        """True if only its shape is left."""
        return self._original.is_meta

    @property
    def data(self) -> torch.Tensor:
        """The same values, apart from autograd."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise self._refusal()

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Return a copy of the values as an array."""
        return self._values().clone().numpy(force=force)

    def tolist(self) -> list:
        """Return the values as nested lists of numbers."""
        return self._values().tolist()

    def __dlpack__(self, **options: object) -> object:
        """Export a copy of the values. This tensor has no memory that another library could read."""
        return self._values().clone().__dlpack__(**options)

    def share_memory_(self) -> NoReturn:
        """Raise RuntimeError. This tensor has no memory, without which PyTorch's method ends the process."""
        raise self._refusal()

    def _refusal(self) -> RuntimeError:
        return RuntimeError(FREED if self.is_freed else RULE)

    def _values(self) -> torch.Tensor:
        if self.is_freed:
            raise RuntimeError(FREED)
        return self._original.data.to(self.device, self.dtype)

    def _showing(self, view: torch.Tensor) -> ReadOnlyWeight:
        dtype = self.dtype if view.dtype == self._original.dtype else view.dtype
        return ReadOnlyWeight(view, self.device, dtype)

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for tensor in _written(op, args, kwargs):
            if isinstance(tensor, cls):
                raise tensor._refusal()
        aliases = (result.alias_info for result in op._schema.returns)
        if any(alias is not None and not alias.is_write for alias in aliases):  # a view
            seen = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
            args, kwargs = tree_map_only(cls, lambda weight: weight._original.data, (args, kwargs))
            return tree_map_only(torch.Tensor, seen._showing, op(*args, **kwargs))
        args, kwargs = tree_map_only(cls, cls._values, (args, kwargs))
        return op(*args, **kwargs)

    def __repr__(self, **_) -> str:
        values = "freed" if self.is_freed else "the original on the CPU"
        return f"ReadOnlyWeight({tuple(self.shape)}, {self.dtype}, device='{self.device}', values: {values})"

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        """Return a plain tensor with the values."""
        return self._values().clone()

    def __reduce_ex__(self, protocol: int) -> tuple:
        return self._values().clone().__reduce_ex__(protocol)


def _written(op: Callable, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Return the tensors that an op writes to."""
    written = []
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return written
