"""A tiny trained Wan text-to-video pipeline, which the command line and the examples run by default.

``weights/`` is an ordinary diffusers pipeline folder, written by scripts/training/train_embedded.py. The model knows
the captions of ``shapes.grammar``, at HEIGHT x WIDTH x FRAMES.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from diffusers import WanPipeline, WanTransformer3DModel
from diffusers.utils import logging as diffusers_logging
from safetensors.torch import load_file
from transformers.utils import logging as transformers_logging

from ..checkpoints.lora import read_lora
from ..patching.families import family_of
from ..patching.families.wan.names import WAN_NAMES
from ..patching.journal import Journal
from ..patching.steps.sparse_linear import add_projections, by_attention, is_projection
from ..scheduler import RCMScheduler
from ..shapes.render import FRAMES, HEIGHT, WIDTH

__all__ = ["FRAMES", "HEIGHT", "SLA_BLOCKS", "WEIGHTS", "WIDTH", "load_embedded_pipeline", "without_progress_bars"]

WEIGHTS = Path(__file__).parent / "weights"
SLA_BLOCKS = (16, 16)  # queries and keys: 700 tokens make too few larger blocks to choose from


def load_embedded_pipeline(
    dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", *, sla: bool = False
) -> WanPipeline:
    """Return a WanPipeline of diffusers' and transformers' classes with this package's scheduler, without network.

    The weights are stored in fp16. Modules that Wan keeps in fp32 are fp32 in every dtype. Sample it with ``use_rcm``.

    Args:
        dtype: of the weights.
        device: where they go.
        sla: True for the weights that scripts/training/train_sparse.py fine-tuned to sparse-linear attention, with its
            projections. They are for ``trp.patch(pipe, trp.Sparse(blocks=SLA_BLOCKS))``. Without this patch attention
            is dense. They pay in 4 steps at the default topk of 0.1. In 1 step with topk from 0.2 on, and in 2 from 0.3
            on, the dense weights show more of their captions (results/README.md).
    """
    with without_progress_bars():
        pipe = WanPipeline.from_pretrained(WEIGHTS, scheduler=RCMScheduler(), dtype=dtype, local_files_only=True)
    if sla:
        _add_difference(pipe.transformer, WEIGHTS / "sla/difference.safetensors")
    return pipe.to(device)


def _add_difference(transformer: WanTransformer3DModel, file: Path) -> None:
    """Add low-rank and whole differences and SLA's projections, from a file of scripts/training/train_sparse.py."""
    tensors = load_file(file)
    projections = by_attention({name: tensors.pop(name) for name in list(tensors) if is_projection(name)})
    add_projections(Journal(), family_of(transformer).self_attentions(transformer), projections)
    learned = read_lora(tensors, transformer, names=WAN_NAMES)
    differences = {f"{name}.weight": pair.product() for name, pair in learned.pairs.items()} | learned.differences
    with torch.no_grad():
        for name, difference in differences.items():
            parameter = transformer.get_parameter(name)
            parameter.copy_(parameter.float() + difference.float())


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
