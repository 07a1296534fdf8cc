"""Compiling the kernels of a computation before it runs, several at once: one after the other they take many seconds.

``launch_kernel`` is how a forward starts a kernel. Within ``compile_ahead`` it compiles the kernel instead.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import triton

_compiling_only = contextvars.ContextVar("turbo_rcm_patch_compiling_only", default=False)


def launch_kernel(kernel, grid: tuple[int, ...], *arguments, **options) -> None:
    """``kernel[grid](*arguments, **options)``; within `compile_ahead` the kernel is compiled alone."""
    if _compiling_only.get():
        kernel.warmup(*arguments, grid=grid, **options)
    else:
        kernel[grid](*arguments, **options)


def compile_ahead(run: Callable[[], object]) -> None:
    """Compile what ``run()`` launches, in threads, and return when all is done. What `run` computes has no meaning.

    A kernel that cannot be compiled raises where it is launched later, not here.
    """
    # A context of its own: an interrupt in the midst of compiling must not leave Triton in this mode.
    contextvars.copy_context().run(_compile_launches_of, run)


def _compile_launches_of(run: Callable[[], object]) -> None:
    _compiling_only.set(True)
    with ThreadPoolExecutor() as executor, triton.AsyncCompileMode(executor, ignore_errors=True):
        run()
