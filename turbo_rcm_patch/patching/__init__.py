"""Patching a loaded pipeline and undoing it (apply.py, journal.py), a folder per model family, and few-step sampling
(handle.py, use_rcm.py, use_distilled.py)."""

from .apply import Patch, patch, restore
from .errors import PatchError
from .sampling.use_distilled import use_distilled
from .sampling.use_rcm import use_rcm
from .weights.load import load_converted
from .weights.turbodiffusion import load_turbodiffusion, merge_turbodiffusion

__all__ = [
    "Patch",
    "PatchError",
    "load_converted",
    "load_turbodiffusion",
    "merge_turbodiffusion",
    "patch",
    "restore",
    "use_distilled",
    "use_rcm",
]
