"""Doubling of pixels that is folded into a convolution's weight, against the convolution of doubled pixels."""

import pytest
import torch
import torch.nn.functional as F

from tests.oracle import assert_no_worse, relative_error, torch_device
from turbo_rcm_patch.kernels import conv_skip, reference
from turbo_rcm_patch.kernels.conv.conv_fold import fold_input, fold_weight, folds

PHASES = [(y, x) for y in (0, 1) for x in (0, 1)]


@pytest.mark.parametrize(("N", "C"), [(3, 1), (5, 40), (2, 300)])
@pytest.mark.parametrize("packed", [True, False])
def test_each_phase_has_a_window_of_two_rows_and_columns(N, C, packed, device):
    x = torch.randn(2, 1, 4, 5, C, dtype=torch.float64)
    weight = torch.randn(N, C, 1, 3, 3).permute(0, 2, 3, 4, 1)  # a module's memory
    if packed:
        weight = weight.contiguous()
    folded = fold_weight(weight.to(torch_device(device))).cpu().double()
    assert folded.shape == (N, 4, 2, 2, C)
    expected = reference.conv_skip(x, weight.double(), None, None, upsample=True)
    images = x[:, 0].permute(0, 3, 1, 2)
    for phase, (y, column) in enumerate(PHASES):
        around = F.pad(images, (1 - column, column, 1 - y, y))  # an even row reads the one before it
        found = F.conv2d(around, folded[:, phase].permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        assert relative_error(found, expected[:, 0, y::2, column::2]) < 1e-7


def test_a_weight_in_bf16_is_folded_to_fp16_and_multiplied(device):
    """The factor is 16, because x is divided by 16. fp16 rounds a sum of weights to 11 bits."""
    weight = torch.randn(5, 1, 3, 3, 40).bfloat16()
    folded = fold_weight(weight.to(torch_device(device)))
    assert folded.dtype == torch.float16
    expected = fold_weight(weight.float().to(torch_device(device)))
    torch.testing.assert_close(folded.float() / 16, expected, rtol=2**-11, atol=0)


def test_which_models_fold():
    assert [folds(dtype, upsample=True) for dtype in (torch.float32, torch.bfloat16, torch.float16)] == [
        True,
        True,
        False,
    ]
    assert not folds(torch.float32, upsample=False)


def test_the_form_of_a_model_in_bf16():
    """fp16, with x divided by 16. All but the smallest values keep their bits."""
    x = torch.tensor([1e6, -3.0, 0.0009765625, 1e-5, torch.nan, torch.inf], dtype=torch.bfloat16)
    given = fold_input(x.expand(3, 6))
    assert (given.dtype, given.is_contiguous()) == (torch.float16, True)
    back = given[0].float() * 16
    assert torch.equal(back[:3], x[:3].float())
    assert abs(back[3] - 1e-5) < 5e-7
    assert back[4].isnan()
    assert back[5].isinf()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e5])
def test_a_model_in_bf16_errs_no_more_than_by_the_rounding_of_its_result(size):
    """Also where its values are far from 1. fp16 alone would end at 65504."""
    x = torch.randn(1, 2, 33, 17, 64, device="cuda") * size
    weight = torch.randn(96, 1, 3, 3, 64, device="cuda") / 24
    x, weight = x.bfloat16(), weight.bfloat16()
    oracle = reference.conv_skip(x.double(), weight.double(), None, None, upsample=True)
    actual = conv_skip(x, weight, None, upsample=True, implementation="triton")
    assert_no_worse(actual, oracle.bfloat16(), oracle)
