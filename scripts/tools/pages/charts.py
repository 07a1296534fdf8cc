"""Charts of a results file: tiers over torch.compile, and a block's memory traffic.

runs: a results file's runs by name, as read from JSON. Drawing needs matplotlib.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from pathlib import Path
from typing import NamedTuple

from scripts.benchmarks.comparison import COMPILED_AFTER_A_CHANGE
from scripts.benchmarks.end_to_end import IN_8_BITS, TINY_VAE, WITHOUT_GRAPHS
from scripts.benchmarks.lora import BESIDE_A_LORA
from turbo_rcm_patch.bench.variants import COMPILED, EXACT_PATCH, PATCHED, UNPATCHED
from turbo_rcm_patch.patching.families import CASES
from turbo_rcm_patch.tiers import EXACT, TIERS

NAMES = {"unpatched": "eager diffusers", "torch.compile": "regional torch.compile"}
QUANTIZED_RIVALS = {
    "torchao float8 + torch.compile": "torchao float8, compiled",
    "patched exactly": "patched (exact)",
    "patched, dense in 8 bits": "patched (quantized)",
}

# The implementations of a block whose memory traffic is counted.
IMPLEMENTATIONS = {
    "eager": "eager diffusers",
    "torch_fused": "patched, in PyTorch",
    "compiled": "torch.compile",
    "triton_fused": "patched (exact)",
}
# The attention modules for new models that are timed.
MODULES = {
    "two_pass": "TwoPassRCMAttention",
    "torch_fused": "TorchFusedRCMAttention",
    "triton_fused": "FusedRCMAttention",
    "triton_quantized": "FusedRCMAttention in 8 bits",
    "naive_softmax": "all scores in memory",
}
# The publishers' names of the sizes.
PUBLIC = {
    "wan2.1-1.3b": "Wan 2.1 1.3B",
    "wan2.1-14b": "Wan 2.1 14B",
    "wan2.1-i2v-14b": "Wan 2.1 I2V 14B",
    "wan2.2-5b": "Wan 2.2 TI2V-5B",
    "ltx2-19b": "LTX-2 19B",
}
# Runs of the same model and size as another run, with other inputs or another option.
ON_THE_PAGE_ALONE = (
    "wan2.2-5b-8-layers-image",
    "wan2.1-1.3b-block-sparse-mass-0.95",
    "wan2.1-1.3b-block-sparse-unstructured",
    "ltx2-19b-8-layers-image",
    "ltx2-19b-8-layers-image-quantized",
    "ltx2-19b-8-layers-image-sparse",
)
# Whole videos of a model whose steps no other run times with all layers. The tables of steps have theirs too.
WITH_STEPS = ("ltx2-19b-1024p-sparse", "ltx2-19b-sparse")
COLOURS = dict(zip(TIERS, ("#4c78a8", "#f58518", "#54a24b", "#b279a2"), strict=True))

DPI = 110
DIGEST = "Description"  # the PNG's text that has it


def names_of(run: dict) -> dict[str, str]:
    """Return the names of a run's variants that ran, in order."""
    tier = tier_of_run(run)
    rivals = {} if tier == "exact" else QUANTIZED_RIVALS
    beside = {name: name for name in (WITHOUT_GRAPHS, IN_8_BITS, TINY_VAE, *BESIDE_A_LORA)}
    names = {**NAMES, **rivals, "patched": f"patched ({tier})", **beside}
    ran = {variant["name"] for variant in run["variants"]}
    return {name: shown for name, shown in names.items() if name in ran}


def module_of(name: str) -> str:
    """Return the public name of a timed attention module."""
    base = name.removesuffix("_compiled")
    return MODULES.get(base, base) + (", compiled" if base != name else "")


def real_models(runs: dict) -> dict[str, dict]:
    """Return the runs that compare variants' steps of a real model without LoRA."""
    found = {name: run for name, run in step_runs(runs).items() if "config" in run["settings"]}
    return {name: run for name, run in found.items() if "lora_ranks" not in run["settings"]}


def step_runs(runs: dict) -> dict[str, dict]:
    """Return the runs that compare variants' steps. Whole videos have no peak of memory here: decoding may make it."""
    videos, found = whole_videos(runs), {name: run for name, run in runs.items() if "variants" in run}
    return {
        name: _without_peaks(run) if name in videos else run
        for name, run in found.items()
        if name not in videos or name in WITH_STEPS
    }


def _without_peaks(run: dict) -> dict:
    variants = [{**variant, "timings": {**variant["timings"], "peak_memory": None}} for variant in run["variants"]]
    return {**run, "variants": variants}


def whole_videos(runs: dict) -> dict[str, dict]:
    """Return the runs that compare variants of a model at its real size up to the decoded video."""
    found = {name: run for name, run in runs.items() if "variants" in run and "config" in run["settings"]}
    return {name: run for name, run in found.items() if run["settings"].get("output_type", "latent") != "latent"}


def start_of(run: dict) -> str:
    """Return what a whole video was made from: "prompt", or "embeddings" of one."""
    return "prompt" if "tokens" in run["settings"] else "embeddings"


def end_of(run: dict) -> str:
    """Return what a whole video has: "frames", or "frames and sound"."""
    has_sound = any(variant["timings"].get("sound") for variant in run["variants"])
    return "frames and sound" if has_sound else "frames"


def model_of(run: dict) -> str:
    """Return the model and the video of a run, such as "wan2.1-14b (4 layers), 81×720×1280, 2 GPUs"."""
    settings = run["settings"]
    layers = f" ({settings['layers']} layers)" if "layers" in settings else ""
    size = f"{settings['num_frames']}×{settings['height']}×{settings['width']}"
    gpus = f", {settings['ulysses']} GPUs" if settings.get("ulysses", 1) > 1 else ""
    ranks = " + ".join(map(str, settings.get("lora_ranks", ())))
    lora = f", LoRA of rank {ranks}" if ranks else ""
    return f"{settings.get('config') or settings['model']}{layers}, {size}{gpus}{lora}{mass_of(settings)}"


def mass_of(settings: dict) -> str:
    return f", mass {settings['mass']:g}" if "mass" in settings else ""


def name_of(settings: dict) -> str:
    """Return a model's public name."""
    if settings.get("experts") == 2:
        return "Wan 2.2 A14B"
    return PUBLIC.get(settings["config"], settings["config"])


def frames_of(settings: dict) -> str:
    return f"{settings['width']}×{settings['height']}, {settings['num_frames']} frames"


def title_of(run: dict) -> str:
    """Return a run's model and video for people, in two lines: the public name, and how many layers of how many ran."""
    settings, case = run["settings"], CASES.get(run["settings"]["config"])
    total = None if case is None else case.transformer.get("num_layers")
    part = total is not None and settings.get("layers", total) != total
    layers = f" ({settings['layers']} of {total} layers)" if part else ""
    gpus = f", {settings['ulysses']} GPUs" if settings.get("ulysses", 1) > 1 else ""
    return f"{name_of(settings)}{layers}\n{frames_of(settings)}{gpus}"


class Step(NamedTuple):
    """One variant's denoising step. peak: bytes, or None. error: relative L2 to fp32, or None if not measured."""

    milliseconds: float
    peak: int | None
    error: float | None


def tier_of_run(run: dict) -> str:
    return run["settings"].get("preset", EXACT.name)


def steps_by_tier(runs: dict) -> dict[str, dict[str, Step]]:
    """Return, by model and run, the unpatched and compiled steps, and those of the tiers that ran in turns with them.

    The exact tier also ran beside the others. Its own run of the model counts, if there is one.
    """
    found = {name: run for name, run in real_models(runs).items() if name not in ON_THE_PAGE_ALONE}
    return {
        name: variants
        for name, run in found.items()
        if run["settings"].get("ulysses", 1) == 1 and COMPILED in (variants := _steps_of(run))
    }


def _steps_of(run: dict) -> dict[str, Step]:
    names = {UNPATCHED: UNPATCHED, COMPILED: COMPILED, EXACT_PATCH: EXACT.name, PATCHED: tier_of_run(run)}
    return {
        names[variant["name"]]: Step(
            milliseconds(variant), variant["timings"]["peak_memory"], variant.get("step_error")
        )
        for variant in run["variants"]
        if variant["name"] in names
    }


def runs_of_tiers(runs: dict) -> dict[str, dict[str, dict[str, Step]]]:
    """Return, by model and tier, the steps of the variants in the tier's own run.

    The exact tier has those of another tier's run if it has none of its own.
    """
    models: dict[str, dict[str, dict[str, Step]]] = {}
    for name, variants in steps_by_tier(runs).items():
        model, own = models.setdefault(title_of(runs[name]), {}), tier_of_run(runs[name])
        for tier in (own, EXACT.name):
            if tier in variants and (tier == own or tier not in model):
                model[tier] = variants
    return models


def speedups_by_tier(runs: dict) -> dict[str, dict[str, float]]:
    """Return how many times as fast as torch.compile a step is, by model and tier, each from the tier's own run.

    Models and tiers have an order: models with all layers first, then those with the most tiers; the tiers as in TIERS.
    """
    speedups = {
        model: {tier: run[COMPILED].milliseconds / run[tier].milliseconds for tier, run in tiers.items()}
        for model, tiers in runs_of_tiers(runs).items()
    }
    ordered = sorted(speedups.items(), key=lambda item: ("layers)" in item[0], -len(item[1])))
    return {model: {tier: tiers[tier] for tier in TIERS if tier in tiers} for model, tiers in ordered}


def one_of_each_model(speedups: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the first entry of each model, so that the chart stays small."""
    first: dict[str, str] = {}
    for title in speedups:
        first.setdefault(title.splitlines()[0].partition(" (")[0], title)
    return {title: speedups[title] for title in first.values()}


def milliseconds(variant: dict) -> float:
    """Return a variant's median step, or the second step of the variant that compiles again after its first."""
    steps = variant["timings"]["steps"]
    return 1e3 * (steps[1] if variant["name"] == COMPILED_AFTER_A_CHANGE else statistics.median(steps))


def chart_file(path: Path, kind: str) -> Path:
    """Return the path of a results file's chart. kind: "tiers" or "traffic"."""
    return path.with_name(f"{path.stem}-{kind}.png")


def draw_charts(runs: dict, path: Path) -> None:
    """Draw each chart in an image file beside the results file, with a digest of its data."""
    for kind, data in chart_data(runs).items():
        _DRAW[kind](data).savefig(chart_file(path, kind), dpi=DPI, metadata={DIGEST: digest_of(data), "Software": None})


def chart_data(runs: dict) -> dict[str, object]:
    """Return the data of each chart that has any: tiers, DRAM passes of a block."""
    models = one_of_each_model(speedups_by_tier(runs))
    data = {
        "tiers": models and {"gpu": gpu_of(real_models(runs)), "models": models},
        "traffic": [r for r in runs.values() if r.get("settings", {}).get("case") == "Wan block"],
    }
    return {kind: shown for kind, shown in data.items() if shown}


def digest_of(data: object) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def _figure(height: float, width: float = 9, rows: int | None = None):
    """Return a figure with its axes. rows: None for one, else a list of so many, one below the other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1 if rows is None else rows, sharex=True, squeeze=False)[:, 0]
    for each in axes:
        each.tick_params(labelsize="large")
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes[0] if rows is None else axes


def _draw_tiers(data: dict):
    """Draw bars from the left, models down, a bar and a colour per tier, with the speed-up at their ends."""
    bars = sum(len(tiers) for tiers in data["models"].values())
    figure, axes = _figure(1.2 + 0.165 * (bars + len(data["models"])), width=700 / DPI)
    places, top = [], 0
    for tiers in data["models"].values():
        for index, (tier, ratio) in enumerate(tiers.items()):
            bar = axes.barh(top + index, ratio, 0.9, color=COLOURS[tier], label=tier)
            axes.bar_label(bar, [f"{ratio:.2f}×"], padding=3)
        places.append(top + (len(tiers) - 1) / 2)
        top += len(tiers) + 1
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(places, list(data["models"]))
    axes.invert_yaxis()
    axes.set_xlabel("speed-up: 1 is torch.compile, longer is better")
    figure.suptitle(f"A denoising step on one {data['gpu']}, over torch.compile", fontsize="large")
    legend_below(figure, axes, ncols=len(TIERS))
    return figure


def gpu_of(runs: dict) -> str:
    return next(iter(runs.values()))["environment"]["gpu"]


def _draw_traffic(runs: list[dict]):
    """Draw a panel per model, a bar per implementation."""
    shown, gpu = {}, runs[0]["environment"]["gpu"]
    for run in runs:
        found = [one for one in run["implementations"] if one["refused"] is None]
        shown.setdefault(name_of(run["settings"]), []).extend((run["pass_bytes"], one) for one in found)
    figure, panels = _figure(1.6 + 0.5 * sum(map(len, shown.values())), rows=len(shown))
    for axes, (model, bars) in zip(panels, shown.items(), strict=True):
        for place, (pass_bytes, one) in enumerate(bars):
            read, written = (one[key] / pass_bytes for key in ("read", "written"))
            axes.barh(place, read, color="C0", label="read")
            bar = axes.barh(place, written, left=read, color="C1", label="written")
            axes.bar_label(bar, [f"{read + written:.0f}"], padding=3, fontsize="large")
        axes.set_yticks(range(len(bars)), [IMPLEMENTATIONS.get(one["name"], one["name"]) for _, one in bars])
        axes.invert_yaxis()
        axes.margins(x=0.07)  # for the longest bar's label
        axes.set_title(f"Memory traffic of a block of {model} on one {gpu}", fontsize="large")
    axes.set_xlabel("passes of one [tokens, channels] tensor; shorter is better", fontsize="large")
    legend_below(figure, axes)
    return figure


_DRAW = {"tiers": _draw_tiers, "traffic": _draw_traffic}


def legend_below(figure, axes, ncols: int = 3) -> None:
    """Draw each label of the axes once, below the figure."""
    by_label = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(by_label.values(), by_label.keys(), loc="outside lower center", ncols=ncols, fontsize="large")
