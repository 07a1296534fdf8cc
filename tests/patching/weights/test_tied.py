"""Linears of a model that share one weight: each has it in 8 bits, and restore ties them again."""

from dataclasses import replace

import pytest
import torch

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.quantized_models import CONFIG, ERROR
from tests.tiny_wan import output_of, tiny_wan_transformer
from turbo_rcm_patch.patching.weights.convert import quantized_linears
from turbo_rcm_patch.patching.weights.linear_8bit import PARTS


def tied(device="cpu"):
    """A model on a device whose blocks share the weight of one linear."""
    model = tiny_wan_transformer().to(device)
    first, second = (block.attn1.to_q for block in model.blocks)
    second.weight = first.weight
    return model, first, second


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_each_gets_an_8_bit_weight_where_the_model_is(place):
    model, first, second = tied(place)
    original = first.weight
    patch = trp.patch(model, CONFIG)
    for linear in (first, second):
        assert linear in quantized_linears(model)
        assert {linear._parameters[part].device.type for part in PARTS} == {place}
        assert linear.original is original
        assert linear.original.device == torch.device("cpu")
    assert torch.equal(first.quantized().values.float(), second.quantized().values.float())
    patch.restore()
    assert first.weight is second.weight is original
    assert original.device.type == place


def test_results_are_those_of_the_tied_weight():
    model, _, _ = tied()
    expected = output_of(model)
    with trp.patch(model, CONFIG):
        assert 1e-3 < relative_error(output_of(model), expected) <= ERROR
    assert torch.equal(output_of(model), expected)


@pytest.mark.parametrize("kept", ["blocks.1.attn1.to_q", "blocks.0.attn1"])
def test_a_weight_that_a_kept_linear_reads_too_stays_with_both(kept):
    """The original would go to the CPU, where the linear that is not in 8 bits does not find it."""
    model, first, second = tied()
    original = first.weight
    with trp.patch(model, replace(CONFIG, keep=(kept,))):
        assert quantized_linears(model)
        assert first not in quantized_linears(model)
        assert second not in quantized_linears(model)
        assert first.weight is second.weight is original
