import math

import pytest
import torch

from turbo_rcm_patch.bench.metrics import Difference, cosine, frame_psnr, psnr, relative_l1, relative_l2


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
    assert frame_psnr(actual, reference, cap=10.0).max() == 10.0
