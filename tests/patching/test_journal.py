"""The journal: attributes and parameters come back, and changes by others are found."""

from functools import partial
from types import MethodType

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn

from turbo_rcm_patch.patching.journal import Journal


def negated(self, x):
    return -type(self).forward(self, x)


def as_method(module):
    return MethodType(negated, module)


def as_partial(module):
    bound = partial(negated, module)
    bound.__func__ = negated
    return bound


@pytest.fixture
def linear():
    return nn.Linear(3, 2)


@pytest.fixture
def accelerator():
    yield accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("bind", [as_method, as_partial])
def test_accelerates_unwrapped_forward_can_be_taken_back(accelerator, linear, bind):
    x, journal = torch.randn(4, 3), Journal()
    expected = linear(x)
    journal.set(linear, "forward", bind(linear))
    prepared = accelerator.prepare_model(linear)
    assert journal.captured() == [(linear, "forward")]
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is linear
    assert torch.equal(linear(x), -expected)
    assert journal.captured() == []
    journal.undo()
    assert "forward" not in linear.__dict__
    assert torch.equal(linear(x), expected)


def other_parameter():
    return nn.Parameter(torch.ones(2, 3), requires_grad=False)


def test_a_parameter_that_was_replaced_is_found_and_stays(linear):
    journal = Journal()
    journal.set_parameter(linear, "weight", other_parameter())
    linear.load_state_dict({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}, assign=True)
    theirs = linear.weight
    assert journal.captured() == [(linear, "weight")]
    journal.undo()
    assert linear.weight is theirs
