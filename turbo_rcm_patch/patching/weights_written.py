"""Weights in 8 bits whose originals were written to, found before the model's blocks read them.

A write to ``linear.weight`` is converted at once (eight_bit_weight.py). Of one to a tensor of `state_dict`, or to a
parameter from before the patch, only PyTorch's count of writes tells, which is compared at each call of the model.
Where torch.compile took the whole model, an op in its graph compares, and refuses: the graph may have read old weights
by then, in whichever order it runs.
"""

from __future__ import annotations

import threading
from weakref import WeakSet

import torch
from torch import nn

from ..config import PatchConfig

# All of this process, copies too. A list on a part of a model would take the other parts along where that is copied.
_KNOWN: WeakSet[nn.Linear] = WeakSet()
_LOCK = threading.Lock()


def make_known(linear: nn.Linear) -> None:
    """Look after a linear in 8 bits, for as long as it lives."""
    with _LOCK:
        _KNOWN.add(linear)


def known_linears() -> list[nn.Linear]:
    """All of this process that were ever in 8 bits."""
    with _LOCK:
        return list(_KNOWN)


def with_weights_up_to_date(timestep: torch.Tensor, config: PatchConfig) -> torch.Tensor:
    """The timestep of a call of a model that was patched so; under torch.compile its equal, which the graph makes."""
    if torch.compiler.is_compiling():
        return _refuse_outdated(timestep) if config.in_8_bits("linears") else timestep
    bring_all_up_to_date()
    return timestep


def bring_all_up_to_date() -> None:
    """Convert anew what was written to."""
    for linear in _outdated():
        linear.bring_up_to_date()


def _outdated() -> list[nn.Linear]:
    # One that is an nn.Linear again, and a copy under way, has no 8-bit weight.
    return [linear for linear in known_linears() if "eight_bit" in vars(linear) and linear.is_outdated]


# A graph leaves out an op whose result it does not use; a CUDA graph would replay no comparison.
@torch.library.custom_op("turbo_rcm_patch::refuse_outdated", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _refuse_outdated(timestep: torch.Tensor) -> torch.Tensor:
    outdated = _outdated()
    if outdated:
        raise RuntimeError(
            f"the weights of {len(outdated)} linears in 8 bits were written to, through tensors of state_dict() or "
            "parameters from before the patch, and torch.compile took a whole model, which cannot convert them. Call "
            "model.load_state_dict(model.state_dict()) after such writes, or compile the model's blocks only, with "
            "model.compile_repeated_blocks()."
        )
    return timestep.clone()


_refuse_outdated.register_fake(torch.empty_like)
_refuse_outdated.register_autograd(lambda context, gradient: gradient)
