"""Snapshots of modules: changes they notice, changes they ignore, and values kept while one holds."""

import copy
import pickle

import pytest
import torch
from torch import nn

from turbo_rcm_patch.patching.changes import Snapshot, WhileUnchanged


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4, bias=False)).requires_grad_(False)


def set_flag(model):
    model[0].flag = True


def append_to_list(model):
    model[0].names.append("second")


def replace_forward(model):
    model[2].forward = lambda x: x


ATTRIBUTES = {
    "an attribute": set_flag,
    "a list": append_to_list,
    "a forward": replace_forward,
    "a hook": lambda model: model[1].register_forward_hook(print),
    "a child": lambda model: setattr(model, "1", nn.LayerNorm(6)),
    "a class": lambda model: setattr(model[1], "__class__", nn.RMSNorm),
}
KINDS = {
    "a parameter's dtype": lambda model: model[0].double(),
    "a parameter's device": lambda model: model[0].to("meta"),
    "a parameter's shape": lambda model: setattr(model[0].weight, "data", torch.zeros(6, 5)),
    "a parameter's gradient": lambda model: model[2].requires_grad_(),
    "a parameter's class": lambda model: model[0]._parameters.update(weight=torch.zeros(6, 4)),
    "a bias for none": lambda model: model[2].register_parameter("bias", nn.Parameter(torch.zeros(4))),
    "a buffer": lambda model: model[1].register_buffer("extra", torch.zeros(1)),
}
PLACES = {
    "an equal weight": lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(6, 4), requires_grad=False)),
    "new storage": lambda model: setattr(model[0].weight, "data", model[0].weight.clone()),
}


@pytest.mark.parametrize("addresses", [True, False])
@pytest.mark.parametrize("change", [*ATTRIBUTES, *KINDS])
def test_changes_are_seen(model, change, addresses):
    model[0].names = ["first"]
    snapshot = Snapshot(model.modules(), addresses)
    assert snapshot.holds()
    {**ATTRIBUTES, **KINDS}[change](model)
    # Where a tensor lies does not tell whether it wants a gradient.
    assert snapshot.holds() == (addresses and change == "a parameter's gradient")


@pytest.mark.parametrize("change", PLACES)
def test_only_a_snapshot_of_addresses_sees_where_tensors_lie(model, change):
    snapshots = [Snapshot(model.modules(), addresses) for addresses in (True, False)]
    PLACES[change](model)
    assert [snapshot.holds() for snapshot in snapshots] == [False, True]


@pytest.mark.parametrize("addresses", [True, False])
def test_contents_do_not_count(model, addresses):
    snapshot = Snapshot(model.modules(), addresses)
    model[0].weight.mul_(2)
    assert snapshot.holds()


def test_parameters_in_a_dictionary_of_their_own_are_followed(model):
    snapshot = Snapshot(model.modules(), addresses=False)
    model[0]._parameters = dict(model[0]._parameters)
    model[0].weight.data = torch.zeros(6, 5)
    assert not snapshot.holds()


class Counted:
    """A computation that counts how often it ran for a key."""

    def __init__(self, model):
        self.model, self.runs = model, []

    def objects(self):
        return self.model.modules()

    def compute(self, key):
        self.runs.append(key)
        return key, len(self.runs)


def test_values_of_several_keys_are_kept_until_something_changes(model):
    counted = Counted(model)
    known = WhileUnchanged(counted.objects, counted.compute, addresses=False)
    first = [known.get(key) for key in ("a", ("b", 1), "a", ("b", 1))]
    assert first == [("a", 1), (("b", 1), 2)] * 2
    model[0].flag = True
    assert [known.get(key) for key in ("a", ("b", 1), "a")] == [("a", 3), (("b", 1), 4), ("a", 3)]


def test_a_computation_that_raises_leaves_nothing(model):
    def divide(key):
        return 1 / key

    known = WhileUnchanged(model.modules, divide)
    with pytest.raises(ZeroDivisionError):
        known.get(0)
    assert known.get(1) == 1.0
    with pytest.raises(ZeroDivisionError):
        known.get(0)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_knows_nothing_and_asks_about_its_own_objects(model, duplicate):
    counted = Counted(model)
    counted.known = WhileUnchanged(counted.objects, counted.compute)
    counted.known.get("a")
    other = duplicate(counted)
    assert other.known.get("a") == ("a", 2)
    assert counted.known.get("a") == ("a", 1)
    other.model[0].flag = True
    assert other.known.get("a") == ("a", 3)
    assert counted.known.get("a") == ("a", 1)


@pytest.mark.parametrize("addresses", [True, False])
def test_never_in_a_function_transform(model, addresses):
    snapshot = Snapshot([model[0]], addresses)
    held = []

    def ask(x):
        held.append(snapshot.holds())
        return x

    torch.vmap(ask)(torch.zeros(2))
    assert held == [False]
    assert snapshot.holds()
