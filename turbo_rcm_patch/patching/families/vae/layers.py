"""The layers that a VAE's encoder and decoder have in common, on channels-last activations [B, T, H, W, C].

diffusers keeps for each causal convolution the last frames that it read. Here these frames are a second input of the
convolution, its front: zeros at first, later the last frames of the previous chunk. A chunk of as many frames as are
kept becomes the next front as it is. An image has only zeros before it, which are not multiplied: only the last frame
of the window is multiplied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from ...steps.plan import Step
from .steps import VaePlan, kernel_size, takes_front


class InPairs(NamedTuple):
    """The input of a causal convolution as planes of pairs of frames, the number of frames, and the convolution."""

    planes: torch.Tensor
    frames: int
    step: Step


class Run:
    """One run of an encoder or a decoder. Each layer is called with the frames in their order.

    is_image: True if there is only one frame, so that no frames are kept for a next chunk.
    """

    def __init__(self, plan: VaePlan, *, is_image: bool = False):
        self._plan, self._is_image = plan, is_image
        self._fronts: dict[nn.Module, torch.Tensor] = {}  # by convolution the last frames of its input so far

    def mid_block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        first, *others = block.resnets
        x = self.residual_block(first, x)
        for attn, resnet in zip(block.attentions, others, strict=False):
            x = self.residual_block(resnet, x if attn is None else self.attention_block(attn, x))
        return x

    def residual_block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = self.causal(block.conv1, self.norm_before(block.conv1, block.norm1, x))
        y = self.norm_before(block.conv2, block.norm2, y)
        y, front = self.with_front(block.conv2, y)
        # The shortcut not earlier, where more is alive.
        return self.convolve(block.conv2, y, self.shortcut_of(block, x), front)

    def norm_before(self, conv: nn.Module, norm: nn.Module, x: torch.Tensor) -> torch.Tensor | InPairs:
        """Return norm and SiLU of x as a causal convolution takes it."""
        step = None if self._is_image else self._plan.pairs(conv, x.shape)
        if step is None:
            return self.norm_silu(norm, x)
        planes = self._plan.rms_norm_pairs(norm).run(x, self.front_of(conv, x))
        return InPairs(planes, x.shape[1], step)

    def shortcut_of(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x if type(block.conv_shortcut) is nn.Identity else self.convolve(block.conv_shortcut, x)

    def attention_block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        B, T, H, W, C = x.shape
        qkv = self.convolve(block.to_qkv, self._plan.rms_norm(block.norm).run(x, silu=False))
        q, k, v = qkv.reshape(B * T, H * W, 1, 3 * C).chunk(3, dim=-1)
        attended = self._plan.attention(C).run(q, k, v)
        return self.convolve(block.proj, attended.reshape(x.shape), x)

    def norm_silu(self, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self._plan.rms_norm(norm).run(x)

    def causal(self, conv: nn.Module, x: torch.Tensor | InPairs) -> torch.Tensor:
        x, front = self.with_front(conv, x)
        return self.convolve(conv, x, front=front)

    def with_front(
        self, conv: nn.Module, x: torch.Tensor | InPairs
    ) -> tuple[torch.Tensor | InPairs, torch.Tensor | None]:
        """Return x and the frames before it, which a causal convolution reads too.

        They are None for an image, which has none, and for pairs of frames, which hold them already.

        PyTorch's convolution takes one tensor: then x begins with these frames, and None is returned for them. Callers
        drop their own x before they convolve, to free memory.
        """
        if self._is_image or isinstance(x, InPairs):
            return x, None
        front = self.front_of(conv, x)
        if takes_front(self._plan.convolution(conv, x.shape)):
            return x, front
        x = torch.cat((front, x), 1)
        self._fronts[conv] = with_last_frames(front, x)
        return x, None

    def front_of(self, conv: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the frames before x, the input of a causal convolution."""
        if conv not in self._fronts:
            self._fronts[conv] = x.new_zeros(x.shape[0], kernel_size(conv)[0] - 1, *x.shape[2:])
        return self._fronts[conv]

    def convolve(
        self,
        conv: nn.Module,
        x: torch.Tensor | InPairs,
        residual: torch.Tensor | None = None,
        front: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if isinstance(x, InPairs):
            return x.step.run(x.planes, residual, x.frames)
        B, T, *image = x.shape
        new = T if front is not None or self._is_image else T - kernel_size(conv)[0] + 1
        y = self._plan.convolution(conv, (B, new, *image), self._is_image).run(x, residual, front)
        if front is not None:
            self._fronts[conv] = with_last_frames(front, x)
        return y


def with_last_frames(front: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the next front: the last frames of front and x together. It is x, or front with other contents.

    x must not be used afterwards. Fronts are most of what a decode of large frames holds, so they never exist twice. A
    view would keep its whole tensor alive, so it is copied.
    """
    left = front.shape[1] - x.shape[1]
    if left == 0 and x.untyped_storage().nbytes() == x.nbytes:
        return x
    if left > 0:
        front[:, :left] = front[:, -left:]  # at most one frame of two, so that they do not overlap
    front[:, max(0, left) :] = x[:, -front.shape[1] :]
    return front
