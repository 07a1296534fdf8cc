"""A patch as `print` and a notebook's cell show it: the summary as text."""

import gc

import pytest
import torch

import turbo_rcm_patch as trp
from tests.tiny_wan import tiny_wan_pipeline
from turbo_rcm_patch.patching.summary import Row, in_one_line


@pytest.fixture
def patch():
    return trp.patch(tiny_wan_pipeline())


def test_print_shows_the_summary(patch):
    assert str(patch) == repr(patch) == patch.summary()
    patch.restore()
    assert str(patch) == "restored: nothing is patched any more"


def test_a_line_counts_what_can_be_fused():
    def row(count, **reasons):
        return Row("", "", "", "", count, {name.replace("_", " "): n for name, n in reasons.items()})

    assert in_one_line([row(3), row(2)]) == "5 of 5 parts of its layers are fused"
    rows = [row(3, hooks=1), row(4, nothing_to_fuse=4), row(2, cpu_tensors=2)]
    assert in_one_line(rows) == "2 of 5 parts of its layers are fused (why not the others: cpu tensors, hooks)"
    assert in_one_line([row(3)], ["transformer"]).endswith("are fused; the transformer is not patched")


@pytest.mark.parametrize("name", ["vae", "transformer"])
def test_it_says_that_the_pipeline_has_another_model_by_now(name):
    pipe, other = tiny_wan_pipeline(), tiny_wan_pipeline(seed=20)
    note = f"no longer the pipeline's {name}"
    patch, alone, model = trp.patch(pipe), trp.patch(other.vae), getattr(pipe, name)
    for same in (model, torch.compile(model, backend="eager")):
        setattr(pipe, name, same)
        assert note not in patch.summary()
    for another in (getattr(other, name), None):
        setattr(pipe, name, another)
        section = next(part for part in patch.summary().split("\n\n") if part.startswith(f"{name}: "))
        assert note in section
        assert patch.summary().count("no longer") == 1
    assert "no longer" not in alone.summary()
    del pipe
    gc.collect()
    assert "no longer" not in patch.summary()
