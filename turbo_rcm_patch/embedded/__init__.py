"""A tiny trained Wan text-to-video pipeline inside the package: what the command line and the examples run by default.

``weights/`` is an ordinary diffusers pipeline folder, written by scripts/train_embedded.py. It knows the captions of
``shapes.grammar``, at HEIGHT x WIDTH x FRAMES.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from diffusers import WanPipeline
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from ..scheduler import RCMScheduler
from ..shapes.render import FRAMES, HEIGHT, WIDTH

__all__ = ["FRAMES", "HEIGHT", "WEIGHTS", "WIDTH", "load_embedded_pipeline", "without_progress_bars"]

WEIGHTS = Path(__file__).parent / "weights"


def load_embedded_pipeline(dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> WanPipeline:
    """A WanPipeline of stock diffusers and transformers classes with this package's few-step scheduler. No network.

    The weights are stored in fp16; modules that Wan keeps in fp32 are fp32 in every dtype. Sample it with ``use_rcm``.
    """
    with without_progress_bars():
        pipe = WanPipeline.from_pretrained(WEIGHTS, scheduler=RCMScheduler(), dtype=dtype, local_files_only=True)
    return pipe.to(device)


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Load weights without the bars of diffusers and transformers."""
    shown = [library for library in (diffusers_logging, transformers_logging) if library.is_progress_bar_enabled()]
    for library in shown:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in shown:
            library.enable_progress_bar()
