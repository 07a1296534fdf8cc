"""Count how often Triton and torch.compile compile something."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch._dynamo.utils import counters
from triton import knobs

from .replaced import replaced


@contextlib.contextmanager
def compilations() -> Iterator[Callable[[], int]]:
    """Yield a function that returns how many Triton kernels and torch.compile graphs were compiled since."""
    kernels, graphs, hook = [], _graphs(), knobs.runtime.jit_post_compile_hook

    def counted(*arguments, **options):
        kernels.append(None)
        return None if hook is None else hook(*arguments, **options)

    with replaced(knobs.runtime, "jit_post_compile_hook", counted):
        yield lambda: len(kernels) + _graphs() - graphs


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]
