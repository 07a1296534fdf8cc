"""The text, the drawing and the plots of docs/writeup.md are those of the results file."""

import copy
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from scripts.tools import writeup
from scripts.tools.writeup import block_rows, measured, plots
from turbo_rcm_patch.bench.evaluate import label_of
from turbo_rcm_patch.config import PRESETS
from turbo_rcm_patch.tiers import EXACT

ROOT = Path(__file__).resolve().parents[3]

DOCS = ROOT / "docs"
RESULTS = json.loads((ROOT / "results/nvidia-h200.json").read_text())
TEMPLATE = (DOCS / writeup.TEMPLATE).read_text()


def test_what_is_there_is_what_the_results_say(tmp_path):
    (tmp_path / writeup.TEMPLATE).write_text(TEMPLATE)
    writeup.write(ROOT / "results/nvidia-h200.json", tmp_path)
    for name in (writeup.PAGE, writeup.ROUND_TRIP):
        assert (tmp_path / name).read_text() == (DOCS / name).read_text(), "run scripts/tools/write_pages.py"
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {f"{name}.png" for name in plots.PLOTS}
    for name in drawn:
        assert plots.saved_data(tmp_path / name) == plots.saved_data(DOCS / name), "run scripts/tools/write_pages.py"
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
    assert float(patched[3]) == pytest.approx(EXACT.limits.factor * float(eager[2]), rel=0.05)
    assert "as much as the unpatched model" in " ".join(writeup.text_of(RESULTS, TEMPLATE).split())


def test_rows_of_two_gpus_are_not_of_one():
    text = " ".join(writeup.text_of(RESULTS, TEMPLATE).split())
    assert ", 2 GPUs |" in text
    assert 'in rows with "2 GPUs" on two' in text


def test_the_quantized_tier_comes_into_the_plot_when_it_was_measured():
    runs = copy.deepcopy(RESULTS["runs"])
    quantized = copy.deepcopy(runs["compare"])
    quantized["settings"]["preset"] = "quantized"
    for name, seconds in (("unpatched", 0.25), ("patched", 0.125)):
        next(v for v in quantized["variants"] if v["name"] == name)["timings"]["steps"] = [seconds] * 4
    runs["compare-quantized"] = quantized
    result = copy.deepcopy(next(r for r in runs["evaluate"]["results"] if r["variant"] == "exact"))
    runs["evaluate"]["results"].append({**result, "variant": "quantized", "steps": 2})
    points = measured.speed_and_accuracy(runs)
    assert [1.0, result["accuracy"]["overall"]["share"]] in points["patched (quantized)"]
    assert all(time is not None for time, _ in points["patched (quantized)"])
    assert [time for time, _ in points["eager diffusers"]] == [1, 2, 4]
    assert "Dashed:" not in writeup.text_of({**RESULTS, "runs": runs}, TEMPLATE)


def _with_sparse_timed() -> dict:
    runs = copy.deepcopy(RESULTS["runs"])
    runs.pop("evaluate-sparse", None)
    sparse = runs["compare-sparse"] = copy.deepcopy(runs["compare"])
    sparse["settings"]["preset"] = "sparse"
    for name, seconds in (("unpatched", 1.0), ("patched", 0.25)):
        next(v for v in sparse["variants"] if v["name"] == name)["timings"]["steps"] = [seconds] * 4
    return runs


def _judged(share: float) -> dict:
    return {"overall": {"share": share, "standard_error": 0.01}}


@pytest.mark.parametrize("seed", [0, 1])
def test_the_sparse_tier_comes_into_the_plot_with_the_same_captions(seed, tmp_path):
    runs = _with_sparse_timed()
    evaluation = runs["evaluate-sparse"] = copy.deepcopy(runs["evaluate"])
    exact = next(row for row in evaluation["results"] if row["variant"] == "exact")
    name = label_of("sparse", PRESETS["sparse"])
    evaluation["results"] = [{**exact, "variant": name, "steps": 2, "accuracy": _judged(0.625)}]
    evaluation["settings"]["seed"] = seed  # with another seed the captions are others
    points = measured.speed_and_accuracy(runs)
    assert points.get("patched (sparse)") == ([[0.5, 0.625]] if seed == 0 else None)
    assert len(points["patched (exact)"]) == len(points["eager diffusers"]) == 3
    plots.save_plot("speed-accuracy", points, tmp_path / "plot.png")
    text = writeup.text_of({**RESULTS, "runs": runs}, TEMPLATE)
    assert (f"|  |  | {name} |  | 62.5 ± 1.0 |" in text) == (seed == 0)


def test_a_tier_that_was_judged_and_not_timed_is_drawn_as_levels(tmp_path):
    runs = copy.deepcopy(RESULTS["runs"])
    runs.pop("compare-quantized", None)
    points = measured.speed_and_accuracy(runs)["patched (quantized)"]
    assert [time for time, _ in points] == [None] * 3
    assert all(0 < share < 1 for _, share in points)
    plots.save_plot("speed-accuracy", measured.plot_data(runs)["speed-accuracy"], tmp_path / "plot.png")
    assert plots.saved_data(tmp_path / "plot.png")["patched (quantized)"][0][0] is None
    text = " ".join(writeup.text_of({**RESULTS, "runs": runs}, TEMPLATE).split())
    assert "Dashed: patched (quantized) was not timed" in text


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


def _changed(run, case, contender, milliseconds):
    """The runs with another time of one contender of one row; None: the row is refused."""
    runs = copy.deepcopy(RESULTS["runs"])
    row = next(row for row in runs[run]["results"] if row["case"] == case)
    if milliseconds is None:
        row["best"] = None
    else:
        row["timings"][contender]["milliseconds"] = milliseconds
    return runs


def _slower(run, case, contender):
    """The runs with one contender of one row a millisecond slower."""
    row = next(row for row in RESULTS["runs"][run]["results"] if row["case"] == case)
    return _changed(run, case, contender, row["timings"][contender]["milliseconds"] + 1)


SPARSE_ATTENTION = "norms_sparse_linear_attention 12×32760×128"
OURS_SPARSE = "rms_norm_rope, sparse_linear_attention"


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


@pytest.mark.parametrize(
    ("run", "case", "contender", "part", "tiers", "times"),
    [
        ("ops", "attention 12×32760×32760×128", "attention", block_rows.SELF_ATTENTION, ("exact",), 1),
        ("ops", "attention 12×32760×32760×128", "SDPA cuDNN", block_rows.SELF_ATTENTION, ("torch.compile",), 1),
        ("ops", "rms_norm_rope 32760×12×128", "rms_norm_rope", block_rows.SELF_ATTENTION, ("exact",), 2),
        ("ops", "linear_skip 32760×1536×1536", "linear_skip", block_rows.LINEARS, ("exact",), 2),
        (
            *("ops", "layer_norm_modulate 32760×1536", "layer_norm_modulate"),
            *(block_rows.NORMS, ("exact", "quantized", "sparse"), 3),
        ),
        (
            *("ops-quantized", "norms_attention_8bit 12×32760×128", "quantize_qkv, attention"),
            *(block_rows.SELF_ATTENTION, ("quantized",), 1),
        ),
        (
            *("ops-quantized", "linear_gelu_8bit 32760×8960×1536", "linear_gelu"),
            *(block_rows.LINEARS, ("quantized", "sparse"), 1),
        ),
        ("ops-sparse", SPARSE_ATTENTION, OURS_SPARSE, block_rows.SELF_ATTENTION, ("sparse",), 1),
    ],
)
def test_a_row_counts_in_its_part_of_its_tiers(run, case, contender, part, tiers, times):
    before = block_rows.blocks_by_tier(RESULTS["runs"])["wan2.1-1.3b"]
    row = next(row for row in RESULTS["runs"][run]["results"] if row["case"] == case)
    more = row["timings"][contender]["milliseconds"] + 1
    after = block_rows.blocks_by_tier(_changed(run, case, contender, more))["wan2.1-1.3b"]
    grown = {
        (tier, name): after[tier][name] - before[tier][name]
        for tier in before
        for name in before[tier]
        if after[tier][name] != before[tier][name]
    }
    assert grown == {(tier, part): pytest.approx(times) for tier in tiers}


def test_the_bars_of_a_step_end_at_the_measured_one():
    """Layers times a block's rows, and the rest of the step, which is less than nothing where the rows are more."""
    runs = copy.deepcopy(RESULTS["runs"])
    for name, milliseconds in (("wan2.1-1.3b", 1000.0), ("wan2.1-1.3b-quantized", 1.0)):
        next(v for v in runs[name]["variants"] if v["name"] == "patched")["timings"]["steps"] = [milliseconds / 1e3] * 4
    steps, block = block_rows.steps_by_tier(runs), block_rows.blocks_by_tier(runs)["wan2.1-1.3b"]
    assert list(steps) == ["wan2.1-1.3b (30 layers), 81×480×832", "wan2.1-14b (4 layers), 81×720×1280"]
    for shown in steps.values():
        assert list(shown) == ["torch.compile", "exact", "quantized", "sparse"]
    shown = steps["wan2.1-1.3b (30 layers), 81×480×832"]
    for tier, step in (("exact", 1000.0), ("quantized", 1.0)):
        assert shown[tier][block_rows.LINEARS] == pytest.approx(30 * block[tier][block_rows.LINEARS])
        assert sum(shown[tier].values()) == pytest.approx(step)
    assert shown["exact"][block_rows.ALL_ELSE] > 0 > shown["quantized"][block_rows.ALL_ELSE]

    del runs["wan2.1-1.3b-quantized"], runs["wan2.1-14b-4-layers-sparse"]
    assert [list(shown) for shown in block_rows.steps_by_tier(runs).values()] == [
        ["torch.compile", "exact", "sparse"],
        ["torch.compile", "exact", "quantized"],
    ]


def test_a_step_is_drawn_up_to_its_measured_line():
    parts = dict.fromkeys((*block_rows.ATTENTION, block_rows.LINEARS, block_rows.NORMS), 10.0)
    steps = {"a model": {"exact": parts | {block_rows.ALL_ELSE: 5.0}, "quantized": parts | {block_rows.ALL_ELSE: -5.0}}}
    figure = Figure()
    plots.PLOTS["step-parts"](figure, steps)
    (axes,) = figure.axes
    assert [segment[0][1] for lines in axes.collections for segment in lines.get_segments()] == [45.0, 35.0]
    grey = axes.containers[-1]
    assert [(bar.get_y(), bar.get_height()) for bar in grey] == [(40.0, 5.0), (40.0, 0.0)]
    assert [text.get_text() for text in axes.texts if text.get_weight() == "bold"] == ["45", "35"]


def test_the_sparse_tier_quantises_one_projection_more_in_a_pass_of_its_own():
    rows = {tier: parts[block_rows.LINEARS] for tier, parts in block_rows.rows_of_block("wan2.1-14b", 8, 5120).items()}
    own, fed = "linear_skip_8bit 8×5120×5120", "fed_linear_skip_8bit 8×5120×5120"
    counts = {tier: [row.count for case in (own, fed) for row in rows[tier] if row.case == case] for tier in rows}
    assert counts == {"torch.compile": [], "exact": [], "quantized": [2], "sparse": [1, 1]}


def test_a_tier_without_one_of_its_rows_has_no_bar():
    refused = _changed("ops-sparse", SPARSE_ATTENTION, OURS_SPARSE, None)
    assert list(block_rows.blocks_by_tier(refused)["wan2.1-1.3b"]) == ["torch.compile", "exact", "quantized"]
    assert "sparse" in block_rows.blocks_by_tier(refused)["wan2.1-14b"]
    text = writeup.text_of({**RESULTS, "runs": refused}, TEMPLATE)
    assert re.search(r"^\| wan2.1-1.3b \| \d+ % \| \d+ % \| \d+ % \|  \|$", text, re.MULTILINE)
    assert "ms less than PyTorch's products in 8 bits" not in " ".join(text.split())

    runs = copy.deepcopy(RESULTS["runs"])
    del runs["ops-quantized"], runs["ops-sparse"]
    assert list(block_rows.blocks_by_tier(runs)["wan2.1-1.3b"]) == ["torch.compile", "exact"]


def test_the_shares_of_attention_are_in_the_text():
    parts = dict(zip((*block_rows.ATTENTION, block_rows.LINEARS, block_rows.NORMS), (5.0, 1.0, 3.0, 1.0), strict=True))
    assert block_rows.attention_share(parts) == 0.6
    text = writeup.text_of({**RESULTS, "runs": _changed("ops-sparse", SPARSE_ATTENTION, OURS_SPARSE, 2000.0)}, TEMPLATE)
    assert re.search(r"^\| wan2.1-1.3b (\| \d+ % ){3}\| 100 % \|$", text, re.MULTILINE)


def test_what_is_saved_outside_attention():
    """One millisecond more of a rival is one more saved; the text has both figures."""
    before = block_rows.saved_outside_attention(RESULTS["runs"], "wan2.1-1.3b")
    slower = _slower("ops", "linear_gelu 32760×8960×1536", "torch + compiled")
    after = block_rows.saved_outside_attention(slower, "wan2.1-1.3b")
    assert after["saved"] - before["saved"] == pytest.approx(1.0)
    assert after["saved_in_8_bits"] == pytest.approx(before["saved_in_8_bits"])
    block = block_rows.blocks_by_tier(slower)["wan2.1-1.3b"]
    assert after["of_compiled"] == pytest.approx(after["saved"] / sum(block["torch.compile"].values()))

    slower = _slower("ops-quantized", "linear_gelu_8bit 32760×8960×1536", "_scaled_mm + compiled")
    after = block_rows.saved_outside_attention(slower, "wan2.1-1.3b")
    assert after["saved_in_8_bits"] - before["saved_in_8_bits"] == pytest.approx(1.0)
    sparse = sum(block["sparse"].values())
    assert after["of_sparse"] == pytest.approx(after["saved_in_8_bits"] / (sparse + after["saved_in_8_bits"]))
    text = " ".join(writeup.text_of({**RESULTS, "runs": slower}, TEMPLATE).split())
    assert f"{after['saved_in_8_bits']:.2f} ms less than PyTorch's products in 8 bits" in text

    without = _changed("ops-sparse", SPARSE_ATTENTION, OURS_SPARSE, None)
    assert block_rows.saved_outside_attention(without, "wan2.1-1.3b") is None


def test_every_bar_can_be_traced_to_rows_of_the_results_page():
    text = (DOCS / writeup.PAGE).read_text()
    rows = re.search(r"<details>.*?</details>", text, re.DOTALL).group()
    named = set(re.findall(r"`(\w+ [\d×]+)`", rows))
    assert len(named) == 15
    page = (ROOT / "results/README.md").read_text()
    assert [name for name in named if f"| {name} |" not in page] == []


def test_a_whole_step_of_the_sparse_tier_is_no_longer_missed_once_it_was_timed():
    missed = "No whole step of the sparse tier was timed yet."
    changed = copy.deepcopy(RESULTS)
    for run in ("wan2.1-1.3b-sparse", "wan2.1-14b-4-layers-sparse"):
        changed["runs"].pop(run, None)
    assert missed in " ".join(writeup.text_of(changed, TEMPLATE).split())
    sparse = changed["runs"]["wan2.1-1.3b-sparse"] = copy.deepcopy(changed["runs"]["wan2.1-1.3b"])
    sparse["settings"]["preset"] = "sparse"
    assert missed not in " ".join(writeup.text_of(changed, TEMPLATE).split())


def test_the_sparse_tier_has_errors_of_blocks():
    changed = copy.deepcopy(RESULTS)
    runs = changed["runs"]
    runs["verify-wan2.1-1.3b-sparse"]["blocks"]["patched_error"]["largest"] = 0.0333
    parts = {part["part"]: part for part in runs["verify-wan2.1-1.3b-block-sparse"]["parts"]}
    parts["feed_forward"]["error"]["largest"] = 0.222
    text = writeup.text_of(changed, TEMPLATE)
    for preset, of, error, allowed in (
        ("sparse", "a block", "3.3e-02", PRESETS["sparse"].tier.limits.block),
        ("", "its feed-forward", "2.2e-01", PRESETS["block_sparse"].tier.limits.part),
    ):
        assert f"| {preset} | {of} | {error} | {allowed:.1e} |" in text
    for name in ("verify-wan2.1-1.3b-sparse", "verify-wan2.1-1.3b-block-sparse"):
        del runs[name]
    assert "No step of the sparse tier is in this table" not in writeup.text_of(changed, TEMPLATE)


def test_the_step_with_block_sparse_attention_is_beside_the_dense_one():
    changed = copy.deepcopy(RESULTS)
    for variant in changed["runs"]["wan2.1-1.3b-block-sparse"]["variants"]:
        seconds = {"patched": 0.111, "patched, dense in 8 bits": 0.222}.get(variant["name"], 0.333)
        variant["timings"]["steps"] = [seconds] * 4
    sentence = (
        "90 % of the estimated attention (`mass`): with all in 8 bits the step takes 111 ms, beside 222 with dense"
    )
    assert sentence in " ".join(writeup.text_of(changed, TEMPLATE).split())
    del changed["runs"]["wan2.1-1.3b-block-sparse"]
    assert "(`mass`)" not in writeup.text_of(changed, TEMPLATE)


def test_the_tiny_model_in_every_tier_is_part_of_the_accuracy():
    tiny = {"sparse": json.loads((ROOT / "results/sparse-tiny.json").read_text())}
    tiny["sparse"]["settings"]["n"] = 77
    tiny["sparse"]["environment"]["gpu"] = None
    assert "| a CPU | 77 | exact |" in writeup.text_of(RESULTS, TEMPLATE, tiny)
    assert "| a CPU |" not in writeup.text_of(RESULTS, TEMPLATE)
    changed = copy.deepcopy(RESULTS)
    del changed["runs"]["evaluate"]
    assert "What the tiny model shows" not in writeup.text_of(changed, TEMPLATE)


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
