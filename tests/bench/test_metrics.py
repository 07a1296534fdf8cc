import math

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import sliding_window_view

from turbo_rcm_patch.bench.metrics import Difference, cosine, frame_psnr, psnr, relative_l1, relative_l2, ssim


def test_metrics_of_a_known_pair():
    reference = torch.tensor([3.0, 4.0])
    actual = torch.tensor([4.0, 3.0])
    assert relative_l2(actual, reference) == pytest.approx(math.sqrt(2) / 5)
    assert relative_l1(actual, reference) == pytest.approx(2 / 7)
    assert cosine(actual, reference) == pytest.approx(24 / 25)
    assert psnr(actual, reference, peak=10.0) == pytest.approx(20.0)


@pytest.mark.parametrize("relative", [relative_l1, relative_l2])
def test_relative_errors_are_of_the_reference_not_of_the_actual(relative):
    assert relative(torch.full((3,), 3.0), torch.ones(3)) == pytest.approx(2.0)


def test_equal_tensors_are_identical_even_when_zero():
    for relative in (relative_l1, relative_l2):
        assert relative(torch.zeros(3), torch.zeros(3)) == 0
        assert relative(torch.ones(3), torch.zeros(3)) == math.inf
    assert psnr(torch.ones(2, 3), torch.ones(2, 3)) == math.inf
    assert Difference.of_frames(torch.ones(2, 3), torch.ones(2, 3)).psnr_db is None


def ssim_by_definition(x, y):
    """SSIM of two images [H, W] in NumPy: every window by itself, with the weights of Wang et al. 2004."""
    offsets = np.arange(11) - 5
    weights = np.exp(-(offsets[:, None] ** 2 + offsets[None] ** 2) / (2 * 1.5**2))
    weights /= weights.sum()
    values = []
    for a, b in zip(*(sliding_window_view(image, (11, 11)).reshape(-1, 11, 11) for image in (x, y)), strict=True):
        mean_a, mean_b = (weights * a).sum(), (weights * b).sum()
        var_a, var_b = (weights * (a - mean_a) ** 2).sum(), (weights * (b - mean_b) ** 2).sum()
        covariance = (weights * (a - mean_a) * (b - mean_b)).sum()
        luminance = (2 * mean_a * mean_b + 0.01**2) / (mean_a**2 + mean_b**2 + 0.01**2)
        values.append(luminance * (2 * covariance + 0.03**2) / (var_a + var_b + 0.03**2))
    return np.mean(values)


@pytest.mark.parametrize("noise", [0.02, 0.3])
def test_ssim_is_what_the_paper_defines(noise):
    generator = torch.Generator().manual_seed(0)
    reference = torch.rand(2, 3, 13, 17, 3, generator=generator)
    actual = (0.9 * reference + noise * torch.rand(reference.shape, generator=generator)).clamp(0, 1)
    expected = [
        ssim_by_definition(actual[b, f, ..., c].double().numpy(), reference[b, f, ..., c].double().numpy())
        for b in range(2)
        for f in range(3)
        for c in range(3)
    ]
    assert ssim(actual, reference) == pytest.approx(np.mean(expected), abs=1e-10)
    assert 0.1 < ssim(actual, reference) < 0.999
    assert Difference.of_frames(actual, reference).ssim == ssim(actual, reference)
    assert ssim(reference, reference) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.gpu
def test_gpu_ssim_is_the_same():
    reference = torch.rand(2, 3, 33, 47, 3, generator=torch.Generator().manual_seed(0))
    actual = 0.9 * reference
    expected = ssim(actual, reference)
    assert Difference.of_frames(actual, reference, torch.device("cuda")).ssim == pytest.approx(expected, abs=1e-12)


def test_ssim_of_frames_smaller_than_its_window():
    frames = torch.rand(1, 2, 10, 64, 3)
    assert Difference.of_frames(frames, frames).ssim is None


def test_nan_never_passes_for_equal():
    actual, reference = torch.tensor([math.nan, 1.0]), torch.ones(2)
    assert all(math.isnan(metric(actual, reference)) for metric in (relative_l1, relative_l2, cosine, psnr))


def test_low_precision_inputs_are_compared_in_fp64():
    reference = torch.full(
        (1 << 16,), 300.0, dtype=torch.float16
    )  # the squared norm overflows fp16 and bf16 sums stall
    assert cosine(reference, reference) == pytest.approx(1.0, abs=1e-12)
    assert relative_l2(reference * 2, reference) == pytest.approx(1.0, abs=1e-12)


def test_frame_psnr_is_per_frame_and_capped():
    reference = torch.rand(2, 3, 3, 4, 5)
    actual = reference.clone()
    actual[0, 1] += 0.1
    actual[1, 2, 0] -= 0.1
    actual[1, 0] += 1e-6
    expected = torch.tensor([[100.0, 20.0, 100.0], [100.0, 100.0, 20 + 10 * math.log10(3)]], dtype=torch.float64)
    torch.testing.assert_close(frame_psnr(actual, reference), expected, atol=1e-4, rtol=0)
