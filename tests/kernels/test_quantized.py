"""The 8-bit formats: rounding, and rows of zeros."""

import pytest
import torch

from turbo_rcm_patch.kernels.quantized import FP8, INT8, LARGEST, quantize_reference, quantize_weight

FORMATS = (INT8, FP8)


@pytest.fixture
def x():
    return torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("format", FORMATS)
def test_values_are_the_nearest_that_the_format_has(x, format):
    """No neighbouring value of the format is nearer than the one chosen."""
    quantized = quantize_reference(x, format)
    scaled = x / quantized.scale[..., None]
    every = torch.arange(256, dtype=torch.uint8).view(format).float()
    every = every[every.isfinite() & (every.abs() <= LARGEST[format])]
    nearest = (scaled[..., None] - every).abs().amin(-1)
    torch.testing.assert_close((scaled - quantized.values.float()).abs(), nearest, rtol=0, atol=1e-5)


@pytest.mark.parametrize("format", FORMATS)
def test_the_largest_of_a_row_uses_the_whole_range(x, format):
    assert torch.equal(quantize_reference(x, format).values.float().abs().amax(-1), torch.full((2, 5), LARGEST[format]))


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_of_zeros_is_zeros(format):
    quantized = quantize_reference(torch.zeros(3, 8), format, with_norm=True)
    assert quantized.scale.min() > 0
    assert not quantized.dequantize().any()
    assert not quantized.norm.any()


@pytest.mark.parametrize("format", FORMATS)
def test_norms_are_those_of_what_is_kept(x, format):
    quantized = quantize_reference(x, format, with_norm=True)
    torch.testing.assert_close(quantized.norm, quantized.dequantize().norm(dim=-1))
    weight = quantize_weight(x[0], format)
    torch.testing.assert_close(weight.norm, weight.dequantize().norm(dim=-1).max())


@pytest.mark.parametrize(("format", "limit"), [(INT8, 0.012), (FP8, 0.028)])
def test_the_error_of_normal_rows_is_the_formats(format, limit):
    """1 and 2.6 percent: a row of 1536 normal values is 3.5 standard deviations wide, which int8 cuts in 127 steps."""
    x = torch.randn(64, 1536, generator=torch.Generator().manual_seed(1))
    error = (quantize_reference(x, format).dequantize() - x).norm() / x.norm()
    assert limit / 2 < error < limit


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_a_gpu_rounds_to_the_same_bits(format):
    x = torch.randn(500, 96).bfloat16()  # of which many are half way between two values
    ours, theirs = quantize_reference(x.cuda(), format), quantize_reference(x, format)
    assert torch.equal(ours.scale.cpu(), theirs.scale)
    assert torch.equal(ours.values.cpu().float(), theirs.values.float())


def test_rows_without_elements():
    quantized = quantize_reference(torch.zeros(2, 0), INT8, with_norm=True)
    assert (quantized.values.shape, quantized.scale.shape, quantized.norm.tolist()) == ((2, 0), (2,), [0, 0])


def test_quantize_weight_names_what_it_accepts():
    with pytest.raises(ValueError, match=r"format=torch.float32; accepted are torch.int8, torch.float8_e4m3fn"):
        quantize_weight(torch.ones(4, 8), torch.float32)
    for shape in ((0, 8), (4, 0), (8,)):
        with pytest.raises(ValueError, match=r"it must be \[N, K\] with N and K at least 1"):
            quantize_weight(torch.ones(shape), INT8)
    for dtype in (torch.int32, torch.complex64):
        with pytest.raises(ValueError, match=f"weight is {dtype}; it must be floating-point"):
            quantize_weight(torch.ones(4, 8, dtype=dtype), INT8)
