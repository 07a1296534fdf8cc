"""PyTorch's attention (SDPA): its backends, and a way to put one of them first.

A program may put a function of its own in place of F.scaled_dot_product_attention, as SageAttention advises.

PyTorch has an order of backends, and takes the first that can compute a call. `preferring` moves one to the front. It
switches no backend on or off: a call that the first cannot compute goes to the next, as usual.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

PYTORCHS = torch._C._nn.scaled_dot_product_attention  # F.scaled_dot_product_attention unless somebody replaced it
MATH = "math"  # no fused kernel: one kernel per operation of the formula
BACKENDS = {
    "FlashAttention": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    MATH: SDPBackend.MATH,
}


def name_if_replaced(function: Callable) -> str | None:
    """Return the name of a function that F.scaled_dot_product_attention was replaced by, or None for PyTorch's own."""
    return None if function is PYTORCHS else getattr(function, "__name__", type(function).__name__)


def chosen_backend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Return the backend (a name in BACKENDS) that PyTorch takes for q, k, v [B, H, S, D], or None if PyTorch does not
    tell."""
    try:
        number = torch._fused_sdp_choice(q, k, v)
    except (RuntimeError, AttributeError):  # the function is private and may change
        return None
    return next((name for name, backend in BACKENDS.items() if int(backend) == number), None)


def preferring(name: str | None) -> contextlib.AbstractContextManager:
    """Make PyTorch's attention try a backend (a name in BACKENDS) first, within this context. None, or a backend that
    the user has switched off, changes nothing."""
    order = [] if name is None else _order(name)
    return sdpa_kernel([BACKENDS[each] for each in order], set_priority=True) if order else contextlib.nullcontext()


@torch.compiler.assume_constant_result  # torch.compile cannot trace the query of PyTorch's order
def _order(first: str) -> list[str]:
    """Return the names of the backends that are switched on, `first` first, or an empty list if `first` is off."""
    _settle_order()
    enabled = _cur_sdpa_kernel_backends(with_priority=True)
    others = [name for backend in enabled for name in BACKENDS if BACKENDS[name] == backend and name != first]
    return [first, *others] if BACKENDS[first] in enabled else []


@functools.cache
def _settle_order() -> None:
    """Let PyTorch choose a backend once. On some GPUs the first choice overwrites the order that was set before it."""
    x = torch.empty(1, 1, 1, 8, dtype=torch.bfloat16, device="cuda" if torch.cuda.is_available() else "cpu")
    chosen_backend(x, x, x)
