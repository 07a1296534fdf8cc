"""8-bit operands, and how far from the oracle a kernel's sums of them may be."""

import torch

from tests.oracle import relative_error
from turbo_rcm_patch.kernels.quantized import (
    FP8,
    INT8,
    LARGEST,
    Quantized,
    QuantizedWeight,
    quantize_reference,
    quantize_weight,
)
from turbo_rcm_patch.tiers import EXACT

FORMATS = (INT8, FP8)
# Tensor cores of sm_89 and sm_90 add products of e4m3, 32 at a time. They keep 13 bits of the sums behind the first. So
# each time at most a unit of the last bit is lost.
FP8_STEP, FP8_LOSS = 32, 2.0**-13


def quantized(*shape: int, format: torch.dtype, device="cpu", scale: float = 1.0) -> Quantized:
    return quantize_reference(scale * torch.randn(shape).to(device), format, with_norm=True)


def quantized_weight(N: int, K: int, format: torch.dtype, device="cpu") -> QuantizedWeight:
    return quantize_weight(K**-0.5 * torch.randn(N, K).to(device), format)


def oracle_of(a: Quantized, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """``a Wᵀ + b`` in fp64, of the operands as they are quantised."""
    wide = (q.values.double() * q.scale.double()[..., None] for q in (a, weight))
    return torch.nn.functional.linear(*wide, None if bias is None else bias.double())


def assert_sums_are_right(actual, reference, oracle, format, K):
    """Like `assert_no_worse`; sums of e4m3 may also lose what K/32 additions lose."""
    lost = FP8_LOSS * -(-K // FP8_STEP) if format == FP8 and actual.is_cuda else 0.0
    limit = EXACT.limits.allowed(relative_error(reference, oracle), actual.dtype) + lost
    error = relative_error(actual, oracle)
    assert error <= limit, f"relative error {error:.3e} > {limit:.3e}"


def assert_same(actual, expected, x):
    """Both are x quantised. The kernel multiplies by the inverse where the reference divides: what is half way between
    two values of the format may be rounded either way."""
    assert (actual.values.shape, actual.values.dtype) == (expected.values.shape, expected.values.dtype)
    torch.testing.assert_close(actual.scale, expected.scale, rtol=1e-6, atol=0)
    ours, theirs = actual.values.double(), expected.values.double()
    scaled = x.detach().double() / expected.scale.detach().double()[..., None]
    differ = ours != theirs
    assert ((scaled - (ours + theirs) / 2).abs()[differ] <= 1e-6 * LARGEST[actual.format]).all()
    if expected.norm is not None:
        own = actual.dequantize(torch.float64).norm(dim=-1)
        torch.testing.assert_close(actual.norm.double(), own, rtol=1e-5, atol=0)


def assert_rounded_once(result: Quantized, wide: torch.Tensor):
    """Assert that a Quantized is an attention's result [B, S, H, D] in e4m3, with one scale per sample that bounds it.

    e4m3 rounds by 1/16 at most, and values below 2^-6 of the scale by 2^-10 of it. So channels err as in rows that have
    scales of their own, on which values of any size have more than enough range.
    """
    wide = wide.flatten(2).float()
    assert (result.format, result.values.shape, result.scale.shape) == (FP8, wide.shape, wide.shape[:2])
    assert (result.scale == result.scale[:, :1]).all()
    assert result.values.float().abs().max() < LARGEST[FP8]  # nothing is clamped
    error = (result.dequantize() - wide).abs()
    assert (error <= wide.abs() / 15 + result.scale[..., None] * 2**-9).all()
    if wide[..., 0].numel() >= 100:  # fewer values of a channel err by chance
        of_rows = quantize_reference(wide, FP8).dequantize() - wide
        ours, rows = (x.norm(dim=(0, 1)) / wide.norm(dim=(0, 1)) for x in (error, of_rows))
        assert ours.median() <= 1.1 * rows.median()
