"""Write the README's measured and evaluated sections and its charts, all from the JSON files in results/.

python scripts/readme_results.py
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MEASURED = "<!-- measured: written by scripts/readme_results.py -->", "<!-- end of measured -->"
EVALUATED = "<!-- evaluated: written by scripts/readme_results.py -->", "<!-- end of evaluated -->"
TRAINING = "training.json"
STEPS_HEADER = (
    "| run | variant | step, ms | over eager | over compile | targets | peak memory, GiB "
    "| rel. L2 of a step to fp32 | of the latents to eager |"
)
# What is asked of a patched step, over which variant.
STEP_TARGETS = {
    "wan2.1-1.3b": {"unpatched": 1.45, "torch.compile": 1.2},
    "wan2.1-1.3b-17-frames": {"torch.compile": 1.2},
    "wan2.1-14b-4-layers": {"torch.compile": 1.12},
}
ACCURACY_TARGETS = {2: 0.9, 4: 0.95}  # overall prompt accuracy of the embedded model, by steps
ACCURACY_FACTOR = 1.05  # a step's error to fp32 may be so many times that of torch.compile
OPS_HEADER = "| op, bf16 | ours, ms | rival | rival, ms | speed-up | target | error, ours / rival |"
TRAFFIC_HEADER = "| what | implementation | read, MB | written, MB | passes | source | rel. L2 to fp32 |"
SOURCES = {"counters": "measured by Nsight Compute", "shapes": "counted from shapes"}
NAMES = {"unpatched": "eager diffusers", "torch.compile": "regional torch.compile", "patched": "patched (exact)"}


def main() -> int:
    for path in result_files(ROOT / "results"):
        draw_charts(json.loads(path.read_text())["runs"], path.with_suffix(".png"))
    readme = ROOT / "README.md"
    readme.write_text(with_results(readme.read_text(), ROOT / "results"))
    return 0


def result_files(folder: Path) -> list[Path]:
    """The results of each GPU."""
    return [path for path in sorted(folder.glob("*.json")) if path.name != TRAINING]


def with_results(text: str, folder: Path) -> str:
    """The README's text with the sections between the markers rendered from the folder's results files."""
    training = json.loads((folder / TRAINING).read_text()) if (folder / TRAINING).exists() else None
    files = {path: json.loads(path.read_text()) for path in result_files(folder)}
    measured = (_measured(f"results/{path.name}", results["runs"]) for path, results in files.items())
    text = _replace(text, MEASURED, measured)
    evaluated = (_evaluated(f"results/{path.name}", results["runs"], training) for path, results in files.items())
    return _replace(text, EVALUATED, evaluated)


def _replace(text: str, markers: tuple[str, str], sections: Iterable[str]) -> str:
    before, rest = text.split(markers[0])
    after = rest.split(markers[1])[1]
    return f"{before}{markers[0]}\n" + "\n".join(filter(None, sections)) + f"{markers[1]}{after}"


def _table(header: str, rows: list[str]) -> str:
    return f"{header}\n" + "|---" * (header.count("|") - 1) + "|\n" + "\n".join(rows) + "\n"


def _measured(file: str, runs: dict) -> str:
    """Denoising steps, single ops and the first step on one GPU; empty without any of them."""
    steps = {name: run for name, run in runs.items() if "variants" in run}
    if not steps and "ops" not in runs:
        return ""
    environment = next(run["environment"] for run in runs.values())
    versions = ", ".join(f"{name} {environment[name]}" for name in ("torch", "triton", "diffusers"))
    parts = [
        f"\n{environment['gpu']}, {versions}. `{file}`, written by `python scripts/gpu_session.py --results results`."
    ]
    if steps:
        parts.append(f"![Steps, memory traffic and attention modules]({file.removesuffix('.json')}.png)")
        parts.append(
            "One denoising step, the median over steps of medians over repeats; all variants in turns in one process:"
        )
        parts.append(_table(STEPS_HEADER, [row for name, run in steps.items() for row in _step_rows(name, run)]))
    if "first-step" in runs:
        parts.append(_first_step(runs["first-step"]))
    if "ops" in runs:
        parts.append(_ops(runs["ops"]))
    traffic = [run for run in runs.values() if "pass_bytes" in run]
    if traffic:
        parts.append(_traffic(traffic))
    if "implementations" in runs:
        parts.append(_implementations(runs["implementations"]))
    return "\n\n".join(parts)


def _first_step(run: dict) -> str:
    empty, filled = (run["seconds"][cache]["first patched"] for cache in ("empty cache", "filled cache"))
    return (
        f"The first patched step of {run['settings']['config']} in a new process takes {empty:.1f} s with an empty "
        f"Triton cache, which compiles the kernels, and {filled:.1f} s with a filled one.\n"
    )


def _ops(run: dict) -> str:
    rows = [row for result in run["results"] for row in _op_rows(result)]
    return (
        "Single ops, checked against an fp64 oracle before they are timed, as CUDA graphs in turns; the median of "
        f"{run['rounds']} rounds. A copy on this GPU moves {run['copy_bandwidth'] / 1e12:.2f} TB/s:\n\n"
        + _table(OPS_HEADER, rows)
    )


def _op_rows(result: dict) -> list[str]:
    best = result["best"]
    if best is None:
        return [f"| {result['case']} | refused: less accurate than its rivals | | | | | |"]
    timings, rows = result["timings"], []
    for index, (rival, speedup) in enumerate(result["speedups"].items()):
        label = f"{result['case']} | {timings[best]['milliseconds']:.3f}" if index == 0 else " | "
        target = result["targets"].get(rival)
        figure = f"{speedup:.3f}" if target is None or speedup >= target else f"**{speedup:.3f}**"
        timing = timings.get(rival, {"milliseconds": None, "error": None})  # a copy has no timing of its own
        milliseconds = "" if timing["milliseconds"] is None else f"{timing['milliseconds']:.3f}"
        errors = "" if timing["error"] is None else f"{timings[best]['error']:.1e} / {timing['error']:.1e}"
        rows.append(
            f"| {label} | {rival} | {milliseconds} | {figure} | {'' if target is None else target} | {errors} |"
        )
    return rows


def _traffic(runs: list[dict]) -> str:
    rows = []
    for run in runs:
        settings = run["settings"]
        name = f"{settings['case']}{' of ' + settings['config'] if 'config' in settings else ''}"
        for index, one in enumerate(run["implementations"]):
            label = f"{name}, {settings['tokens']}×{settings['dim']}" if index == 0 else ""
            figures = [f"{one[key] / 1e6:.0f}" for key in ("read", "written")] if one["refused"] is None else ["", ""]
            passes = f"{one['passes']:.1f}" if one["refused"] is None else "refused"
            error = "" if one.get("error") is None else f"{one['error']:.1e}"
            cells = (label, one["name"], *figures, passes, SOURCES[run["source"]], error)
            rows.append(f"| {' | '.join(cells)} |")
    return (
        "Memory traffic of one forward; a pass is one read or write of the [tokens, channels] tensor in bf16:\n\n"
        + _table(TRAFFIC_HEADER, rows)
    )


def _implementations(run: dict) -> str:
    """Latency of two_pass and every other implementation's speed-up over it, a row per size, dtype and mode."""
    names = list(dict.fromkeys(row["implementation"] for row in run["rows"]))
    groups: dict[str, dict[str, dict]] = {}
    for row in run["rows"]:
        label = f"{row['B']}×{row['N']}×{row['C']}, {row['dtype']}, {row['mode']}"
        groups.setdefault(label, {})[row["implementation"]] = row
    lines = []
    for label, rows in groups.items():
        first = rows[names[0]]
        latency = "refused" if first["latency"] is None else f"{first['latency'] * 1e3:.3f}"
        others = [f"{row['speedup']:.2f}×" if row["speedup"] else row["status"] for row in map(rows.get, names[1:])]
        lines.append(f"| {label} | {latency} | {' | '.join(others)} |")
    header = f"| samples×tokens×channels | {names[0]}, ms | {' | '.join(names[1:])} |"
    return (
        "The attention modules against each other (triton_fused is `trp.FusedRCMAttention` with "
        '`implementation="triton"`): the median latency of '
        f"{names[0]}, and the others' speed-up over it. All are checked against fp64 before they are timed:\n\n"
        + _table(header, lines)
    )


def _step_rows(name: str, run: dict) -> list[str]:
    settings = run["settings"]
    size = f"{settings['num_frames']}×{settings['height']}×{settings['width']}"
    label = f"{settings.get('config') or settings['model']}, {size}, `{name}`"
    if "layers" in settings:
        label = label.replace(",", f" ({settings['layers']} layers),", 1)
    steps = {variant["name"]: _milliseconds(variant) for variant in run["variants"]}
    errors = {variant["name"]: variant.get("step_error") for variant in run["variants"]}
    rows = []
    for variant in run["variants"]:
        step = steps[variant["name"]]
        targets = STEP_TARGETS.get(name, {}) if variant["name"] == "patched" else {}
        rivals = ("unpatched", "torch.compile")
        speedups = [_speedup(steps.get(rival), step, targets.get(rival, 0.0)) for rival in rivals]
        asked = " / ".join(str(targets.get(rival, "–")) for rival in rivals) if targets else ""
        memory = f"{variant['timings']['peak_memory'] / 2**30:.2f}"
        error = _step_error(errors[variant["name"]], errors.get("torch.compile") if targets else None)
        drift = "" if variant["latents"] is None else f"{variant['latents']['relative_l2']:.1e}"
        cells = (NAMES[variant["name"]], f"{step:.1f}", *speedups, asked, memory, error, drift)
        rows.append(f"| {'' if rows else label} | {' | '.join(map(str, cells))} |")
    return rows


def _step_error(error: float | None, rival: float | None) -> str:
    """Bold where it is above what is asked of a step, ACCURACY_FACTOR times the rival's."""
    if error is None:
        return ""
    return f"{error:.1e}" if rival is None or error <= ACCURACY_FACTOR * rival else f"**{error:.1e}**"


def _milliseconds(variant: dict) -> float:
    return statistics.median(variant["timings"]["steps"]) * 1e3


def _speedup(rival: float | None, step: float, target: float) -> str:
    """The rival's time over the step's, bold where it misses the target."""
    if rival is None:
        return ""
    return f"{rival / step:.2f}×" if rival >= target * step else f"**{rival / step:.2f}×**"


def _evaluated(file: str, runs: dict, training: dict | None) -> str:
    """Prompt accuracy of the embedded model and of its teacher; empty for a GPU without an evaluation."""
    evaluation = runs.get("evaluate")
    if evaluation is None:
        return ""
    attributes, rows, origin = list(evaluation["results"][0]["accuracy"]), [], ""
    if training is not None:
        taught = training["stages"]["teacher accuracy"]
        rows.append(["teacher, guided", taught["steps"], taught["accuracy"], None, None, None])
        minutes = training["seconds"] / 60
        gpu = training["environment"]["gpu"]
        origin = f"The stages of its training took {minutes:.1f} minutes on one {gpu} (`results/{TRAINING}`). "
    for result in evaluation["results"]:
        psnr = result["psnr_to_fp32"], result["psnr_to_exact"]
        rows.append([result["variant"], result["steps"], result["accuracy"], result["change"], *psnr])
    header = ["variant", "steps", *attributes, "vs unpatched", "PSNR to fp32, dB", "to exact, dB"]
    lines = []
    for variant, steps, accuracy, change, *psnr in rows:
        shares = [_percent(accuracy[name]["share"]) for name in attributes]
        if accuracy["overall"]["share"] < ACCURACY_TARGETS.get(steps, 0):
            shares[-1] = f"**{shares[-1]}**"
        shares[-1] += f" ± {_percent(accuracy['overall']['standard_error'])}"
        changed = "" if change is None else f"{100 * change['share']:+.1f} ± {_percent(change['standard_error'])}"
        cells = [variant, str(steps), *shares, changed, *map(_decibels, psnr)]
        lines.append("| " + " | ".join(cells) + " |")
    environment = evaluation["environment"]
    return (
        f"\nShare of what {evaluation['settings']['n']} held-out captions ask for that the videos show, in %, overall "
        f"with its standard error; bold: below the target, {_accuracy_targets()}. {environment['gpu']}, torch "
        f"{environment['torch']}. {origin}"
        f"File: `{file}`.\n\n" + _table("| " + " | ".join(header) + " |", lines)
    )


def _accuracy_targets() -> str:
    return ", ".join(f"{100 * share:.0f} in {steps} steps" for steps, share in ACCURACY_TARGETS.items())


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _decibels(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def draw_charts(runs: dict, path: Path) -> None:
    """Denoising steps, DRAM passes of a block, and attention modules beside each other, in an image file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    steps, traffic, modules = figure.subplots(1, 3)
    _draw_steps({name: run for name, run in runs.items() if "variants" in run}, steps)
    _draw_traffic([run for run in runs.values() if run.get("settings", {}).get("case") == "Wan block"], traffic)
    _draw_modules(runs.get("implementations", {"rows": []})["rows"], modules)
    figure.savefig(path, dpi=100)


def _draw_steps(runs: dict, axes) -> None:
    for place, run in enumerate(runs.values()):
        eager, *_ = variants = run["variants"]
        for index, variant in enumerate(variants):
            speedup = _milliseconds(eager) / _milliseconds(variant)
            axes.bar(place + 0.27 * index, speedup, 0.25, color=f"C{index}", label=NAMES[variant["name"]])
    axes.set_xticks([place + 0.27 for place in range(len(runs))], runs, fontsize="small")
    axes.set_title("denoising step, speed-up over eager", fontsize="medium")
    _draw_legend(axes)


def _draw_traffic(runs: list[dict], axes) -> None:
    for run in runs:
        for one in run["implementations"]:
            if one["refused"] is None:
                label = f"{run['settings']['config']}\n{one['name']}"
                read, written = (one[key] / run["pass_bytes"] for key in ("read", "written"))
                axes.barh(label, read, color="C0", label="read")
                axes.barh(label, written, left=read, color="C1", label="written")
    axes.invert_yaxis()
    axes.set_title("DRAM traffic of a block, passes of [tokens, channels]", fontsize="medium")
    _draw_legend(axes)


def _draw_modules(rows: list[dict], axes) -> None:
    shown = [row for row in rows if (row["dtype"], row["mode"], row["C"]) == ("bfloat16", "forward", 768)]
    for name in dict.fromkeys(row["implementation"] for row in shown):
        points = sorted((row["N"], row["speedup"]) for row in shown if row["implementation"] == name and row["B"] == 4)
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens (4 samples, 768 channels, 12 heads)")
    axes.set_title("attention modules, bf16 forward, over two_pass", fontsize="medium")
    _draw_legend(axes)


def _draw_legend(axes) -> None:
    by_label = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(by_label.values(), by_label.keys(), fontsize="small")


if __name__ == "__main__":
    sys.exit(main())
