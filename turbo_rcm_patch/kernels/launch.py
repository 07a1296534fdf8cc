"""Starting kernels, and recording what would be started.

``launch_kernel`` is how every launcher starts a kernel. Within `recorded` it hands the launch over instead: to
`compile_ahead`, which compiles the kernels of a computation before it runs, several at once, as one after the other
they take many seconds; or to the compile gate (compile_without_gpu.py), for GPUs that are not there.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import triton

_AS_IT_IS = contextlib.nullcontext()
_record = contextvars.ContextVar("turbo_rcm_patch_record", default=None)


class Launch(NamedTuple):
    """``kernel[grid](*arguments, **options)``"""

    kernel: object
    grid: tuple[int, ...]
    arguments: tuple
    options: dict[str, object]

    def compile(self) -> object:
        """What Triton compiles for it: the kernel, or a future of it in Triton's mode that compiles in threads."""
        return self.kernel.warmup(*self.arguments, grid=self.grid, **self.options)


def launch_kernel(kernel, grid: tuple[int, ...], *arguments, **options) -> None:
    """``kernel[grid](*arguments, **options)``; within `recorded` nothing runs."""
    record = _record.get()
    if record is not None:
        record(Launch(kernel, grid, arguments, options))
    else:
        kernel[grid](*arguments, **options)


def on_device(tensor: torch.Tensor) -> AbstractContextManager:
    """Within it the tensor's GPU is the current one. It costs little where that is so already."""
    if tensor.is_cpu or (tensor.is_cuda and tensor.get_device() == torch._C._cuda_getDevice()):
        return _AS_IT_IS
    return torch.cuda.device_of(tensor)


def register_options(capability: tuple[int, int], majors: tuple[int, ...] = (10,)) -> dict[str, int]:
    """Options of a kernel that multiplies matrices on a GPU of this compute capability: ptxas for sm_100 spills some
    registers to fit more programs than run, unless it is told that it may have all of them. majors: of the
    architectures for which ptxas does so to this kernel."""
    return {"maxnreg": 255} if capability[0] in majors else {}


def recording() -> bool:
    """Whether this is a call within `recorded`, whose values have no meaning."""
    return not torch.compiler.is_dynamo_compiling() and _record.get() is not None  # torch.compile cannot trace `get`


@contextlib.contextmanager
def recorded(record: Callable[[Launch], object]) -> Iterator[None]:
    """Within it every launch is given to ``record`` and does not run."""
    token = _record.set(record)
    try:
        yield
    finally:
        _record.reset(token)


def compile_ahead(run: Callable[[], object]) -> None:
    """Compile what ``run()`` launches, in threads, and return when all is done. What `run` computes has no meaning.

    A kernel that cannot be compiled raises where it is launched later, not here.
    """
    # An empty context: nobody else's compiling mode within, and none left behind by an interrupt.
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
        executor.shutdown(wait=False, cancel_futures=True)  # does nothing, unless interrupted
        for kernel, future in compiled:
            _forget_failed(kernel, future)


def _forget_failed(kernel, future: object) -> None:
    """Let the next launch compile the kernel anew; Triton 3.7 would raise the old error again, and keep its frames."""
    if isinstance(future, triton.FutureKernel) and future.kernel is None:
        kernel.device_caches.clear()
