"""The sizes of random inputs for Wan's pipelines."""

from __future__ import annotations

from collections.abc import Mapping

from diffusers import DiffusionPipeline, WanImageToVideoPipeline
from PIL import Image

from ..family import PipelineInputs
from .sub_layers import TEXT_TOKENS


def pipeline_inputs(pipe: DiffusionPipeline) -> PipelineInputs:
    """Return the sizes of prompts and latents. A pipeline from an image gets a picture, which its call requires."""
    is_of_image = isinstance(pipe, WanImageToVideoPipeline)
    more = {"image": Image.new("RGB", (64, 64))} if is_of_image else {}

    def latents(height: int, width: int, frames: int) -> Mapping[str, tuple[int, ...]]:
        spatial, temporal = pipe.vae_scale_factor_spatial, pipe.vae_scale_factor_temporal
        return {"latents": (pipe.vae.config.z_dim, (frames - 1) // temporal + 1, height // spatial, width // spatial)}

    return PipelineInputs((TEXT_TOKENS, pipe.transformer.config.text_dim), latents, more)
