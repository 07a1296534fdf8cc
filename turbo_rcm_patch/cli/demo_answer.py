"""The answer of the page of `turbo-rcm demo`, as HTML: a headline, a bar for each video, and tables that fold."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from ..bench.compare import Comparison
from ..bench.report import format_seconds, stages
from ..bench.variants import PATCHED, UNPATCHED

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")  # of the stages
FOLDED = "cursor: pointer; font-weight: bold"

Stages = Sequence[tuple[str, float]]  # names and seconds


def headline_of(comparison: Comparison) -> str:
    """Return how much faster the patched video was made, and how far its frames agree with the unpatched ones."""
    patched = comparison.variants[-1]
    alike = patched.frames.psnr_db
    frames = "the frames are identical" if alike is None else f"the frames agree to {alike:.0f} dB"
    if comparison.environment.gpu is None:
        return f"{frames[0].upper()}{frames[1:]}"
    return f"{patched.total_speedup:.1f}× as fast, {frames}"


def stages_of(comparison: Comparison) -> dict[str, Stages]:
    """Return the stages of both videos."""
    return {v.name: stages(v.timings) for v in comparison.variants if v.name in (UNPATCHED, PATCHED)}


def as_headline(text: str, notes: Sequence[str]) -> str:
    shown = "".join(f'<p style="white-space: pre-line">{html.escape(note)}</p>' for note in notes)
    title = "peak signal-to-noise ratio: the higher, the more alike"
    return f'<h2 style="margin: 0" title="{title}">{html.escape(text)}</h2>{shown}'


def as_error(text: str) -> str:
    """Return a refusal in the place of the headline."""
    return f'<p role="alert" style="color: #b00020; font-weight: bold; margin: 0">{html.escape(text)}</p>'


def as_bars(stages: Mapping[str, Stages]) -> str:
    """Return a bar for each video, of a length as its time, in the stages' colours, and a legend."""
    totals = {name: sum(seconds for _, seconds in parts) for name, parts in stages.items()}
    longest = max(totals.values())
    rows = []
    for name, parts in stages.items():
        pieces = "".join(
            f'<span title="{html.escape(f"{stage}: {format_seconds(seconds)}")}" style="background: {colour}; '
            f'width: {100 * seconds / longest:.2f}%"></span>'
            for (stage, seconds), colour in zip(parts, COLOURS, strict=False)
        )
        bar = f'<div style="display: flex; flex: 1; height: 1.4em">{pieces}</div>'
        label = f'<span style="width: 6em">{html.escape(name)}</span>'
        total = f'<span style="width: 5em; text-align: right">{format_seconds(totals[name])}</span>'
        rows.append(f'<div style="display: flex; gap: 0.5em; margin: 0.3em 0">{label}{bar}{total}</div>')
    legend = "".join(
        f'<span style="margin-right: 1em; white-space: nowrap"><span style="color: {colour}">■</span> '
        f"{html.escape(stage)}</span>"
        for (stage, _), colour in zip(next(iter(stages.values())), COLOURS, strict=False)
    )
    return f'{"".join(rows)}<div style="display: flex; flex-wrap: wrap">{legend}</div>'


def folded(title: str, text: str, style: str) -> str:
    """Return a text that shows at a click on its title."""
    return (
        f'<details><summary style="{FOLDED}">{title}</summary>'
        f'<pre style="line-height: 1.4; {style}">{html.escape(text)}</pre></details>'
    )
