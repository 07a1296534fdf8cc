"""The README's figures are those of the results files."""

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

spec = importlib.util.spec_from_file_location("readme_results", ROOT / "scripts/readme_results.py")
readme_results = importlib.util.module_from_spec(spec)
spec.loader.exec_module(readme_results)


def test_measured_and_evaluated_sections_are_rendered_from_the_results():
    text = (ROOT / "README.md").read_text()
    assert readme_results.with_results(text, ROOT / "results") == text


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
    (tmp_path / "x").mkdir()
    for name, content in ((readme_results.EVALUATION, evaluation), (readme_results.TRAINING, training)):
        (tmp_path / "x" / name).write_text(json.dumps(content))
    section = readme_results._evaluation_section(tmp_path / "x")
    assert "| teacher, guided | 50 | 100.0 | 98.0 ± 1.2 |  |  |  |" in section
    assert "| exact | 4 | 100.0 | 95.6 ± 1.2 | -0.4 ± 0.6 | 31.26 |  |" in section
    assert "77 held-out captions" in section
    assert "1.5 minutes on one GPU X" in section

    (tmp_path / "x" / readme_results.TRAINING).unlink()
    section = readme_results._evaluation_section(tmp_path / "x")
    assert "teacher" not in section
    assert "| exact | 4 | 100.0 | 95.6 ± 1.2 | -0.4 ± 0.6 | 31.26 |  |" in section
    assert readme_results._folder_section(tmp_path / "x") == ""
