"""What is set on modules, attributes and parameters, remembered so that all of it can be taken back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import NamedTuple

import torch

from ..plain import function_bound_to, is_original


def bind(forward: Callable, module: torch.nn.Module) -> Callable:
    """``forward`` with the module as its first argument.

    Unlike a bound method it can be pickled; accelerate looks for a bound method's ``__func__``.
    """
    bound = partial(forward, module)
    bound.__func__ = forward
    return bound


class _ABSENT:
    """Stands for an attribute that was not there; a class, because copies and pickles keep a class's identity."""


class _Entry(NamedTuple):
    """What was set: value under name in the module's ``__dict__``, among its parameters or its submodules, where
    `before` was. kind: the attribute that holds it, "__dict__", "_parameters" or "_modules"."""

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
        """Whether what was set is there, or is bound alike, as in a copy and after accelerate's unwrap_model."""
        found = self.holder.get(self.name, _ABSENT)
        if self.kind == "_modules" and getattr(found, "base_layer", None) is self.value:
            return True  # within PEFT's layer
        function = function_bound_to(self.module, found)
        return found is self.value or (function is not None and function is function_bound_to(self.module, self.value))


class _Call(NamedTuple):
    """What takes back something that the journal did not set."""

    module: torch.nn.Module
    undo: Callable[[torch.nn.Module], None]


class Journal:
    """Sets attributes and parameters of modules and undoes that in reverse order.

    Writing to ``__dict__`` and ``_parameters`` keeps nn.Module from registering anything, so module classes stay as
    they are, and the names in state_dict too, but for modules that `set_module` adds. Copies and pickles of a whole
    model can be undone as well, with the journal that comes with them.
    """

    def __init__(self):
        self._entries: list[_Entry | _Call] = []

    @property
    def owner(self) -> torch.nn.Module | None:
        """The module that something was set on first; None for an empty journal."""
        return self._entries[0].module if self._entries else None

    def set(self, module: torch.nn.Module, name: str, value: object) -> None:
        """Set the instance attribute and remember what was there. A forward goes below diffusers' hooks."""
        entry = _Entry(module, "__dict__", name, value, module.__dict__.get(name, _ABSENT))
        slot = slot_below_hooks(module) if name == "forward" else None
        if slot is None:
            self._set(entry)
        else:
            self._entries.append(entry._replace(before=_ABSENT))
            setattr(*slot, value)

    def set_parameter(self, module: torch.nn.Module, name: str, value: torch.nn.Parameter | None) -> None:
        """Put another parameter in the place of one that the module has (KeyError if not), and remember that one.

        What is written into the new parameter, as by load_state_dict, is lost with it.
        """
        self._set(_Entry(module, "_parameters", name, value, module._parameters[name]))

    def set_module(self, module: torch.nn.Module, name: str, value: torch.nn.Module) -> None:
        """Register a submodule, and remember what was there."""
        self._set(_Entry(module, "_modules", name, value, module._modules.get(name, _ABSENT)))

    def on_undo(self, undo: Callable[[torch.nn.Module], None], module: torch.nn.Module) -> None:
        """Call ``undo(module)``, a function that can be pickled, when all that is set from now on was taken back."""
        self._entries.append(_Call(module, undo))

    def _set(self, entry: _Entry) -> None:
        self._entries.append(entry)
        entry.holder[entry.name] = entry.value

    def forget_parameters(self) -> None:
        """Let go of the parameters that others took the place of: these stay."""
        self._entries = [entry for entry in self._entries if not getattr(entry, "is_parameter", False)]

    def captured(self) -> list[tuple[torch.nn.Module, str]]:
        """The (module, name) pairs that no longer hold what was set, nor a known hook's wrapper around it."""
        entries = (entry for entry in self._entries if isinstance(entry, _Entry))
        lost = (entry for entry in entries if not entry.holds and not _hook_slots(entry))
        return [(entry.module, entry.name) for entry in lost]

    def undo(self) -> None:
        """Take everything back. A later hook around a patched forward stays and gets the old one; a parameter that
        somebody replaced since stays theirs."""
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
    """The object and its attribute where diffusers' hooks on a module keep the forward of its class, if they do."""
    registry = module.__dict__.get("_diffusers_hook")
    if registry is None or not registry.hooks or not is_original(type(module).forward, type(module)):
        return None
    innermost = registry._fn_refs[0]
    name = "forward" if innermost.original_forward is None else "original_forward"
    return (innermost, name) if getattr(innermost, name) == MethodType(type(module).forward, module) else None


def _hook_slots(entry: _Entry) -> list[tuple[object, str]]:
    """Where hooks put on a module keep a forward: accelerate's ``_old_forward``, diffusers' function references."""
    module, forward = entry.module, entry.value
    if entry.kind != "__dict__":
        return []
    slots = [(module, "_old_forward")] if module.__dict__.get("_old_forward") is forward else []
    registry = module.__dict__.get("_diffusers_hook")
    for reference in registry._fn_refs if registry is not None else ():
        slots += [(reference, name) for name in ("forward", "original_forward") if getattr(reference, name) is forward]
    return slots
