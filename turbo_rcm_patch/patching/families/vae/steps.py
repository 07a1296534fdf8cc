"""The steps of the encoder and the decoder, each with its kernel, or the reason why it is not ours.

Activations are channels-last, [B, T, H, W, C]. Modules are plain (plain.py decides). A convolution is read when its
step runs, a norm when its step is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from .... import kernels
from ....kernels.conv.conv_8bit import CONV_8BIT
from ....kernels.conv.conv_pairs import CONV_PAIRS
from ....kernels.conv.conv_pairs_weight import pair_weight
from ....kernels.conv.conv_pytorch import convolve
from ....kernels.conv.conv_skip import CONVOLUTION
from ....kernels.conv.conv_weight import pack_weight
from ....kernels.launch import recording
from ....kernels.rows.rms_norm_silu import RMS_NORM_SILU
from ....kernels.rows.rms_norm_silu_pairs import RMS_NORM_SILU_PAIRS
from ...steps.attention import pick_attention
from ...steps.layers import ALONE
from ...steps.plan import LINEAR, Call, Step

SMALL = 4 << 20  # bytes of a weight


class VaePlan:
    """The steps of an encoder or a decoder for one device and dtype. Each is chosen once, a convolution once per shape.

    It lasts for one encode or decode, within which no module changes.
    """

    def __init__(self, call: Call):
        self.call = call
        self._steps: dict[tuple, Step] = {}
        self._pairs: dict[tuple, Step | None] = {}
        self._weights = PackedWeights()

    def convolution(self, conv: nn.Conv2d | nn.Conv3d, shape: tuple[int, ...], of_image: bool = False) -> Step:
        """Return the step of a convolution, for x of this shape without the frames before it.

        of_image: True if x is an image. Only the window's last frame counts then, because there are zeros before.
        """
        key = convolution, conv, shape, of_image
        if (known := self._steps.get(key)) is not None:
            return known
        return self._choose(key, convolution, conv, shape, of_image=of_image, weights=self._weights)

    def pairs(self, conv: nn.Conv3d, shape: tuple[int, ...]) -> Step | None:
        """Return the step of a causal convolution that multiplies pairs of frames. None: `convolution` runs.

        shape: of the norm's input before it.
        """
        key = conv, shape
        if key not in self._pairs:
            self._pairs[key] = pairs(conv, shape, self.call, weights=self._weights)
        return self._pairs[key]

    def convolution_8bit(self, conv: nn.Conv3d, shape: tuple[int, ...], of_image: bool) -> Step:
        """Return the step of a convolution in 8 bits, for x of this shape without the pixels around images."""
        key = convolution_8bit, conv, shape, of_image
        return self._steps.get(key) or self._choose(key, convolution_8bit, conv, shape, of_image=of_image)

    def downsampling(self, conv: nn.Conv2d | nn.Conv3d) -> Step:
        """Return the step of a convolution that halves height and width, or frames."""
        key = downsampling, conv
        return self._steps.get(key) or self._choose(key, downsampling, conv)

    def rms_norm(self, norm: nn.Module) -> Step:
        """Return the step of a norm."""
        key = rms_norm, norm
        return self._steps.get(key) or self._choose(key, rms_norm, norm)

    def rms_norm_pairs(self, norm: nn.Module) -> Step:
        """Return the step of a norm before a convolution of `pairs`."""
        key = rms_norm_pairs, norm
        return self._steps.get(key) or self._choose(key, rms_norm_pairs, norm)

    def attention(self, channels: int) -> Step:
        """Return the step of an attention."""
        key = attention, channels
        return self._steps.get(key) or self._choose(key, attention, channels)

    def _choose(self, key: tuple, choose: Callable[..., Step], *given: object, **options: object) -> Step:
        step = self._steps[key] = choose(*given, self.call, **options)
        return step


class PackedWeights:
    """The convolutions' weights of one encode or decode as kernels take them, [N, kt, kh, kw, C].

    Small ones are packed once: their convolutions run many times, and packing takes the host longer than the GPU. Large
    ones are packed by each call, because together they would be a large part of a decode's memory.
    """

    def __init__(self):
        self._packed: dict[tuple, torch.Tensor] = {}

    def of(self, conv: nn.Conv2d | nn.Conv3d, frames: int, channels: int) -> torch.Tensor:
        """Return a convolution's weight, packed if it is small.

        frames: how many of the window's frames count, the last ones. channels: of x; those that the convolution lacks
        are multiplied by zero.
        """
        key = conv, frames, channels
        if key in self._packed:
            return self._packed[key]
        weight = weight_of(conv, frames)
        if channels > conv.in_channels:
            weight = F.pad(weight, (0, channels - conv.in_channels))
        if conv.weight.nbytes <= SMALL and not recording():  # what is recorded has no values
            weight = self._packed[key] = pack_weight(weight)
        return weight

    def of_pairs(self, conv: nn.Conv3d) -> torch.Tensor:
        """Return a convolution's weight for pairs of frames [N, 4, 9, C], kept if the convolution's own is small."""
        key = conv, "pairs"
        if key in self._packed:
            return self._packed[key]
        weight = pair_weight(conv.weight.permute(0, 2, 3, 4, 1))
        if conv.weight.nbytes <= SMALL and not recording():
            self._packed[key] = weight
        return weight


def weight_of(conv: nn.Conv2d | nn.Conv3d, frames: int) -> torch.Tensor:
    """Return the last frames of a convolution's weight, [N, kt, kh, kw, C], not packed."""
    weight = conv.weight.unflatten(1, (-1, *(1,) * (5 - conv.weight.dim()))).permute(0, 2, 3, 4, 1)
    return weight[:, -frames:]


def convolution(
    conv: nn.Conv2d | nn.Conv3d,
    shape: tuple[int, ...],
    call: Call,
    *,
    of_image: bool = False,
    weights: PackedWeights | None = None,
) -> Step:
    """Return a convolution with the residual, for x [B, T, H, W, C] of this shape.

    Step: (x, residual=None, front=None) -> [B, T', H', W', N].
    front: the kt - 1 frames before x, for a step that `takes_front`, so that nothing is padded in time. Otherwise x
        begins with these frames. x may have more channels than the convolution. These are not read.

    In the decoder a convolution over images with a window of 3×3 and stride 1 comes after upsampling. Its step doubles
    x's height and width first, by repeating pixels. Its residual may be smaller, as `kernels.conv_skip` takes it. A
    convolution over time alone has the channels of two frames, and returns [B, 2 T, H, W, N / 2].

    of_image: True if only the last frame of the window counts. weights: where the run keeps weights for the kernels.
    """
    kt, kh, kw = kernel_size(conv)
    upsample, interleave = isinstance(conv, nn.Conv2d) and kh > 1, 2 if (kt, kh) == (3, 1) else 1
    kt = 1 if of_image else kt
    weight = partial(weight_of, conv, kt)
    if (kt, kh, kw) == (1, 1, 1):
        return Step(partial(_convolve, convolve, conv, weight, upsample, interleave), LINEAR, ALONE)
    pick = call.pick(
        kernels.CONV_SKIP,
        kernels.ConvSpec,
        shape=tuple(shape),
        weight_shape=(conv.out_channels, kt, kh, kw, shape[-1]),
        upsample=upsample,
        interleave=interleave,
        in_model=True,
    )
    if pick.kernel.is_fused:
        weight = partial((weights or PackedWeights()).of, conv, kt, shape[-1])
    return Step(partial(_convolve, pick.launch, conv, weight, upsample, interleave), pick.label, pick.reason, pick=pick)


def pairs(conv: nn.Conv3d, shape: tuple[int, ...], call: Call, *, weights: PackedWeights | None = None) -> Step | None:
    """Return a causal convolution with the residual that multiplies pairs of frames, or None if it cannot run.

    Step: (planes of `rms_norm_pairs`, residual or None, T) -> [B, T, H, W, N].
    shape: of the norm's input, [B, T, H, W, C]. weights: as of `convolution`.
    """
    weight_shape = (conv.out_channels, *kernel_size(conv), shape[-1])
    spec = call.spec(kernels.ConvSpec, shape=tuple(shape), weight_shape=weight_shape, in_model=True)
    if CONV_PAIRS.why_not_fused(spec) is not None:
        return None
    pick = CONV_PAIRS.pick(spec)
    weight = partial((weights or PackedWeights()).of_pairs, conv)
    return Step(partial(_convolve_pairs, pick.launch, conv, weight), pick.label, pick.reason, pick=pick)


def _convolve_pairs(launch, conv, weight, planes, residual, frames):
    return launch(planes, weight(), conv.bias, residual, frames, conv.weight.dtype)


def convolution_8bit(conv: nn.Conv3d, shape: tuple[int, ...], call: Call, *, of_image: bool = False) -> Step:
    """Return the step of a convolution in 8 bits, for x [B, T, H, W, C] of this shape.

    Step: as `CONV_8BIT`'s launchers. of_image: True if only the last frame of the window counts.
    """
    pick = call.pick(CONV_8BIT, kernels.ConvSpec, **sizes_8bit(conv, shape, of_image=of_image))
    return Step(pick.launch, pick.label, pick.reason, pick=pick)


def sizes_8bit(conv: nn.Conv3d, shape: tuple[int, ...], *, of_image: bool = False) -> dict[str, tuple]:
    """Return the fields of the spec of a convolution in 8 bits."""
    kt, kh, kw = kernel_size(conv)
    window = 1 if of_image else kt, kh, kw
    return {
        "eight_bits": (torch.int8,),
        "shape": tuple(shape),
        "weight_shape": (conv.out_channels, *window, conv.in_channels),
    }


def takes_front(step: Step) -> bool:
    """True if a convolution's step reads the frames before its input from a tensor of their own."""
    return step.pick is not None and step.pick.kernel.is_fused


def kernel_size(conv: nn.Conv2d | nn.Conv3d) -> tuple[int, int, int]:
    """Return (kt, kh, kw). A convolution over images has kt = 1."""
    return (*(1,) * (3 - len(conv.kernel_size)), *conv.kernel_size)


def _convolve(launch, conv, weight, upsample, interleave, x, residual=None, front=None):
    return launch(x, weight(), conv.bias, residual, front, upsample, interleave)


def downsampling(conv: nn.Conv2d | nn.Conv3d, call: Call) -> Step:
    """Return a convolution of stride 2.

    Over images it takes x [B, T, H, W, C] and pads one row and one column of zeros at the end. Over time it takes
    (x [B, T, H, W, C], front [B, 1, H, W, C]) with an even T, and reads the frames 2t - 1, 2t and 2t + 1.
    """
    if isinstance(conv, nn.Conv2d):
        return Step(partial(_halve_images, conv), CONVOLUTION, "stride 2")
    return Step(partial(_halve_frames, conv), LINEAR, "stride 2")


def _halve_images(conv, x):
    images = F.pad(x.flatten(0, 1).permute(0, 3, 1, 2), (0, 1, 0, 1))
    return F.conv2d(images, conv.weight, conv.bias, stride=2).permute(0, 2, 3, 1).unflatten(0, x.shape[:2])


def _halve_frames(conv, x, front):
    odd = x[:, 1::2]
    windows = torch.cat((torch.cat((front, odd[:, :-1]), 1), x[:, ::2], odd), -1)
    return F.linear(windows, conv.weight.flatten(2).transpose(1, 2).flatten(1), conv.bias)


def rms_norm(norm: nn.Module, call: Call) -> Step:
    """Return an RMS norm with SiLU or without: (x [B, T, H, W, C], *, silu=True) -> [B, T, H, W, C]."""
    pick = call.pick(RMS_NORM_SILU)
    return Step(partial(_rms_norm, pick.launch, norm.gamma.flatten()), pick.label, pick.reason, pick=pick)


def _rms_norm(launch, weight, x, *, silu=True):
    return launch(x, weight, silu)


def rms_norm_pairs(norm: nn.Module, call: Call) -> Step:
    """Return an RMS norm with SiLU that writes planes: (x [B, T, H, W, C], front) -> [B, ⌈T / 2⌉, 4, H, W, C] in fp16.

    front: the two frames before x. The step overwrites them with the last two frames of x, after norm and SiLU.
    """
    pick = call.pick(RMS_NORM_SILU_PAIRS)
    return Step(partial(_rms_norm_pairs, pick.launch, norm.gamma.flatten()), pick.label, pick.reason, pick=pick)


def _rms_norm_pairs(launch, weight, x, front):
    return launch(x, weight, front)


def attention(channels: int, call: Call) -> Step:
    """Return one-head attention over each frame's positions: (q, k, v [B, S, 1, channels]) -> [B, S, 1, channels]."""
    pick, kernel = pick_attention(call, channels)
    return Step(partial(_attention, pick.launch), kernel, pick.reason)


def _attention(launch, q, k, v):
    return launch(q, k, v, None, None, None, q.shape[3] ** -0.5)
