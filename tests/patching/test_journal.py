"""The journal: attributes and parameters come back, and changes by others are found."""

import copy
import pickle
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


def test_another_modules_method_is_no_equal(linear):
    journal = Journal()
    journal.set(linear, "forward", as_method(linear))
    for other in (as_method(nn.Linear(3, 2)), MethodType(nn.Linear.forward, linear)):
        linear.forward = other
        assert journal.captured() == [(linear, "forward")]


def other_parameter():
    return nn.Parameter(torch.ones(2, 3), requires_grad=False)


def test_a_parameter_comes_back_in_reverse_order(linear):
    journal, weight = Journal(), linear.weight
    names = list(linear.state_dict())
    for _ in range(2):
        journal.set_parameter(linear, "weight", other_parameter())
    assert list(linear.state_dict()) == names
    assert torch.equal(linear.weight, torch.ones(2, 3))
    assert len(journal.captured()) == 1  # the second took the first one's place
    journal.undo()
    assert linear.weight is weight


def test_a_parameter_may_be_none_and_must_be_there(linear):
    journal, bias = Journal(), linear.bias
    journal.set_parameter(linear, "bias", None)
    assert linear(torch.zeros(1, 3)).tolist() == [[0.0, 0.0]]
    with pytest.raises(KeyError):
        journal.set_parameter(linear, "scale", other_parameter())
    assert journal.captured() == []
    journal.undo()
    assert linear.bias is bias


def test_a_state_dict_loaded_in_place_is_no_capture(linear):
    journal, weight = Journal(), linear.weight
    journal.set_parameter(linear, "weight", other_parameter())
    linear.load_state_dict({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)})
    linear.double()
    assert journal.captured() == []
    journal.undo()
    assert linear.weight is weight


def test_a_parameter_that_was_replaced_is_found_and_stays(linear):
    journal = Journal()
    journal.set_parameter(linear, "weight", other_parameter())
    linear.load_state_dict({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}, assign=True)
    theirs = linear.weight
    assert journal.captured() == [(linear, "weight")]
    journal.undo()
    assert linear.weight is theirs


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_a_model_can_be_taken_back_on_their_own(linear, duplicate):
    """This needs a forward that can be pickled, which a bound method cannot."""
    journal, weight, x = Journal(), linear.weight, torch.randn(4, 3)
    expected = linear(x)
    journal.set(linear, "journal", journal)
    journal.set(linear, "forward", as_partial(linear))
    journal.set_parameter(linear, "weight", nn.Parameter(2 * weight.detach()))
    other = duplicate(linear)
    assert torch.equal(other(x), linear(x))
    assert not other.journal.captured()
    other.journal.undo()
    assert torch.equal(other(x), expected)
    assert set(other.__dict__) == set(nn.Linear(1, 1).__dict__)
    assert linear.__dict__["forward"](x).equal(linear(x))
    assert not journal.captured()
    assert linear.weight is not weight


def forget_name(module):
    del module.name


def test_calls_take_back_what_others_set_in_reverse_order(linear):
    journal, weight = Journal(), linear.weight
    journal.set_parameter(linear, "weight", other_parameter())
    linear.name = "somebody's"
    journal.on_undo(forget_name, linear)
    journal.set(linear, "name", "the journal's")
    assert journal.captured() == []
    copied = pickle.loads(pickle.dumps((linear, journal)))
    for module, own in (copied, (linear, journal)):
        own.undo()
        assert not hasattr(module, "name")
    assert linear.weight is weight


def test_forgotten_parameters_stay_as_they_are(linear):
    journal, before = Journal(), other_parameter()
    linear.weight = before
    journal.set(linear, "name", "the journal's")
    journal.set_parameter(linear, "weight", value := other_parameter())
    journal.forget_parameters()
    journal.undo()
    assert linear.weight is value
    assert not hasattr(linear, "name")
