"""The host's memory that a plan takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from torch import nn

from ..amounts import enough_in_gb, in_gb
from .choose import Placement
from .components import Component
from .pinned import SLAB

CGROUP = Path("/sys/fs/cgroup")
# A container's limit, its use, and its statistics with the prefix of the names there: of cgroups' versions 2 and 1.
CONTAINERS = (
    ("memory.max", "memory.current", "memory.stat", ""),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_"),
)


class DoesNotFit(RuntimeError):
    """A generation does not fit into the memory. The pipeline is as it was before the call."""


def check_host(
    placement: Placement, components: Sequence[Component], models: Mapping[str, nn.Module], originals: int
) -> None:
    """Raise DoesNotFit if the host has too little memory for what a placement moves there.

    components: the models as they are now. originals: bytes of weights that the host must hold beside these.
    """
    _, pinned = placement.on_host(components)
    free = free_memory()
    on_cpu = all(p.device.type == "cpu" for name in placement.streaming for p in models[name].parameters())
    # Pinning replaces weights in ordinary memory one by one. Weights of a mapped file take memory only when they are
    # pinned.
    needed = originals + min(pinned, SLAB) + (max(0, pinned - _ordinary_memory()) if on_cpu else pinned)
    if needed > free:
        streaming = " and ".join(sorted(placement.streaming))
        why = f"{streaming} must stream from there" if streaming else "it keeps original weights"
        raise DoesNotFit(
            f"this takes {enough_in_gb(needed)} GB more of the host's memory, because {why}, and {in_gb(free)} GB are "
            "free; close other programs, or let diffusers offload to disk instead of fit (enable_group_offload with "
            "offload_to_disk_path)."
        )


def free_memory() -> int:
    """Return the bytes that this process can still take: those that are free, or that its container's limit leaves."""
    left = [psutil.virtual_memory().available]
    for *files, prefix in CONTAINERS:
        try:
            limit, used, statistics = ((CGROUP / file).read_text() for file in files)
            sizes = dict(line.split() for line in statistics.splitlines())
            cached = sum(
                int(sizes[f"{prefix}{state}_file"]) for state in ("active", "inactive")
            )  # which can be dropped
            left.append(int(limit) - int(used) + cached)
        except (OSError, ValueError, KeyError):  # no such container, or "max": no limit
            continue
    return min(left)


def _ordinary_memory() -> int:
    """Return the bytes of memory of this process, on Linux without those of mapped files."""
    memory = psutil.Process().memory_info()
    return memory.rss - getattr(memory, "shared", 0)
