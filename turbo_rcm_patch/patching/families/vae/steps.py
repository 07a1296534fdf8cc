"""The steps of the decoder, each with its kernel, or the reason why it is not ours.

Activations are channels-last, [B, T, H, W, C]. Modules are plain (plain.py decides), and read when a step runs.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from .... import kernels
from ....kernels.conv.conv_pytorch import convolve
from ....kernels.conv.conv_skip import CONVOLUTION
from ....kernels.rows.rms_norm_silu import RMS_NORM_SILU
from ...steps.attention import pick_attention
from ...steps.exact import ALONE
from ...steps.plan import LINEAR, Call, Step

ANY_IMAGE = (60, 104)  # height and width


def convolution(conv: nn.Conv2d | nn.Conv3d, call: Call, image: tuple[int, int] | None = None) -> Step:
    """A convolution that is given the kt - 1 frames before its input, so that nothing is padded in time.

    Step: (x [B, T, H, W, C], residual=None, *, front=None, upsample=False, interleave=1) -> [B, T, H, W, N] (+
    residual). front: these frames, [B, kt - 1, H, W, C], if kt > 1; given only where the step takes it (`takes_front`),
    else x begins with them.
    upsample: to twice the height and width by nearest neighbours, before; a residual may then be smaller, as that of
    `kernels.conv_skip`. interleave=2: the channels are those of two frames, [B, 2 T, H, W, N / 2].
    image: the height and width of x, where the step is to name the kernel that serves these.
    """
    if kernel_size(conv) == (1, 1, 1):
        return Step(partial(_convolve, conv, convolve), LINEAR, ALONE)
    pick = _pick(conv, call, image or ANY_IMAGE)
    if not pick.kernel.is_fused:
        return Step(partial(_convolve, conv, pick.launch), CONVOLUTION, pick.reason)
    return Step(partial(_conv_skip, conv, call.config.implementation), "conv_skip" if image is None else pick.label)


def takes_front(conv: nn.Conv2d | nn.Conv3d, call: Call) -> bool:
    """True if the convolution's step reads the frames before its input from a tensor of their own."""
    return kernel_size(conv) != (1, 1, 1) and _pick(conv, call, ANY_IMAGE).kernel.is_fused


def _pick(conv: nn.Conv2d | nn.Conv3d, call: Call, image: tuple[int, int]) -> kernels.Pick:
    """Return the kernel of a convolution of four frames of one video.

    Sizes only choose between our kernels, and `conv_skip` chooses again with a call's sizes.
    """
    kt, kh, kw = kernel_size(conv)
    return call.pick(
        kernels.CONV_SKIP,
        kernels.ConvSpec,
        shape=(1, 4, *image, conv.in_channels),
        weight_shape=(conv.out_channels, kt, kh, kw, conv.in_channels),
        upsample=isinstance(conv, nn.Conv2d) and kh > 1,
        interleave=2 if (kt, kh) == (3, 1) else 1,
        in_model=True,
    )


def _weight(conv: nn.Conv2d | nn.Conv3d) -> torch.Tensor:
    """Return a convolution's weight as kernels take it, [N, kt, kh, kw, C].

    They pack it at each call, which is fast beside the convolution. Packed copies of all weights would be a large part
    of a decode's memory.
    """
    return conv.weight.unflatten(1, (-1, *(1,) * (5 - conv.weight.dim()))).permute(0, 2, 3, 4, 1)


def kernel_size(conv: nn.Conv2d | nn.Conv3d) -> tuple[int, int, int]:
    """Return (kt, kh, kw). A convolution over images has kt = 1."""
    return (*(1,) * (3 - len(conv.kernel_size)), *conv.kernel_size)


def _conv_skip(conv, implementation, x, residual=None, **options):
    return kernels.conv_skip(x, _weight(conv), conv.bias, residual, **options, implementation=implementation)


def _convolve(conv, launch, x, residual=None, *, front=None, upsample=False, interleave=1):
    return launch(x, _weight(conv), conv.bias, residual, front, upsample, interleave)


def rms_norm(norm: nn.Module, call: Call) -> Step:
    """Return WanRMS_norm with SiLU or without: (x [B, T, H, W, C], *, silu=True) -> [B, T, H, W, C]."""
    pick = call.pick(RMS_NORM_SILU)
    return Step(partial(_rms_norm, pick.launch, norm), pick.label, pick.reason, pick=pick)


def _rms_norm(launch, norm, x, *, silu=True):
    return launch(x, norm.gamma.flatten(), silu)


def attention(channels: int, call: Call) -> Step:
    """Return one-head attention over each frame's positions: (q, k, v [B, S, 1, channels]) -> [B, S, 1, channels]."""
    pick, kernel = pick_attention(call, channels)
    return Step(partial(_attention, pick.launch), kernel, pick.reason)


def _attention(launch, q, k, v):
    return launch(q, k, v, None, None, None, q.shape[3] ** -0.5)
