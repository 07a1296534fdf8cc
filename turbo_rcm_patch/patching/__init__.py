"""Patching a loaded pipeline and undoing it (apply.py, journal.py), a folder per model family, and rcm.py to sample."""

from .apply import Patch, PatchError, patch, restore
from .converted import load_converted
from .rcm import use_rcm

__all__ = ["Patch", "PatchError", "load_converted", "patch", "restore", "use_rcm"]
