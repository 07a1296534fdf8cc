"""Charts of a results file: denoising steps, a block's memory traffic, and the attention modules.

runs: a results file's runs by name, as read from JSON. Drawing needs matplotlib.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from pathlib import Path

from scripts.benchmarks.lora import BESIDE_A_LORA
from turbo_rcm_patch.bench.variants import COMPILED_AFTER_A_CHANGE

NAMES = {"unpatched": "eager diffusers", "torch.compile": "regional torch.compile"}
QUANTIZED_RIVALS = {
    "torchao float8 + torch.compile": "torchao float8, compiled",
    "patched exactly": "patched (exact)",
    "patched, dense in 8 bits": "patched (quantized)",
}

DIGEST = "Description"  # the PNG's text that has it


def names_of(run: dict) -> dict[str, str]:
    """Return the names of a run's variants that ran, in order."""
    tier = run["settings"].get("preset", "exact")
    rivals = {} if tier == "exact" else QUANTIZED_RIVALS
    names = {**NAMES, **rivals, "patched": f"patched ({tier})", **{name: name for name in BESIDE_A_LORA}}
    ran = {variant["name"] for variant in run["variants"]}
    return {name: shown for name, shown in names.items() if name in ran}


def real_models(runs: dict, tier: str | None = None) -> dict[str, dict]:
    """Return the runs that compare variants' steps of a real model without LoRA. tier: only of this tier."""
    found = {name: run for name, run in runs.items() if "variants" in run and "config" in run["settings"]}
    found = {name: run for name, run in found.items() if name not in whole_videos(runs)}
    found = {name: run for name, run in found.items() if "lora_ranks" not in run["settings"]}
    return {name: run for name, run in found.items() if tier in (None, run["settings"].get("preset", "exact"))}


def whole_videos(runs: dict) -> dict[str, dict]:
    """Return the runs that compare variants of a model at its real size up to the decoded video."""
    found = {name: run for name, run in runs.items() if "variants" in run and "config" in run["settings"]}
    return {name: run for name, run in found.items() if run["settings"].get("output_type", "latent") != "latent"}


def model_of(run: dict) -> str:
    """Return the model and the video of a run, such as "wan2.1-14b (4 layers), 81×720×1280, 2 GPUs"."""
    settings = run["settings"]
    layers = f" ({settings['layers']} layers)" if "layers" in settings else ""
    size = f"{settings['num_frames']}×{settings['height']}×{settings['width']}"
    gpus = f", {settings['ulysses']} GPUs" if settings.get("ulysses", 1) > 1 else ""
    ranks = " + ".join(map(str, settings.get("lora_ranks", ())))
    lora = f", LoRA of rank {ranks}" if ranks else ""
    mass = f", mass {settings['mass']:g}" if "mass" in settings else ""
    return f"{settings.get('config') or settings['model']}{layers}, {size}{gpus}{lora}{mass}"


def milliseconds(variant: dict) -> float:
    """Return a variant's median step, or the second step of the variant that compiles again after its first."""
    steps = variant["timings"]["steps"]
    return 1e3 * (steps[1] if variant["name"] == COMPILED_AFTER_A_CHANGE else statistics.median(steps))


def chart_file(path: Path, kind: str) -> Path:
    """Return the path of a results file's chart. kind: "steps", "traffic" or "modules"."""
    return path.with_name(f"{path.stem}-{kind}.png")


def draw_charts(runs: dict, path: Path) -> None:
    """Draw each chart in an image file beside the results file, with a digest of its data."""
    for kind, data in chart_data(runs).items():
        _DRAW[kind](data).savefig(chart_file(path, kind), dpi=110, metadata={DIGEST: digest_of(data), "Software": None})


def chart_data(runs: dict) -> dict[str, object]:
    """Return the data of each chart that has any: denoising steps, DRAM passes of a block, attention modules."""
    data = {
        "steps": real_models(runs),
        "traffic": [r for r in runs.values() if r.get("settings", {}).get("case") == "Wan block"],
        "modules": runs.get("implementations", {}).get("rows"),
    }
    return {kind: shown for kind, shown in data.items() if shown}


def digest_of(data: object) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def _figure(height: float):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.subplots()
    axes.tick_params(labelsize="large")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _draw_steps(runs: dict):
    """Draw bars from the left, a group per model, with the speed-up written at their ends."""
    bars = sum(len(run["variants"]) + 1 for run in runs.values())
    figure, axes = _figure(1.2 + 0.3 * bars)
    colors, places, top = {}, [], 0
    for run in runs.values():
        steps = {variant["name"]: milliseconds(variant) for variant in run["variants"]}
        for index, (name, shown) in enumerate(names_of(run).items()):
            speedup = steps["unpatched"] / steps[name]
            color = colors.setdefault(shown, f"C{len(colors)}")
            bar = axes.barh(top + index, speedup, 0.9, color=color, label=shown)
            axes.bar_label(bar, [f"{speedup:.2f}×"], padding=3, fontsize="large")
        places.append(top + (len(steps) - 1) / 2)
        top += len(steps) + 1
    axes.set_yticks(places, [model_of(run).replace(", ", "\n", 1) for run in runs.values()])
    axes.invert_yaxis()
    axes.set_xlabel("speed-up of a denoising step over eager diffusers", fontsize="large")
    legend_above(figure, axes)
    return figure


def _draw_traffic(runs: list[dict]):
    shown = [(run, one) for run in runs for one in run["implementations"] if one["refused"] is None]
    figure, axes = _figure(1.2 + 0.5 * len(shown))
    labels = []
    for place, (run, one) in enumerate(shown):
        read, written = (one[key] / run["pass_bytes"] for key in ("read", "written"))
        axes.barh(place, read, color="C0", label="read")
        bar = axes.barh(place, written, left=read, color="C1", label="written")
        axes.bar_label(bar, [f"{read + written:.0f}"], padding=3, fontsize="large")
        labels.append(f"{run['settings']['config']}: {one['name']}")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("memory traffic of a block, in passes of one [tokens, channels] tensor", fontsize="large")
    legend_above(figure, axes)
    return figure


def _draw_modules(rows: list[dict]):
    """Return a line per implementation over the number of tokens."""
    shown = [row for row in rows if (row["dtype"], row["mode"], row["C"], row["B"]) == ("bfloat16", "forward", 768, 4)]
    figure, axes = _figure(5)
    for name in dict.fromkeys(row["implementation"] for row in shown):
        points = [(row["N"], row["speedup"]) for row in shown if row["implementation"] == name and row["speedup"]]
        if points:
            axes.plot(*zip(*sorted(points), strict=True), marker="o", linewidth=2, label=name)
    sizes = sorted({row["N"] for row in shown})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, sizes)
    axes.set_xlabel("tokens (4 samples, 768 channels, 12 heads; bf16, forward)", fontsize="large")
    axes.set_ylabel("speed-up over two_pass", fontsize="large")
    legend_above(figure, axes)
    return figure


_DRAW = {"steps": _draw_steps, "traffic": _draw_traffic, "modules": _draw_modules}


def legend_above(figure, axes, ncols: int = 3) -> None:
    """Draw each label of the axes once, above the figure."""
    by_label = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(by_label.values(), by_label.keys(), loc="outside upper center", ncols=ncols, fontsize="large")
