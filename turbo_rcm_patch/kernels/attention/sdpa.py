"""PyTorch's attention (SDPA): its backends, and how one of them goes first.

PyTorch has an order of backends, and takes the first that can compute a call. `preferring` moves one to the front and
switches none on or off, so that what it cannot compute goes to the next one, as always.
"""

from __future__ import annotations

import contextlib
import functools

import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

MATH = "math"  # no kernel of its own, but as many as its formula has operations
BACKENDS = {
    "FlashAttention": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    MATH: SDPBackend.MATH,
}


def chosen_backend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """The backend, of BACKENDS, that PyTorch takes for q, k, v [B, H, S, D]; None where it does not tell."""
    try:
        number = torch._fused_sdp_choice(q, k, v)
    except (RuntimeError, AttributeError):  # a private function
        return None
    return next((name for name, backend in BACKENDS.items() if int(backend) == number), None)


def preferring(name: str | None) -> contextlib.AbstractContextManager:
    """Within it PyTorch's attention asks a backend, of BACKENDS, first; as always with None, and with one that the user
    has switched off."""
    order = [] if name is None else _order(name)
    return sdpa_kernel([BACKENDS[each] for each in order], set_priority=True) if order else contextlib.nullcontext()


@torch.compiler.assume_constant_result  # torch.compile cannot trace what asks PyTorch for its order
def _order(first: str) -> list[str]:
    """The names of the backends that are switched on, this one first; empty where it is off."""
    _settle_order()
    enabled = _cur_sdpa_kernel_backends(with_priority=True)
    others = [name for backend in enabled for name in BACKENDS if BACKENDS[name] == backend and name != first]
    return [first, *others] if BACKENDS[first] in enabled else []


@functools.cache
def _settle_order() -> None:
    """Let PyTorch choose once: on some GPUs the first choice sets the order, over what was set before it."""
    x = torch.empty(1, 1, 1, 8, dtype=torch.bfloat16, device="cuda" if torch.cuda.is_available() else "cpu")
    chosen_backend(x, x, x)
