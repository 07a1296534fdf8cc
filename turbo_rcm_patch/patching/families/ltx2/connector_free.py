"""LTX-2 without encoders and connectors, for models with random weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from diffusers import ConfigMixin, LTX2ImageToVideoPipeline, LTX2Pipeline, ModelMixin
from diffusers.configuration_utils import register_to_config
from PIL import Image

from ..family import PipelineInputs
from .call import FRAME_RATE, TEXT_TOKENS

# One run of the transformer in a step, as in a distilled model. Each stream has the timestep that LTX-2.0 gives it.
WITHOUT_GUIDANCE = {
    **{f"{stream}{kind}": 1.0 for stream in ("", "audio_") for kind in ("guidance_scale", "modality_scale")},
    **{f"{stream}{kind}": 0.0 for stream in ("", "audio_") for kind in ("stg_scale", "guidance_rescale")},
    "use_cross_timestep": False,
}


class NoConnectors(ModelMixin, ConfigMixin):
    """Stands for a pipeline's connectors: its prompts are embeddings as connectors give them, for both streams."""

    @register_to_config
    def __init__(self):
        super().__init__()
        self.nothing = torch.nn.Parameter(torch.empty(0))  # a pipeline asks its models for their device

    def forward(
        self, prompt: torch.Tensor, mask: torch.Tensor, padding_side: str = "left"
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return prompt, prompt, mask


def pipeline_inputs(pipe: LTX2Pipeline | LTX2ImageToVideoPipeline) -> PipelineInputs:
    """Return the sizes of prompts and of both streams' latents, and a picture for a pipeline that requires one.

    A prompt's mask hides nothing, as after connectors. The picture is not compressed first, for which diffusers needs
    PyAV.
    """
    audio = pipe.audio_vae

    def latents(height: int, width: int, frames: int) -> Mapping[str, tuple[int, ...]]:
        spatial, temporal = pipe.vae_spatial_compression_ratio, pipe.vae_temporal_compression_ratio
        per_second = audio.config.sample_rate / audio.config.mel_hop_length / audio.temporal_compression_ratio
        sound = (audio.config.latent_channels, round(frames / FRAME_RATE * per_second))
        size = ((frames - 1) // temporal + 1, height // spatial, width // spatial)
        return {
            "latents": (pipe.transformer.config.in_channels, *size),
            "audio_latents": (*sound, audio.config.mel_bins // audio.mel_compression_ratio),
        }

    device, mask = pipe.transformer.device, torch.ones(1, TEXT_TOKENS, dtype=torch.long)
    more = {"prompt_attention_mask": mask.to(device), "frame_rate": float(FRAME_RATE), **WITHOUT_GUIDANCE}
    if isinstance(pipe, LTX2ImageToVideoPipeline):
        more |= {"image": Image.new("RGB", (64, 64)), "image_crf": 0}
    return PipelineInputs((TEXT_TOKENS, pipe.transformer.config.caption_channels), latents, more)
