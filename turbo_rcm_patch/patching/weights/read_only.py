"""What ``linear.weight`` is while the linear runs in 8 bits: a tensor that reads and writes the original on the CPU.

Every write, through whichever view, alias or ``.data``, comes by here, so that none can be missed: it goes to the
original, and the 8-bit weight is converted anew, in place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

FREED = (
    "the values of this weight were freed: its linear runs in 8 bits, patched with restorable=False or loaded from 8 "
    "bits. Load the model again without the patch, or patch it with restorable=True, to read, save or change them. "
    "pipe.load_lora_weights reads them too: load a LoRA before the patch, or with use_distilled."
)


class EightBitWeight(torch.Tensor):
    """The weight [N, K] of a QuantizedLinear, on the device and in the dtype that the model takes it to have.

    original: the Parameter that it stands for, on the CPU; on "meta" where its values were freed, and then reading and
    writing raise RuntimeError. linear: converts it anew after every write. view: for what indexing and the like give,
    that part of the original.
    """

    # Results of functions are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    @torch.inference_mode(False)
    def __new__(cls, original, device, dtype, linear, view=None):
        shown = original if view is None else view
        layout = {"strides": shown.stride(), "storage_offset": shown.storage_offset()}
        return torch.Tensor._make_wrapper_subclass(cls, shown.shape, dtype=dtype, device=device, **layout)

    def __init__(self, original: nn.Parameter, device: torch.device, dtype: torch.dtype, linear, view=None):
        self.original, self.linear, self._view = original, linear, view
        self._is_param = view is None  # what isinstance(..., nn.Parameter) asks

    @property
    def freed(self) -> bool:
        """Whether only its shape is left."""
        return self.original.is_meta

    @property
    def data(self) -> torch.Tensor:
        """As of any tensor: the same memory, apart from autograd."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        is_alias = isinstance(value, EightBitWeight) and value.original is self.original
        if is_alias and value.shape == self.shape and value.stride() == self.stride():
            return  # what ``weight.data += x`` assigns last
        check_shape(self, value)
        with torch.no_grad():
            self.copy_(value)

    def _alias(self) -> torch.Tensor:
        """The memory of the original that this is."""
        return self.original.data if self._view is None else self._view

    def _part(self, view: torch.Tensor) -> EightBitWeight:
        """A view of the original as the model takes that to be."""
        dtype = self.dtype if view.dtype == self.original.dtype else view.dtype
        return EightBitWeight(self.original, self.device, dtype, self.linear, view)

    def _values(self) -> torch.Tensor:
        """What it holds, where and as the model takes it to be."""
        self._check_kept()
        return self._alias().to(self.device, self.dtype)

    def moved(self, device: torch.device, dtype: torch.dtype) -> EightBitWeight:
        """Itself, from now on taken to be there; no value is moved."""
        twin = EightBitWeight(self.original, device, dtype, self.linear)
        if "meta" in (device.type, self.device.type):
            return twin  # torch makes no tensor one of another kind
        torch.Tensor.data.__set__(self, twin)
        return self

    def _check_kept(self) -> None:
        if self.freed:
            raise RuntimeError(FREED)

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        written = _written(op, args, kwargs)
        if any(isinstance(tensor, cls) for tensor in written):
            return _write(op, args, kwargs, written)
        if _gives_views(op):
            seen = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
            args, kwargs = tree_map_only(cls, cls._alias, (args, kwargs))
            return tree_map_only(torch.Tensor, seen._part, op(*args, **kwargs))
        args, kwargs = tree_map_only(cls, cls._values, (args, kwargs))
        return op(*args, **kwargs)

    def __repr__(self, **_) -> str:
        values = "freed" if self.freed else "the original on the CPU"
        return f"EightBitWeight({tuple(self.shape)}, {self.dtype}, device='{self.device}', values: {values})"

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        """Of a linear's own weight within the linear's copy, that copy's weight; else a plain tensor."""
        if self._view is not None or id(self.linear) not in memo:
            return self._values().clone()
        original, linear = copy.deepcopy(self.original, memo), memo[id(self.linear)]
        twin = memo[id(self)] = EightBitWeight(original, self.device, self.dtype, linear)
        return twin

    def __reduce_ex__(self, protocol: int) -> tuple:
        """With the linear as state, because that holds this weight."""
        if self._view is not None:
            return self._values().clone().__reduce_ex__(protocol)
        return _without_state, (self.original, self.device, self.dtype), {"linear": self.linear}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)


def check_shape(weight: torch.Tensor, value: torch.Tensor) -> None:
    """Raise RuntimeError for a value that a weight in 8 bits cannot take."""
    if value.shape != weight.shape:
        raise RuntimeError(f"a weight of shape {tuple(weight.shape)} in 8 bits cannot become {tuple(value.shape)}.")


def _without_state(original: nn.Parameter, device: torch.device, dtype: torch.dtype) -> EightBitWeight:
    return EightBitWeight(original, device, dtype, None)


def _gives_views(op: Callable) -> bool:
    return any(result.alias_info is not None and not result.alias_info.is_write for result in op._schema.returns)


def _written(op: Callable, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that an op writes to."""
    written = []
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return written


def _write(op: Callable, args: tuple, kwargs: dict, written: list[torch.Tensor]) -> object:
    """Run an op on the originals, and convert them anew."""
    if not all(isinstance(tensor, EightBitWeight) for tensor in written):
        raise RuntimeError(f"{op} writes to a weight in 8 bits and to other tensors at once; write to each apart.")
    for weight in written:
        weight._check_kept()
        now = vars(weight.linear).get("eight_bit")
        if now is None or now.original is not weight.original:
            raise RuntimeError("this is not the weight of its linear in 8 bits any more; take linear.weight anew.")

    def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
        return tensor._alias() if isinstance(tensor, EightBitWeight) else tensor.cpu()

    op(*tree_map_only(torch.Tensor, on_cpu, args), **tree_map_only(torch.Tensor, on_cpu, kwargs))
    for weight in {id(weight.original): weight for weight in written}.values():
        torch.autograd.graph.increment_version(weight.original)  # below autograd torch counts nothing
        weight.linear.convert_all_tied()
    if not op._schema.returns:
        return None
    return written[0] if len(op._schema.returns) == 1 else tuple(written)
