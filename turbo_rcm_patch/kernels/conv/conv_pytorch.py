"""PyTorch's convolutions with the arguments of conv_skip."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .. import reference


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    front: torch.Tensor | None = None,
    upsample: bool = False,
    interleave: int = 1,
) -> torch.Tensor:
    """Return ``residual + (x ∗ W + b)`` by PyTorch's convolution, or by its linear for a window of one pixel.

    x: [B, T, H, W, C]. weight: [N · interleave, kt, kh, kw, C]. bias: [N · interleave] or None.
    residual: shaped like the result, or smaller (reference.repeat_residual), or None. It is added in place, which
        autograd would refuse.
    front: the frames before x, [B, kt − 1, H, W, C], or None. upsample: True to double x in height and width first.
    interleave: result frames per frame of x.
    """
    if front is not None:
        x = torch.cat((front, x), 1)
    if upsample:
        x = _nearest(x)
    (kt, kh, kw), weight = weight.shape[1:4], weight.contiguous()
    if (kt, kh, kw) == (1, 1, 1):
        y = F.linear(x, weight.flatten(1), bias)
    elif kt == 1:
        frames, weight = x.flatten(0, 1).permute(0, 3, 1, 2), weight[:, 0].permute(0, 3, 1, 2)
        y = F.conv2d(frames, weight, bias, padding=(kh // 2, kw // 2)).permute(0, 2, 3, 1)
        y = y.unflatten(0, x.shape[:2])
    else:
        x, weight = (tensor.permute(0, 4, 1, 2, 3) for tensor in (x, weight))
        y = F.conv3d(x, weight, bias, padding=(0, kh // 2, kw // 2)).permute(0, 2, 3, 4, 1)
    if interleave > 1:
        y = y.unflatten(-1, (interleave, -1)).movedim(-2, 2).flatten(1, 2)
    return y if residual is None else y.add_(reference.repeat_residual(residual, y.shape))


def _nearest(x: torch.Tensor) -> torch.Tensor:
    """Return x [B, T, H, W, C] enlarged to twice the height and width by nearest neighbour."""
    return x[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2, -1).flatten(4, 5).flatten(2, 3)
