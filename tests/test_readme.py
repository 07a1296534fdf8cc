"""The figures of the README and of the results page are those of the results files."""

import json
import re
import sys
from pathlib import Path

import pytest
from PIL import Image

from turbo_rcm_patch.bench import charts
from turbo_rcm_patch.bench.lora import ALONE, RESCALED, SWITCHED, WITHOUT
from turbo_rcm_patch.bench.ops_quantized import OURS_EXACT
from turbo_rcm_patch.bench.ops_sparse import DENSE
from turbo_rcm_patch.bench.variants import COMPILED_AFTER_A_CHANGE

ROOT = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(ROOT / "scripts"))  # which is no package
import readme_results  # noqa: E402
from result_tables import ops, steps, tiny_model  # noqa: E402


def test_the_readme_and_the_page_are_rendered_from_the_results():
    text = (ROOT / "README.md").read_text()
    assert readme_results.MEASURED[0] in text
    assert readme_results.with_results(text, ROOT / "results") == text
    assert readme_results.results_page(ROOT / "results") == (ROOT / "results/README.md").read_text()


def test_the_page_says_what_wrote_the_files_that_are_of_no_gpu():
    gpus = {path.name for path in readme_results.result_files(ROOT / "results")}
    others = {path.name for path in (ROOT / "results").glob("*.json")} - gpus
    assert others
    assert [name for name in others if f"`{name}` by `" not in readme_results.INTRODUCTION.replace("\n", " ")] == []


@pytest.mark.parametrize("page", ["README.md", "results/README.md", "results/designs.md", "docs/writeup.md"])
def test_files_that_a_page_names_are_there(page):
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text())
    named = re.findall(r"`(results/[\w./-]+)`", (ROOT / page).read_text())
    assert all((ROOT / page).parent.joinpath(link).exists() for link in links)
    assert all((ROOT / name).exists() for name in named)


def test_results_of_any_gpu_become_a_page_and_a_short_table(tmp_path):
    """Also of a file without the embedded model, commits or tests, and of one GPU beside another."""
    run = _step_run("wan2.2-5b", compiled=0.6, patched=0.5)
    two = {**run, "settings": {**run["settings"], "ulysses": 2, "layers": 4}}
    for file, gpu, runs, more in (
        ("geforce-rtx-4090", "NVIDIA GeForce RTX 4090", {"wan2.2-5b": run}, {}),
        ("nvidia-b200", "NVIDIA B200", {"ops": {"results": [], "rounds": 2, "copy_bandwidth": 1e12}}, {}),
        ("nvidia-x", "NVIDIA X", {"wan2.1-14b-4-layers-2-gpus": two}, {"tests": [_tests_entry()]}),
    ):
        (tmp_path / f"{file}.json").write_text(json.dumps({"gpu": gpu, "runs": runs, **more}))
    page = readme_results.results_page(tmp_path)
    for heading in ("## NVIDIA GeForce RTX 4090", "## NVIDIA B200", "## NVIDIA X"):
        assert heading in page
    assert "geforce-rtx-4090-steps.png" in page
    assert "| 2.11 | 3.6 | 0.42 | 0123456789ab | 71 | 0 |" in page
    start, end = readme_results.MEASURED
    readme = readme_results.with_results(f"a {start} old {end} b", tmp_path)
    assert "| wan2.2-5b, 5×16×32 | exact | 900 | 600 |  | 500 | 1.20× | 1.00× |  |" in readme
    assert "| wan2.2-5b (4 layers), 5×16×32, 2 GPUs | exact | 900 | 600 |  | 500 | 1.20× | 1.00× |  |" in readme
    assert "results/geforce-rtx-4090-steps.png" in readme
    assert "old" not in readme
    assert readme_results.with_results("no markers", tmp_path) == "no markers"


def test_failed_gpu_tests_are_bold():
    assert "| 71 | **3** |" in ops.tests_table([{**_tests_entry(), "ok": False, "failed": 2, "error": 1}])


def test_the_page_says_what_compute_sanitizer_found(tmp_path):
    environment = {"commit": "0123456789abcdef"}
    sanitizers = {"memcheck": {"ok": True, "environment": environment}, "racecheck": {"ok": False, "environment": {}}}
    results = {"gpu": "NVIDIA X", "runs": {}, "tests": [], "sanitizers": sanitizers}
    (tmp_path / "nvidia-x.json").write_text(json.dumps(results))
    page = readme_results.results_page(tmp_path)
    assert "memcheck passes at commit 0123456789ab, racecheck **fails** at commit unknown." in page


def _tests_entry():
    environment = {"torch": "2.11", "triton": "3.6", "diffusers": "0.42", "commit": "0123456789abcdef"}
    return {"ok": True, "passed": 71, "environment": environment}


def _step_run(name, compiled, patched, errors=(None, None, None)):
    def variant(name, step, error):
        timings = {"steps": [step, step], "peak_memory": 2**30}
        return {"name": name, "timings": timings, "latents": None, "step_error": error}

    names, steps = ("unpatched", "torch.compile", "patched"), (0.9, compiled, patched)
    variants = [variant(*each) for each in zip(names, steps, errors, strict=True)]
    settings = {"config": name, "num_frames": 5, "height": 16, "width": 32}
    environment = {"gpu": "GPU X", "torch": "2", "triton": "3", "diffusers": "0"}
    return {"settings": settings, "variants": variants, "environment": environment}


def _line(cells):
    return f"| {' | '.join(cells)} |"


def _step_lines(name, run):
    return [_line(row) for row in steps.step_rows(name, run)]


def test_steps_are_compared_with_eager_and_with_compile():
    run = _step_run("wan2.1-1.3b", compiled=0.6, patched=0.5)
    assert _step_lines("wan2.1-1.3b", run)[2] == (
        "|  | patched (exact) | 500.0 | 1.80× | 1.20× | 1.45 / 1.2 | 1.00 |  |  |"
    )
    run = _step_run("wan2.1-1.3b", compiled=0.6, patched=0.5, errors=(0.003, 0.002, 0.0021))
    rows = _step_lines("wan2.1-1.3b", run)
    assert [row.split(" | ")[-2] for row in rows] == ["3.0e-03", "2.0e-03", "2.1e-03"]
    run = _step_run("wan2.1-1.3b", compiled=0.6, patched=0.5, errors=(0.003, 0.002, 0.0022))
    rows = _step_lines("wan2.1-1.3b", run)
    assert [row.split(" | ")[-2] for row in rows] == ["3.0e-03", "2.0e-03", "**2.2e-03**"]
    run = _step_run("wan2.1-1.3b", compiled=0.59, patched=0.5)
    assert "| 1.80× | **1.18×** | 1.45 / 1.2 |" in _step_lines("wan2.1-1.3b", run)[2]
    slow = _step_run("wan2.1-1.3b", compiled=0.9, patched=0.7)
    assert "| **1.29×** | 1.29× | 1.45 / 1.2 |" in _step_lines("wan2.1-1.3b", slow)[2]
    assert "| 1.80× | **1.18×** | – / 1.2 |" in _step_lines("wan2.1-1.3b-17-frames", run)[2]
    assert "| 1.80× | 1.18× |  |" in _step_lines("another", run)[2]


def _video_run(patched, error, memory=2**31):
    def variant(name, decode, error):
        stages = {"steps": [0.2, 0.2], "vae_decode": decode, "output": 0.05, "total": decode + 0.5}
        peak = memory if name == "patched" else 2**31
        return {"name": name, "timings": {**stages, "peak_memory": peak}, "latents": None, "decode_error": error}

    run = _step_run("wan2.1-1.3b", compiled=0.6, patched=0.5)
    decodes = {"unpatched": (1.8, 0.01), "torch.compile": (1.0, 0.01), "patched": (patched, error)}
    run["variants"] = [variant(name, *each) for name, each in decodes.items()]
    run["settings"] |= {"output_type": "np", "num_inference_steps": 2}
    return run


def test_whole_videos_are_a_table_of_their_own():
    runs = {"wan2.1-1.3b-decoded": _video_run(0.5, 0.0101)}
    assert charts.real_models(runs) == {}
    measured = readme_results._measured(Path("gpu.json"), runs, [])
    asked = "–× / 1.75× / decode 0.6 s / output 0.1 s / total 2.5 s"
    assert (
        f"|  | patched (exact) | 0.40 | 0.50 | 0.05 | 1.00 | 3.60× | 2.00× |  | {asked} | 2.00 | 1.0e-02 |" in measured
    )
    assert "| eager diffusers | 0.40 | 1.80 | 0.05 | 2.30 | 1.00× | 0.56× |  |  | 2.00 | 1.0e-02 |" in measured
    assert "over compile, whose decoder is compiled too" in measured
    assert "One denoising step" not in measured
    missed = steps.whole_videos_table({"wan2.1-1.3b-decoded": _video_run(0.61, 0.0106)})
    assert "| 0.40 | **0.61** | 0.05 | 1.11 | 2.95× | **1.64×** |" in missed
    assert "**1.1e-02** |" in missed
    more = steps.whole_videos_table({"wan2.1-1.3b-decoded": _video_run(0.5, 0.01, memory=2**31 + 2**27)})
    assert "| **2.12** | 1.0e-02 |" in more
    counted = steps.whole_videos_table({"another": _video_run(0.5, 0.01) | {"decode_flops": 300e12}})
    assert "| 1.00× | 0.56× | 167 |" in counted
    assert "| 3.60× | 2.00× | 600 |" in counted


def test_the_readme_has_a_short_table_of_a_whole_video():
    steps_run = _step_run("wan2.1-1.3b", compiled=0.6, patched=0.5)
    assert "whole video" not in steps.short_steps(Path("x.json"), {"wan2.1-1.3b": steps_run})
    runs = {"wan2.1-1.3b": steps_run, "wan2.1-1.3b-decoded": _video_run(0.61, 0.01)}
    lines = steps.short_steps(Path("x.json"), runs).splitlines()
    assert lines[-4].startswith("| from the prompt's embeddings to frames | eager, s | compile, s | patched, s |")
    assert lines[-2:] == [
        "| a whole video of wan2.1-1.3b, 5×16×32, 2 steps, exact | 2.30 | 1.50 | 1.11 | 2.07× | 1.35× | 1.00× |",
        "| decoding alone, Wan 2.1's VAE, 5×16×32 | 1.80 | 1.00 | **0.61** | 2.95× | **1.64×** | 1.00× |",
    ]
    timings = runs["wan2.1-1.3b-decoded"]["variants"][-1]["timings"]
    timings["peak_memory"], timings["total"] = 2 * timings["peak_memory"], 2.6
    assert "| 1.50 | **2.60** | 0.88× | 0.58× | **2.00×** |" in steps.short_steps(Path("x.json"), runs)
    del runs["wan2.1-1.3b-decoded"]["variants"][1]
    assert "| 2.30 | not run | **2.60** |" in steps.short_steps(Path("x.json"), runs)


def test_a_variant_that_was_not_run_says_so():
    run = _step_run("wan2.1-1.3b", compiled=0.6, patched=0.5)
    run["settings"]["preset"] = "quantized"
    table = steps.short_steps(Path("x.json"), {"wan2.1-1.3b": _step_run("x", 0.6, 0.5), "8-bit": run})
    assert "| quantized | 900 | 600 | not run | 500 |" in table


def test_steps_of_all_tiers_are_in_the_short_tables():
    runs = {"exact": _step_run("exact", compiled=0.6, patched=0.5)}
    for tier in ("quantized", "sparse", "block_sparse"):
        runs[tier] = _step_run(tier, compiled=0.6, patched=0.1)
        runs[tier]["settings"]["preset"] = tier
    lines = steps.short_steps(Path("x.json"), runs).splitlines()
    assert [line.split(" | ")[1] for line in lines[-3:]] == ["quantized", "sparse", "block_sparse"]
    assert "6.00×" in lines[-1]


@pytest.mark.parametrize(("seconds", "shown"), [(0.257, "257.0 (1.008× without"), (0.27, "270.0 (**1.059×** without")])
def test_a_step_with_lora_is_compared_with_one_without(seconds, shown):
    times = {"unpatched": 0.33, "torch.compile": 0.28, "patched": seconds, WITHOUT: 0.255, RESCALED: 0.26}
    variants = [
        {"name": name, "timings": {"steps": [step] * 2, "peak_memory": 2**30}, "latents": None, "compiled": 0}
        for name, step in times.items()
    ]
    settings = {"config": "wan2.1-14b", "layers": 4, "num_frames": 81, "height": 480, "width": 832, "lora_ranks": [64]}
    rows = steps.step_rows("wan2.1-14b-4-layers-lora-64", {"settings": settings, "variants": variants})
    assert "wan2.1-14b (4 layers), 81×480×832, LoRA of rank 64" in rows[0][0]
    assert shown in rows[2][2]
    assert "≤ 1.03× without LoRA" in rows[2]
    assert [row[1] for row in rows[3:]] == [WITHOUT, RESCALED]
    assert charts.real_models({"x": {"settings": settings, "variants": variants}}) == {}


def test_a_step_after_a_change_is_compared_with_one_without():
    """Ours may take 5 ms more, and compile nothing; of the compiled rival only the step right after it counts."""
    times = {"unpatched": [0.33] * 3, "torch.compile": [0.28] * 3, "patched": [0.257] * 3, WITHOUT: [0.25] * 3}
    times |= {RESCALED: [0.2615] * 3, ALONE: [0.25] * 3, SWITCHED: [0.256] * 3}
    times[COMPILED_AFTER_A_CHANGE] = [0.28, 21.5, 0.28]
    variants = [
        {"name": name, "timings": {"steps": each, "peak_memory": 2**30}, "latents": None, "compiled": 0}
        for name, each in times.items()
    ]
    variants[4]["compiled"], variants[-1]["compiled"] = 2, 3
    settings = {"config": "wan2.1-14b", "num_frames": 81, "height": 480, "width": 832, "lora_ranks": [64, 64]}
    rows = {row[1]: row for row in steps.step_rows("x", {"settings": settings, "variants": variants})}
    assert rows[RESCALED][2] == "261.5 (+4.5 ms, **2 compiled**)"
    assert rows[SWITCHED][2] == "256.0 (**+6.0 ms**, 0 compiled)"
    assert rows[ALONE][2] == "250.0"
    assert rows[COMPILED_AFTER_A_CHANGE][2] == "21500.0 (+21220.0 ms, 3 compiled)"
    asked = [name for name, row in rows.items() if row[5] == "≤ 5 ms on top, nothing compiled"]
    assert asked == [RESCALED, SWITCHED]


def test_memory_has_a_target_beside_compile():
    run = _step_run("wan2.2-5b", compiled=0.6, patched=0.5)
    run["variants"][2]["timings"]["peak_memory"] = 1.15 * 2**30
    assert "memory 1.15 | 1.15 (1.15×) |" in _step_lines("wan2.2-5b-8-layers", run)[2]
    assert "| 1.15× |" in _line(steps.short_step_row("wan2.2-5b-8-layers", run))
    run["variants"][2]["timings"]["peak_memory"] = 1.2 * 2**30
    assert "memory 1.15 | 1.20 (**1.20×**) |" in _step_lines("wan2.2-5b-8-layers", run)[2]
    assert "| **1.20×** |" in _line(steps.short_step_row("wan2.2-5b-8-layers", run))
    assert "| 1.20× |" in _line(steps.short_step_row("another", run))


def test_charts(tmp_path):
    traffic = {"name": "eager", "read": 2e9, "written": 1e9, "refused": None}
    block = {"case": "Wan block", "config": "wan2.1-1.3b"}
    size = {"B": 4, "N": 16, "C": 768, "dtype": "bfloat16", "mode": "forward"}
    runs = {
        "wan2.1-1.3b": _step_run("wan2.1-1.3b", compiled=0.6, patched=0.5),
        "traffic": {"settings": block, "pass_bytes": 80, "implementations": [traffic]},
        "implementations": {"rows": [{**size, "implementation": "two_pass", "speedup": 1.0}]},
    }
    charts.draw_charts(runs, tmp_path / "gpu.json")
    names = {f"gpu-{kind}.png" for kind in ("steps", "traffic", "modules")}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)
    charts.draw_charts({}, tmp_path / "none.json")
    assert {path.name for path in tmp_path.iterdir()} == names


def test_charts_are_of_the_results():
    shown = {}
    for path in readme_results.result_files(ROOT / "results"):
        for kind, data in charts.chart_data(json.loads(path.read_text())["runs"]).items():
            with Image.open(charts.chart_file(path, kind)) as image:
                shown[path.name, kind] = image.text[charts.DIGEST] == charts.digest_of(data)
    assert len(shown) >= 3
    assert all(shown.values()), "run scripts/readme_results.py"


def test_the_chart_of_steps_shows_real_models_alone():
    embedded = _step_run("embedded", compiled=0.6, patched=0.1)
    embedded["settings"]["model"] = embedded["settings"].pop("config")
    runs = {"compare": embedded, "wan2.1-1.3b": _step_run("wan2.1-1.3b", compiled=0.6, patched=0.5)}
    assert list(charts.real_models(runs)) == ["wan2.1-1.3b"]


def test_an_evaluation_and_its_training_become_a_table(tmp_path):
    def accuracy(share):
        part = {"share": share, "right": 1, "asked": 2, "standard_error": 0.0123}
        return {"count": {**part, "share": 1.0}, "overall": part}

    result = {
        "variant": "exact",
        "steps": 4,
        "accuracy": accuracy(0.956),
        "change": {"share": -0.004, "standard_error": 0.006},
        "psnr_to_fp32": 31.257,
        "psnr_to_exact": None,
    }
    environment = {"gpu": "GPU X", "torch": "2.11"}
    evaluation = {"settings": {"n": 77}, "environment": environment, "results": [result]}
    taught = {"steps": 50, "accuracy": accuracy(0.98)}
    training = {"seconds": 90, "environment": environment, "stages": {"teacher accuracy": taught}}
    section = tiny_model.evaluated("x.json", {"evaluate": evaluation}, training)
    assert "| teacher, guided | 50 | 100.0 | 98.0 ± 1.2 |  |  |  |" in section
    assert "| exact | 4 | 100.0 | 95.6 ± 1.2 | -0.4 ± 0.6 | 31.26 |  |" in section
    assert "77 held-out captions" in section
    assert "1.5 minutes on one GPU X" in section
    assert "`x.json`" in section

    evaluation["results"].append({**result, "accuracy": accuracy(0.949)})
    section = tiny_model.evaluated("x.json", {"evaluate": evaluation}, None)
    assert "teacher" not in section
    assert "| exact | 4 | 100.0 | **94.9** ± 1.2 | -0.4 ± 0.6 | 31.26 |  |" in section  # 95 are wanted
    assert "| exact | 4 | 100.0 | 95.6 ± 1.2 | -0.4 ± 0.6 | 31.26 |  |" in section
    assert tiny_model.evaluated("x.json", {}, training) == ""


def test_what_sparsity_costs_becomes_a_table_of_a_row_per_kept_share(tmp_path):
    def row(variant, kept, steps, share, psnr):
        overall = {"share": share, "standard_error": 0.021}
        return {
            "variant": variant,
            "kept": kept,
            "steps": steps,
            "accuracy": {"overall": overall},
            "psnr_to_exact": psnr,
        }

    environment = {"gpu": None, "torch": "2.13", "triton": "3.9", "diffusers": "0.42", "commit": "0123456789abcdef"}
    rows = [row("exact", None, 1, 0.9, None), row("exact", None, 4, 1.0, None)]
    rows += [row("SLA", 0.15, 1, 0.5, 17.891), row("SLA", 0.15, 4, 0.75, 20.0)]
    content = {"settings": {"n": 24, "blocks": [16, 16]}, "environment": environment, "results": rows}
    (tmp_path / "sparse-tiny.json").write_text(json.dumps(content))
    page = readme_results.results_page(tmp_path)
    assert "24 held-out captions" in page
    assert "On a CPU, torch 2.13, triton 3.9, diffusers 0.42, commit 0123456789ab" in page
    assert "| attention | key blocks kept | 1 step, % | PSNR to exact, dB | 4 steps, % | PSNR to exact, dB |" in page
    assert "| exact in fp32 | all | 90.0 ± 2.1 |  | 100.0 ± 2.1 |  |" in page
    assert "| SLA in fp32 | 15 % | 50.0 ± 2.1 | 17.89 | 75.0 ± 2.1 | 20.00 |" in page


def _judged(variant, steps, share, psnr, **more):
    accuracy = {"overall": {"share": share, "standard_error": 0.0123}}
    return {"variant": variant, "steps": steps, "accuracy": accuracy, "psnr_to_exact": psnr, **more}


def _evaluation(n=77):
    rows = [("unpatched", 1, 0.9, 40.0), ("exact", 1, 0.91, None), ("quantized", 1, 0.89, 38.125)]
    rows += [("unpatched", 4, 0.98, 41.0), ("exact", 4, 0.99, None), ("quantized", 4, 0.97, 44.5)]
    rows.append(("unpatched fp32", 4, 0.96, 45.0))
    results = [_judged(*row) for row in rows]
    return {"settings": {"n": n}, "environment": {"gpu": "GPU X"}, "results": results}


def _sparse(n=24):
    rows = [_judged("exact", 1, 0.9, None, kept=None), _judged("block sparse", 1, 0.6, 19.0, kept=0.3)]
    rows += [_judged("SLA", 1, 0.5, 20.0, kept=0.1), _judged("SLA", 4, 0.75, 21.0, kept=0.1)]
    rows.append(_judged("SLA", 4, 0.85, 22.0, kept=0.2))
    return {"settings": {"n": n}, "environment": {"gpu": None}, "results": rows}


def _block_sparse(n=6):
    variants = [_judged("mass 0.9", 4, 0.8, 22.25), _judged("mass 0.9, first step exact", 4, 0.9, 30.0)]
    exact = _judged("exact", 4, 1.0, None)
    return {"settings": {"n": n}, "environment": {"gpu": None}, "exact": exact, "variants": variants}


SHORT_TIERS = "| measured on | captions | what the tiny model shows of held-out captions, %"
TIERS = [
    "|---|---|---|---|---|---|",
    "| GPU X | 77 | unpatched | 90.0 ± 1.2 | 98.0 ± 1.2 | 41.00 |",
    "|  |  | exact | 91.0 ± 1.2 | 99.0 ± 1.2 |  |",
    "|  |  | quantized | 89.0 ± 1.2 | 97.0 ± 1.2 | 44.50 |",
    "|  |  | unpatched fp32 |  | 96.0 ± 1.2 | 45.00 |",
    "| a CPU | 24 | exact | 90.0 ± 1.2 |  |  |",
    "|  |  | sparse (SLA) in fp32, 10 % of the key blocks | 50.0 ± 1.2 | 75.0 ± 1.2 | 21.00 |",
    "|  |  | sparse (SLA) in fp32, 20 % of the key blocks |  | 85.0 ± 1.2 | 22.00 |",
    "| a CPU | 6 | exact |  | 100.0 ± 1.2 |  |",
    "|  |  | block_sparse in fp32, mass 0.9 |  | 80.0 ± 1.2 | 22.25 |",
    "|  |  | block_sparse in fp32, mass 0.9, first step exact |  | 90.0 ± 1.2 | 30.00 |",
]


def test_every_tier_is_in_one_table_with_where_it_was_measured_and_of_how_many_captions():
    assert tiny_model.tiers_table(None) is None
    lines = tiny_model.tiers_table(_evaluation(), _sparse(), _block_sparse()).splitlines()[2:]
    assert lines == ["| measured on | captions | variant | 1 step | 4 steps | PSNR to exact, dB |", *TIERS]


def test_sparse_rows_measured_on_a_gpu_are_in_bf16_unless_they_say_otherwise():
    sparse, block_sparse = ({**each, "environment": {"gpu": "GPU X"}} for each in (_sparse(), _block_sparse()))
    block_sparse["settings"] = {**block_sparse["settings"], "dtype": "float32"}
    table = tiny_model.tiers_table(None, sparse, block_sparse)
    assert "| sparse (SLA) in bf16, 10 % of the key blocks |" in table
    assert "| block_sparse in fp32, mass 0.9 |" in table


def test_the_readmes_table_has_every_tier_but_not_every_variant():
    assert tiny_model.short_tiny_table(None) is None
    lines = tiny_model.short_tiny_table(_evaluation(), _sparse(), _block_sparse()).splitlines()
    assert lines[0].startswith(f"{SHORT_TIERS} | 1 step | 4 steps |")
    assert lines[1:] == [line for line in TIERS if "unpatched fp32" not in line and "first step" not in line]


def test_the_readme_shows_what_the_files_hold(tmp_path):
    """The rows of both sparse tiers, from the files beside the GPU's results."""
    runs = {"wan2.2-5b": _step_run("wan2.2-5b", compiled=0.6, patched=0.5), "evaluate": _evaluation()}
    (tmp_path / "gpu-x.json").write_text(json.dumps({"gpu": "GPU X", "runs": runs}))
    for name, content in (("sparse-tiny.json", _sparse()), ("block-sparse-tiny.json", _block_sparse())):
        (tmp_path / name).write_text(json.dumps(content))
    text = readme_results.with_results("\n".join(readme_results.MEASURED), tmp_path)
    assert TIERS[6] in text
    assert TIERS[9] in text


def _attention_rows(sizes="12×32760×128"):
    def row(case, best, **milliseconds):
        timings = {name.replace("_", " "): {"milliseconds": time} for name, time in milliseconds.items()}
        return {"case": f"{case} {sizes}", "best": best, "timings": timings, "targets": {}, "speedups": {}}

    sparse = row("norms_sparse_linear_attention", "ours", ours=1.5)
    sparse["timings"][DENSE] = {"milliseconds": 7.125}
    quantized = row("norms_attention_8bit", "ours", ours=7.75)
    quantized["timings"][OURS_EXACT] = {"milliseconds": 9.5}
    return {"ops-sparse": {"results": [sparse]}, "ops-quantized": {"results": [quantized]}}


def test_the_whole_sparse_attention_beside_the_dense_ones_is_a_sentence():
    assert ops.sparse_attention_sentence(_attention_rows()) == (
        "One self-attention with its norms and RoPE (12 heads of 128, 32760 tokens): exact 9.50 ms beside 7.75 in 8 "
        "bits, and sparse 1.50 beside 7.12 in 8 bits; each pair was timed in turns.\n"
    )
    missed = _attention_rows()
    missed["ops-sparse"]["results"][0]["most"] = 1.45
    missed["ops-quantized"]["results"][0] |= {"targets": {OURS_EXACT: 1.25}, "speedups": {OURS_EXACT: 1.2}}
    assert "beside **7.75** in 8 bits, and sparse **1.50** beside" in ops.sparse_attention_sentence(missed)
    refused = _attention_rows()
    refused["ops-sparse"]["results"][0]["best"] = None
    assert ops.sparse_attention_sentence(refused) is None
    assert ops.sparse_attention_sentence({"ops-quantized": refused["ops-quantized"]}) is None
    apart = {"ops-sparse": _attention_rows()["ops-sparse"], "ops-quantized": _attention_rows("1×2×3")["ops-quantized"]}
    assert ops.sparse_attention_sentence(apart) is None


def test_the_readme_has_sparse_attention_beside_dense_in_8_bits(tmp_path):
    runs = {"x": _step_run("x", compiled=0.6, patched=0.5), **_attention_rows()}
    (whole,) = runs["ops-sparse"]["results"]
    kernel = {**whole, "case": "sparse_kernel 12×32760×128", "most": 0.78}
    runs["ops-sparse"]["results"] = [
        {**whole, "most": 1.6},
        {**whole, "case": f"{whole['case']}×9", "best": None},
        kernel,
    ]
    (tmp_path / "gpu-x.json").write_text(json.dumps({"gpu": "GPU X", "runs": runs}))
    assert (
        "\n\nSparse attention beside dense in 8 bits, ms. With norms and RoPE: 1.50 beside 7.12 at 12×32760×128 (1.6 "
        "wanted). The kernel alone: **1.50** beside 7.12 at 12×32760×128 (0.78 wanted).\n"
    ) in readme_results.with_results("\n".join(readme_results.MEASURED), tmp_path)
    assert ops.short_sparse({}) == ""


def test_what_the_readme_has_of_a_gpu(tmp_path):
    runs = {"x": _step_run("x", compiled=0.6, patched=0.5), "evaluate": _evaluation(), **_attention_rows()}
    start, end = readme_results.MEASURED

    def readme():
        (tmp_path / "gpu-x.json").write_text(json.dumps({"gpu": "GPU X", "runs": runs}))
        return readme_results.with_results(f"a {start} old {end} b", tmp_path)

    whole = readme()
    assert f"\n\n{SHORT_TIERS} | 1 step | 4 steps |" in whole
    assert "a CPU" not in whole
    assert whole.endswith(f"|\n{end} b")
    del runs["x"]
    assert "held-out" not in readme()


def test_what_the_judge_sees_of_a_lora_becomes_a_table(tmp_path):
    environment = {"gpu": None, "torch": "2.13", "triton": "3.9", "diffusers": "0.42", "commit": "0123456789abcdef"}
    rows = [
        {"variant": "with it, unpatched", "colour": 0.9375, "asked": 0.0, "psnr": None},
        {"variant": "with it, patched (exact)", "colour": 0.9375, "asked": 0.0, "psnr": 81.25},
    ]
    settings = {"n": 16, "colour": "red", "rank": 8, "steps": 4}
    content = {"settings": settings, "training": {"updates": 60, "seconds": 61.7}, "environment": environment}
    (tmp_path / "lora-tiny.json").write_text(json.dumps({**content, "results": rows}))
    page = readme_results.results_page(tmp_path)
    assert "60 updates in 62 s" in page
    assert "| with it, patched (exact) | 93.8 | 0.0 | 81.25 |" in page


def test_what_a_conversion_takes_becomes_a_table(tmp_path):
    environment = {"gpu": None, "cpu": "x86_64, 2 threads", "torch": "2.13", "triton": "3.9", "diffusers": "0.42"}
    row = {"what": "bf16: convert --preset sparse", "seconds": 18.44, "file_bytes": 3 * 2**30}
    row |= {"own_peak_bytes": 2**29, "mapped_peak_bytes": 5 * 2**29}
    content = {"settings": {"config": "wan2.1-1.3b", "parameters": 1419000000}, "environment": environment}
    (tmp_path / "conversion.json").write_text(json.dumps({**content, "rows": [row]}))
    page = readme_results.results_page(tmp_path)
    assert "random weights of wan2.1-1.3b's size, 1.42 billion" in page
    assert "x86_64, 2 threads, torch 2.13, triton 3.9" in page
    assert "| bf16: convert --preset sparse | 18.4 | 0.50 | 2.50 | 3.00 |" in page


def test_ops_become_a_table_that_marks_what_is_missed():
    def timing(milliseconds, error):
        return {"milliseconds": milliseconds, "error": error}

    timings = {"rival A": timing(2.0, 2e-3), "rival B": timing(3.0, None), "ours": timing(2.5, 1e-3)}
    result = {
        "case": "op 1×2",
        "best": "ours",
        "timings": timings,
        "speedups": {"rival A": 0.8, "rival B": 1.2, "copy": 0.75},
        "targets": {"rival A": 1.1, "rival B": 1.0},
    }
    refused = {"case": "op 3×4", "best": None, "timings": {}, "speedups": {}, "targets": {}}
    table = ops.ops_table({"results": [result, refused], "rounds": 7, "copy_bandwidth": 4e12})
    assert "| op 1×2 | 2.500 | rival A | 2.000 | **0.800** | 1.1 | 1.0e-03 / 2.0e-03 |" in table
    assert "|  |  | rival B | 3.000 | 1.200 | 1.0 |  |" in table
    assert "|  |  | copy |  | 0.750 |  |  |" in table
    assert "| op 3×4 | refused" in table
    assert "4.00 TB/s" in table
    for least, shown in (
        (860, "2.500 (860 TFLOP/s) | rival A | 2.000 | **0.800** | 1.1 / 860 TFLOP/s"),
        (861, "2.500 (**860** TFLOP/s) | rival A | 2.000 | **0.800** | 1.1 / 861 TFLOP/s"),
    ):
        rated = ops.ops_table(
            {"results": [{**result, "teraflops": 860.2, "least": least}], "rounds": 7, "copy_bandwidth": 1e12}
        )
        assert f"| op 1×2 | {shown} | 1.0e-03 / 2.0e-03 |" in rated
    alone = {**result, "timings": {"ours": timings["ours"]}, "speedups": {}, "teraflops": 860.2, "least": 860}
    table = ops.ops_table({"results": [alone], "rounds": 7, "copy_bandwidth": 4e12})
    assert "| op 1×2 | 2.500 (860 TFLOP/s) |  |  |  | 860 TFLOP/s | 1.0e-03 |" in table
    dense = {**result, "timings": {**timings, "rival A": timing(2.0, None)}}
    table = ops.ops_table({"results": [dense], "rounds": 7, "copy_bandwidth": 4e12})
    assert "| op 1×2 | 2.500 | rival A | 2.000 | **0.800** | 1.1 | 1.0e-03 |" in table  # ours alone


def test_traffic_becomes_a_table_that_names_its_source():
    eager = {"name": "eager", "read": 2e9, "written": 1e9, "passes": 30.04, "refused": None, "error": 0.00123}
    refused = {"name": "fused", "refused": "wrong"}
    settings = {"case": "Wan block", "config": "wan2.1-1.3b", "tokens": 10, "dim": 4}
    run = {"settings": settings, "pass_bytes": 80, "implementations": [eager, refused], "source": "counters"}
    table = ops.traffic_table([run, {**run, "source": "shapes"}])
    measured = "measured by Nsight Compute"
    assert f"| Wan block of wan2.1-1.3b, 10×4 | eager | 2000 | 1000 | 30.0 | {measured} | 1.2e-03 |" in table
    assert f"|  | fused |  |  | refused | {measured} |  |" in table
    assert "| 30.0 | counted from shapes | 1.2e-03 |" in table


def test_implementations_become_a_row_per_size_dtype_and_mode():
    size = {"B": 4, "N": 16, "C": 64, "dtype": "bfloat16", "mode": "forward"}
    two_pass = {**size, "implementation": "two_pass", "latency": 2e-3, "speedup": 1.0, "status": "ok"}
    fused = {**size, "implementation": "fused", "latency": 1e-3, "speedup": 2.0, "status": "ok"}
    naive = {**size, "implementation": "naive", "latency": None, "speedup": None, "status": "left out"}
    table = ops.implementations_table({"rows": [two_pass, fused, naive]})
    assert "| samples×tokens×channels | two_pass, ms | fused | naive |" in table
    assert "| 4×16×64, bfloat16, forward | 2.000 | 2.00× | left out |" in table
