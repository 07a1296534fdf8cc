"""Weights that are prepared once: converted when they must be, and not more often."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

from turbo_rcm_patch.patching.prepared import PreparedWeights


class Conversion:
    def __init__(self):
        self.runs = 0

    def __call__(self, parameter):
        assert not torch.is_grad_enabled()
        self.runs += 1
        return 2 * parameter


@pytest.fixture
def linear():
    return nn.Linear(3, 2)


def in_place(linear):
    with torch.no_grad():
        linear.weight.mul_(3)


CHANGES = {
    "in place": in_place,
    "new storage": lambda linear: setattr(linear.weight, "data", linear.weight.data.clone()),
    "another parameter": lambda linear: setattr(linear, "weight", nn.Parameter(torch.ones(2, 3))),
    "dtype": lambda linear: linear.double(),
    "transposed": lambda linear: setattr(linear.weight, "data", linear.weight.data.T),
    "a state dict": lambda linear: linear.load_state_dict(nn.Linear(3, 2).state_dict()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_parameter_is_converted_anew(linear, change):
    prepared, double = PreparedWeights(), Conversion()
    for _ in range(3):
        assert torch.equal(prepared.get(linear, "weight", double), 2 * linear.weight)
    assert double.runs == 1
    CHANGES[change](linear)
    for _ in range(3):
        assert torch.equal(prepared.get(linear, "weight", double), 2 * linear.weight)
    assert double.runs == 2


def test_each_parameter_of_each_module_has_its_own(linear):
    prepared, double, other = PreparedWeights(), Conversion(), nn.Linear(3, 2)
    for module in (linear, other):
        for name in ("weight", "bias"):
            assert torch.equal(prepared.get(module, name, double), 2 * getattr(module, name))
    assert len(prepared) == 4
    prepared.clear()
    assert len(prepared) == 0
    prepared.get(linear, "weight", double)
    assert double.runs == 5


def test_what_is_prepared_goes_with_its_module():
    prepared = PreparedWeights()
    prepared.get(nn.Linear(3, 2), "weight", Conversion())
    gc.collect()
    assert len(prepared) == 0


def test_a_conversion_that_raises_leaves_nothing(linear):
    prepared, double = PreparedWeights(), Conversion()
    prepared.get(linear, "weight", double)
    in_place(linear)
    with pytest.raises(ZeroDivisionError):
        prepared.get(linear, "weight", lambda parameter: 1 / 0)
    assert len(prepared) == 0
    assert torch.equal(prepared.get(linear, "weight", double), 2 * linear.weight)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_empty(linear, duplicate):
    prepared = PreparedWeights()
    prepared.get(linear, "weight", Conversion())
    assert (len(duplicate(prepared)), len(prepared)) == (0, 1)
