"""The stock video autoencoder on whole clips.

``AutoencoderKLWan`` works through chunks of four frames, with caches for the next chunk. This saves memory and takes
five times the launches. Without caches its layers see a whole clip and compute the same. Only the layers that change
the frame rate do nothing then, so they are replaced here.
"""

from __future__ import annotations

import functools

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample


def take_whole_clips(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """Let ``vae.encoder`` and ``vae.decoder`` take whole clips; ``vae.encode`` and ``vae.decode`` no longer work."""
    for module in vae.modules():
        if isinstance(module, WanResample):
            module.forward = functools.partial(_resample, module)
    return vae


def encode_clip(vae: AutoencoderKLWan, video: torch.Tensor) -> torch.Tensor:
    """Return the posterior's mean [B, 16, f, h, w] of videos [B, 3, F, H, W]."""
    return vae.quant_conv(vae.encoder(video))[:, : vae.config.z_dim]


def decode_clip(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """Decode latents without the clamp to [-1, 1], which would stop the gradient of every saturated pixel."""
    return vae.decoder(vae.post_quant_conv(latents))


def _resample(module: WanResample, x: torch.Tensor) -> torch.Tensor:
    """Resample a clip. Its first frame is a separate chunk, which keeps its rate and does not affect later frames."""
    if module.mode == "upsample3d":
        first, pairs = x[:, :, :1], module.time_conv(x[:, :, 1:]).unflatten(1, (2, -1))
        x = torch.cat([first, torch.stack(pairs.unbind(1), dim=3).flatten(2, 3)], dim=2)
    frames = module.resample(x.transpose(1, 2).flatten(0, 1))
    x = frames.unflatten(0, (len(x), -1)).transpose(1, 2)
    if module.mode == "downsample3d":
        x = torch.cat([x[:, :, :1], module.time_conv(x)], dim=2)
    return x
