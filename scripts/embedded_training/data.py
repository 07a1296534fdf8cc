"""Training data: captioned videos drawn on the fly, and a pool of them encoded to latents."""

from __future__ import annotations

import copy
import random

import torch
from diffusers import AutoencoderKLWan
from transformers import PreTrainedTokenizerFast

from turbo_rcm_patch.shapes.grammar import draw_scene, fill_open
from turbo_rcm_patch.shapes.render import render

from .models import compile_norms
from .progress import Run

MAX_CAPTION_TOKENS = 24


def draw_videos(count: int, seed: int, device: torch.device) -> tuple[list[str], torch.Tensor]:
    """Captions without held-out triples, and their videos [count, 3, F, H, W] in [-1, 1]."""
    generator = random.Random(seed)
    scenes = [draw_scene(generator, held_out=False) for _ in range(count)]
    complete = [fill_open(scene, generator) for scene in scenes]
    video = render(complete, torch.Generator().manual_seed(seed), device)
    return [str(scene) for scene in scenes], video * 2 - 1


def token_ids(tokenizer: PreTrainedTokenizerFast, captions: list[str]) -> torch.Tensor:
    """Token ids [B, MAX_CAPTION_TOKENS] with padding."""
    return tokenizer(captions, padding="max_length", max_length=MAX_CAPTION_TOKENS, return_tensors="pt").input_ids


def latent_statistics(vae: AutoencoderKLWan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation [16] of the latents' channels over 256 videos."""
    latents = torch.cat([encode(vae, draw_videos(32, seed, device)[1]) for seed in range(8)])
    return latents.mean(dim=(0, 2, 3, 4)), latents.std(dim=(0, 2, 3, 4))


def encode(vae: AutoencoderKLWan, video: torch.Tensor) -> torch.Tensor:
    """The posterior's mode [B, 16, f, h, w] in fp32, not normalised."""
    with torch.no_grad():
        return vae.encode(video.to(vae.dtype)).latent_dist.mode().float()


class LatentPool:
    """Normalised latents [count, 16, f, h, w] in bf16 with their captions' token ids, all on the device."""

    def __init__(self, run: Run, vae: AutoencoderKLWan, tokenizer: PreTrainedTokenizerFast, count: int):
        device = run.device
        statistics = vae.config.latents_mean, vae.config.latents_std
        mean, std = (torch.tensor(values, device=device).view(1, -1, 1, 1, 1) for values in statistics)
        vae = copy.deepcopy(vae).bfloat16()
        compile_norms(vae)
        captions, latents = [], []
        for index in range(0, count, 64):
            drawn, video = draw_videos(64, run.seed_of("pool", index), device)
            captions += drawn
            latents.append(((encode(vae, video) - mean) / std).bfloat16())
        self.latents = torch.cat(latents)
        self.token_ids = token_ids(tokenizer, captions).to(device)

    def draw(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A random batch: latents in fp32 and token ids."""
        chosen = torch.randint(len(self.latents), (count,), device=self.latents.device)
        return self.latents[chosen].float(), self.token_ids[chosen]
