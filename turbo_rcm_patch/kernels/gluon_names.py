"""Gluon, in which the kernels for sm_90 are written, changes between releases of Triton: names that 3.8 changed, and
the releases with which the kernels run well."""

import re

import triton
from triton.experimental.gluon.language.nvidia.hopper import tma

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


def why_not_this_triton(version: str = triton.__version__) -> str | None:
    """Why the kernels are not run with this release of Triton, in a few words; None when they are."""
    release = tuple(map(int, re.findall(r"\d+", version)[:2]))
    # scripts/compile_gate.py shows it: 3.9 gives the kernels' inner loops fewer registers than they need.
    return "its registers do not hold the kernels' loops; Triton 3.6 to 3.8 do" if release >= (3, 9) else None
