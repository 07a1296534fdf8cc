"""What calling some modules depends on besides their inputs and the contents of memory, and whether it is as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch
from torch.nn.modules.module import _has_any_global_hook

Value = TypeVar("Value")

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Snapshot:
    """The classes and attributes of some modules (and of other objects), what calling them runs, their hooks, and where
    their tensors lie.

    Contents of tensors do not count. Attributes that are changed in place, such as a list, are not seen; dictionaries
    are.
    """

    def __init__(self, objects: Iterable[object]):
        self._objects = [(thing, type(thing), _attributes(thing)) for thing in objects]
        self._modules = [thing for thing, _, _ in self._objects if isinstance(thing, torch.nn.Module)]
        self._code = {cls: code_of(cls) for _, cls, _ in self._objects}
        self._tensors = self._layout()
        self._under_global_hook = bool(_has_any_global_hook())

    def holds(self) -> bool:
        """Whether nothing changed since. Never with a global hook, then or now: it belongs to no module."""
        if self._under_global_hook or _has_any_global_hook():
            return False
        try:
            same = all(type(thing) is cls and _vars(thing) == known for thing, cls, known in self._objects)
            same = same and all(code_of(cls) is code for cls, code in self._code.items())
            return same and self._tensors is not None and self._layout() == self._tensors
        except (RuntimeError, TypeError, ValueError):
            return False  # a tensor or an array became another one: their comparison has no truth value

    def _layout(self) -> list[tuple] | None:
        tensors = [t for m in self._modules for group in (m._parameters, m._buffers) for t in group.values()]
        try:
            return [
                (type(t), t.data_ptr(), t.dtype, t.shape, t.stride()) if type(t) in _PLAIN else (type(t), id(t))
                for t in tensors
                if t is not None
            ]
        except RuntimeError:
            return None  # a tensor of a function transform lies nowhere


def code_of(cls: type) -> Callable:
    """What calling an object of this class runs: a module's forward."""
    return cls.forward if issubclass(cls, torch.nn.Module) else cls.__call__


def _vars(thing: object) -> dict[str, object]:
    return getattr(thing, "__dict__", {})  # with slots alone there is none


def _attributes(thing: object) -> dict[str, object]:
    """A copy of an object's attributes, and of dictionaries among them, such as hooks and children."""
    tensors = ("_parameters", "_buffers")
    return {k: dict(v) if isinstance(v, dict) and k not in tensors else v for k, v in _vars(thing).items()}


class WhileUnchanged(Generic[Value]):
    """What ``compute(device)`` found out about some objects, kept for as long as a snapshot of them holds."""

    def __init__(self, objects: Callable[[], Iterable[object]], compute: Callable[[torch.device], Value]):
        self._objects, self._compute = objects, compute
        self._known: tuple[torch.device, Snapshot, Value] | None = None

    def get(self, device: torch.device) -> Value:
        """``compute(device)``, or what it returned last if device and objects are the same."""
        known = self._known
        if known is not None and known[0] == device and known[1].holds():
            return known[2]
        self._known = known = None  # lets go of modules that were removed
        snapshot = Snapshot(self._objects())
        value = self._compute(device)
        self._known = device, snapshot, value
        return value

    def __deepcopy__(self, memo) -> WhileUnchanged:
        """Without what is known of the objects that were copied from."""
        return WhileUnchanged(copy.deepcopy(self._objects, memo), copy.deepcopy(self._compute, memo))
