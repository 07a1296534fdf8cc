"""Training data: captioned videos, a pool of them as bytes, and a larger one encoded to latents."""

from __future__ import annotations

import copy
import random

import torch
from diffusers import AutoencoderKLWan
from transformers import PreTrainedTokenizerFast

from turbo_rcm_patch.shapes.grammar import draw_scene, fill_open
from turbo_rcm_patch.shapes.render import GRID, render

from .models import channels_last, compile_norms
from .progress import Run
from .whole_clips import encode_clip, take_whole_clips

MAX_CAPTION_TOKENS = 24
_AT_ONCE = 64  # videos drawn together
_POINTS = 32  # per video, to crop around


def draw_videos(count: int, seed: int, device: torch.device) -> tuple[list[str], torch.Tensor]:
    """Return captions without held-out triples, and their videos [count, 3, F, H, W] in [-1, 1]."""
    generator = random.Random(seed)
    scenes = [draw_scene(generator, held_out=False) for _ in range(count)]
    complete = [fill_open(scene, generator) for scene in scenes]
    video = render(complete, torch.Generator().manual_seed(seed), device)
    return [str(scene) for scene in scenes], video * 2 - 1


def token_ids(tokenizer: PreTrainedTokenizerFast, captions: list[str]) -> torch.Tensor:
    """Return token ids [B, MAX_CAPTION_TOKENS] with padding."""
    return tokenizer(captions, padding="max_length", max_length=MAX_CAPTION_TOKENS, return_tensors="pt").input_ids


def latent_statistics(vae: AutoencoderKLWan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and standard deviation [16] of the latents' channels over 256 videos."""
    latents = torch.cat([encode(vae, draw_videos(32, seed, device)[1]) for seed in range(8)])
    return latents.mean(dim=(0, 2, 3, 4)), latents.std(dim=(0, 2, 3, 4))


def encode(vae: AutoencoderKLWan, video: torch.Tensor) -> torch.Tensor:
    """Return the posterior's mode [B, 16, f, h, w] in fp32, not normalised."""
    with torch.no_grad():
        return vae.encode(video.to(vae.dtype)).latent_dist.mode().float()


def is_foreground(video: torch.Tensor, background: torch.Tensor) -> torch.Tensor:
    """Return a mask [B, 1, F, H, W] of pixels that differ from their video's background colour [B, 3, 1, 1, 1]."""
    return (video - background).abs().amax(dim=1, keepdim=True) > 0.05


class VideoPool:
    """Videos as bytes on the device, without captions, to draw random clips of their full length from."""

    def __init__(self, run: Run, count: int):
        videos, backgrounds, points = [], [], []
        for index in range(0, count, _AT_ONCE):
            video = draw_videos(_AT_ONCE, run.seed_of("videos", index), run.device)[1]
            background = video.flatten(2)[..., ::7].median(dim=2).values[:, :, None, None, None]
            seen = is_foreground(video, background).any(dim=2).flatten(1)
            videos.append(((video + 1) * 127.5).round().byte().permute(0, 3, 4, 1, 2).contiguous())
            backgrounds.append(background)
            points.append(torch.multinomial(seen.float(), _POINTS, replacement=True))
        self._videos, self._backgrounds, self._points = torch.cat(videos), torch.cat(backgrounds), torch.cat(points)

    def draw(self, count: int, side: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return clips [count, 3, F, H, W] in [-1, 1] and their background colours [count, 3, 1, 1, 1].

        side: crop a square of side × side pixels around a pixel of each video's objects: most of a frame is background.
        Crops lie on the objects' grid.
        """
        chosen = torch.randint(len(self._videos), (count,), device=self._videos.device)
        clips = self._videos[chosen] if side is None else self._crop(chosen, side)
        return clips.permute(0, 3, 4, 1, 2) / 127.5 - 1, self._backgrounds[chosen]

    def _crop(self, chosen: torch.Tensor, side: int) -> torch.Tensor:
        height, width = self._videos.shape[1:3]
        points = self._points[chosen, torch.randint(_POINTS, chosen.shape, device=chosen.device)]
        tops = (points // width - side // 2).clamp(0, height - side) // GRID * GRID
        lefts = (points % width - side // 2).clamp(0, width - side) // GRID * GRID
        offsets = torch.arange(side, device=chosen.device)
        rows, columns = tops[:, None, None] + offsets[:, None], lefts[:, None, None] + offsets
        return self._videos[chosen[:, None, None], rows, columns]


class LatentPool:
    """Normalised latents [count, 16, f, h, w] in bf16 with their captions' token ids, all on the device."""

    def __init__(self, run: Run, vae: AutoencoderKLWan, tokenizer: PreTrainedTokenizerFast, count: int):
        device = run.device
        statistics = vae.config.latents_mean, vae.config.latents_std
        mean, std = (torch.tensor(values, device=device).view(1, -1, 1, 1, 1) for values in statistics)
        encoder = take_whole_clips(copy.deepcopy(vae).bfloat16())
        channels_last(encoder)
        compile_norms(encoder)
        captions, latents = [], []
        for index in range(0, count, _AT_ONCE):
            drawn, video = draw_videos(_AT_ONCE, run.seed_of("pool", index), device)
            captions += drawn
            with torch.no_grad():
                encoded = encode_clip(encoder, video.to(torch.bfloat16, memory_format=torch.channels_last_3d)).float()
            latents.append(((encoded - mean) / std).bfloat16())
        self.latents = torch.cat(latents)
        self.token_ids = token_ids(tokenizer, captions).to(device)

    def draw(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a random batch: latents in fp32 and token ids."""
        chosen = torch.randint(len(self.latents), (count,), device=self.latents.device)
        return self.latents[chosen].float(), self.token_ids[chosen]
