"""Copies of patched modules and pipelines: a copy runs on itself, not on the original.

The patch binds both methods on modules whose forward it binds. Few-step pipelines get `reduce_ex`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from ..plain import function_bound_to
from .journal import bind


def reduce_ex(self: object, protocol: int) -> tuple:
    """Replace ``object.__reduce_ex__`` for copy, deepcopy and pickle: functions bound to self are bound to the copy."""
    bound = {name: function_bound_to(self, value) for name, value in vars(self).items()}
    bound = {name: function for name, function in bound.items() if function is not None}
    state = {name: value for name, value in vars(self).items() if name not in bound}
    return _new_bound, (type(self), bound), state


def _new_bound(cls: type, bound: Mapping[str, Callable]) -> object:
    copied = cls.__new__(cls)
    vars(copied).update({name: bind(function, copied) for name, function in bound.items()})
    return copied


def refuse_replicas(self: nn.Module) -> nn.Module:
    """Replace the method of nn.Module that torch.nn.DataParallel calls for each replica."""
    raise RuntimeError(
        f"torch.nn.DataParallel cannot replicate a patched {type(self).__name__}; restore it first, or run one process "
        "for each GPU and patch the model in each."
    )
