"""8-bit tensors: the formats, the parts of a quantised matrix, and its definition in plain torch.

    x ≈ values · scale        one scale per row: per token of an activation, per output channel of a weight

e4m3 has a sign, 4 bits of exponent, 3 bits of mantissa and no infinity (Micikevicius et al. 2022, FP8 Formats for Deep
Learning). Its error is relative: 2.6 % of each value. The error of int8 is the same for all values of a row: 0.8 % of
the norm of a normally distributed row, and more if the row has outliers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

INT8, FP8 = torch.int8, torch.float8_e4m3fn
LARGEST = {INT8: 127.0, FP8: 448.0}  # the largest magnitude that values use
FP8_CAPABILITY = (8, 9)
TINY = 1e-30  # the smallest scale, so that a row of zeros does not divide by 0


class Quantized(NamedTuple):
    """A tensor x [..., K] in 8 bits.

    values: [..., K] int8 or float8_e4m3fn. scale: [...] fp32, positive.
    norm: [...] fp32, the L2 norm of each row of ``values · scale``, or None if it was not asked for. A linear bounds
        its results with it before it computes them.
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
    a row, or None if no result in 8 bits needs it.
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


def check_format(op: str, format: torch.dtype) -> None:
    """Raise ValueError unless the format is INT8 or FP8."""
    if format not in LARGEST:
        raise ValueError(f"{op}: format={format}; accepted are {', '.join(map(str, LARGEST))}.")


def round_to(scaled: torch.Tensor, format: torch.dtype) -> torch.Tensor:
    """Round ``x / scale`` (fp32) to the nearest value of a format, and clamp it to the format's largest magnitude."""
    limit = LARGEST[format]
    if format == INT8:
        scaled = scaled.round()
    return scaled.clamp(-limit, limit).to(format)


def quantize_reference(x: torch.Tensor, format: torch.dtype, with_norm: bool = False) -> Quantized:
    """Quantise x [..., K]. Each row's scale maps its largest magnitude to the format's largest."""
    wide = x.float()
    largest = wide.abs().amax(-1) if x.shape[-1] > 0 else wide.new_zeros(x.shape[:-1])
    # Divide by a tensor: on a GPU, torch replaces division by a Python number with a product, which rounds differently.
    scale = (largest / largest.new_full((), LARGEST[format])).clamp_min(TINY)
    values = round_to(wide / scale[..., None], format)
    norm = values.float().norm(dim=-1) * scale if with_norm else None
    return Quantized(values, scale, norm)


def quantize_weight(weight: torch.Tensor, format: torch.dtype) -> QuantizedWeight:
    """Quantise a weight [N, K] to a format, on the weight's device.

    Raises ValueError for another format, and for a weight of another shape, without elements or not floating-point.
    """
    check_format("quantize_weight", format)
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(f"quantize_weight: weight is {list(weight.shape)}; it must be [N, K] with N and K at least 1.")
    if not weight.is_floating_point():
        raise ValueError(f"quantize_weight: weight is {weight.dtype}; it must be floating-point.")
    values, scale, norm = quantize_reference(weight.detach(), format, with_norm=True)
    return QuantizedWeight(values, scale, norm.amax())
