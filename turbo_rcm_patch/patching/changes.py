"""Snapshots of the things that a call of modules depends on, besides its inputs and the contents of memory."""

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
_ATTRIBUTES = attrgetter("__dict__")
_KIND = attrgetter("__class__", "device", "dtype", "shape", "requires_grad")


class Snapshot:
    """The classes, attributes and hooks of some modules and other objects, the code that runs them, and their tensors.

    Contents of tensors do not count. Changes inside an attribute are seen if it is a dictionary, a list or a set.

    Args:
        objects: the modules and other objects.
        addresses: compare where each tensor lies. Otherwise compare its class, device, dtype, shape and requires_grad.
        live: names of attributes that do not count.
    """

    def __init__(self, objects: Iterable[object], addresses: bool = True, live: Collection[str] = ()):
        self._objects = list(objects)
        self._classes = list(map(type, self._objects))
        self._with_attributes = [thing for thing in self._objects if hasattr(thing, "__dict__")]
        self._attributes = [_copy(vars(thing), live) for thing in self._with_attributes]
        self._modules = [thing for thing in self._objects if isinstance(thing, torch.nn.Module)]
        self._code = {cls: code_of(cls) for each in set(self._classes) for cls in _with_bases(each)}
        self._describe = _place if addresses else _KIND
        self._tensors = self._layout()
        self._under_global_hook = bool(_has_any_global_hook())

    def holds(self) -> bool:
        """True if nothing changed.

        Always False with a global hook, then or now, because it belongs to no module. Always False in a function
        transform, whose tensors look like others.
        """
        if self._under_global_hook or _has_any_global_hook() or maybe_current_level() is not None:
            return False
        try:
            # Lists are compared in C: this runs before every forward, for hundreds of modules.
            return (
                list(map(type, self._objects)) == self._classes
                and list(map(_ATTRIBUTES, self._with_attributes)) == self._attributes
                and list(map(code_of, self._code)) == list(self._code.values())
                and self._tensors is not None
                and self._layout() == self._tensors
            )
        except (RuntimeError, TypeError, ValueError):
            return False  # an attribute became another tensor or array: their comparison has no truth value

    def _layout(self) -> list[tuple | None] | None:
        describe = self._describe
        tensors = [t for m in self._modules for group in (m._parameters, m._buffers) for t in group.values()]
        try:
            return [None if tensor is None else describe(tensor) for tensor in tensors]
        except RuntimeError:
            return None  # a tensor of a function transform has no address


def _place(tensor: torch.Tensor) -> tuple:
    if type(tensor) in _PLAIN:
        return type(tensor), tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    return type(tensor), id(tensor)


def code_of(cls: type) -> Callable:
    """Return what a call of an object of this class runs: for a module, its forward."""
    return cls.forward if issubclass(cls, torch.nn.Module) else cls.__call__


def _with_bases(cls: type) -> Iterable[type]:
    """Yield a class, and the modules' classes that it inherits from, whose forward its own may call."""
    return (base for base in cls.__mro__ if base is cls or issubclass(base, torch.nn.Module))


def _copy(attributes: dict[str, object], live: Collection[str]) -> dict[str, object]:
    """Copy attributes, and collections among them, such as hooks and children. Tensors have a description instead."""
    tensors = ("_parameters", "_buffers")
    known = {name: value if name in tensors else _copy_collection(value) for name, value in attributes.items()}
    return known | {name: _Anything() for name in live if name in known}


class _Anything:
    """Equals every object."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return True


def _copy_collection(value: object) -> object:
    """Return a copy of a dictionary, list or set, equal to it until it changes. Return other values as they are."""
    if isinstance(value, (dict, list, set)):  # few values are: one check of all three is the fastest
        return next(kind(value) for kind in (dict, list, set) if isinstance(value, kind))
    return value


class WhileUnchanged(Generic[Key, Value]):
    """Keeps what ``compute(key)`` returned about some objects, for each key, until one of the objects changes.

    live: names of attributes whose changes do not count.
    """

    def __init__(
        self,
        objects: Callable[[], Iterable[object]],
        compute: Callable[[Key], Value],
        live: Collection[str] = (),
    ):
        self._objects, self._compute, self._live = objects, compute, live
        self._known: tuple[Snapshot, dict[Key, Value]] | None = None

    def get(self, key: Key) -> Value:
        """Return ``compute(key)``, or what it returned for this key since the objects last changed."""
        known = self._known
        if known is None or not known[0].holds():
            self._known = known = None  # lets go of modules that were removed
            self._known = known = Snapshot(self._objects(), live=self._live), {}
        _, values = known
        if key not in values:
            values[key] = self._compute(key)
        return values[key]

    def __getstate__(self) -> dict[str, object]:
        """Copy and pickle without the known values, which belong to the original objects."""
        return {**self.__dict__, "_known": None}
