"""Launching kernels, or recording the launches instead.

Every launcher starts its kernel through ``launch_kernel``. Within `recorded` the kernel does not run and the launch is
handed over. `compile_ahead` records so that it can compile the kernels of a computation in parallel before it runs: one
by one they take many seconds. The compile gate (compile_without_gpu.py) records to compile for GPUs that are absent.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import triton

_SAME_GPU = contextlib.nullcontext()
_record = contextvars.ContextVar("turbo_rcm_patch_record", default=None)


class Launch(NamedTuple):
    """``kernel[grid](*arguments, **options)``"""

    kernel: object
    grid: tuple[int, ...]
    arguments: tuple
    options: dict[str, object]

    def compile(self) -> object:
        """Return the kernel compiled for this launch, or its future in Triton's mode that compiles in threads."""
        return self.kernel.warmup(*self.arguments, grid=self.grid, **self.options)


def launch_kernel(kernel, grid: tuple[int, ...], *arguments, **options) -> None:
    """Run ``kernel[grid](*arguments, **options)``, or record it within `recorded`.

    The first argument is a tensor or a descriptor of one. Its GPU is the current one during the launch.
    """
    tensor = arguments[0] if isinstance(arguments[0], torch.Tensor) else arguments[0].base
    is_current = tensor.is_cpu or (tensor.is_cuda and tensor.get_device() == torch._C._cuda_getDevice())
    with _SAME_GPU if is_current else torch.cuda.device_of(tensor):
        record = _record.get()
        if record is None:
            kernel[grid](*arguments, **options)
        else:
            record(Launch(kernel, grid, arguments, options))


def register_options(capability: tuple[int, int], majors: tuple[int, ...] = (10,)) -> dict[str, int]:
    """Return the compile options of a kernel that multiplies matrices on a GPU of this compute capability.

    For sm_100 ptxas spills registers to make room for more programs than run, unless it is told that it may use all of
    them. majors: the architectures (major versions) for which ptxas does so to this kernel.
    """
    return {"maxnreg": 255} if capability[0] in majors else {}


def recording() -> bool:
    """True if this call is within `recorded`, where computed values have no meaning."""
    return not torch.compiler.is_dynamo_compiling() and _record.get() is not None  # torch.compile cannot trace `get`


@contextlib.contextmanager
def recorded(record: Callable[[Launch], object]) -> Iterator[None]:
    """Give every launch within this context to ``record`` instead of running it."""
    token = _record.set(record)
    try:
        yield
    finally:
        _record.reset(token)


def compile_ahead(run: Callable[[], object]) -> None:
    """Compile the kernels that ``run()`` launches, in threads, and return when all are done.

    The values that ``run()`` computes have no meaning. A kernel that cannot be compiled raises its error when it is
    launched later, not here.
    """
    # A new context: it inherits no compile mode from a caller, and an interrupt leaves none behind.
    contextvars.Context().run(_compile_launches_of, run)


def _compile_launches_of(run: Callable[[], object]) -> None:
    compiled, executor = [], ThreadPoolExecutor()
    try:
        with (
            recorded(lambda launch: compiled.append((launch.kernel, launch.compile()))),
            triton.AsyncCompileMode(executor, ignore_errors=True),
        ):
            run()
    finally:
        executor.shutdown(wait=False, cancel_futures=True)  # only matters after an interrupt
        for kernel, future in compiled:
            _forget_failed(kernel, future)


def _forget_failed(kernel, future: object) -> None:
    """Let the next launch compile a failed kernel again. Triton 3.7 would raise the old error and keep its frames."""
    if isinstance(future, triton.FutureKernel) and future.kernel is None:
        kernel.device_caches.clear()
