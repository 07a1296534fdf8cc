"""The encoder on channels-last activations, several frames at a time.

The stages read like diffusers' (autoencoder_kl_wan.py), which encodes frame 0 alone, and then four frames after four.
Frame 0 skips `time_conv`, whose later inputs follow the last frame before them. diffusers leaves out the frames after
the last four.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import patchify
from torch import nn

from .classes import RESAMPLE, RESIDUAL_BLOCK
from .layers import Run, with_last_frames
from .steps import VaePlan, takes_front

FRAMES = 4  # that become one latent frame, or more: the least to encode at a time
PIXEL = 8  # channels of a pixel's first layer: kernels read 16 bytes at a time


def count_encoded(frames: int) -> int:
    """Return the number of a video's frames that are encoded."""
    return 1 + (frames - 1) // FRAMES * FRAMES


def encoded(vae: nn.Module, x: torch.Tensor, plan: VaePlan, frames: int, patch_size: int = 1) -> Iterator[torch.Tensor]:
    """Encode pixels x [B, C, F, H, W] and yield the latents' moments [B, 2 · z_dim, n, H', W'] in order.

    frames: the number of frames at a time, a multiple of FRAMES. patch_size: by which x is patchified first.
    """
    last = count_encoded(x.shape[2])
    run = _Encoder(plan, is_image=last == 1)
    for first in (0, *range(1, last, frames)):
        pixels = x[:, :, first : min(first + frames, last) if first else 1]
        moments = run.encoder(vae.encoder, patchify(pixels, patch_size))
        yield run.convolve(vae.quant_conv, moments).permute(0, 4, 1, 2, 3)


class _Encoder(Run):
    """One encode. The first call is with frame 0 alone."""

    def encoder(self, encoder: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
        x = self.causal(encoder.conv_in, self.channels_last(encoder.conv_in, pixels))
        for block in encoder.down_blocks:
            x = self.down_block(block, x)
        x = self.mid_block(encoder.mid_block, x)
        return self.causal(encoder.conv_out, self.norm_silu(encoder.norm_out, x))

    def channels_last(self, conv: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
        """Return pixels as [B, T, H, W, C], with channels of zeros if our kernel convolves them."""
        x = pixels.permute(0, 2, 3, 4, 1)
        *sizes, C = x.shape
        if not takes_front(self._plan.convolution(conv, x.shape)):
            return x.contiguous()
        wide = x.new_zeros(*sizes, -(-C // PIXEL) * PIXEL)
        wide[..., :C] = x
        return wide

    def down_block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        kind = type(block)
        if kind in RESIDUAL_BLOCK:
            return self.residual_block(block, x)
        return self.downsample(block, x) if kind in RESAMPLE else self.residual_down_block(block, x)

    def residual_down_block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = x
        for resnet in block.resnets:
            y = self.residual_block(resnet, y)
        if block.downsampler is not None:
            y = self.downsample(block.downsampler, y)
        return y + self.average(block.avg_shortcut, x)

    def downsample(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = self._plan.downsampling(block.resample[1]).run(x)
        return self.half_the_frames(block.time_conv, x) if block.mode == "downsample3d" else x

    def half_the_frames(self, time_conv: nn.Module, x: torch.Tensor) -> torch.Tensor:
        front = self._fronts.get(time_conv)
        if front is None:  # frame 0
            if not self._is_image:
                self._fronts[time_conv] = x.clone()
            return x
        y = self._plan.downsampling(time_conv).run(x, front)
        self._fronts[time_conv] = with_last_frames(front, x)
        return y

    def average(self, shortcut: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return means of x over neighbours, as a shortcut makes them.

        The pixels (and frames, after zeros if they do not suffice) that become one are channels next to each other. A
        result's channel is the mean of some of these. For TI2V-5B these are the pixels of one frame.
        """
        frames, edge = shortcut.factor_t, shortcut.factor_s
        if missing := -x.shape[1] % frames:
            x = torch.cat((x.new_zeros(x.shape[0], missing, *x.shape[2:]), x), 1)
        x = x.unflatten(3, (-1, edge)).unflatten(2, (-1, edge)).unflatten(1, (-1, frames))
        if shortcut.group_size == edge**2:
            return x.mean((4, 6)).movedim(2, -1).flatten(-2)
        x = x.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(4)
        return x.unflatten(-1, (shortcut.out_channels, shortcut.group_size)).mean(-1)
