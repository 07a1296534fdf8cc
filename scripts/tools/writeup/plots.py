"""The plots of results/writeup.md. A plot's file keeps the data that it shows, for the test that compares them."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from PIL import Image

from scripts.tools.pages.charts import legend_below
from turbo_rcm_patch.bench.ops import OpKey

DATA = "Description"  # the PNG's text that keeps the data
# Dense tensor core rates of NVIDIA's H200 data sheet, TFLOP/s.
LIMITS = {"attention": ("bf16", 989.5), "attention_8bit": ("8 bits", 1979.0)}

COLORS = "C0", "C1", "C2", "C3", "0.6"  # colours of a step's parts; the rest is grey
MARKERS = "osD^"


def save_plot(name: str, data: dict, path: Path) -> None:
    """Draw a plot of PLOTS into a PNG file, with its data: what it shows, and the GPU's name."""
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    PLOTS[name](figure, **data)
    figure.savefig(path, dpi=110, metadata={DATA: json.dumps(data), "Software": None})


def saved_data(path: Path) -> dict:
    """Return the data that a plot's file shows."""
    with Image.open(path) as image:
        return json.loads(image.text[DATA])


def _axes(figure: Figure, places: int = 1):
    for axes in figure.subplots(1, places, squeeze=False)[0]:
        axes.tick_params(labelsize="large")
        axes.spines[["top", "right"]].set_visible(False)
    return figure.axes


def _step_parts(figure: Figure, gpu: str, shown: dict) -> None:
    """Draw stacked bars, one per tier, a panel per model, and a line at the measured step, which is their sum."""
    for axes, (model, steps) in zip(_axes(figure, len(shown)), shown.items(), strict=True):
        measured = [sum(parts.values()) for parts in steps.values()]
        top, tops = max(measured), [0.0] * len(steps)
        for index, part in enumerate(next(iter(steps.values()))):
            times = [max(parts[part], 0.0) for parts in steps.values()]  # the rest may be negative
            axes.bar(range(len(steps)), times, 0.7, bottom=tops, label=part, color=COLORS[index])
            for place, (time, bottom) in enumerate(zip(times, tops, strict=True)):
                if time > 0.06 * top:  # a smaller part has no room for it
                    middle = bottom + time / 2
                    axes.text(place, middle, f"{time:.3g}", ha="center", va="center", fontsize="large", color="white")
            tops = [a + b for a, b in zip(tops, times, strict=True)]
        for place, (step, end) in enumerate(zip(measured, tops, strict=True)):
            axes.hlines(step, place - 0.42, place + 0.42, color="black", linewidth=2, label="measured step")
            text = f"{step:.4g}" if step >= 1000 else f"{step:.3g}"
            axes.text(
                place, max(step, end) + 0.01 * top, text, ha="center", va="bottom", fontsize="large", weight="bold"
            )
        axes.set_xticks(range(len(steps)), [name.replace(".", ".\n") for name in steps], fontsize="large")
        axes.set_ylim(0, 1.1 * top)
        axes.set_title(model, fontsize="large")
        axes.set_ylabel("ms of one step; lower is better", fontsize="large")
    figure.suptitle(f"Where the time of a denoising step goes on one {gpu}", fontsize="x-large")
    legend_below(figure, figure.axes[0], ncols=2)


def _speed_accuracy(figure: Figure, gpu: str, shown: dict) -> None:
    """Draw a line per variant over its numbers of steps."""
    (axes,) = _axes(figure)
    hollow = {"markerfacecolor": "none", "markeredgewidth": 2}  # tiers are close to each other
    for index, (name, steps) in enumerate(shown.items()):
        times, shares = zip(*steps, strict=True)
        style = {"marker": MARKERS[index % len(MARKERS)], "markersize": 9, "color": f"C{index}", **hollow}
        axes.plot(times, [100 * share for share in shares], label=name, **style)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel(
        "time of denoising in 1, 2 and 4 steps; 1 is a step of eager diffusers in the same run", fontsize="large"
    )
    axes.set_ylabel("% of the captions shown", fontsize="large")
    figure.suptitle(f"The tiny model on one {gpu}: accuracy and time; the upper left is better", fontsize="x-large")
    axes.grid(alpha=0.3)
    legend_below(figure, axes, ncols=2)


def _attention(figure: Figure, gpu: str, shown: dict) -> None:
    """Draw bars from the left, a group per case, each with the data sheet's rate."""
    (axes,) = _axes(figure)
    top, places, labels, colors = 0, [], [], {}
    for case, rates in shown.items():
        for name, rate in rates.items():
            whose = "ours" if name.startswith("attention") else name
            color = colors.setdefault(whose, f"C{len(colors)}")
            bar = axes.barh(top, rate, 0.8, color=color, label=whose)
            axes.bar_label(bar, [f"{rate:.0f}"], padding=3, fontsize="large")
            places.append(top)
            labels.append("")
            top += 1
        key = OpKey.parse(case)
        kind, limit = LIMITS[key.op]
        line = "data sheet, dense"
        axes.vlines(limit, top - len(rates) - 0.5, top - 0.5, color="black", linestyle="--", label=line)
        axes.text(limit - 20, top - 0.5 - len(rates) / 2, f"{limit:.0f}", ha="right", va="center", fontsize="large")
        heads, tokens, *_, head_dim = key.shape  # in bf16 the tokens are named twice, as queries and as keys
        labels[-len(rates)] = f"{kind}\n{heads}×{tokens}×{head_dim}"
        top += 1
    groups = [label for label in labels if label]
    starts = [place for place, label in zip(places, labels, strict=True) if label]
    sizes = [len(rates) for rates in shown.values()]
    axes.set_yticks([start + (size - 1) / 2 for start, size in zip(starts, sizes, strict=True)], groups)
    axes.invert_yaxis()
    figure.suptitle(f"Self-attention alone on one {gpu}: heads × tokens × channels of a head", fontsize="x-large")
    axes.set_xlabel("TFLOP/s; longer is better", fontsize="large")
    legend_below(figure, axes)


PLOTS = {"step-parts": _step_parts, "speed-accuracy": _speed_accuracy, "attention": _attention}
