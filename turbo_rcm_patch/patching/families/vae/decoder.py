"""The decoder on channels-last activations, several latent frames at a time.

The stages read like diffusers' (autoencoder_kl_wan.py), which decodes one latent frame after another and keeps for each
causal convolution the last frames that it read. Here these frames are a second input of a convolution, its front: zeros
at first, later the last frames of the previous chunk. If the first chunk is one frame, as for an image, zeros are not
multiplied: only the last frame of the convolution's window is. Latent frame 0 is special. It skips `time_conv`, whose
first input therefore follows zeros, not frame 0. A residual block's shortcut makes several frames of it, and only the
last one counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from .classes import UP_BLOCK
from .steps import DecoderPlan, kernel_size, takes_front


def decoded(vae: nn.Module, z: torch.Tensor, plan: DecoderPlan, frames: Sequence[int]) -> Iterator[torch.Tensor]:
    """Decode latents z [B, z_dim, F, H, W] and yield the frames in order, as parts [B, C, n, H', W'].

    Each part is yielded as soon as it is made. Frames are neither unpatchified nor clamped. One latent frame becomes
    one frame. F latent frames become 1 + (F - 1) · 4 frames with two temporal upsamplers.

    frames: the number of frames that each stage takes at a time (chunks.py).
    """
    run = _Run(plan, is_image=z.shape[2] == 1)
    for latents in z.permute(0, 2, 3, 4, 1).split(frames[0], dim=1):
        for part in run.decoder(vae.decoder, run.convolve(vae.post_quant_conv, latents), frames[1:]):
            yield part.permute(0, 4, 1, 2, 3)


class _Run:
    """One decode. Activations x are [B, T, H, W, C]; each stage is called with the frames in their order.

    is_image: True if there is only one frame, so that no frames are kept for a next chunk.
    """

    def __init__(self, plan: DecoderPlan, *, is_image: bool = False):
        self._plan, self._is_image = plan, is_image
        self._fronts: dict[nn.Module, torch.Tensor] = {}  # by convolution the last kt - 1 frames of its input so far
        self._begun: set[nn.Module] = set()  # modules that had latent frame 0, which gives fewer frames

    def decoder(self, decoder: nn.Module, x: torch.Tensor, frames: Sequence[int]) -> Iterator[torch.Tensor]:
        x = self.causal(decoder.conv_in, x)
        x = self.mid_block(decoder.mid_block, x)
        return self.up_blocks(decoder, zip(decoder.up_blocks, frames, strict=True), x)

    def up_blocks(
        self, decoder: nn.Module, blocks: Iterable[tuple[nn.Module, int]], x: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Run x through the up blocks and yield the results. Each part of its frames runs through before the next."""
        (block, frames), *others = blocks
        for part in x.split(frames, dim=1):
            y = self.up_block(block, part) if type(block) in UP_BLOCK else self.residual_up_block(block, part)
            if others:
                yield from self.up_blocks(decoder, others, y)
            else:
                yield self.causal(decoder.conv_out, self.norm_silu(decoder.norm_out, y))

    def mid_block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        first, *others = block.resnets
        x = self.residual_block(first, x)
        for attn, resnet in zip(block.attentions, others, strict=False):
            x = self.residual_block(resnet, x if attn is None else self.attention_block(attn, x))
        return x

    def up_block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for resnet in block.resnets:
            x = self.residual_block(resnet, x)
        for upsampler in block.upsamplers or ():
            x = self.upsample(upsampler, x)
        return x

    def residual_up_block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = x
        for resnet in block.resnets:
            y = self.residual_block(resnet, y)
        if block.upsampler is None:
            return y
        residual = () if block.avg_shortcut is None else (self.shortcut(block.avg_shortcut, x),)
        return self.upsample(block.upsampler, y, *residual)

    def residual_block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_silu(block.norm1, x)
        y, front = self.with_front(block.conv1, y)
        y = self.convolve(block.conv1, y, front=front)
        y = self.norm_silu(block.norm2, y)
        y, front = self.with_front(block.conv2, y)
        # Not earlier, where more is alive.
        shortcut = x if type(block.conv_shortcut) is nn.Identity else self.convolve(block.conv_shortcut, x)
        return self.convolve(block.conv2, y, shortcut, front)

    def attention_block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        B, T, H, W, C = x.shape
        qkv = self.convolve(block.to_qkv, self._plan.rms_norm(block.norm).run(x, silu=False))
        q, k, v = qkv.reshape(B * T, H * W, 1, 3 * C).chunk(3, dim=-1)
        attended = self._plan.attention(C).run(q, k, v)
        return self.convolve(block.proj, attended.reshape(x.shape), x)

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

    def norm_silu(self, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self._plan.rms_norm(norm).run(x)

    def causal(self, conv: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x, front = self.with_front(conv, x)
        return self.convolve(conv, x, front=front)

    def with_front(self, conv: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a causal convolution's input for x, and the last frames of its previous input.

        For PyTorch's convolution these are prepended to x instead. Before a first frame alone there are none. Callers
        drop x before they convolve, to free memory.
        """
        is_alone = x.shape[1] == 1 and conv not in self._fronts
        if is_alone and self._is_image:
            return x, None
        if conv not in self._fronts:
            self._fronts[conv] = x.new_zeros(x.shape[0], kernel_size(conv)[0] - 1, *x.shape[2:])
        front = self._fronts[conv]
        if is_alone:
            _keep_last_frames(front, x)
            return x, None
        if takes_front(self._plan.convolution(conv, x.shape)):
            return x, front
        x = torch.cat((front, x), 1)
        _keep_last_frames(front, x)
        return x, None

    def convolve(
        self,
        conv: nn.Module,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        front: torch.Tensor | None = None,
    ) -> torch.Tensor:
        B, T, *image = x.shape
        after_front = T - kernel_size(conv)[0] + 1
        is_alone = front is None and after_front < 1
        new = T if front is not None or is_alone else after_front
        y = self._plan.convolution(conv, (B, new, *image), is_alone).run(x, residual, front)
        if front is not None:
            _keep_last_frames(front, x)
        return y

    def _is_first(self, module: nn.Module) -> bool:
        """True if the module's present input begins with latent frame 0."""
        is_first = module not in self._begun
        self._begun.add(module)
        return is_first


def _keep_last_frames(front: torch.Tensor, x: torch.Tensor) -> None:
    """Replace the frames of a front by the last ones of front and x together, in place.

    Fronts are most of what a decode of large frames holds. In place they never exist twice, and leave no gaps between
    what PyTorch's allocator reuses.
    """
    left = front.shape[1] - x.shape[1]
    if left > 0:
        front[:, :left] = front[:, -left:]  # at most one frame of two, so that they do not overlap
    front[:, max(0, left) :] = x[:, -front.shape[1] :]
