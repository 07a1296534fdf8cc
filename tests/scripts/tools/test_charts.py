import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

import turbo_rcm_patch as trp
from scripts.tools import write_pages
from scripts.tools.pages import charts, readme
from scripts.tools.writeup import measured, plots
from tests.scripts.tools.pages.results import step_run
from turbo_rcm_patch.bench.variants import EXACT_PATCH

ROOT = Path(__file__).resolve().parents[3]


def test_charts(tmp_path):
    traffic = {"name": "eager", "read": 2e9, "written": 1e9, "refused": None}
    on_a_gpu = {"environment": {"gpu": "NVIDIA X"}}
    block = {"case": "Wan block", "config": "wan2.1-1.3b"}
    runs = {
        "wan2.1-1.3b": step_run("wan2.1-1.3b", compiled=0.6, patched=0.5),
        "traffic": {"settings": block, "pass_bytes": 80, "implementations": [traffic], **on_a_gpu},
    }
    charts.draw_charts(runs, tmp_path / "gpu.json")
    names = {f"gpu-{kind}.png" for kind in ("tiers", "traffic")}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)
    charts.draw_charts({}, tmp_path / "none.json")
    assert {path.name for path in tmp_path.iterdir()} == names


def test_modules_have_their_public_names():
    assert [name for name in charts.MODULES.values() if name.endswith("RCMAttention") and name not in trp.__all__] == []
    assert charts.module_of("two_pass_compiled") == "TwoPassRCMAttention, compiled"


def test_charts_are_of_the_results():
    shown = {}
    for path in write_pages.result_files(ROOT / "results"):
        for kind, data in charts.chart_data(json.loads(path.read_text())["runs"]).items():
            with Image.open(charts.chart_file(path, kind)) as image:
                shown[path.name, kind] = image.text[charts.DIGEST] == charts.digest_of(data)
    assert len(shown) >= 3
    assert all(shown.values()), "run scripts/tools/write_pages.py"


def test_the_embedded_model_is_no_real_model():
    embedded = step_run("embedded", compiled=0.6, patched=0.1)
    embedded["settings"]["model"] = embedded["settings"].pop("config")
    runs = {"compare": embedded, "wan2.1-1.3b": step_run("wan2.1-1.3b", compiled=0.6, patched=0.5)}
    assert list(charts.real_models(runs)) == ["wan2.1-1.3b"]


def tier_run(name, tier, layers, compiled, exactly, patched):
    run = step_run(name, compiled, patched, errors=(0.03, 0.01, 0.02))
    run["settings"] |= {"preset": tier, "layers": layers}
    timings = {"steps": [exactly], "peak_memory": 2**30}
    run["variants"].append({**run["variants"][0], "name": EXACT_PATCH, "timings": timings, "step_error": 0.01})
    return run


def test_tiers_are_compared_with_the_compiled_step_of_their_own_run():
    runs = {
        "wan2.1-14b-4-layers": step_run("wan2.1-14b", compiled=1.0, patched=0.8),
        "wan2.1-14b-4-layers-quantized": tier_run("wan2.1-14b", "quantized", 4, compiled=1.2, exactly=0.9, patched=0.6),
        "wan2.1-1.3b-quantized": tier_run("wan2.1-1.3b", "quantized", 30, compiled=0.6, exactly=0.5, patched=0.3),
        "wan2.1-1.3b-sparse": tier_run("wan2.1-1.3b", "sparse", 30, compiled=0.8, exactly=0.5, patched=0.1),
    }
    runs["wan2.1-14b-4-layers"]["settings"]["layers"] = 4
    two_gpus = step_run("wan2.1-14b", compiled=1.0, patched=0.1)
    two_gpus["settings"] |= {"ulysses": 2}
    speedups = charts.speedups_by_tier({**runs, "wan2.1-14b-2-gpus": two_gpus})
    assert list(speedups) == ["Wan 2.1 1.3B\n32×16, 5 frames", "Wan 2.1 14B (4 of 40 layers)\n32×16, 5 frames"]
    small, large = speedups.values()
    assert list(small) == ["exact", "quantized", "sparse"]
    assert small == pytest.approx({"exact": 1.2, "quantized": 2.0, "sparse": 8.0})
    assert large == pytest.approx({"exact": 1.25, "quantized": 2.0})  # the exact tier's own run
    whole = {"Wan 2.1 14B\n1280×720": {"exact": 1.1}}
    assert charts.one_of_each_model({**speedups, **whole}) == speedups
    lines = readme.tiers_table(runs).splitlines()
    assert "| error of a step to fp32; unpatched 3.0 % |" in lines[0]
    assert lines[2].startswith('| `"exact"`, the default | 1.20× to 1.25× | 1.00× | 1.0 % |')
    assert lines[4].startswith('| `"sparse"` | 8.00× | 1.00× | 2.0 % |')
    assert len(lines) == 5


def test_the_headline_is_about_whole_videos_of_its_model_on_one_gpu():
    def whole(name, total, **settings):
        run = step_run(name, compiled=0.6, patched=0.5)
        run["settings"] |= {"output_type": "np", "num_inference_steps": 4, **settings}
        for variant in run["variants"]:
            variant["timings"]["total"] = total if variant["name"] == "patched" else 2 * total
        return run

    runs = {"a": tier_run("wan2.1-14b", "quantized", 4, compiled=1.2, exactly=0.9, patched=0.6)}
    runs["b"] = step_run("wan2.1-1.3b", compiled=0.6, patched=0.5)
    runs |= {"c": whole("wan2.1-1.3b", 1.5), "d": whole("wan2.1-1.3b", 0.5, ulysses=2), "e": whole("wan2.1-14b", 9.0)}
    runs["f"] = whole("wan2.1-1.3b", 1.0, vae_dtype="float32")
    text = " ".join(readme.headline({"gpu": "GPU X", "runs": runs}).split())
    assert text.startswith(
        "On one **GPU X** a denoising step of Wan 2.1 1.3B at 32×16, 5 frames, is 1.20× (exact) as fast"
    )
    assert "takes 1.50 s (exact); with `torch.compile` 3.0 s, in diffusers 3.0 s." in text


def test_every_chart_names_its_gpu():
    for path in write_pages.result_files(ROOT / "results"):
        results = json.loads(path.read_text())
        drawn = [charts._DRAW[kind](data) for kind, data in charts.chart_data(results["runs"]).items()]
        if path.name == write_pages.WRITEUP:
            for name, data in measured.plot_data(results["runs"]).items():
                drawn.append(Figure(layout="constrained"))
                plots.PLOTS[name](drawn[-1], **data)
        assert drawn
        for figure in drawn:
            assert any(results["gpu"] in text.get_text() for text in figure.findobj(Text))
