"""What calling some modules depends on besides their inputs and the contents of memory, and whether it is as it was."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from operator import attrgetter
from typing import Generic, TypeVar

import torch
from torch._C._functorch import maybe_current_level
from torch.nn.modules.module import _has_any_global_hook

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_KIND = attrgetter("__class__", "device", "dtype", "shape", "requires_grad")


class Snapshot:
    """The classes and attributes of some modules (and of other objects), what calling them runs, their hooks, and their
    tensors: where each lies, or, without addresses, of which kind it is (class, device, dtype, shape, requires_grad).

    Contents of tensors do not count, nor attributes of the names in live. An attribute that is changed in place is seen
    where it is a dictionary, a list or a set.
    """

    def __init__(self, objects: Iterable[object], addresses: bool = True, live: Collection[str] = ()):
        self._objects = [(thing, type(thing), _attributes(thing, live)) for thing in objects]
        self._modules = [thing for thing, _, _ in self._objects if isinstance(thing, torch.nn.Module)]
        self._describe = _place if addresses else _kind
        self._code = {cls: code_of(cls) for _, cls, _ in self._objects}
        self._tensors = self._layout()
        self._under_global_hook = bool(_has_any_global_hook())

    def holds(self) -> bool:
        """Whether nothing changed since. Never with a global hook, then or now, for it belongs to no module; never in a
        function transform, whose tensors look like others."""
        if self._under_global_hook or _has_any_global_hook() or maybe_current_level() is not None:
            return False
        try:
            same = all(type(thing) is cls and _vars(thing) == known for thing, cls, known in self._objects)
            same = same and all(code_of(cls) is code for cls, code in self._code.items())
            return same and self._tensors is not None and self._layout() == self._tensors
        except (RuntimeError, TypeError, ValueError):
            return False  # a tensor or an array became another one: their comparison has no truth value

    def _layout(self) -> list[tuple | None] | None:
        tensors = [t for m in self._modules for group in (m._parameters, m._buffers) for t in group.values()]
        try:
            return list(map(self._describe, tensors))
        except RuntimeError:
            return None  # a tensor of a function transform lies nowhere


def _place(tensor: torch.Tensor | None) -> tuple | None:
    if type(tensor) in _PLAIN:
        return type(tensor), tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    return None if tensor is None else (type(tensor), id(tensor))


def _kind(tensor: torch.Tensor | None) -> tuple | None:
    return None if tensor is None else _KIND(tensor)


def code_of(cls: type) -> Callable:
    """What calling an object of this class runs: a module's forward."""
    return cls.forward if issubclass(cls, torch.nn.Module) else cls.__call__


def _vars(thing: object) -> dict[str, object]:
    return getattr(thing, "__dict__", {})  # with slots alone there is none


def _attributes(thing: object, live: Collection[str]) -> dict[str, object]:
    """A copy of an object's attributes, and of collections among them, such as hooks and children."""
    tensors = ("_parameters", "_buffers")
    known = {name: value if name in tensors else _copied(value) for name, value in _vars(thing).items()}
    return known | {name: _Anything() for name in live if name in known}


class _Anything:
    """Equals all."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return True


def _copied(value: object) -> object:
    """What compares equal to a dictionary, list or set for as long as nobody changes it; other values themselves."""
    return next((kind(value) for kind in (dict, list, set) if isinstance(value, kind)), value)


class WhileUnchanged(Generic[Key, Value]):
    """What ``compute(key)`` found out about some objects, by key, kept for as long as a snapshot of them holds.

    addresses, live: as for Snapshot. Without addresses, a call costs some two microseconds a module, and weights may be
    reloaded, moved on their device or swapped for equal ones without anything being computed anew.
    """

    def __init__(
        self,
        objects: Callable[[], Iterable[object]],
        compute: Callable[[Key], Value],
        addresses: bool = True,
        live: Collection[str] = (),
    ):
        self._objects, self._compute, self._addresses, self._live = objects, compute, addresses, live
        self._known: tuple[Snapshot, dict[Key, Value]] | None = None

    def get(self, key: Key) -> Value:
        """``compute(key)``, or what it returned for this key since the objects last changed."""
        known = self._known
        if known is None or not known[0].holds():
            self._known = known = None  # lets go of modules that were removed
            self._known = known = Snapshot(self._objects(), self._addresses, self._live), {}
        _, values = known
        if key not in values:
            values[key] = self._compute(key)
        return values[key]

    def __getstate__(self) -> dict[str, object]:
        """Copied and pickled without what is known of the objects that were copied from."""
        return {**self.__dict__, "_known": None}
