"""The text, the drawing and the plots of results/writeup.md follow from the results file."""

import copy
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from scripts.tools import writeup
from scripts.tools.writeup import block_rows, measured, plots
from turbo_rcm_patch.config import PRESETS
from turbo_rcm_patch.tiers import EXACT

ROOT = Path(__file__).resolve().parents[3]

FOLDER = ROOT / "results"
RESULTS = json.loads((FOLDER / "nvidia-h200.json").read_text())
TINY = {
    tier: json.loads((FOLDER / f"{tier.replace('_', '-')}-tiny.json").read_text())
    for tier in ("sparse", "block_sparse")
}
TEMPLATE = (ROOT / "docs/writeup.md.jinja").read_text()


def test_what_is_there_is_what_the_results_say(tmp_path):
    writeup.write(FOLDER / "nvidia-h200.json", ROOT / "docs/writeup.md.jinja", tmp_path)
    for name in (writeup.PAGE, writeup.ROUND_TRIP):
        assert (tmp_path / name).read_text() == (FOLDER / name).read_text(), "run scripts/tools/write_pages.py"
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {f"{name}.png" for name in plots.PLOTS}
    for name in drawn:
        assert plots.saved_data(tmp_path / name) == plots.saved_data(FOLDER / name), "run scripts/tools/write_pages.py"
        assert name in (FOLDER / writeup.PAGE).read_text()


def test_another_figure_changes_text_drawing_and_plot():
    changed = copy.deepcopy(RESULTS)
    runs = changed["runs"]
    for variant in runs["wan2.1-1.3b-quantized"]["variants"]:
        variant["timings"]["steps"] = [1.2345] * 4
    fused = next(i for i in runs["traffic-attention"]["implementations"] if i["name"] == "triton_fused")
    fused["kernels"][-1]["read"] = 777e6
    runs["ops"]["results"][0]["timings"]["attention"]["milliseconds"] = 1.0
    assert "takes 1234 ms in eager" in " ".join(writeup.text_of(changed, TEMPLATE, TINY).split())
    assert ">777 MB<" in writeup.round_trip_svg(writeup.round_trip(runs))
    assert writeup.plot_data(runs)["attention"] != writeup.plot_data(RESULTS["runs"])["attention"]


def test_the_exact_tier_may_err_a_little_more_than_the_unpatched_model():
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]] for row in measured.accuracy_table(RESULTS["runs"]).split("\n")
    ]
    eager, compiled, patched = rows[2:5]
    assert (eager[1], patched[1]) == ("eager diffusers", "patched (exact)")
    assert [row[3] for row in (eager, compiled)] == ["", ""]
    assert float(patched[3]) == pytest.approx(EXACT.limits.factor * float(eager[2]), rel=0.05)
    assert "as much as the unpatched model" in " ".join(writeup.text_of(RESULTS, TEMPLATE, TINY).split())


def test_rows_of_two_gpus_are_not_of_one():
    text = " ".join(writeup.text_of(RESULTS, TEMPLATE, TINY).split())
    assert ", 2 GPUs |" in text
    assert 'in rows with "2 GPUs" on two' in text


def test_no_measured_figure_is_typed_into_the_template():
    prose = re.sub(r"{{.*?}}|{%.*?%}", "", TEMPLATE, flags=re.DOTALL)
    assert re.findall(r"\d[\d.]*\s*(?:ms|s|MB|GB|%|TFLOP/s|TB/s|times)\b", prose) == []


def test_a_bar_is_the_sum_of_its_rows():
    runs = copy.deepcopy(RESULTS["runs"])
    for run, ours, rival in (("ops", 1.0, 100.0), ("ops-quantized", 10.0, 999.0), ("ops-sparse", 0.125, 999.0)):
        for row in runs[run]["results"]:
            for name, timing in row["timings"].items():
                timing["milliseconds"] = ours if name == row["best"] else rival
    blocks = block_rows.blocks_by_tier(runs)
    assert set(blocks) == {"wan2.1-1.3b", "wan2.1-14b"}
    for block in blocks.values():
        assert {tier: list(parts.values()) for tier, parts in block.items()} == {
            "torch.compile": [300.0, 100.0, 500.0, 300.0],
            "exact": [3.0, 1.0, 5.0, 3.0],
            "quantized": [10.0, 1.0, 50.0, 3.0],
            "sparse": [0.125, 1.0, 50.0, 3.0],
        }


def test_the_bars_of_a_step_end_at_the_measured_one():
    """Layers times a block's rows, and the rest of the step, which is less than nothing where the rows are more."""
    runs = copy.deepcopy(RESULTS["runs"])
    for name, milliseconds in (("wan2.1-1.3b", 1000.0), ("wan2.1-1.3b-quantized", 1.0)):
        next(v for v in runs[name]["variants"] if v["name"] == "patched")["timings"]["steps"] = [milliseconds / 1e3] * 4
    steps, block = block_rows.steps_by_tier(runs), block_rows.blocks_by_tier(runs)["wan2.1-1.3b"]
    small, large = "Wan 2.1 1.3B\n832×480, 81 frames", "Wan 2.1 14B (4 of 40 layers)\n1280×720, 81 frames"
    assert list(steps) == [small, large]
    for shown in steps.values():
        assert set(shown) == {"torch.compile", "exact", "quantized", "sparse"}
    shown = steps[small]
    for tier, step in (("exact", 1000.0), ("quantized", 1.0)):
        assert shown[tier][block_rows.LINEARS] == pytest.approx(30 * block[tier][block_rows.LINEARS])
        assert sum(shown[tier].values()) == pytest.approx(step)
    assert shown["exact"][block_rows.ALL_ELSE] > 0 > shown["quantized"][block_rows.ALL_ELSE]


def test_every_bar_can_be_traced_to_rows_of_the_results_page():
    text = (FOLDER / writeup.PAGE).read_text()
    rows = re.search(r"<details.*?</details>", text, re.DOTALL).group()
    named = set(re.findall(r"`(\w+ [\d×]+)`", rows))
    assert len(named) == 15
    page = (ROOT / "results/README.md").read_text()
    assert [name for name in named if f"| {name} |" not in page] == []


def test_the_sparse_tier_has_errors_of_blocks():
    changed = copy.deepcopy(RESULTS)
    runs = changed["runs"]
    runs["verify-wan2.1-1.3b-sparse"]["blocks"]["patched_error"]["largest"] = 0.0333
    parts = {part["part"]: part for part in runs["verify-wan2.1-1.3b-block-sparse"]["parts"]}
    parts["feed_forward"]["error"]["largest"] = 0.222
    text = writeup.text_of(changed, TEMPLATE, TINY)
    for preset, of, error, allowed in (
        ("sparse", "a block", "3.3e-02", PRESETS["sparse"].tier.limits.block),
        ("", "its feed-forward", "2.2e-01", PRESETS["block_sparse"].tier.limits.part),
    ):
        assert f"| {preset} | {of} | {error} | {allowed:.1e} |" in text


def test_the_drawing_is_svg_within_its_edges():
    root = ET.fromstring((FOLDER / writeup.ROUND_TRIP).read_text())
    width, height = map(float, root.get("viewBox").split()[2:])
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        x, y, length = float(text.get("x")), float(text.get("y")), 11 * len(text.text)  # 20 pixels high
        anchor = re.search("anchor: (\\w+)", text.get("style") or "")
        kind = anchor.group(1) if anchor else ("start" if text.get("class") == "title" else "middle")
        left = {"start": x, "middle": x - length / 2, "end": x - length}[kind]
        assert 0 <= left <= left + length <= width, text.text
        assert 0 <= y <= height
