"""Snapshots of modules: changes they notice, changes they ignore, and values kept while one holds."""

import copy
import pickle

import pytest
import torch
from torch import nn

from turbo_rcm_patch.patching.changes import Snapshot, WhileUnchanged


@pytest.fixture
def model():
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4, bias=False)).requires_grad_(False)
    model[0].names = ["first"]
    return model


# name: (the change, if a snapshot of addresses holds after it, if another one does)
CHANGES = {
    "an attribute": (lambda model: setattr(model[0], "flag", True), False, False),
    "a list": (lambda model: model[0].names.append("second"), False, False),
    "a forward": (lambda model: setattr(model[2], "forward", lambda x: x), False, False),
    "a hook": (lambda model: model[1].register_forward_hook(print), False, False),
    "a child": (lambda model: setattr(model, "1", nn.LayerNorm(6)), False, False),
    "a class": (lambda model: setattr(model[1], "__class__", nn.RMSNorm), False, False),
    "a dtype": (lambda model: model[0].double(), False, False),
    "a device": (lambda model: model[0].to("meta"), False, False),
    "a shape": (lambda model: setattr(model[0].weight, "data", torch.zeros(6, 5)), False, False),
    "a parameter's class": (lambda model: model[0]._parameters.update(weight=torch.zeros(6, 4)), False, False),
    "a bias for none": (lambda model: model[2].register_parameter("bias", nn.Parameter(torch.zeros(4))), False, False),
    "a buffer": (lambda model: model[1].register_buffer("extra", torch.zeros(1)), False, False),
    "a gradient": (lambda model: model[2].requires_grad_(), True, False),
    "an equal weight": (lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(6, 4), False)), False, True),
    "new storage": (lambda model: setattr(model[0].weight, "data", model[0].weight.clone()), False, True),
    "contents": (lambda model: model[0].weight.mul_(2), True, True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_snapshot_notices(model, change):
    snapshots = [Snapshot(model.modules(), addresses) for addresses in (True, False)]
    assert all(snapshot.holds() for snapshot in snapshots)
    make, *expected = CHANGES[change]
    make(model)
    assert [snapshot.holds() for snapshot in snapshots] == expected


def test_parameters_in_a_dictionary_of_their_own_are_followed(model):
    snapshot = Snapshot(model.modules(), addresses=False)
    model[0]._parameters = dict(model[0]._parameters)
    model[0].weight.data = torch.zeros(6, 5)
    assert not snapshot.holds()


@pytest.mark.parametrize("addresses", [True, False])
def test_never_in_a_function_transform(model, addresses):
    snapshot, held = Snapshot([model[0]], addresses), []
    torch.vmap(lambda x: (held.append(snapshot.holds()), x)[1])(torch.zeros(2))
    assert held == [False]
    assert snapshot.holds()


class Counted:
    """A computation that counts how often it ran."""

    def __init__(self, model):
        self.model, self.runs = model, []
        self.known = WhileUnchanged(self.objects, self.compute)

    def objects(self):
        return self.model.modules()

    def compute(self, key):
        self.runs.append(key)
        return key, 1 / len(key), len(self.runs)


def test_values_are_kept_by_key_until_something_changes_or_fails(model):
    counted = Counted(model)
    get = lambda *keys: [counted.known.get(key)[-1] for key in keys]  # noqa: E731
    assert get("a", "b", "a", "b") == [1, 2, 1, 2]
    model[0].flag = True
    assert get("a", "b", "a") == [3, 4, 3]
    for _ in range(2):  # an error is not kept
        with pytest.raises(ZeroDivisionError):
            get("")


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_knows_nothing_and_asks_about_its_own_objects(model, duplicate):
    counted = Counted(model)
    counted.known.get("a")
    other = duplicate(counted)
    assert [each.known.get("a")[-1] for each in (other, counted)] == [2, 1]
    other.model[0].flag = True
    assert [each.known.get("a")[-1] for each in (other, counted)] == [3, 1]
