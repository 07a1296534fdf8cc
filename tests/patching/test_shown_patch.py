"""A patch as `print` and a notebook's cell show it."""

import gc
import xml.etree.ElementTree as ET

import pytest
import torch

import turbo_rcm_patch as trp
from tests.tiny_wan import tiny_wan_pipeline
from turbo_rcm_patch.patching.summary import Row, in_one_line


@pytest.fixture
def patch():
    return trp.patch(tiny_wan_pipeline())


def parsed(patch):
    return ET.fromstring(f"<cell>{patch._repr_html_()}</cell>")


def test_print_shows_the_summary(patch):
    assert str(patch) == patch.summary()
    patch.restore()
    assert str(patch) == "restored: nothing is patched any more"


def test_a_line_counts_what_can_be_fused():
    def row(count, **reasons):
        return Row("", "", "", "", count, {name.replace("_", " "): n for name, n in reasons.items()})

    assert in_one_line([row(3), row(2)]) == "5 of 5 parts of its layers are fused"
    rows = [row(3, hooks=1), row(4, nothing_to_fuse=4), row(2, cpu_tensors=2)]
    assert in_one_line(rows) == "2 of 5 parts of its layers are fused (not the others: cpu tensors, hooks)"
    assert in_one_line([row(3)], ["transformer"]).endswith("are fused; the transformer is not patched")


def test_a_cell_shows_every_row_and_note_as_html(patch):
    cell = parsed(patch)
    lines = [[text.text or "" for text in line] for line in cell.iterfind(".//tbody/tr")]
    assert lines == [list(row.cells()) for row in patch.rows()]
    assert [head.text for head in cell.find(".//thead/tr")][:3] == ["sub-layer", "step", "kernel"]
    shown = [*cell.iterfind(".//b"), *cell.iterfind(".//li")]
    text = patch.summary().splitlines()
    assert shown
    assert all(any(line.strip() == element.text for line in text) for element in shown)
    patch.restore()
    assert parsed(patch).find("p").text == str(patch)


def test_names_of_others_are_escaped_in_html(patch):
    linear = patch.transformers["transformer"].blocks[0].attn1.to_q
    linear.__class__ = type("<script>alert(1)</script>&", (torch.nn.Linear,), {})
    assert "<script>alert(1)</script>& layer" in str(patch)
    assert "<script>" not in patch._repr_html_()
    assert any("<script>alert(1)</script>& layer" in (cell.text or "") for cell in parsed(patch).iter("td"))


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
