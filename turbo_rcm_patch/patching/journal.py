"""Instance attributes set on modules, remembered so that all of them can be taken back."""

from __future__ import annotations

from types import MethodType

import torch

from ..plain import is_original


class _ABSENT:
    """Stands for an attribute that was not there; a class, because deepcopy keeps a class's identity."""


class Journal:
    """Sets attributes in modules' ``__dict__`` and undoes them in reverse order.

    Writing to ``__dict__`` keeps nn.Module from registering anything, so state_dict, parameters and module classes stay
    as they are.
    """

    def __init__(self):
        self._entries: list[tuple[torch.nn.Module, str, object, object]] = []

    def set(self, module: torch.nn.Module, name: str, value: object) -> None:
        """Set the instance attribute and remember what was there. A forward goes below diffusers' hooks."""
        slot = slot_below_hooks(module) if name == "forward" else None
        if slot is not None:
            self._entries.append((module, name, value, _ABSENT))
            setattr(*slot, value)
        else:
            self._entries.append((module, name, value, module.__dict__.get(name, _ABSENT)))
            module.__dict__[name] = value

    def captured(self) -> list[tuple[torch.nn.Module, str]]:
        """The (module, attribute) pairs that no longer hold what was set, nor a known hook's wrapper around it."""
        return [
            (module, name)
            for module, name, value, _ in self._entries
            if module.__dict__.get(name, _ABSENT) is not value and not _hook_slots(module, value)
        ]

    def undo(self) -> None:
        """Take every attribute back. A later hook around a patched forward stays and gets the old one."""
        while self._entries:
            module, name, value, before = self._entries.pop()
            if module.__dict__.get(name, _ABSENT) is value:
                if before is _ABSENT:
                    del module.__dict__[name]
                else:
                    module.__dict__[name] = before
            else:
                original = MethodType(type(module).forward, module) if before is _ABSENT else before
                for holder, attribute in _hook_slots(module, value):
                    setattr(holder, attribute, original)


def slot_below_hooks(module: torch.nn.Module) -> tuple[object, str] | None:
    """The object and its attribute where diffusers' hooks on a module keep the forward of its class, if they do."""
    registry = module.__dict__.get("_diffusers_hook")
    if registry is None or not registry.hooks or not is_original(type(module).forward, type(module)):
        return None
    innermost = registry._fn_refs[0]
    name = "forward" if innermost.original_forward is None else "original_forward"
    return (innermost, name) if getattr(innermost, name) == MethodType(type(module).forward, module) else None


def _hook_slots(module: torch.nn.Module, forward: object) -> list[tuple[object, str]]:
    """Where hooks put on a module keep `forward`: accelerate's ``_old_forward``, diffusers' function references."""
    slots = [(module, "_old_forward")] if module.__dict__.get("_old_forward") is forward else []
    registry = module.__dict__.get("_diffusers_hook")
    for reference in registry._fn_refs if registry is not None else ():
        slots += [(reference, name) for name in ("forward", "original_forward") if getattr(reference, name) is forward]
    return slots
