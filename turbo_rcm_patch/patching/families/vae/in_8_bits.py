"""The decoder with ``vae="8bit"``: which convolutions run in 8 bits, and how.

They are those of the resnets in all up blocks but the first. Each reads RMSNorm and SiLU, which write 8 bits at once,
and together they have 87 % (Wan 2.1) or 82 % (TI2V-5B) of the decoder's products. The middle block and the first up
block stay in the VAE's dtype, because their errors pass through all that follows. So do the first and the last
convolution, shortcuts, and convolutions that upsample or double the frames (docs/designs.md).

A convolution's input has one range for all of its frames and channels. The range grows with each chunk that exceeds
it. The frames before a chunk, which are kept in 8 bits, are rounded anew then.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from .... import kernels
from ....config import VAE_8BIT
from ....kernels.conv.conv_8bit import CONV_8BIT, Weight8bit, channel_divisor, quantize_conv_weight
from ....kernels.range_8bit import EMPTY
from ....kernels.rows.rms_norm_silu_8bit import MEASURE_NORM_SILU, QUANTIZE_NORM_SILU
from ...steps.plan import Call
from .classes import resnets_for_8_bits
from .layers import with_last_frames
from .steps import VaePlan, kernel_size, sizes_8bit

ALIGNED = 4  # fp32 values in memory for a range of two, so that each begins at a multiple of 16 bytes
SIZE = (1, 4, 64, 64)  # B, T, H, W of an input: whether a kernel takes it does not depend on them


@dataclass(slots=True, eq=False)
class _Convolution:
    """A convolution during a decode: its norm's weight, its own weight and bias, and the state of its input.

    before, bounds: the range before the present chunk, and with it. front: None for an image, because nothing comes
    before it. combined: of the chunk that is convolved next. None: before the first chunk.
    """

    gain: torch.Tensor
    divisor: torch.Tensor
    weight: Weight8bit
    bias: torch.Tensor
    before: torch.Tensor
    bounds: torch.Tensor
    front: torch.Tensor | None
    combined: torch.Tensor | None = None


def in_8_bits(decoder: nn.Module, call: Call) -> tuple[frozenset[nn.Module], str | None]:
    """Return the resnets whose convolutions run in 8 bits, and the reason why not all of `resnets_for_8_bits` do.

    The reason is None if all do, or if the configuration does not ask for it.
    """
    if call.config.vae != VAE_8BIT:
        return frozenset(), None
    reasons = {resnet: _why_not(resnet, call) for resnet in resnets_for_8_bits(decoder)}
    chosen = frozenset(resnet for resnet, reason in reasons.items() if reason is None)
    return chosen, next(filter(None, reasons.values()), None)


def _why_not(resnet: nn.Module, call: Call) -> str | None:
    for conv in (resnet.conv1, resnet.conv2):
        spec = call.spec(kernels.ConvSpec, **sizes_8bit(conv, (*SIZE, conv.in_channels)))
        reason = "no bias" if conv.bias is None else CONV_8BIT.why_not_fused(spec)
        if reason is not None:
            return reason
    return None


class Convolutions8bit:
    """The convolutions in 8 bits of one decode. A convolution is called with the frames in their order.

    Weights are quantised once per decode and dropped with it: kept for longer they would take memory while nothing is
    decoded (29 MB for Wan 2.1, 232 MB for TI2V-5B, calculated).
    """

    def __init__(self, plan: VaePlan, *, is_image: bool):
        self._plan, self._is_image = plan, is_image
        self._known: dict[nn.Module, _Convolution] = {}
        self._ranges: dict[nn.Module, torch.Tensor] = {}  # by up block: [2, convolutions, ALIGNED]
        self._places: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}  # by convolution: its two ranges
        self._measure, self._quantize = (plan.call.pick(op).launch for op in (MEASURE_NORM_SILU, QUANTIZE_NORM_SILU))

    def begin_chunk(self, block: nn.Module, x: torch.Tensor) -> None:
        """Take the ranges of an up block's convolutions as those before its next chunk x.

        One copy serves all of them. A copy in each convolution would be one launch in four.
        """
        if block in self._ranges:
            before, bounds = self._ranges[block]
            before.copy_(bounds)
            return
        convolutions = [conv for resnet in block.resnets for conv in (resnet.conv1, resnet.conv2)]
        ranges = x.new_zeros(2, len(convolutions), ALIGNED, dtype=torch.float32)
        self._ranges[block] = ranges
        for conv, before, bounds in zip(convolutions, *ranges[..., :2], strict=True):
            self._places[conv] = before, bounds

    def quantized(self, norm: nn.Module, conv: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return RMSNorm and SiLU of x [B, T, H, W, C] in 8 bits: a convolution's input, with a pixel around images."""
        known = self._known.get(conv) or self._begin(norm, conv, x)
        given, ranges, weight = (x, known.gain, known.divisor), (known.before, known.bounds), known.weight
        self._measure(*given, known.bounds)
        of_result = weight.scale, weight.total, known.bias
        values, known.combined = self._quantize(*given, *ranges, known.front, *of_result)
        return values

    def convolve(self, conv: nn.Module, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``residual + conv(x)``, for x from `quantized`."""
        B, T, H, W, C = x.shape
        step = self._plan.convolution_8bit(conv, (B, T, H - 2, W - 2, C), self._is_image)
        known = self._known[conv]
        y = step.run(x, known.combined, known.weight.values, known.bias.dtype, residual, known.front)
        if known.front is not None:
            known.front = with_last_frames(known.front, x)
        return y

    def _begin(self, norm: nn.Module, conv: nn.Module, x: torch.Tensor) -> _Convolution:
        gain, frames = norm.gamma.flatten(), kernel_size(conv)[0] - 1
        divisor, weight, front = channel_divisor(gain), conv.weight.detach().permute(0, 2, 3, 4, 1), None
        if self._is_image:
            weight = weight[:, -1:]
        else:
            B, _, H, W, C = x.shape
            front = x.new_full((B, frames, H + 2, W + 2, C), EMPTY, dtype=torch.int8)
        weight = quantize_conv_weight(weight, divisor)
        known = self._known[conv] = _Convolution(gain, divisor, weight, conv.bias, *self._places[conv], front)
        return known
