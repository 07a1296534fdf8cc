"""Pinned memory for many tensors: the GPU copies from it while it computes.

PyTorch rounds each pinned allocation up to a power of two. Allocations for each weight of Wan 14B in 8 bits would take
1.5 times the weights. So tensors share allocations whose size is a power of two.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

SLAB = 1 << 29  # bytes of an allocation
ALIGNMENT = 512  # bytes: that of PyTorch's own allocators


def pin(tensors: Iterable[torch.Tensor], *, pinned: bool = True) -> None:
    """Move tensors into pinned memory, in place, the largest first. pinned=False: into ordinary memory, for tests.

    Tensors of other classes than PyTorch's own, and those that are not contiguous, stay where they are.
    """
    plain = {id(tensor): tensor for tensor in tensors if _is_plain(tensor)}
    waiting = sorted(plain.values(), key=lambda tensor: tensor.nbytes, reverse=True)
    left = sum(map(_room, waiting))
    slabs: list[torch.Tensor] = []
    free: list[int] = []  # bytes at the end of each slab
    for tensor in waiting:
        room = _room(tensor)
        index = next((i for i, size in enumerate(free) if size >= room), len(slabs))
        if index == len(slabs):
            size = max(room, min(SLAB, left))
            slabs.append(torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned))
            free.append(slabs[-1].numel())
        start = slabs[index].numel() - free[index]
        part = slabs[index][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensor.data = part.copy_(tensor.detach())
        free[index] -= room
        left -= room


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (nn.Parameter, torch.Tensor) and tensor.is_contiguous() and tensor.nbytes > 0


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
