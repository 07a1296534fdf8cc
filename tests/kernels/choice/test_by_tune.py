"""Kernels that only `turbo-rcm tune` may choose."""

import pytest
import torch

from turbo_rcm_patch.kernels.choice import registry
from turbo_rcm_patch.kernels.choice.measured import kernels_of
from turbo_rcm_patch.kernels.choice.registry import Kernel, Op, Spec


def row(ours, rival, **kernels):
    return {"op": "linear_skip", "ours": ours, "rival": rival, "kernels": kernels}


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([row(2.0, 3.0, small=1.0)], {"linear_skip": "small"}),
        ([row(2.0, 3.0, small=1.99)], {}),  # no more than noise
        ([row(2.0, 1.0, small=1.5)], {}),  # PyTorch's is faster
        ([row(None, 3.0, small=1.5)], {"linear_skip": "small"}),
        ([row(2.0, 3.0, small=1.0), row(9.0, 9.0)], {}),  # it failed at a shape
        ([row(2.0, 3.0, small=2.5), row(9.0, 9.0, small=5.0)], {"linear_skip": "small"}),  # over all shapes
        ([row(2.0, 3.0, small=1.0, smaller=0.5)], {"linear_skip": "smaller"}),
        ([row(2.0, 3.0)], {}),
    ],
)
def test_it_must_be_worthwhile(rows, found):
    assert kernels_of(rows) == found


def test_a_tiers_kernel_need_not_be_faster_than_the_exact_tiers():
    rows = [{**row(2.0, 1.0, small=1.5), "op": "linear_skip_8bit"}]
    assert kernels_of(rows) == {"linear_skip_8bit": "small"}


def test_rows_in_8_bits_choose_for_8_bit_operands_alone(monkeypatch):
    found = {"an op": "wide", "an op in 8 bits": "narrow"}
    monkeypatch.setattr(registry, "tuned_kernel", lambda name, device: found[name])
    names = ("narrow", "wide", "usual")
    kernels = tuple(Kernel(name, lambda spec: None, print, by_tune=name != "usual") for name in names)
    for op, picks in (
        (Op("an op", kernels, name_in_8_bits="an op in 8 bits"), {"bfloat16": "wide", "int8": "narrow"}),
        (Op("an op", kernels), {"float16": "wide", "int8": "wide", "float32": "usual"}),
    ):
        specs = {name: Spec(device=torch.device("cpu"), dtype=getattr(torch, name)) for name in picks}
        assert {name: op.pick(spec).name for name, spec in specs.items()} == picks


def test_tune_picks_the_kernel_that_it_tries_or_nothing():
    def kernel(name, why_not=None, **options):
        return Kernel(name, lambda spec: why_not, lambda: name, **options)

    tried, foreign = kernel("tried", by_tune=True), kernel("foreign", "no GPU of sm_0", by_tune=True)
    op = Op("an op", (foreign, tried, kernel("usual")))
    spec = Spec(device=torch.device("cpu"), dtype=torch.bfloat16)
    assert op.pick(spec).name == "usual"
    assert op.pick(spec).label == "usual"
    with op.trying(tried) as picked:
        assert op.pick(spec).name == "tried"
    assert picked == [tried]
    with op.trying(foreign), pytest.raises(ValueError, match="no GPU of sm_0"):
        op.pick(spec)
    assert op.pick(spec).name == "usual"
