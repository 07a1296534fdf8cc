"""Write the results page, its charts, the README's table of steps and docs/writeup.md, from the JSON files in results/.

python scripts/readme_results.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from writeup import write as write_writeup

from turbo_rcm_patch.bench.block_sparsity import block_sparsity_page
from turbo_rcm_patch.bench.charts import (
    chart_file,
    draw_charts,
    milliseconds,
    model_of,
    names_of,
    real_models,
    whole_videos,
)
from turbo_rcm_patch.bench.lora import WITHOUT
from turbo_rcm_patch.bench.tables import table
from turbo_rcm_patch.tiers import BLOCK_SPARSE, EXACT, QUANTIZED

ROOT = Path(__file__).resolve().parent.parent
PAGE = "README.md"  # in the folder of results
MEASURED = "<!-- measured: written by scripts/readme_results.py -->", "<!-- end of measured -->"
EVALUATED = "<!-- evaluated: written by scripts/readme_results.py -->", "<!-- end of evaluated -->"
WRITEUP = "nvidia-h200.json"  # which docs/writeup.md tells of
TRAINING = "training.json"
CONVERSION = "conversion.json"  # of scripts/benchmark_conversion.py, which needs no GPU
BLOCK_SPARSITY = "block-sparse-tiny.json"  # of scripts/measure_block_sparsity.py, nor does that
SPARSE = "sparse-tiny.json"  # of scripts/evaluate_sparse.py, which needs none either
INTRODUCTION = """# Results

All of this page is written by `python scripts/readme_results.py`, from the JSON files beside it; those are written by
`python scripts/gpu_session.py --results results`. What missed its target is bold. `designs.md` tells what was tried.
"""
STEPS_HEADER = (
    "run",
    "variant",
    "step, ms",
    "over eager",
    "over compile",
    "targets",
    "peak memory, GiB",
    "rel. L2 of a step to fp32",
    "of the latents to eager",
)
VIDEOS_HEADER = (
    "run",
    "variant",
    "steps, s",
    "decode, s",
    "output, s",
    "total, s",
    "decode over eager",
    "over compile",
    "targets",
    "peak memory, GiB",
    "rel. L2 of decoding to fp32",
)
SHORT_QUANTIZED_HEADER = (
    "one step of, 8 bits",
    "compile, ms",
    "torchao float8, ms",
    "exact, ms",
    "quantized, ms",
    "over compile",
    "memory over compile's",
    "rel. L2 to fp32",
)
SHORT_STEPS_HEADER = ("one step of", "eager, ms", "compile, ms", "patched, ms", "over compile", "memory over compile's")
# What is asked of a patched step: a speed-up over a variant, and memory as a multiple of regional torch.compile's.
STEP_TARGETS = {
    "wan2.1-1.3b": {"unpatched": 1.45, "torch.compile": 1.2},
    "wan2.1-1.3b-17-frames": {"torch.compile": 1.2},
    "wan2.1-14b-4-layers": {"torch.compile": 1.12},
    "wan2.2-5b-8-layers": {"torch.compile": 1.11},
    "wan2.2-5b-8-layers-image": {"torch.compile": 1.11},
    "wan2.1-i2v-14b-4-layers": {"torch.compile": 1.11},
    "wan2.1-14b-4-layers-2-gpus": {"torch.compile": 1.12},
    "wan2.1-1.3b-quantized": {"torch.compile": 1.5},
    "wan2.1-14b-4-layers-quantized": {"torch.compile": 1.5},
    "wan2.2-5b-8-layers-quantized": {"torch.compile": 1.48},
}
# How many times the step without LoRA one with it may take.
LORA_TARGETS = {"wan2.1-14b-4-layers-lora-64": 1.03}
OTHER_LORA_TARGET = 1.06
MEMORY_TARGETS = dict.fromkeys(("wan2.2-5b-8-layers", "wan2.2-5b-8-layers-image", "wan2.1-i2v-14b-4-layers"), 1.15)
# What is asked of a patched decoding: a speed-up over a variant's; and of the stages of a whole video, seconds.
DECODE_TARGETS = {
    "wan2.1-1.3b-decoded": {"torch.compile": 1.75},
    "wan2.1-14b-1-layer-decoded": {"unpatched": 3.0, "torch.compile": 1.6},
    "wan2.2-5b-1-layer-decoded": {"unpatched": 2.0, "torch.compile": 1.25},
}
STAGE_LIMITS = {"wan2.1-1.3b-decoded": {"vae_decode": 0.6, "output": 0.1, "total": 2.5}}
ACCURACY_TARGETS = {2: 0.9, 4: 0.95}  # overall prompt accuracy of the embedded model, by steps
ACCURACY_FACTOR = EXACT.limits.factor  # a step's error to fp32 may be so many times that of torch.compile
OPS_HEADER = ("op, bf16", "ours, ms", "rival", "rival, ms", "speed-up", "target", "error, ours / rival")
OPS_QUANTIZED_HEADER = ("op, 8 bits", *OPS_HEADER[1:])
TRAFFIC_HEADER = ("what", "implementation", "read, MB", "written, MB", "passes", "source", "rel. L2 to fp32")
TESTS_HEADER = ("torch", "triton", "diffusers", "commit", "GPU tests passed", "failed")
SOURCES = {"counters": "measured by Nsight Compute", "shapes": "counted from shapes"}


def main() -> int:
    folder = ROOT / "results"
    for path in result_files(folder):
        draw_charts(json.loads(path.read_text())["runs"], path)
    (folder / PAGE).write_text(results_page(folder))
    readme = ROOT / "README.md"
    readme.write_text(with_results(readme.read_text(), folder))
    write_writeup(folder / WRITEUP, ROOT / "docs")
    return 0


def result_files(folder: Path) -> list[Path]:
    """The results of each GPU."""
    others = (TRAINING, CONVERSION, BLOCK_SPARSITY, SPARSE)
    return [path for path in sorted(folder.glob("*.json")) if path.name not in others]


def with_results(text: str, folder: Path) -> str:
    """The README's text with the sections between its markers rendered from the folder's results files."""
    files = {path: json.loads(path.read_text()) for path in result_files(folder)}
    text = _replace(text, MEASURED, (_short_steps(path, results["runs"]) for path, results in files.items()))
    return _replace(text, EVALUATED, (_short_evaluation(results["runs"]) for results in files.values()))


def results_page(folder: Path) -> str:
    """The page of all tables: for each GPU what was measured, then what the embedded model shows."""
    training = json.loads((folder / TRAINING).read_text()) if (folder / TRAINING).exists() else None
    parts = [INTRODUCTION]
    for path in result_files(folder):
        results = json.loads(path.read_text())
        parts.append(f"## {results['gpu']}\n")
        parts.append(_measured(path, results["runs"], results.get("tests", [])))
        parts.append(_evaluated(path.name, results["runs"], training))
    if (folder / BLOCK_SPARSITY).exists():
        parts.append(block_sparsity_page(json.loads((folder / BLOCK_SPARSITY).read_text()), BLOCK_SPARSITY))
    if (folder / SPARSE).exists():
        parts.append(_sparse(json.loads((folder / SPARSE).read_text())))
    return "\n".join(filter(None, parts))


def _replace(text: str, markers: tuple[str, str], sections: Iterable[str]) -> str:
    """The text with the sections between the markers; as it was where it has no such markers."""
    if markers[0] not in text:
        return text
    before, rest = text.split(markers[0])
    after = rest.split(markers[1])[1]
    return f"{before}{markers[0]}\n" + "\n".join(filter(None, sections)) + f"{markers[1]}{after}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return table([header, *rows], markdown=True) + "\n"


def _measured(path: Path, runs: dict, tests: list[dict]) -> str:
    """Denoising steps, single ops, traffic and modules on one GPU, and with which versions its tests passed."""
    environments = {_versions(run["environment"]): None for run in runs.values() if "environment" in run}
    parts = [f"From `{path.name}`: {'; '.join(environments)}.\n"] if environments else []
    if tests:
        parts.append(_tests(tests))
    steps = {name: run for name, run in runs.items() if "variants" in run and name not in whole_videos(runs)}
    traffic = [run for run in runs.values() if "pass_bytes" in run]
    if steps:
        parts.append(_chart(path, "steps", "Speed-up of a denoising step over eager diffusers"))
        parts.append(
            "One denoising step, the median over steps of medians over repeats; all variants in turns in one process, "
            "or with several GPUs in one process each. Targets are the speed-ups over eager and over compile, and the "
            "memory over compile's:\n"
        )
        parts.append(_table(STEPS_HEADER, [row for name, run in steps.items() for row in _step_rows(name, run)]))
    if whole_videos(runs):
        parts.append(_whole_videos(whole_videos(runs)))
    if "first-step" in runs:
        parts.append(_first_step(runs["first-step"]))
    if "ops" in runs:
        parts.append(_ops(runs["ops"]))
    if "ops-quantized" in runs:
        parts.append(_ops(runs["ops-quantized"], OPS_QUANTIZED_HEADER))
    parts += [_parts(run) for run in runs.values() if run.get("parts")]
    if traffic:
        parts += [_chart(path, "traffic", "Memory traffic of a Wan block"), _traffic(traffic)]
    if "implementations" in runs:
        parts.append(_chart(path, "modules", "Speed-up of the attention modules"))
        parts.append(_implementations(runs["implementations"]))
    return "\n".join(parts)


def _versions(environment: dict) -> str:
    commit = f", commit {environment['commit'][:12]}" if environment.get("commit") else ""
    return ", ".join(f"{name} {environment[name]}" for name in ("torch", "triton", "diffusers")) + commit


def _chart(path: Path, kind: str, description: str) -> str:
    return f"![{description}]({chart_file(path, kind).name})\n"


def _tests(tests: list[dict]) -> str:
    """A row per pair of torch and triton with which the GPU tests ran."""
    rows = []
    for entry in tests:
        environment = entry["environment"]
        versions = [environment[name] for name in ("torch", "triton", "diffusers")]
        failed = sum(entry.get(word, 0) for word in ("failed", "error", "errors"))
        cells = [*versions, (environment.get("commit") or "")[:12], str(entry.get("passed", 0))]
        cells.append(str(failed) if entry["ok"] else f"**{failed}**")
        rows.append(cells)
    return _table(TESTS_HEADER, rows)


def _short_steps(path: Path, runs: dict) -> str:
    """The README's table: a row per real model; empty without one. Its chart is beside it."""
    rows = [_short_step_row(name, run) for name, run in real_models(runs, "exact").items()]
    if not rows:
        return ""
    environment = next(iter(real_models(runs).values()))["environment"] | {"commit": None}  # runs may be of several
    chart = f"![Speed-up of a denoising step over eager diffusers](results/{chart_file(path, 'steps').name})"
    tables = [_table(SHORT_STEPS_HEADER, rows)]
    quantized = [_short_quantized_row(name, run) for name, run in real_models(runs, "quantized").items()]
    if quantized:
        tables.append(_table(SHORT_QUANTIZED_HEADER, quantized))
    return "\n\n".join((f"\n{environment['gpu']}, {_versions(environment)}.", chart, "\n".join(tables)))


def _short_step_row(name: str, run: dict) -> list[str]:
    variants = ("unpatched", "torch.compile", "patched")
    return [model_of(run), *_short_milliseconds(run, variants), _over_compile(name, run), _memory_ratio(name, run)]


def _short_quantized_row(name: str, run: dict) -> list[str]:
    variants = ("torch.compile", "torchao float8 + torch.compile", "patched exactly", "patched")
    error = next(variant.get("step_error") for variant in run["variants"] if variant["name"] == "patched")
    cells = [model_of(run), *_short_milliseconds(run, variants), _over_compile(name, run), _memory_ratio(name, run)]
    return [*cells, "" if error is None else f"{error:.1e}"]


def _short_milliseconds(run: dict, variants: Sequence[str]) -> Iterator[str]:
    steps = {variant["name"]: milliseconds(variant) for variant in run["variants"]}
    return (f"{steps[name]:.0f}" if name in steps else "" for name in variants)


def _over_compile(name: str, run: dict) -> str:
    steps = {variant["name"]: milliseconds(variant) for variant in run["variants"]}
    target = STEP_TARGETS.get(name, {}).get("torch.compile", 0.0)
    return _speedup(steps.get("torch.compile"), steps["patched"], target)


def _memory_ratio(name: str, run: dict) -> str:
    """The patched peak over torch.compile's, bold where it is above the target."""
    peaks = {variant["name"]: variant["timings"]["peak_memory"] for variant in run["variants"]}
    if peaks.get("torch.compile") is None:
        return ""
    ratio = peaks["patched"] / peaks["torch.compile"]
    return f"{ratio:.2f}×" if ratio <= MEMORY_TARGETS.get(name, ratio) else f"**{ratio:.2f}×**"


def _parts(run: dict) -> str:
    """What the parts of blocks err in a tier that errs more, over all blocks and checked steps."""
    settings, rows = run["settings"], []
    for name in dict.fromkeys(part["part"] for part in run["parts"]):
        parts = [part for part in run["parts"] if part["part"] == name]
        errors = [part["error"] for part in parts]
        mean, largest = f"{sum(errors) / len(errors):.1e}", f"{max(errors):.1e}"
        failed = not all(part["ok"] for part in parts)
        allowed = parts[0]["allowed"]
        rows.append([name, mean, f"**{largest}**" if failed else largest, "" if allowed is None else f"{allowed:.1e}"])
    model = settings.get("config") or settings.get("model")
    return (
        f"Parts of the blocks of {model}, preset {settings['preset']}, each on the inputs that an fp32 oracle's has: "
        "relative L2 errors to the oracle (of a sub-layer: of what it adds):\n\n"
        + _table(("part", "mean error", "largest error", "allowed"), rows)
    )


def _first_step(run: dict) -> str:
    empty, filled = (run["seconds"][cache]["first patched"] for cache in ("empty cache", "filled cache"))
    return (
        f"The first patched step of {run['settings']['config']} in a new process takes {empty:.1f} s with an empty "
        f"Triton cache, which compiles the kernels, and {filled:.1f} s with a filled one.\n"
    )


def _ops(run: dict, header: Sequence[str] = OPS_HEADER) -> str:
    rows = [row for result in run["results"] for row in _op_rows(result)]
    return (
        "Single ops, checked against an fp64 oracle before they are timed, as CUDA graphs in turns; the median of "
        f"{run['rounds']} rounds. A copy on this GPU moves {run['copy_bandwidth'] / 1e12:.2f} TB/s:\n\n"
        + _table(header, rows)
    )


def _op_rows(result: dict) -> list[list[str]]:
    best = result["best"]
    if best is None:
        return [[result["case"], "refused: less accurate than its rivals", *[""] * (len(OPS_HEADER) - 2)]]
    timings, rows = result["timings"], []
    for index, (rival, speedup) in enumerate(result["speedups"].items()):
        label = [result["case"], f"{timings[best]['milliseconds']:.3f}"] if index == 0 else ["", ""]
        target = result["targets"].get(rival)
        figure = f"{speedup:.3f}" if target is None or speedup >= target else f"**{speedup:.3f}**"
        timing = timings.get(rival, {"milliseconds": None, "error": None})  # a copy has no timing of its own
        rival_time = "" if timing["milliseconds"] is None else f"{timing['milliseconds']:.3f}"
        errors = "" if timing["error"] is None else f"{timings[best]['error']:.1e} / {timing['error']:.1e}"
        rows.append([*label, rival, rival_time, figure, "" if target is None else str(target), errors])
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
            rows.append([label, one["name"], *figures, passes, SOURCES[run["source"]], error])
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
        lines.append([label, latency, *others])
    header = ["samples×tokens×channels", f"{names[0]}, ms", *names[1:]]
    in_8_bits = ', triton_quantized the same with `preset="quantized"`' if "triton_quantized" in names else ""
    return (
        "The attention modules against each other (triton_fused is `trp.FusedRCMAttention` with "
        f'`implementation="triton"`{in_8_bits}): the median latency of '
        f"{names[0]}, and the others' speed-up over it. All are checked against fp64 before they are timed:\n\n"
        + _table(header, lines)
    )


def _step_rows(name: str, run: dict) -> list[list[str]]:
    label = f"{model_of(run)}, `{name}`"
    steps = {variant["name"]: milliseconds(variant) for variant in run["variants"]}
    errors = {variant["name"]: variant.get("step_error") for variant in run["variants"]}
    rows = []
    for variant in run["variants"]:
        step = steps[variant["name"]]
        targets = STEP_TARGETS.get(name, {}) if variant["name"] == "patched" else {}
        rivals = ("unpatched", "torch.compile")
        speedups = [_speedup(steps.get(rival), step, targets.get(rival, 0.0)) for rival in rivals]
        asked = " / ".join(str(targets.get(rival, "–")) for rival in rivals) if targets else ""
        memory = f"{variant['timings']['peak_memory'] / 2**30:.2f}"
        if targets and name in MEMORY_TARGETS:
            asked += f", memory {MEMORY_TARGETS[name]}"
            memory += f" ({_memory_ratio(name, run)})"
        limit = _error_limit(run, errors.get("torch.compile")) if variant["name"] == "patched" else None
        error = _step_error(errors[variant["name"]], limit)
        drift = "" if variant["latents"] is None else f"{variant['latents']['relative_l2']:.1e}"
        shown = f"{step:.1f}"
        if variant["name"] == "patched" and WITHOUT in steps:
            most = LORA_TARGETS.get(name, OTHER_LORA_TARGET)
            ratio = f"{step / steps[WITHOUT]:.3f}×"
            shown += f" ({ratio if step <= most * steps[WITHOUT] else f'**{ratio}**'} without LoRA)"
            asked = f"≤ {most}× without LoRA"
        cells = [names_of(run)[variant["name"]], shown, *speedups, asked, memory, error, drift]
        rows.append(["" if rows else label, *cells])
    return rows


def _whole_videos(runs: dict) -> str:
    """The stages from the prompt's embeddings to the frames on the CPU, a row per variant."""
    rows = [row for name, run in runs.items() for row in _video_rows(name, run)]
    return (
        "Whole videos, from the prompt's embeddings to frames in numpy, medians over repeats. Targets are the "
        "speed-ups of decoding over eager and over compile, whose decoder is compiled too, and seconds:\n\n"
        + _table(VIDEOS_HEADER, rows)
    )


def _video_rows(name: str, run: dict) -> Iterator[list[str]]:
    decodes = {variant["name"]: variant["timings"]["vae_decode"] for variant in run["variants"]}
    errors = {variant["name"]: variant.get("decode_error") for variant in run["variants"]}
    for variant, shown in names_of(run).items():
        timings = next(each["timings"] for each in run["variants"] if each["name"] == variant)
        is_ours = variant == "patched"
        targets, limits = (each.get(name, {}) if is_ours else {} for each in (DECODE_TARGETS, STAGE_LIMITS))
        stages = {"steps": sum(timings["steps"]), **{key: timings[key] for key in ("vae_decode", "output", "total")}}
        seconds = [_bold(f"{value:.2f}", value > limits.get(key, value)) for key, value in stages.items()]
        rivals = ("unpatched", "torch.compile")
        speedups = [_speedup(decodes.get(rival), decodes[variant], targets.get(rival, 0.0)) for rival in rivals]
        asked = [f"{targets.get(rival, '–')}×" for rival in rivals] if targets else []
        asked += [f"{key.removeprefix('vae_')} {limit} s" for key, limit in limits.items()]
        limit = ACCURACY_FACTOR * errors["unpatched"] if is_ours and errors["unpatched"] is not None else None
        cells = [*seconds, *speedups, " / ".join(asked), f"{timings['peak_memory'] / 2**30:.2f}"]
        label = f"{model_of(run)}, `{name}`" if variant == "unpatched" else ""
        yield [label, shown, *cells, _step_error(errors[variant], limit)]


def _bold(text: str, missed: bool) -> str:
    return f"**{text}**" if missed else text


def _error_limit(run: dict, compiled: float | None) -> float | None:
    """What is asked of a step: ACCURACY_FACTOR times torch.compile's error, or the tier's own limit."""
    tier = {"quantized": QUANTIZED, "block_sparse": BLOCK_SPARSE}.get(run["settings"].get("preset"))
    if tier is not None:
        return tier.limits.step
    return None if compiled is None else ACCURACY_FACTOR * compiled


def _step_error(error: float | None, limit: float | None) -> str:
    """Bold where it is above the limit."""
    if error is None:
        return ""
    return f"{error:.1e}" if limit is None or error <= limit else f"**{error:.1e}**"


def _speedup(rival: float | None, step: float, target: float) -> str:
    """The rival's time over the step's, bold where it misses the target."""
    if rival is None:
        return ""
    return f"{rival / step:.2f}×" if rival >= target * step else f"**{rival / step:.2f}×**"


def _evaluated(file: str, runs: dict, training: dict | None) -> str:
    """Prompt accuracy of the embedded model and of its teacher; empty for a GPU without an evaluation.

    file: the results file's name.
    """
    evaluation = runs.get("evaluate")
    if evaluation is None:
        return ""
    attributes, rows, origin = list(evaluation["results"][0]["accuracy"]), [], ""
    if training is not None:
        taught = training["stages"]["teacher accuracy"]
        rows.append(["teacher, guided", taught["steps"], taught["accuracy"], None, None, None])
        minutes = training["seconds"] / 60
        gpu = training["environment"]["gpu"]
        origin = f"The stages of its training took {minutes:.1f} minutes on one {gpu} (`{TRAINING}`). "
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
        lines.append([variant, str(steps), *shares, changed, *map(_decibels, psnr)])
    environment = evaluation["environment"]
    return (
        f"\nShare of what {evaluation['settings']['n']} held-out captions ask for that the videos show, in %, overall "
        f"with its standard error; bold: below the target, {_accuracy_targets()}. {environment['gpu']}, torch "
        f"{environment['torch']}. {origin}"
        f"File: `{file}`.\n\n" + _table(header, lines)
    )


def _sparse(results: dict) -> str:
    """What a kept share of the key blocks costs the embedded model, with and without its fine-tuning."""
    settings, environment, rows = results["settings"], results["environment"], results["results"]
    steps = list(dict.fromkeys(row["steps"] for row in rows))
    header = ["attention", "key blocks kept"]
    for count in steps:
        header += [f"{count} step{'s' * (count > 1)}, %", "PSNR to exact, dB"]
    lines = []
    for variant, kept in dict.fromkeys((row["variant"], row["kept"]) for row in rows):
        cells = [variant, "all" if kept is None else f"{100 * kept:.0f} %"]
        for row in (row for row in rows if (row["variant"], row["kept"]) == (variant, kept)):
            overall = row["accuracy"]["overall"]
            cells += [f"{_percent(overall['share'])} ± {_percent(overall['standard_error'])}"]
            cells.append(_decibels(row["psnr_to_exact"]))
        lines.append(cells)
    queries, keys = settings["blocks"]
    return (
        "## Sparse-linear attention on the tiny model\n\n"
        f"Share of what {settings['n']} held-out captions ask for that the videos show, in %, with its standard error, "
        "and the PSNR of the frames to those of exact attention. The model's videos have 700 tokens: blocks of "
        f"{queries} queries and {keys} keys. Block sparse: softmax attention to the kept blocks, with the dense "
        "model's weights; SLA: the weights that `scripts/train_sparse.py` fine-tuned, with the linear branch. "
        f"{environment['gpu'] or 'On a CPU'}, {_versions(environment)}. File: `{SPARSE}`.\n\n" + _table(header, lines)
    )


def _short_evaluation(runs: dict) -> str:
    """The README's sentence: how much of the captions the patched embedded model shows."""
    evaluation = runs.get("evaluate", {"results": []})
    exact = [result for result in evaluation["results"] if result["variant"] == "exact"]
    if not exact:
        return ""
    shares, steps = (", ".join(values) for values in zip(*map(_share_and_steps, exact), strict=True))
    return (
        f"\nOf what {evaluation['settings']['n']} held-out captions ask for, the patched model's videos show {shares} "
        f"% in {steps} steps ({evaluation['environment']['gpu']}).\n"
    )


def _share_and_steps(result: dict) -> tuple[str, str]:
    return _percent(result["accuracy"]["overall"]["share"]), str(result["steps"])


def _accuracy_targets() -> str:
    return ", ".join(f"{100 * share:.0f} in {steps} steps" for steps, share in ACCURACY_TARGETS.items())


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _decibels(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
