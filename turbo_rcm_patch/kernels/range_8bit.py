"""Activations in int8 with one range for a whole tensor, and their definition in plain torch.

    v ≈ (q − zero) · step        step = (largest + below) / 255, zero = ⌊below / step + ½⌋ − 128

A range is [2] in fp32: the largest value, and the negated smallest. Both are at least 0, so that 0 itself is exact: it
is stored as `zero`. SiLU's values begin at −0.28, so a symmetric range would waste nearly half of the 256 values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from . import reference
from .quantized import TINY as _TINY

TINY = tl.constexpr(_TINY)
EMPTY = -128  # how zero is stored before anything was measured


@triton.jit
def step_and_zero(largest, below):
    step = tl.maximum((largest + below) / 255, TINY, propagate_nan=tl.PropagateNan.ALL)
    return step, tl.floor(below / step + 0.5) - 128


def step_and_zero_reference(bounds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the step and the zero of a range [2], both 0-d fp32."""
    largest, below = bounds
    step = ((largest + below) / bounds.new_full((), 255)).clamp_min(_TINY)
    return step, (below / step + 0.5).floor() - 128


def dequantize(values: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values that int8 values stand for."""
    step, zero = step_and_zero_reference(bounds)
    return (values.float() - zero) * step


def measure_norm_silu(x: torch.Tensor, weight: torch.Tensor, divisor: torch.Tensor, bounds: torch.Tensor) -> None:
    """Widen a range, in place, so that it also holds ``silu(RMSNorm(x)) / divisor``."""
    v = _normed(x, weight, divisor)
    bounds.copy_(torch.maximum(bounds, torch.stack((v.amax(), -v.amin()))))


def quantize_norm_silu(
    x: torch.Tensor, weight: torch.Tensor, divisor: torch.Tensor, bounds: torch.Tensor
) -> torch.Tensor:
    """Return ``silu(RMSNorm(x)) / divisor`` in int8, with a pixel of zero around each image."""
    v = F.pad(_normed(x, weight, divisor), (0, 0, 1, 1, 1, 1))
    step, zero = step_and_zero_reference(bounds)
    return _rounded(v / step + zero)


def requantize(values: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> None:
    """Move int8 values of a range to another range that holds it, in place."""
    (old_step, old_zero), (new_step, new_zero) = map(step_and_zero_reference, (old, new))
    values.copy_(_rounded((values.float() - old_zero) * (old_step / new_step) + new_zero))


def combined(bounds: torch.Tensor, scale: torch.Tensor, total: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return [2, N] fp32: what the sums of a convolution with x in this range are multiplied by, and what is added.

    scale, total: of its Weight8bit. bias: [N].
    """
    step, zero = step_and_zero_reference(bounds)
    factor = step * scale
    return torch.stack((factor, bias.float() - zero * factor * total))


def quantize_for_convolution(
    x: torch.Tensor, weight: torch.Tensor, divisor: torch.Tensor,
    before: torch.Tensor, bounds: torch.Tensor, front: torch.Tensor | None,
    scale: torch.Tensor, total: torch.Tensor, bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return `quantize_norm_silu` and `combined`, and `requantize` the frames before x, if there are any."""
    if front is not None:
        requantize(front, before, bounds)
    return quantize_norm_silu(x, weight, divisor, bounds), combined(bounds, scale, total, bias)


def _normed(x: torch.Tensor, weight: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    return reference.rms_norm_silu(x.float(), weight.float()) / divisor


def _rounded(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.round().clamp(-128, 127).to(torch.int8)
