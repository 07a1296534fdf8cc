"""The README's links on pages outside the repository."""

import re
from pathlib import Path

import pytest

from scripts.tools.absolute_links import with_absolute_links

RAW, PAGE = "https://raw.githubusercontent.com/ann/trp/v1", "https://github.com/ann/trp/blob/v1"


@pytest.mark.parametrize(
    ("text", "absolute"),
    [
        ("[tiers](docs/tiers.md#quantized)", f"[tiers]({PAGE}/docs/tiers.md#quantized)"),
        ("![speed](results/a.png)", f"![speed]({RAW}/results/a.png)"),
        ("[![speed](a.png)](results/README.md)", f"[![speed]({RAW}/a.png)]({PAGE}/results/README.md)"),
        ("[tiers](#tiers) [x](https://x.org/a.png)", "[tiers](#tiers) [x](https://x.org/a.png)"),
    ],
)
def test_links(text, absolute):
    assert with_absolute_links(text, "ann/trp", "v1") == absolute


def test_the_readme_keeps_no_relative_link():
    readme = (Path(__file__).resolve().parents[3] / "README.md").read_text()
    assert re.findall(r"\]\((?!https:|#)", readme)
    assert re.findall(r"\]\((?!https:|#)", with_absolute_links(readme, "ann/trp", "v1")) == []
