"""Kernels that only `turbo-rcm tune` may choose."""

import pytest
import torch

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


def test_tune_picks_the_kernel_that_it_tries_or_nothing():
    def kernel(name, why_not=None, **options):
        return Kernel(name, lambda spec: why_not, lambda: name, **options)

    tried, foreign = kernel("tried", by_tune=True), kernel("foreign", "no GPU of sm_0", by_tune=True)
    op = Op("an op", (foreign, tried, kernel("usual")))
    spec = Spec(device=torch.device("cpu"), dtype=torch.bfloat16)
    assert op.pick(spec).name == "usual"
    assert op.pick(spec).label == "usual"
    with op.trying(tried):
        assert op.pick(spec).name == "tried"
    with op.trying(foreign), pytest.raises(ValueError, match="no GPU of sm_0"):
        op.pick(spec)
    assert op.pick(spec).name == "usual"
