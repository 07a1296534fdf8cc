"""conv_skip in 8 bits: ``residual + (x ∗ W + b)`` for x and W in int8, with sums in int32.

    x ≈ (q − zero) · step · divisor       q [B, T, H + 2, W + 2, C], from rows/rms_norm_silu_8bit.py
    W · divisor ≈ values · scale          one scale for each channel of the result
    x ∗ W ≈ step · scale · (q ∗ values) − step · scale · zero · total

The total is the sum of a channel's values, so that the last term is one number for each channel. x is stored with a
pixel of zero around each image, so that this holds at the edges too. b, residual and the result have the model's dtype.
The kernels are those of conv_skip.

e4m3 errs more than twice as much, is summed with 14 bits on sm_90, and needs sm_89 (docs/designs.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .. import range_8bit, reference
from ..choice.registry import GLUON, PORTABLE, REFERENCE, Kernel, Op, why_not_ours, why_not_reference
from ..dispatch import kernels_op
from ..launch import launch_kernel
from ..quantized import INT8, quantize_reference
from ..sizes import cdiv
from . import conv_portable, conv_sm90
from .conv_skip import ConvSpec

ALIGNED = 16  # channels that TMA and vectors of 16 bytes need
CHANNELS = 128  # for which a program combines the scales
ROWS = 64  # of a weight that are quantised at a time


class Weight8bit(NamedTuple):
    """A convolution's weight in 8 bits.

    values: [N, kt, kh, kw, C] int8. scale: [N] fp32. total: [N] int32, the sum of each row's values.
    """

    values: torch.Tensor
    scale: torch.Tensor
    total: torch.Tensor


def channel_divisor(weight: torch.Tensor) -> torch.Tensor:
    """Return the divisor [C], fp32, of the channels that a norm with this weight [C] gives: √|weight|.

    So channels with a large gain take less of the range that all share, and their part of the weight takes more.
    """
    gain = weight.float().abs()
    return gain.clamp_min(gain.amax() / 256).clamp_min(1e-12).sqrt()


def quantize_conv_weight(weight: torch.Tensor, divisor: torch.Tensor) -> Weight8bit:
    """Quantise a weight [N, kt, kh, kw, C] with any strides, multiplied by a divisor [C]."""
    values = weight.new_empty(weight.shape, dtype=INT8)
    scales, totals = [], []
    for rows, out in zip(weight.split(ROWS), values.split(ROWS), strict=True):
        quantized = quantize_reference((rows.float() * divisor).flatten(1), INT8)
        out.copy_(quantized.values.view(out.shape))
        scales.append(quantized.scale)
        totals.append(quantized.values.sum(1, dtype=torch.int32))
    return Weight8bit(values, torch.cat(scales), torch.cat(totals))


def convolve_reference(
    x: torch.Tensor, bounds: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, total: torch.Tensor,
    bias: torch.Tensor, residual: torch.Tensor | None, front: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """``residual + (x ∗ W + b)`` in plain torch: x and front dequantised, and convolved in fp32."""
    inner = (slice(None), slice(None), slice(1, -1), slice(1, -1))
    x, front = (None if part is None else range_8bit.dequantize(part[inner], bounds) for part in (x, front))
    weight = values.float() * scale[:, None, None, None, None]
    residual = None if residual is None else residual.float()
    return reference.conv_skip(x, weight, bias.float(), residual, front).to(bias.dtype)


@kernels_op("conv_8bit")
def _conv_8bit(
    x: torch.Tensor,
    bounds: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    total: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor | None,
    front: torch.Tensor | None,
) -> torch.Tensor:
    B, T, H, W, _ = x.shape
    T = T if front is not None else T - values.shape[1] + 1
    return bias.new_empty(B, T, H - 2, W - 2, len(values))


def _launch_gluon(x, bounds, values, scale, total, bias, residual, front):
    """Launch the kernel for sm_90, or the portable one if operands are not aligned. Takes `_conv_8bit`'s arguments."""
    return _launch(conv_sm90.launch, x, bounds, values, scale, total, bias, residual, front)


def _launch_portable(x, bounds, values, scale, total, bias, residual, front):
    return _launch(conv_portable.launch, x, bounds, values, scale, total, bias, residual, front)


def _launch(launch, x, bounds, values, scale, total, bias, residual, front):
    B, T, H, W, _ = x.shape
    out = bias.new_empty(B, T if front is not None else T - values.shape[1] + 1, H - 2, W - 2, len(values))
    residual = None if residual is None else residual.contiguous()
    if launch is conv_sm90.launch and not conv_sm90.fits_tma(x, front, values, residual):
        launch = conv_portable.launch
    factor, offset = (torch.empty_like(scale) for _ in range(2))
    operands = bounds, scale, total, bias.contiguous(), factor, offset, len(scale)
    launch_kernel(_combine_kernel, (cdiv(len(scale), CHANNELS),), *operands, BLOCK=CHANNELS, num_warps=1)
    launch(x, front, values, offset, residual, out, False, 1, factor)
    return out


@triton.jit
def _combine_kernel(bounds, scale, total, bias, factor, offset, N, BLOCK: tl.constexpr):
    """Write what the sums are multiplied by, and what is added then."""
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < N
    step, zero = range_8bit.step_and_zero(tl.load(bounds), tl.load(bounds + 1))
    of_channel = step * tl.load(scale + channels, mask=mask)
    added = tl.load(bias + channels, mask=mask).to(tl.float32)
    tl.store(factor + channels, of_channel, mask=mask)
    tl.store(offset + channels, added - zero * of_channel * tl.load(total + channels, mask=mask), mask=mask)


def _why_not(spec: ConvSpec) -> str | None:
    reason = why_not_ours(spec)
    if reason is None and spec.shape[-1] % ALIGNED:
        return f"channels that are no multiple of {ALIGNED}"
    return reason


def _why_not_gluon(spec: ConvSpec) -> str | None:
    return _why_not(spec) or conv_sm90.why_not(spec.device, spec.dtype, spec.shape, spec.weight_shape)


# The spec's dtype is the result's, and its shape x's without the frames before it and without the pixels around images.
# Arguments: x, its range, the parts of a Weight8bit, bias [N], residual or None, front or None, as of conv_skip.
CONV_8BIT = Op(
    "conv_8bit",
    (
        Kernel(GLUON, _why_not_gluon, _conv_8bit.launch(GLUON, _launch_gluon)),
        Kernel(PORTABLE, _why_not, _conv_8bit.launch(PORTABLE, _launch_portable)),
        Kernel(REFERENCE, why_not_reference, convolve_reference, is_fused=False),
    ),
)
