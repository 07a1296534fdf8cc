"""docs/writeup.md with its drawing and its plots, all from a results file; scripts/tools/write_pages.py writes them.

The text is the template docs/writeup.md.jinja. What was not measured yet is left out, and the next run fills it in.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import jinja2

from scripts.tools.pages.tiny_model import BLOCK_SPARSE, SPARSE

from .drawing import round_trip_svg
from .measured import figures, plot_data, round_trip
from .plots import save_plot

PAGE, TEMPLATE, ROUND_TRIP = "writeup.md", "writeup.md.jinja", "round-trip.svg"


def write(results: Path, docs: Path) -> None:
    """The text, the drawing and the plots of a results file, into a folder with the template."""
    read = json.loads(results.read_text())
    tiny = {name: results.with_name(file) for name, file in (("sparse", SPARSE), ("block_sparse", BLOCK_SPARSE))}
    tiny = {name: json.loads(path.read_text()) for name, path in tiny.items() if path.exists()}
    (docs / PAGE).write_text(text_of(read, (docs / TEMPLATE).read_text(), tiny))
    (docs / ROUND_TRIP).write_text(round_trip_svg(round_trip(read["runs"])))
    for name, data in plot_data(read["runs"]).items():
        save_plot(name, data, docs / f"{name}.png")


def text_of(results: dict, template: str, tiny: dict[str, dict] | None = None) -> str:
    """The template with the figures of a results file, and of the files beside it on the tiny model, by tier. Raises
    jinja2.UndefinedError for a name that there is not."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return _wrapped(environment.from_string(template).render(figures(results, tiny or {})))


def _wrapped(text: str) -> str:
    """The paragraphs in lines of 120 characters; headings, tables, pictures and lists as they are."""
    blocks = re.sub(r"\n{3,}", "\n\n", text.strip()).split("\n\n")
    return "\n\n".join(block if block[0] in "#|!-" else PARAGRAPH.fill(block) for block in blocks) + "\n"


PARAGRAPH = textwrap.TextWrapper(120, break_long_words=False, break_on_hyphens=False)
