"""Patching a loaded pipeline and undoing it (apply.py, journal.py), a folder per model family, and few-step sampling
(few_step.py, rcm.py, distilled.py)."""

from .apply import Patch, PatchError, patch, restore
from .converted import load_converted
from .distilled import use_distilled
from .rcm import use_rcm

__all__ = ["Patch", "PatchError", "load_converted", "patch", "restore", "use_distilled", "use_rcm"]
