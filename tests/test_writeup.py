"""The text, the drawing and the plots of docs/writeup.md are those of the results file."""

import copy
import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))  # which is no package
import writeup  # noqa: E402
from writeup import measured, plots  # noqa: E402

DOCS = ROOT / "docs"
RESULTS = json.loads((ROOT / "results/nvidia-h200.json").read_text())
TEMPLATE = (DOCS / writeup.TEMPLATE).read_text()


def test_what_is_there_is_what_the_results_say(tmp_path):
    (tmp_path / writeup.TEMPLATE).write_text(TEMPLATE)
    writeup.write(ROOT / "results/nvidia-h200.json", tmp_path)
    for name in (writeup.PAGE, writeup.ROUND_TRIP):
        assert (tmp_path / name).read_text() == (DOCS / name).read_text(), "run scripts/readme_results.py"
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {f"{name}.png" for name in plots.PLOTS}
    for name in drawn:
        assert plots.saved_data(tmp_path / name) == plots.saved_data(DOCS / name), "run scripts/readme_results.py"
        assert name in (DOCS / writeup.PAGE).read_text()


def test_another_figure_changes_text_drawing_and_plot():
    changed = copy.deepcopy(RESULTS)
    runs = changed["runs"]
    for variant in runs["wan2.1-1.3b"]["variants"]:
        variant["timings"]["steps"] = [1.2345] * 4
    fused = next(i for i in runs["traffic-attention"]["implementations"] if i["name"] == "triton_fused")
    fused["kernels"][-1]["read"] = 777e6
    runs["ops"]["results"][0]["timings"]["attention"]["milliseconds"] = 1.0
    assert "takes 1234 ms in eager" in " ".join(writeup.text_of(changed, TEMPLATE).split())
    assert ">777 MB<" in writeup.round_trip_svg(writeup.round_trip(runs))
    assert writeup.plot_data(runs)["attention"] != writeup.plot_data(RESULTS["runs"])["attention"]


def test_what_was_not_measured_is_left_out_and_what_was_comes_in():
    text = writeup.text_of(RESULTS, TEMPLATE)
    assert "## Where the seconds of a whole video go" in text
    assert "In 8 bits the step of" in text

    changed = copy.deepcopy(RESULTS)
    runs = changed["runs"]
    for name in ("wan2.1-1.3b-quantized", "evaluate", "wan2.1-1.3b-decoded"):
        del runs[name]
    assert "## Where the seconds of a whole video go" not in writeup.text_of(changed, TEMPLATE)
    decoded = runs["wan2.1-1.3b-decoded"] = copy.deepcopy(runs["wan2.1-1.3b"])
    decoded["settings"]["output_type"] = "np"
    for variant in decoded["variants"]:
        variant["timings"] |= {"steps": [0.25] * 4, "vae_decode": 1.75, "output": 0.125, "total": 3.0}
    text = writeup.text_of(changed, TEMPLATE)
    assert "| VAE decode | 1.750 s | 1.750 s | 1.750 s |" in text
    assert "| all steps | 1.000 s | 1.000 s | 1.000 s |" in text
    assert "In 8 bits the step of" not in text
    assert "speed-accuracy.png" not in text


def test_the_exact_tier_may_err_a_little_more_than_the_unpatched_model():
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]] for row in measured.accuracy_table(RESULTS["runs"]).split("\n")
    ]
    eager, compiled, patched = rows[2:5]
    assert (eager[1], patched[1]) == ("eager diffusers", "patched (exact)")
    assert [row[3] for row in (eager, compiled)] == ["", ""]
    assert float(patched[3]) == pytest.approx(1.05 * float(eager[2]), rel=0.05)
    assert "as much as the unpatched model" in " ".join(writeup.text_of(RESULTS, TEMPLATE).split())


def test_rows_of_two_gpus_are_not_of_one():
    text = " ".join(writeup.text_of(RESULTS, TEMPLATE).split())
    assert ", 2 GPUs |" in text
    assert 'in rows with "2 GPUs" on two' in text


def test_the_quantized_tier_comes_into_the_plot_when_it_was_measured():
    runs = copy.deepcopy(RESULTS["runs"])
    quantized = copy.deepcopy(runs["compare"])
    quantized["settings"]["preset"] = "quantized"
    next(v for v in quantized["variants"] if v["name"] == "patched")["timings"]["steps"] = [0.5] * 4
    runs["compare-quantized"] = quantized
    result = copy.deepcopy(next(r for r in runs["evaluate"]["results"] if r["variant"] == "exact"))
    runs["evaluate"]["results"].append({**result, "variant": "quantized", "steps": 2})
    points = measured.speed_and_accuracy(runs)
    assert points["patched (quantized)"] == [[1.0, result["accuracy"]["overall"]["share"]]]


def test_no_measured_figure_is_typed_into_the_template():
    prose = re.sub(r"{{.*?}}|{%.*?%}", "", TEMPLATE, flags=re.DOTALL)
    assert re.findall(r"\d[\d.]*\s*(?:ms|s|MB|GB|%|TFLOP/s|TB/s|times)\b", prose) == []


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", measured.ATTENTION),
        ("attention_kernel", measured.ATTENTION),
        ("_join_kernel", measured.ATTENTION),
        ("nvjet_sm90_tst_256x152_64x4_1x2_h_bz_coopA_bias_TNT", measured.LINEARS),
        ("gemm_of_three_kernel", measured.LINEARS),
        ("triton_red_fused__fused_rms_norm__scaled_dot_product_cudnn_attention_permute", measured.REST),
        ("_rms_norm_rope_kernel", measured.REST),
    ],
)
def test_kernels_belong_to_parts(kernel, part):
    assert measured.part_of(kernel) == part


def test_the_parts_are_all_of_a_block():
    run = RESULTS["runs"]["traffic-wan2.1-1.3b"]
    for one, parts in zip(run["implementations"], measured.parts_of_block(run).values(), strict=True):
        assert sum(parts.values()) == pytest.approx(1e3 * sum(kernel["seconds"] for kernel in one["kernels"]))
        assert min(parts.values()) > 0


def test_the_drawing_is_svg_within_its_edges():
    root = ET.fromstring((DOCS / writeup.ROUND_TRIP).read_text())
    width, height = map(float, root.get("viewBox").split()[2:])
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        x, y, length = float(text.get("x")), float(text.get("y")), 11 * len(text.text)  # 20 pixels high
        anchor = re.search("anchor: (\\w+)", text.get("style") or "")
        kind = anchor.group(1) if anchor else ("start" if text.get("class") == "title" else "middle")
        left = {"start": x, "middle": x - length / 2, "end": x - length}[kind]
        assert 0 <= left <= left + length <= width, text.text
        assert 0 <= y <= height
