"""A recorded call also depends on PyTorch's settings, and on functions that were replaced before it."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.patching.changes import attribute, scaled, under_its_name
from tests.patching.tape import assert_eager, assert_replayed, graphs_of, inputs_for, make_models, warm
from turbo_rcm_patch.patching import cuda_graphs as graphs


def test_settings_of_torch_are_told_apart(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    with sdpa_kernel(SDPBackend.MATH):
        assert_eager(pair, inputs, "not recorded yet")
        warm(pair, inputs)
    assert_replayed(pair, inputs)
    assert graphs_of(pair[0]).kept == 2


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
        (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
        (torch.backends.cudnn, "benchmark", True),
    ],
)
def test_the_key_knows_what_chooses_kernels(owner, name, value):
    inputs = [torch.ones(3)]
    before = graphs.call_key(inputs)
    with attribute(owner, name, value):
        assert graphs.call_key(inputs) != before
    assert graphs.call_key(inputs) == before


def test_the_key_knows_the_default_device():
    before = graphs.call_key([])
    with torch.device("meta"):
        assert graphs.call_key([]) != before
    assert graphs.call_key([]) == before


@pytest.mark.parametrize("replaced", [scaled, under_its_name])
def test_a_class_forward_replaced_before_the_first_call_is_not_recorded(tape, replaced):
    pair = make_models()
    with attribute(torch.nn.SiLU, "forward", replaced(torch.nn.SiLU.forward)):
        assert_eager(pair, inputs_for(pair[0]), "replaced forward of its class")
