import json
from pathlib import Path

from PIL import Image

from scripts.tools import write_pages
from scripts.tools.pages import charts
from tests.scripts.tools.pages.results import step_run

ROOT = Path(__file__).resolve().parents[3]


def test_charts(tmp_path):
    traffic = {"name": "eager", "read": 2e9, "written": 1e9, "refused": None}
    block = {"case": "Wan block", "config": "wan2.1-1.3b"}
    size = {"B": 4, "N": 16, "C": 768, "dtype": "bfloat16", "mode": "forward"}
    runs = {
        "wan2.1-1.3b": step_run("wan2.1-1.3b", compiled=0.6, patched=0.5),
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
    for path in write_pages.result_files(ROOT / "results"):
        for kind, data in charts.chart_data(json.loads(path.read_text())["runs"]).items():
            with Image.open(charts.chart_file(path, kind)) as image:
                shown[path.name, kind] = image.text[charts.DIGEST] == charts.digest_of(data)
    assert len(shown) >= 3
    assert all(shown.values()), "run scripts/tools/write_pages.py"


def test_the_chart_of_steps_shows_real_models_alone():
    embedded = step_run("embedded", compiled=0.6, patched=0.1)
    embedded["settings"]["model"] = embedded["settings"].pop("config")
    runs = {"compare": embedded, "wan2.1-1.3b": step_run("wan2.1-1.3b", compiled=0.6, patched=0.5)}
    assert list(charts.real_models(runs)) == ["wan2.1-1.3b"]
