"""A journal of what the patch sets on modules, so that all of it can be undone."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import NamedTuple

import torch

from ..plain import function_bound_to, is_original


def bind(forward: Callable, module: object) -> MethodType:
    """Return a method of the object that runs ``forward``.

    `reduce_ex` (copying.py) pickles methods that an object holds. Elsewhere they cannot be pickled.
    """
    return MethodType(forward, module)


class _ABSENT:
    """Marks an attribute that did not exist. It is a class because copies and pickles keep a class's identity."""


class _Entry(NamedTuple):
    """One value that was set on a module.

    kind: the dictionary of the module that holds it: "__dict__", "_parameters" or "_modules".
    before: the old value under that name, or _ABSENT.
    """

    module: torch.nn.Module
    kind: str
    name: str
    value: object
    before: object

    @property
    def is_parameter(self) -> bool:
        return self.kind == "_parameters"

    @property
    def holder(self) -> dict[str, object]:
        return getattr(self.module, self.kind)

    @property
    def holds(self) -> bool:
        """True if the value is still there, or the same function is bound again (copies, accelerate's unwrap_model)."""
        found = self.holder.get(self.name, _ABSENT)
        if self.kind == "_modules" and getattr(found, "base_layer", None) is self.value:
            return True  # inside PEFT's layer
        function = function_bound_to(self.module, found)
        return found is self.value or (function is not None and function is function_bound_to(self.module, self.value))

    @property
    def is_undone(self) -> bool:
        """True if the old value is there again, or the class's own forward where there was none."""
        found = self.holder.get(self.name, _ABSENT)
        if found is self.before:
            return True
        is_new_forward = self.before is _ABSENT and self.name == "forward"
        return is_new_forward and function_bound_to(self.module, found) is type(self.module).forward

    def __reduce__(self) -> tuple:
        """Pickle methods of the module by their functions."""
        values = (_Method.of(self.module, value) for value in (self.value, self.before))
        return _entry, (self.module, self.kind, self.name, *values)


class _Method(NamedTuple):
    """A method of an entry's module, as it is pickled."""

    function: Callable

    @classmethod
    def of(cls, module: torch.nn.Module, value: object) -> object:
        """Return a value as it is pickled."""
        function = function_bound_to(module, value)
        return value if function is None else cls(function)


def _entry(module: torch.nn.Module, kind: str, name: str, *values: object) -> _Entry:
    """Return the entry that was pickled."""
    return _Entry(module, kind, name, *(bind(v.function, module) if isinstance(v, _Method) else v for v in values))


class _Call(NamedTuple):
    """A function that undoes a change that the journal did not make."""

    module: torch.nn.Module
    undo: Callable[[torch.nn.Module], None]


class Journal:
    """Set attributes and parameters of modules, and undo that in reverse order.

    The journal writes to ``__dict__`` and ``_parameters``, so nn.Module registers nothing. Module classes and the names
    in state_dict stay the same, except for modules that `set_module` adds. A copy or pickle of a whole model includes
    its journal, which undoes the copy.
    """

    def __init__(self):
        self._entries: list[_Entry | _Call] = []

    @property
    def owner(self) -> torch.nn.Module | None:
        """The module of the first entry, or None for an empty journal."""
        return self._entries[0].module if self._entries else None

    def set(self, module: torch.nn.Module, name: str, value: object) -> None:
        """Set an instance attribute and remember the old value. A forward is set below diffusers' hooks."""
        entry = _Entry(module, "__dict__", name, value, module.__dict__.get(name, _ABSENT))
        slot = slot_below_hooks(module) if name == "forward" else None
        if slot is None:
            self._set(entry)
        else:
            self._entries.append(entry._replace(before=_ABSENT))
            setattr(*slot, value)

    def set_parameter(self, module: torch.nn.Module, name: str, value: torch.nn.Parameter | None) -> None:
        """Replace a parameter of the module and remember the old one. Raises KeyError if the module has none.

        Undoing drops the new parameter with all writes to it, for example by load_state_dict.
        """
        self._set(_Entry(module, "_parameters", name, value, module._parameters[name]))

    def set_module(self, module: torch.nn.Module, name: str, value: torch.nn.Module) -> None:
        """Register a submodule and remember the old one."""
        self._set(_Entry(module, "_modules", name, value, module._modules.get(name, _ABSENT)))

    def on_undo(self, undo: Callable[[torch.nn.Module], None], module: torch.nn.Module) -> None:
        """Call ``undo(module)`` after everything that is set later was undone. The function must be picklable."""
        self._entries.append(_Call(module, undo))

    def _set(self, entry: _Entry) -> None:
        self._entries.append(entry)
        entry.holder[entry.name] = entry.value

    def forget_parameters(self) -> None:
        """Forget replaced parameters, so that they can be freed. `undo` then leaves the new ones in place."""
        self._entries = [entry for entry in self._entries if not getattr(entry, "is_parameter", False)]

    def captured(self) -> list[tuple[torch.nn.Module, str]]:
        """Return the (module, name) pairs that hold another value than the one that was set, the old one, or a known
        hook around it."""
        entries = (entry for entry in self._entries if isinstance(entry, _Entry))
        lost = (entry for entry in entries if not (entry.holds or entry.is_undone or _hook_slots(entry)))
        return [(entry.module, entry.name) for entry in lost]

    def undo(self) -> None:
        """Undo everything.

        A hook that was put around a patched forward stays and gets the old forward. A parameter that someone replaced
        after the journal stays as well.
        """
        while self._entries:
            entry = self._entries.pop()
            if isinstance(entry, _Call):
                entry.undo(entry.module)
            elif not entry.holds:
                for holder, attribute in _hook_slots(entry):
                    setattr(holder, attribute, _original(entry))
            elif entry.before is _ABSENT:
                del entry.holder[entry.name]
            else:
                entry.holder[entry.name] = entry.before


def _original(entry: _Entry) -> object:
    absent = entry.before is _ABSENT
    return MethodType(type(entry.module).forward, entry.module) if absent else entry.before


def slot_below_hooks(module: torch.nn.Module) -> tuple[object, str] | None:
    """Return the object and attribute where diffusers' hooks keep a module's class forward, or None."""
    slot, cls = _innermost_slot(module), type(module)
    is_own = slot is not None and is_original(cls.forward, cls) and getattr(*slot) == MethodType(cls.forward, module)
    return slot if is_own else None


def forward_below_hooks(module: torch.nn.Module) -> Callable:
    """Return the forward that diffusers' hooks on a module run, such as the patched one, or the module's own."""
    slot = _innermost_slot(module)
    return module.forward if slot is None else getattr(*slot)


def _innermost_slot(module: torch.nn.Module) -> tuple[object, str] | None:
    """Return the object and attribute that hold the forward that diffusers' hooks run, or None without hooks."""
    registry = module.__dict__.get("_diffusers_hook")
    if registry is None or not registry.hooks:
        return None
    innermost = registry._fn_refs[0]
    return innermost, "forward" if innermost.original_forward is None else "original_forward"


def _hook_slots(entry: _Entry) -> list[tuple[object, str]]:
    """Return where hooks on a module keep the forward: accelerate's ``_old_forward``, diffusers' ``_fn_refs``."""
    module, forward = entry.module, entry.value
    if entry.kind != "__dict__":
        return []
    slots = [(module, "_old_forward")] if module.__dict__.get("_old_forward") == forward else []
    registry = module.__dict__.get("_diffusers_hook")
    for reference in registry._fn_refs if registry is not None else ():
        slots += [(reference, name) for name in ("forward", "original_forward") if getattr(reference, name) == forward]
    return slots
