"""Differences of Gluon between releases of Triton. The kernels for sm_90 are written in Gluon.

Names changed between releases. Triton 3.9 and later also use another assembler for sm_90: the ptxas of CUDA 13.4, which
spills registers in the kernels' loops (docs/designs.md). The ptxas of CUDA 12.9, which Triton ships for older GPUs,
spills none there. `jit` makes Triton assemble kernels with the older one.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable

import triton
from triton import knobs
from triton.backends.nvidia import compiler
from triton.experimental import gluon
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language._core import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.hopper import tma

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
reinterpret = getattr(shared_memory_descriptor, "reinterpret", None) or shared_memory_descriptor._reinterpret

SM_90 = 90  # Triton's name for the architecture
RELEASE = tuple(map(int, re.findall(r"\d+", triton.__version__)[:2]))
NEEDS_OLDER_PTXAS = RELEASE >= (3, 9)


def jit(**options: object) -> Callable[[Callable], GluonJITFunction]:
    """Return gluon.jit with these options, for kernels. Functions that kernels call use gluon.jit itself."""
    return functools.partial(_WithOlderPtxas, **options) if NEEDS_OLDER_PTXAS else gluon.jit(**options)


class _WithOlderPtxas(GluonJITFunction):
    def create_binder(self):
        binder = super().create_binder()
        self.compile = functools.partial(_compile_with_older_ptxas, self.compile)
        return binder


_this_thread = threading.local()  # Triton compiles a kernel in one thread from start to end


def _compile_with_older_ptxas(compile: Callable, *arguments: object, **options: object) -> object:
    compiler.get_ptxas_version(SM_90)  # Triton caches the unchanged version for its compile keys
    _this_thread.takes_older_ptxas = True
    try:
        return compile(*arguments, **options)
    finally:
        _this_thread.takes_older_ptxas = False


def _choose_ptxas(by_architecture: Callable[[int], knobs.NvidiaTool], arch: int) -> knobs.NvidiaTool:
    return knobs.nvidia.ptxas if getattr(_this_thread, "takes_older_ptxas", False) else by_architecture(arch)


if NEEDS_OLDER_PTXAS:  # replaces Triton's function: no setting chooses ptxas for a single kernel
    compiler.get_ptxas = functools.partial(_choose_ptxas, compiler.get_ptxas)
