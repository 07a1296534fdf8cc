"""Gluon, in which the kernels for sm_90 are written, differs between releases of Triton: in names, and from 3.9 on in
what assembles the kernels.

Triton 3.9 assembles for sm_90 with the ptxas of CUDA 13.4, which spills registers in the kernels' loops: 556 bytes in
the attention's, where that of CUDA 12.9, which Triton brings along for older GPUs, spills none. `jit` has kernels
assembled with the latter.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable

import triton
from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.experimental import gluon
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language._core import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.hopper import tma

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
reinterpret = getattr(shared_memory_descriptor, "reinterpret", None) or shared_memory_descriptor._reinterpret

SM_90 = 90  # as Triton names it
NEWER_PTXAS = "ptxas_blackwell"  # as Triton names that of CUDA 13


def jit(**options: object) -> Callable[[Callable], GluonJITFunction]:
    """gluon.jit with these options, for kernels; the functions that they call need it not."""
    release = tuple(map(int, re.findall(r"\d+", triton.__version__)[:2]))
    return gluon.jit(**options) if release < (3, 9) else functools.partial(_WithOlderPtxas, **options)


class _WithOlderPtxas(GluonJITFunction):
    def create_binder(self):
        binder = super().create_binder()
        self.compile = functools.partial(_compile_with_older_ptxas, self.compile)
        return binder


def _compile_with_older_ptxas(compile: Callable, *arguments: object, **options: object) -> object:
    with _older_ptxas:
        return compile(*arguments, **options)


class _OlderPtxas:
    """Within it Triton assembles with the older ptxas; what other threads compile meanwhile, too."""

    def __init__(self):
        self._lock, self._inside, self._before = threading.Lock(), 0, None

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                get_ptxas_version(SM_90)  # Triton remembers it for the key of every kernel that it compiles
                self._before = vars(knobs.nvidia).get(NEWER_PTXAS)
                vars(knobs.nvidia)[NEWER_PTXAS] = knobs.nvidia.ptxas.path  # assigned, it would be in os.environ too

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                del vars(knobs.nvidia)[NEWER_PTXAS]
                if self._before is not None:
                    vars(knobs.nvidia)[NEWER_PTXAS] = self._before


_older_ptxas = _OlderPtxas()
