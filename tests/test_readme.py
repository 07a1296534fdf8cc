"""The README's figures are those of the results files."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_measured_section_is_rendered_from_the_results():
    spec = importlib.util.spec_from_file_location("readme_results", ROOT / "scripts/readme_results.py")
    readme_results = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(readme_results)
    text = (ROOT / "README.md").read_text()
    assert readme_results.with_measured_section(text) == text
