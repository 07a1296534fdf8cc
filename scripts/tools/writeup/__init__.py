"""Write results/writeup.md with its drawing and plots from a results file, for scripts/tools/write_pages.py.

The text is the template docs/writeup.md.jinja. A run that it needs and that is not in the file is a KeyError.
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

PAGE, ROUND_TRIP = "writeup.md", "round-trip.svg"


def write(results: Path, template: Path, folder: Path) -> None:
    """Write the text, the drawing and the plots of a results file into a folder."""
    read = json.loads(results.read_text())
    tiny = {name: results.with_name(file) for name, file in (("sparse", SPARSE), ("block_sparse", BLOCK_SPARSE))}
    tiny = {name: json.loads(path.read_text()) for name, path in tiny.items()}
    (folder / PAGE).write_text(text_of(read, template.read_text(), tiny))
    (folder / ROUND_TRIP).write_text(round_trip_svg(round_trip(read["runs"])))
    for name, data in plot_data(read["runs"]).items():
        save_plot(name, data, folder / f"{name}.png")


def text_of(results: dict, template: str, tiny: dict[str, dict]) -> str:
    """Return the template with the figures of a results file and, by tier, of the tiny model's files.

    Raises jinja2.UndefinedError for an unknown name in the template."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return _wrapped(environment.from_string(template).render(figures(results, tiny)))


def _wrapped(text: str) -> str:
    """Return the paragraphs in lines of 120 characters; headings, tables, pictures and lists as they are."""
    blocks = re.sub(r"\n{3,}", "\n\n", text.strip()).split("\n\n")
    return "\n\n".join(block if block[0] in "#|!-" else PARAGRAPH.fill(block) for block in blocks) + "\n"


PARAGRAPH = textwrap.TextWrapper(120, break_long_words=False, break_on_hyphens=False)
