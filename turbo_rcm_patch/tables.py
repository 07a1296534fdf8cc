"""Rows of cells as text: aligned for a terminal, or Markdown for a page."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], *, markdown: bool = False, numbers: bool = True) -> str:
    """Return rows of equal length as a table, one per line. The first row is the header.

    For a terminal, columns are padded to their widest cell. The first is flush left, the others flush right, or flush
    left too with numbers=False.
    """
    if markdown:
        header, *rest = (f"| {' | '.join(row)} |" for row in rows)
        return "\n".join([header, "|---" * len(rows[0]) + "|", *rest])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.ljust, *[str.rjust if numbers else str.ljust] * (len(widths) - 1)]
    lines = ([pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)
