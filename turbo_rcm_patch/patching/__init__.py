"""Patch a loaded pipeline and undo that (apply.py, journal.py).

families/    what each family of models states
steps/       the kernels of a block's steps
weights/     weights in 8 bits
lora/        LoRA files, and LoRA layers inside projections
sampling/    few-step sampling
text_encoder/    the text encoder of a pipeline
tiny_vae/    a tiny VAE that decodes in place of a pipeline's own
"""

from .apply import Patch, patch, restore
from .errors import PatchError
from .sampling.use_distilled import use_distilled
from .sampling.use_rcm import use_rcm
from .text_encoder import TextEncoderPatch, patch_text_encoder
from .tiny_vae import TinyVae, use_tiny_vae
from .weights.load import load_converted
from .weights.turbodiffusion import load_turbodiffusion, merge_turbodiffusion

__all__ = [
    "Patch",
    "PatchError",
    "TextEncoderPatch",
    "TinyVae",
    "load_converted",
    "load_turbodiffusion",
    "merge_turbodiffusion",
    "patch",
    "patch_text_encoder",
    "restore",
    "use_distilled",
    "use_rcm",
    "use_tiny_vae",
]
