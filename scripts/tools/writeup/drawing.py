"""Draw the cost of the skip as a pass of its own and in the projection's epilogue, for results/writeup.md."""

from __future__ import annotations

from collections.abc import Iterator

WIDTH, HEIGHT = 960, 620
STYLE = """<style>
text { font: 20px sans-serif; fill: #222; text-anchor: middle } .title { font-weight: bold; text-anchor: start }
.kernel { fill: #cfe3f7; stroke: #2a6db0 } .memory { fill: #eee; stroke: #777 } .read { stroke: #2a6db0 }
.write { stroke: #c4521b } .arrow { stroke-width: 3; fill: none; marker-end: url(#head) }
</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" orient="auto">
<path d="M0 0 8 4 0 8z"/></marker></defs>"""


def round_trip_svg(moved: dict) -> str:
    """Return the drawing as SVG.

    moved: the MB that "projection", "skip" and "fused" read and write, the sums of two passes and of one, and the
    GPU's name (`round_trip` of measured.py).
    """
    two = f"Two passes: {moved['two_passes']:.0f} MB between one {moved['gpu']} and its memory"
    one = f"One pass, the skip in the epilogue: {moved['one_pass']:.0f} MB"
    parts = [
        *_picture(0, two, [("projection", 350, moved["projection"]), ("skip", 760, moved["skip"])], ROUND),
        *_picture(310, one, [("projection + skip", 465, moved["fused"])], STRAIGHT),
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    return "\n".join([head, STYLE, background, *parts, "</svg>"]) + "\n"


# For each kernel, the tensors that it reads and writes.
ROUND = [("attention's result, W", "F(x)"), ("F(x), x", "the sum")]
STRAIGHT = [("attention's result, W, x", "the sum")]


def _picture(top: int, title: str, kernels: list[tuple[str, int, dict]], names: list[tuple[str, str]]) -> Iterator[str]:
    yield f'<text class="title" x="20" y="{top + 36}">{title}</text>'
    yield _box("memory", 20, top + 230, WIDTH - 40, 50, "GPU memory")
    for (kernel, center, moved), (reads, writes) in zip(kernels, names, strict=True):
        yield _box("kernel", center - 130, top + 60, 260, 50, kernel)
        yield _arrow("read", center - 90, top + 228, top + 114)
        yield _arrow("write", center + 90, top + 112, top + 226)
        yield from _label(center - 100, top + 150, "end", reads, f"{moved['read']:.0f} MB")
        yield from _label(center + 100, top + 150, "start", writes, f"{moved['written']:.0f} MB")


def _box(kind: str, x: int, y: int, width: int, height: int, text: str) -> str:
    rect = f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'
    return f'{rect}<text x="{x + width / 2:g}" y="{y + height / 2 + 7:g}">{text}</text>'


def _arrow(kind: str, x: int, start: int, end: int) -> str:
    return f'<path class="arrow {kind}" d="M{x} {start}V{end}"/>'


def _label(x: int, y: int, anchor: str, *lines: str) -> Iterator[str]:
    for index, line in enumerate(lines):
        yield f'<text style="text-anchor: {anchor}" x="{x}" y="{y + 28 * index}">{line}</text>'
