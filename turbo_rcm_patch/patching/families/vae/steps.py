"""The steps of the decoder, each with the kernel that does it and why that is not ours.

Activations are channels-last, [B, T, H, W, C]. Modules are plain (plain.py decides), and read when a step runs.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from .... import kernels
from ....kernels import reference
from ...steps.exact import ALONE, choose_attention
from ...steps.plan import LINEAR, REFERENCE, Call, Step

CONVOLUTION = "PyTorch convolution"


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
        return Step(partial(_convolution, conv), LINEAR, ALONE)
    implementation, reason = call.choose()
    if reason is None and implementation == "auto":
        reason = kernels.why_conv(call.device, call.dtype)
    if reason is not None:
        return Step(partial(_convolution, conv), CONVOLUTION, reason)
    kernel = "conv_skip" if image is None else _kernel_name(conv, implementation, call, image)
    return Step(partial(_conv_skip, conv, implementation), kernel)


def takes_front(conv: nn.Conv2d | nn.Conv3d, call: Call) -> bool:
    """Whether the convolution's step reads the frames before its input from a tensor of their own."""
    return convolution(conv, call).kernel not in (CONVOLUTION, LINEAR)


def _kernel_name(conv: nn.Conv2d | nn.Conv3d, implementation: str, call: Call, image: tuple[int, int]) -> str:
    """The kernel of a convolution of one video's four frames."""
    kt, kh, kw = kernel_size(conv)
    shape = 1, 4, *image, conv.in_channels
    options = {"upsample": isinstance(conv, nn.Conv2d) and kh > 1, "interleave": 2 if (kt, kh) == (3, 1) else 1}
    weight_shape = conv.out_channels, kt, kh, kw, conv.in_channels
    return kernels.conv_kernel(implementation, call.device, call.dtype, shape, weight_shape, **options)


def _weight(conv: nn.Conv2d | nn.Conv3d) -> torch.Tensor:
    """A convolution's weight as kernels take it, [N, kt, kh, kw, C]. They pack it at each call, which takes little of
    what the convolution takes: kept, all of them would be a large part of a decode's memory."""
    return conv.weight.unflatten(1, (-1, *(1,) * (5 - conv.weight.dim()))).permute(0, 2, 3, 4, 1)


def kernel_size(conv: nn.Conv2d | nn.Conv3d) -> tuple[int, int, int]:
    """kt, kh, kw; an image's convolution has kt = 1."""
    return (*(1,) * (3 - len(conv.kernel_size)), *conv.kernel_size)


def _conv_skip(conv, implementation, x, residual=None, **options):
    return kernels.conv_skip(x, _weight(conv), conv.bias, residual, **options, implementation=implementation)


def _convolution(conv, x, residual=None, *, upsample=False, interleave=1):
    if upsample:
        x = _nearest(x)
    (kt, kh, kw), weight = kernel_size(conv), _weight(conv).contiguous()
    if (kt, kh, kw) == (1, 1, 1):
        y = F.linear(x, weight.flatten(1), conv.bias)
    elif kt == 1:
        frames, weight = x.flatten(0, 1).permute(0, 3, 1, 2), weight[:, 0].permute(0, 3, 1, 2)
        y = F.conv2d(frames, weight, conv.bias, padding=(kh // 2, kw // 2)).permute(0, 2, 3, 1)
        y = y.unflatten(0, x.shape[:2])
    else:
        x, weight = (tensor.permute(0, 4, 1, 2, 3) for tensor in (x, weight))
        y = F.conv3d(x, weight, conv.bias, padding=(0, kh // 2, kw // 2)).permute(0, 2, 3, 4, 1)
    if interleave > 1:
        y = y.unflatten(-1, (interleave, -1)).movedim(-2, 2).flatten(1, 2)
    return y if residual is None else y.add_(reference.repeat_residual(residual, y.shape))


def _nearest(x: torch.Tensor) -> torch.Tensor:
    """x [B, T, H, W, C] at twice the height and width."""
    return x[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2, -1).flatten(4, 5).flatten(2, 3)


def rms_norm(norm: nn.Module, call: Call) -> Step:
    """WanRMS_norm and, where asked, SiLU: (x [B, T, H, W, C], *, silu=True) -> [B, T, H, W, C]."""
    implementation, reason = call.choose()
    return Step(partial(_rms_norm, norm, implementation), "Triton" if reason is None else REFERENCE, reason)


def _rms_norm(norm, implementation, x, *, silu=True):
    return kernels.rms_norm_silu(x, norm.gamma.flatten(), silu=silu, implementation=implementation)


def attention(channels: int, call: Call) -> Step:
    """Attention of one head over the positions of each frame: (q, k, v [B, S, 1, channels]) -> [B, S, 1, channels]."""
    implementation, reason = choose_attention(call, channels, with_backward=False)
    if reason is None and channels > kernels.MAX_HEAD_DIM:
        implementation, reason = "torch", f"a head of {channels} channels"
    kernel = kernels.attention_kernel_name(implementation, call.device, call.dtype, channels)
    return Step(partial(kernels.attention, implementation=implementation), kernel, reason)
