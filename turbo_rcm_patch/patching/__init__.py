"""Patch a loaded pipeline and undo that (apply.py, journal.py).

families/    what each family of models states
steps/       the kernels of a block's steps
weights/     weights in 8 bits
lora/        LoRA files, and LoRA layers inside projections
sampling/    few-step sampling
"""

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
