"""8-bit tensors: which formats there are, what a quantised matrix consists of, and its definition in plain torch.

    x ≈ values · scale        one scale per row: per token of an activation, per output channel of a weight

e4m3 has a sign, 4 bits of exponent and 3 of mantissa and no infinity (Micikevicius et al. 2022, FP8 Formats for Deep
Learning): its error is relative, 2.6 % of each value. int8's is the same for all values of a row: 0.8 % of a normal
row's norm, more where single values stand out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

INT8, FP8 = torch.int8, torch.float8_e4m3fn
LARGEST = {INT8: 127.0, FP8: 448.0}  # the largest magnitude that values use
FP8_CAPABILITY = (8, 9)
TINY = 1e-30  # scales are no smaller: a row of zeros has values, and divides nothing by 0


class Quantized(NamedTuple):
    """A tensor x [..., K] in 8 bits.

    values: [..., K] int8 or float8_e4m3fn. scale: [...] fp32, positive. norm: [...] fp32, the L2 norm of each row of
    ``values · scale``, or None where nobody asked for it: with it a linear bounds its results before it has them.
    """

    values: torch.Tensor
    scale: torch.Tensor
    norm: torch.Tensor | None = None

    @property
    def format(self) -> torch.dtype:
        return self.values.dtype

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """``values · scale``, computed in fp32."""
        return (self.values.float() * self.scale[..., None]).to(dtype)


class QuantizedWeight(NamedTuple):
    """A linear's weight [N, K] in 8 bits.

    values: [N, K] int8 or float8_e4m3fn. scale: [N] fp32. norm: [] or [1] fp32, the largest L2 norm of
    a row; None if no result in 8 bits follows.
    """

    values: torch.Tensor
    scale: torch.Tensor
    norm: torch.Tensor | None = None

    @property
    def format(self) -> torch.dtype:
        return self.values.dtype

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """``values · scale``, computed in fp32."""
        return (self.values.float() * self.scale[:, None]).to(dtype)


def round_to(scaled: torch.Tensor, format: torch.dtype) -> torch.Tensor:
    """x / scale, within fp32, to the nearest value of a format; beyond its largest, that."""
    limit = LARGEST[format]
    if format == INT8:
        scaled = scaled.round()
    return scaled.clamp(-limit, limit).to(format)


def quantize_reference(x: torch.Tensor, format: torch.dtype, with_norm: bool = False) -> Quantized:
    """x [..., K], each row divided such that its largest magnitude is the format's."""
    wide = x.float()
    largest = wide.abs().amax(-1)
    # By a tensor: torch divides by a number on a GPU as it multiplies by the inverse, and not on the CPU.
    scale = (largest / largest.new_full((), LARGEST[format])).clamp_min(TINY)
    values = round_to(wide / scale[..., None], format)
    norm = values.float().norm(dim=-1) * scale if with_norm else None
    return Quantized(values, scale, norm)


def quantize_weight(weight: torch.Tensor, format: torch.dtype) -> QuantizedWeight:
    """A weight [N, K] in a format, on its own device."""
    values, scale, norm = quantize_reference(weight.detach(), format, with_norm=True)
    return QuantizedWeight(values, scale, norm.amax())
