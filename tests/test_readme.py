"""The figures of the README and of the results page equal the results files'."""

import json
import re
from pathlib import Path

import pytest

from scripts.tools import write_pages
from scripts.tools.pages import ops
from scripts.tools.pages import steps as steps_page
from tests.scripts.tools.pages.results import (
    gpu_tests_entry,
    step_run,
)

ROOT = Path(__file__).resolve().parents[1]


def test_the_readme_and_the_page_are_rendered_from_the_results():
    text = (ROOT / "README.md").read_text()
    for part in ("figures", "tiers", "cards", "install"):
        assert text.count(write_pages.WRITTEN[0].format(part)) == 1
    assert write_pages.with_results(text, ROOT / "results") == text
    assert write_pages.results_page(ROOT / "results") == (ROOT / "results/README.md").read_text()


TIERS = ("", "-quantized", "-sparse", "-block-sparse")  # the ends of their runs' names


def test_the_page_on_many_gpus_has_the_steps_of_the_results():
    runs = json.loads((ROOT / "results/nvidia-h200.json").read_text())["runs"]
    models = [f"{model}{{}}{gpus}" for model in ("wan2.1-1.3b", "wan2.1-14b-4-layers") for gpus in ("-2-gpus", "")]
    for row, model in zip(rows_on_many_gpus("one step, ms"), models, strict=True):
        names = [model.format(tier) for tier in TIERS]
        steps = [steps_page.short_step_row(name, runs[name]) if name in runs else None for name in names]
        compiled, *tiers = row
        assert tiers == [step[5] if step else "not timed" for step in steps]
        fastest, *_, slowest = sorted(step[3] for step in steps if step)
        assert compiled in (f"{fastest} to {slowest}", steps[0][3])


def test_the_page_on_many_gpus_has_the_videos_of_the_results():
    runs = json.loads((ROOT / "results/nvidia-h200.json").read_text())["runs"]
    models = [f"{model}-decoded{{}}{gpus}" for model in ("wan2.1-1.3b", "wan2.2-5b") for gpus in ("-2-gpus", "")]
    for row, model in zip(rows_on_many_gpus("one video, s"), models, strict=True):
        timed = [runs.get(model.format(tier)) for tier in TIERS]
        seconds = [{one["name"]: one["timings"]["total"] for one in run["variants"]} if run else None for run in timed]
        eager, compiled, *tiers = row
        assert tiers == [f"{total['patched']:.2f}" if total else "not timed" for total in seconds]
        for cell, name in ((eager, "unpatched"), (compiled, "torch.compile")):
            totals = [total[name] for total in seconds if total and name in total]
            fastest, slowest = (f"{end(totals, default=0):.1f}" for end in (min, max))
            assert cell == ("not timed" if not totals else fastest if fastest == slowest else f"{fastest} to {slowest}")


def rows_on_many_gpus(heading: str) -> list[list[str]]:
    """Return the rows of a table of docs/gpus.md, without their names."""
    _, table = (ROOT / "docs/gpus.md").read_text().split(f"| {heading} |")
    rows = table.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.split("|")[2:-1]] for row in rows]


def test_the_page_says_what_wrote_the_files_that_are_of_no_gpu():
    gpus = {path.name for path in write_pages.result_files(ROOT / "results")}
    others = {path.name for path in (ROOT / "results").glob("*.json")} - gpus
    assert others
    assert [name for name in others if f"`{name}` by `" not in write_pages.INTRODUCTION.replace("\n", " ")] == []


@pytest.mark.parametrize("page", ["README.md", "results/README.md", "docs/designs.md", "results/writeup.md"])
def test_results_that_a_page_names_are_there(page):
    named = re.findall(r"`(results/[\w./-]+)`", (ROOT / page).read_text())
    assert all((ROOT / name).exists() for name in named)


def test_results_of_any_gpu_become_a_page(tmp_path):
    """Files may lack the embedded model, commits or tests, or hold several GPUs' results.

    The README shows the GPU with the most measurements.
    """
    run = step_run("wan2.2-5b", compiled=0.6, patched=0.5)
    two = {**run, "settings": {**run["settings"], "ulysses": 2, "layers": 4}}
    for file, gpu, runs, more in (
        ("geforce-rtx-4090", "NVIDIA GeForce RTX 4090", {"wan2.2-5b": run, "wan2.1-14b-4-layers-2-gpus": two}, {}),
        ("nvidia-b200", "NVIDIA B200", {"ops": {"results": [], "rounds": 2, "copy_bandwidth": 1e12}}, {}),
        ("nvidia-x", "NVIDIA X", {"wan2.1-14b-4-layers-2-gpus": two}, {"tests": [gpu_tests_entry()]}),
    ):
        (tmp_path / f"{file}.json").write_text(json.dumps({"gpu": gpu, "runs": runs, **more}))
    page = write_pages.results_page(tmp_path)
    for heading in ("## NVIDIA GeForce RTX 4090", "## NVIDIA B200", "## NVIDIA X"):
        assert heading in page
    assert "geforce-rtx-4090-tiers.png" in page
    assert "| wan2.2-5b, 5×16×32 | exact | 900 | 600 |  | 500 | 1.20× | 1.00× |  |" in page
    assert "| 2.11 | 3.6 | 0.42 | 0123456789ab | 71 | 0 |" in page
    start, end = (marker.format("figures") for marker in write_pages.WRITTEN)
    readme = write_pages.with_results(f"a {start} old {end} b", tmp_path)
    assert readme.startswith(f"a {start}\nOn one **NVIDIA GeForce RTX 4090** a denoising step of Wan 2.2 TI2V-5B at 32")
    assert "5 frames, is 1.20× (exact) as fast as with `torch.compile`. <" in " ".join(readme.split())
    assert "old" not in readme
    assert write_pages.with_results("no markers", tmp_path) == "no markers"


def test_the_install_is_as_large_as_it_was_measured(tmp_path):
    (tmp_path / "gpu-x.json").write_text(json.dumps({"gpu": "GPU X", "runs": {}}))
    sizes = {"bytes": 54 * 10**8, "package_bytes": 21 * 10**6, "torch": "2.14"}
    (tmp_path / "install.json").write_text(json.dumps({"gpu": sizes, "cpu": {**sizes, "bytes": 10**9}}))
    start, end = (marker.format("install") for marker in write_pages.WRITTEN)
    text = " ".join(write_pages.with_results(f"{start}{end}", tmp_path).split())
    assert "takes 5.4 GB with torch 2.14 for CUDA, of which this package is 21 MB." in text
    assert "For a CPU alone it takes 1.0 GB: the first line is then `pip install torch --index-url " in text


def test_failed_gpu_tests_are_marked():
    assert "| 71 | 3 ✗ |" in ops.tests_table([{**gpu_tests_entry(), "ok": False, "failed": 2, "error": 1}])


def test_the_page_says_what_compute_sanitizer_found(tmp_path):
    environment = {"commit": "0123456789abcdef"}
    sanitizers = {"memcheck": {"ok": True, "environment": environment}, "racecheck": {"ok": False, "environment": {}}}
    results = {"gpu": "NVIDIA X", "runs": {}, "tests": [], "sanitizers": sanitizers}
    (tmp_path / "nvidia-x.json").write_text(json.dumps(results))
    page = write_pages.results_page(tmp_path)
    assert "memcheck passes at commit 0123456789ab, racecheck **fails** at commit unknown." in page
