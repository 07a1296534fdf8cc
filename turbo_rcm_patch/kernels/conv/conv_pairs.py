"""conv_pairs: a causal 3×3×3 convolution of pairs of frames, with four products for two frames in place of six.

Winograd's F(2, 3) (Lavin and Gray 2015) along the frames. With the frames d₀ to d₃ that two frames of the result read,
and the weight's frames g₀ to g₂:

    y₀ = (d₀ − d₂) ∗ g₀ + m₁ + m₂          m₁ = (d₁ + d₂) ∗ (g₀ + g₁ + g₂) / 2
    y₁ = (d₁ − d₃) ∗ −g₂ + m₁ − m₂         m₂ = (d₂ − d₁) ∗ (g₀ − g₁ + g₂) / 2

    planes    the sums of frames, in fp16: d₁ + d₂, d₂ − d₁, d₀ − d₂, d₁ − d₃. rms_norm_silu_pairs writes them.
    weight    the sums of the weight's frames that multiply them, in fp16, from conv_pairs_weight.py.

The sums of products are in fp32, in which the residual and the bias are added, and rounded once to bf16. The sums of
frames and of weights are rounded to fp16. A result errs 1.016 times as much as an exact one that is rounded to bf16.
With a norm that is rounded to bf16, as conv_skip takes it, it errs 1.25 times as much. No gradient.

A norm's result is at most √C times the norm's weight, and the planes add two of them. So they fit in fp16 for weights
up to 1000 (1024 channels) or 2300 (192 channels).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..choice.registry import GLUON, REFERENCE, Kernel, Op, why_not_reference
from ..dispatch import kernels_op
from . import conv_pairs_sm90
from .conv_skip import ConvSpec, why_not_fused

PAIRS = f"{GLUON}, pairs of frames"


def conv_pairs_reference(
    planes: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
    frames: int, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """The convolution of planes in plain torch."""
    B, pairs = planes.shape[:2]
    images = planes.transpose(1, 2).flatten(1, 2).flatten(0, 1).permute(0, 3, 1, 2).float()
    images = images.unflatten(0, (B, 4, pairs)).transpose(0, 1).flatten(1, 2)
    windows = weight.float().unflatten(2, (3, 3)).permute(1, 0, 4, 2, 3)
    m1, m2, m0, m3 = (F.conv2d(image, window, padding=1) for image, window in zip(images, windows, strict=True))
    y = torch.stack((m0 + m1 + m2, m1 - m2 + m3), 1).unflatten(0, (B, pairs)).flatten(1, 2)
    y = y.permute(0, 1, 3, 4, 2)[:, :frames]
    y = y if bias is None else y + bias.float()
    return (y if residual is None else residual.float() + y).to(dtype)


@kernels_op("conv_pairs")
def _conv_pairs(
    planes: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    frames: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    B, pairs, _, H, W, _ = planes.shape
    return planes.new_empty((B, 2 * pairs, H, W, len(weight)), dtype=dtype)[:, :frames]


def _launch_gluon(planes, weight, bias, residual, frames, dtype):
    B, pairs, _, H, W, _ = planes.shape
    out = planes.new_empty((B, 2 * pairs, H, W, len(weight)), dtype=dtype)
    residual = None if residual is None else residual.contiguous()
    conv_pairs_sm90.launch(planes, weight, None if bias is None else bias.contiguous(), residual, out)
    return out[:, :frames]


def _why_not_gluon(spec: ConvSpec) -> str | None:
    return why_not_fused(spec) or conv_pairs_sm90.why_not(spec.device, spec.dtype, spec.shape, spec.weight_shape)


# The spec's shape is that of the norm's input, [B, T, H, W, C]. Arguments: the planes, the weight, the bias [N] or
# None, the residual [B, T, H, W, N] or None, T, and the result's dtype.
CONV_PAIRS = Op(
    "conv_pairs",
    (
        Kernel(PAIRS, _why_not_gluon, _conv_pairs.launch(PAIRS, _launch_gluon)),
        Kernel(REFERENCE, why_not_reference, conv_pairs_reference, is_fused=False),
    ),
)
