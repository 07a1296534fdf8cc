"""Image to video without encoders, for models with random weights."""

from __future__ import annotations

import functools

import torch
from diffusers import WanImageToVideoPipeline
from diffusers.utils.torch_utils import randn_tensor

IMAGE_TOKENS = 257


class ImageFreePipeline(WanImageToVideoPipeline):
    """Image to video without encoders: the image is random features [1, 257, image_dim] and random latents.

    Encoding an image as a video takes more memory than a denoising step, and CLIP is not needed for one.
    """

    def encode_image(self, image: object, device: torch.device | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(1, IMAGE_TOKENS, self.transformer.config.image_dim, generator=generator).to(device)

    def prepare_latents(
        self,
        image: torch.Tensor,
        batch_size: int,
        num_channels_latents: int = 16,
        height: int = 480,
        width: int = 832,
        num_frames: int = 81,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        generator: torch.Generator | None = None,
        latents: torch.Tensor | None = None,
        last_image: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return latents, condition and, with timesteps per token, a mask: 0 in the first frame, as in diffusers."""
        shape = (
            (num_frames - 1) // self.vae_scale_factor_temporal + 1,
            height // self.vae_scale_factor_spatial,
            width // self.vae_scale_factor_spatial,
        )
        draw = functools.partial(randn_tensor, generator=generator, device=device, dtype=dtype)
        latents = draw((batch_size, num_channels_latents, *shape)) if latents is None else latents
        first_frame = torch.zeros(1, 1, *shape, dtype=dtype, device=device)
        first_frame[:, :, 0] = 1
        if self.config.expand_timesteps:
            return latents, draw((batch_size, num_channels_latents, 1, *shape[1:])), 1 - first_frame
        condition = draw((batch_size, num_channels_latents, *shape))
        masks = first_frame.expand(batch_size, self.vae_scale_factor_temporal, *shape)
        return latents, torch.cat([masks, condition], dim=1)
