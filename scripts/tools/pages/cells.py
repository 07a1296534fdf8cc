"""Cells and charts that the tables of the results page share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from scripts.tools.pages.charts import chart_file
from turbo_rcm_patch.tables import table


def table_of(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return table([header, *rows], markdown=True) + "\n"


def versions(environment: dict) -> str:
    return versions_and_commits([environment])


def versions_and_commits(environments: Iterable[dict]) -> str:
    """Return each set of versions once, with all commits that ran with it."""
    commits: dict[str, dict[str, None]] = {}
    for environment in environments:
        names = ", ".join(f"{name} {environment[name]}" for name in ("torch", "triton", "diffusers"))
        known = commits.setdefault(names, {})
        if environment.get("commit"):
            known[environment["commit"][:12]] = None
    words = {0: "", 1: ", commit "}
    return "; ".join(names + words.get(len(of), ", commits ") + ", ".join(of) for names, of in commits.items())


def marked(text: str, missed: bool) -> str:
    return f"{text} ✗" if missed else text


def speedup(rival: float | None, step: float, target: float) -> str:
    """Return the rival's time over the step's, with ✗ where it misses the target."""
    if rival is None:
        return ""
    return marked(f"{rival / step:.2f}×", rival < target * step)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def with_error(accuracy: Mapping) -> str:
    """Return a share in percent with its standard error."""
    return f"{percent(accuracy['share'])} ± {percent(accuracy['standard_error'])}"


def decibels(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def folded(title: str, *parts: str) -> str:
    """Return a part of a page that shows its title alone until a reader opens it, or "" if all its parts are."""
    text = "\n".join(filter(None, parts)).strip("\n")
    # The attribute is for the documentation's site, which leaves Markdown in HTML alone without it.
    return f'<details markdown="1"><summary>{title}</summary>\n\n{text}\n\n</details>\n' if text else ""


def chart(path: Path, kind: str, description: str) -> str:
    return f"![{description}]({chart_file(path, kind).name})\n"
