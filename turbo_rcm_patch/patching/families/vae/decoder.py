"""The decoder on channels-last activations, several latent frames at a time.

The stages read like diffusers' (autoencoder_kl_wan.py), which decodes one latent frame after another. Latent frame 0 is
special. It skips `time_conv`, whose first input therefore follows zeros, not frame 0. A residual block's shortcut makes
several frames of it, and only the last one counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set

import torch
from torch import nn

from .classes import UP_BLOCK
from .in_8_bits import Convolutions8bit, in_8_bits
from .layers import Run
from .steps import VaePlan
from .strips import Cuts


def decoded(
    vae: nn.Module, z: torch.Tensor, plan: VaePlan, frames: Sequence[int], cuts: Cuts | None = None
) -> Iterator[torch.Tensor]:
    """Decode latents z [B, z_dim, F, H, W] and yield the frames in order, as parts [B, C, n, H', W'].

    Each part is yielded as soon as it is made. Frames are neither unpatchified nor clamped. One latent frame becomes
    one frame. F latent frames become 1 + (F - 1) · 4 frames with two temporal upsamplers.

    frames: the number of frames that each stage takes at a time (chunks.py). cuts: for a strip of the frames
    (strips.py), which the parts are then. None: all of them.
    """
    resnets, _ = in_8_bits(vae.decoder, plan.call)
    run = _Decoder(plan, is_image=z.shape[2] == 1, cuts=cuts, in_8_bits=resnets)
    for latents in z.permute(0, 2, 3, 4, 1).split(frames[0], dim=1):
        for part in run.decoder(vae.decoder, run.convolve(vae.post_quant_conv, latents), frames[1:]):
            yield part.permute(0, 4, 1, 2, 3)


class _Decoder(Run):
    """One decode. in_8_bits: the resnets whose convolutions run in 8 bits."""

    def __init__(
        self,
        plan: VaePlan,
        *,
        is_image: bool = False,
        cuts: Cuts | None = None,
        in_8_bits: Set[nn.Module] = frozenset(),
    ):
        super().__init__(plan, is_image=is_image)
        self._in_8_bits = in_8_bits
        self._convolutions_8bit = Convolutions8bit(plan, is_image=is_image) if in_8_bits else None
        self._cuts = {} if cuts is None else cuts.after
        self._begun: set[nn.Module] = set()  # modules that had latent frame 0, which gives fewer frames

    def decoder(self, decoder: nn.Module, x: torch.Tensor, frames: Sequence[int]) -> Iterator[torch.Tensor]:
        x = self.causal(decoder.conv_in, x)
        x = self.cut(decoder.mid_block, self.mid_block(decoder.mid_block, x))
        return self.up_blocks(decoder, zip(decoder.up_blocks, frames, strict=True), x)

    def up_blocks(
        self, decoder: nn.Module, blocks: Iterable[tuple[nn.Module, int]], x: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Run x through the up blocks and yield the results. Each part of its frames runs through before the next."""
        (block, frames), *others = blocks
        for part in x.split(frames, dim=1):
            if not self._in_8_bits.isdisjoint(block.resnets):
                self._convolutions_8bit.begin_chunk(block, part)
            y = self.up_block(block, part) if type(block) in UP_BLOCK else self.residual_up_block(block, part)
            if others:
                yield from self.up_blocks(decoder, others, y)
            else:
                yield self.cut(decoder.conv_out, self.causal(decoder.conv_out, self.norm_silu(decoder.norm_out, y)))

    def up_block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for resnet in block.resnets:
            x = self.cut(resnet, self.residual_block(resnet, x))
        for upsampler in block.upsamplers or ():
            x = self.upsample(upsampler, x)
        return x

    def residual_up_block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = x
        for resnet in block.resnets:
            y = self.cut(resnet, self.residual_block(resnet, y))
        if block.upsampler is None:
            return y
        residual = () if block.avg_shortcut is None else (self.shortcut(block.avg_shortcut, self.cut(block, x)),)
        return self.upsample(block.upsampler, y, *residual)

    def residual_block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if block not in self._in_8_bits:
            return super().residual_block(block, x)
        convolutions = self._convolutions_8bit
        y = convolutions.convolve(block.conv1, convolutions.quantized(block.norm1, block.conv1, x))
        y = convolutions.quantized(block.norm2, block.conv2, y)
        return convolutions.convolve(block.conv2, y, self.shortcut_of(block, x))

    def cut(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return what is kept of x, a module's result or an up block's input (strips.py)."""
        return x.narrow(*self._cuts[module]).contiguous() if module in self._cuts else x

    def upsample(self, block: nn.Module, x: torch.Tensor, *residual: torch.Tensor) -> torch.Tensor:
        if block.mode == "upsample3d":
            x = self.twice_the_frames(block.time_conv, x)
        return self.convolve(block.resample[1], x, *residual)

    def twice_the_frames(self, time_conv: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not self._is_first(time_conv):
            return self.causal(time_conv, x)
        alone, others = x[:, :1], x[:, 1:]
        return torch.cat((alone, self.causal(time_conv, others)), 1) if others.shape[1] else alone

    def shortcut(self, shortcut: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the residual that a shortcut makes of x.

        Its channels, each repeated, become the channels of the pixels (and frames) that one pixel becomes. Values that
        are equal for two columns, rows or frames are stored once.
        """
        repeats, counts = shortcut.repeats, []
        for factor in (shortcut.factor_s, shortcut.factor_s, shortcut.factor_t):
            shared = factor if repeats % factor == 0 else 1
            repeats //= shared
            counts.append(factor // shared)
        columns, rows, frames = counts
        if repeats > 1:
            x = x.repeat_interleave(repeats, dim=-1)
        x = x.unflatten(-1, (shortcut.out_channels, frames, rows, columns))
        x = x.permute(0, 1, 5, 2, 6, 3, 7, 4).flatten(5, 6).flatten(3, 4).flatten(1, 2)
        return x[:, frames - 1 :] if self._is_first(shortcut) else x

    def _is_first(self, module: nn.Module) -> bool:
        """True if the module's present input begins with latent frame 0."""
        is_first = module not in self._begun
        self._begun.add(module)
        return is_first
