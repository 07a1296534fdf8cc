"""Compiling the kernels of a computation before it runs, several at once: one after the other they take many seconds.

``launch_kernel`` is how a forward starts a kernel. Within ``compile_ahead`` it compiles the kernel instead.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import triton

# Within compile_ahead: the kernels that came, each with what compiling it gave, or will give.
_compiled = contextvars.ContextVar("turbo_rcm_patch_compiled", default=None)


def launch_kernel(kernel, grid: tuple[int, ...], *arguments, **options) -> None:
    """``kernel[grid](*arguments, **options)``; within `compile_ahead` the kernel is only compiled."""
    if compiling_ahead():
        _compiled.get().append((kernel, kernel.warmup(*arguments, grid=grid, **options)))
    else:
        kernel[grid](*arguments, **options)


def compiling_ahead() -> bool:
    """Whether this is a call within `compile_ahead`, whose values have no meaning."""
    return not torch.compiler.is_compiling() and _compiled.get() is not None  # torch.compile cannot trace `get`


def compile_ahead(run: Callable[[], object]) -> None:
    """Compile what ``run()`` launches, in threads, and return when all is done. What `run` computes has no meaning.

    A kernel that cannot be compiled raises where it is launched later, not here.
    """
    # An empty context: nobody else's compiling mode within, and none left behind by an interrupt.
    contextvars.Context().run(_compile_launches_of, run)


def _compile_launches_of(run: Callable[[], object]) -> None:
    compiled, executor = [], ThreadPoolExecutor()
    _compiled.set(compiled)
    try:
        with triton.AsyncCompileMode(executor, ignore_errors=True):
            run()
    finally:
        executor.shutdown(wait=False, cancel_futures=True)  # does nothing, unless interrupted
        for kernel, future in compiled:
            _forget_failed(kernel, future)


def _forget_failed(kernel, future: object) -> None:
    """Let the next launch compile the kernel anew; Triton 3.7 would raise the old error again, and keep its frames."""
    if isinstance(future, triton.FutureKernel) and future.kernel is None:
        kernel.device_caches.clear()
