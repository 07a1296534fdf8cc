"""A linear whose weight alone is in 8 bits."""

import pytest
import torch
from torch import nn

from turbo_rcm_patch.patching.text_encoder.apply import linears_to_store
from turbo_rcm_patch.patching.weights import linear_8bit
from turbo_rcm_patch.patching.weights.weight_only import GROUP, WeightOnlyLinear, bring_back, convert_in_groups

CPU = torch.device("cpu")


def stored(linear):
    WeightOnlyLinear.begin(linear, convert_in_groups(linear.weight, linear.weight.device))
    return linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("at_once", [1, 2**20])
def test_each_value_errs_by_at_most_half_a_step_of_its_group(dtype, at_once, monkeypatch):
    monkeypatch.setattr(linear_8bit, "AT_ONCE", at_once)
    weight = (torch.randn(12, 4 * GROUP) * torch.logspace(-3, 1, 12)[:, None]).to(dtype)
    weight[3] = 0
    values, scale, norm = convert_in_groups(weight, CPU)
    assert (values.dtype, scale.dtype, norm) == (torch.int8, torch.bfloat16, None)
    assert scale.shape == (12, 4)
    groups = weight.double().unflatten(1, (-1, GROUP))
    error = (values.double().unflatten(1, (-1, GROUP)) * scale.double()[..., None] - groups).abs().amax(-1)
    assert (error <= groups.abs().amax(-1) / 127 * 0.502 + 1e-30).all()
    assert values.abs().max() == 127
    back = bring_back(values, scale, dtype)
    exact = values.double().unflatten(1, (-1, GROUP)) * scale.double()[..., None]
    assert back.dtype == dtype
    assert torch.equal(back, exact.flatten(1).to(torch.float32).to(dtype))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_not_rounded(dtype, bias):
    linear = nn.Linear(64, 24, bias=bias).to(dtype)
    x = torch.randn(5, 3, 64).to(dtype)
    exact = linear.weight.detach().double()
    weight = bring_back(*stored(linear).parameters_in_8_bits(), dtype)
    assert 1e-3 < (weight.double() - exact).norm() / exact.norm() < 1e-2
    assert torch.equal(linear(x), nn.functional.linear(x, weight, linear.bias))


def test_nan_shows():
    weight = torch.randn(2, GROUP)
    weight[0, 3] = torch.nan
    assert bring_back(*convert_in_groups(weight, CPU)[:2], torch.float32)[0].isnan().any()


def test_derivatives_reach_the_input():
    linear = stored(nn.Linear(GROUP, 4))
    x = torch.randn(2, GROUP, requires_grad=True)
    linear(x).sum().backward()
    weight = bring_back(*linear.parameters_in_8_bits(), torch.float32)
    torch.testing.assert_close(x.grad, weight.sum(0).expand(2, -1))


def test_end_brings_the_linear_back():
    linear = nn.Linear(GROUP, 4)
    weight, values = linear.weight, linear.weight.detach().clone()
    stored(linear).to(torch.bfloat16)
    assert linear(torch.randn(1, GROUP, dtype=torch.bfloat16)).dtype == torch.bfloat16
    WeightOnlyLinear.end(linear)
    assert type(linear) is nn.Linear
    assert linear.weight is weight
    assert torch.equal(linear.weight, values.bfloat16())


def test_on_the_meta_device_it_has_the_sizes():
    linear = stored(nn.Linear(64, 8, device="meta"))
    parts = linear.parameters_in_8_bits()
    assert [part.is_meta for part in parts] == [True, True]
    assert sum(part.nbytes for part in parts) == 64 * 8 * (1 + 2 / GROUP)


def test_kernels_that_round_the_inputs_do_not_get_it():
    with pytest.raises(TypeError, match="only stores"):
        stored(nn.Linear(GROUP, 4)).quantized()


def test_widths_that_no_group_divides_are_left_out():
    odd, even, empty = nn.Linear(40, 4), nn.Linear(64, 4), nn.Linear(64, 0)
    assert linears_to_store(nn.Sequential(odd, even, empty)) == [even]
