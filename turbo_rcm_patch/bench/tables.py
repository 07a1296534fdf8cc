"""Rows of cells as text: aligned for a terminal, or Markdown for a page."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], *, markdown: bool = False) -> str:
    """Equally long rows, the first of which is the header, one a line.

    For a terminal columns are padded to their widest cell, the first to the left, the others to the right.
    """
    if markdown:
        header, *rest = (f"| {' | '.join(row)} |" for row in rows)
        return "\n".join([header, "|---" * len(rows[0]) + "|", *rest])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        for row in rows
    ]
    return "\n".join("  ".join(line).rstrip() for line in lines)
