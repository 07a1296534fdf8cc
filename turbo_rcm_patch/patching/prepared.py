"""The home of weights that are prepared once, such as 8-bit copies, for as long as their parameters stay the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

import torch

Prepared = TypeVar("Prepared")


class PreparedWeights:
    """What parameters were converted to. A converted weight goes with its module, and is converted anew when the
    parameter is another object, lies elsewhere, or was written to.

    Writes through ``.data`` and in inference mode are not seen: `clear` after them.
    """

    def __init__(self):
        self._known = weakref.WeakKeyDictionary()  # by module: by name: (parameter, its state, what it became)

    def get(self, module: torch.nn.Module, name: str, convert: Callable[[torch.nn.Parameter], Prepared]) -> Prepared:
        """``convert(parameter)`` of a module's parameter of this name, or what that returned last.

        A parameter has one conversion. What `convert` returns must not hold the module.
        """
        parameter = module._parameters[name]
        state = _state(parameter)
        known = self._known.setdefault(module, {})
        if name not in known or known[name][0]() is not parameter or known[name][1] != state:
            known.pop(name, None)  # not beside its successor
            with torch.no_grad():
                known[name] = weakref.ref(parameter), state, convert(parameter)
        return known[name][2]

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()

    def __len__(self) -> int:
        return sum(map(len, self._known.values()))

    def __reduce__(self) -> tuple:
        """Copied and pickled empty: what is known belongs to the modules that were copied from."""
        return PreparedWeights, ()


def _state(parameter: torch.nn.Parameter) -> tuple:
    version = None if parameter.is_inference() else parameter._version
    return parameter.data_ptr(), parameter.device, parameter.dtype, parameter.shape, parameter.stride(), version
