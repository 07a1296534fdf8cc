"""The figures of results/writeup.md, from the runs of a results file."""

from __future__ import annotations

import statistics
from dataclasses import replace

from scripts.tools.pages.charts import gpu_of, milliseconds, model_of, names_of, real_models, start_of
from scripts.tools.pages.ops import sparse_attention_sentence
from scripts.tools.pages.tiny_model import evaluation_of, tier_of, tiers_table
from turbo_rcm_patch.bench.ops import OpKey
from turbo_rcm_patch.bench.parts import SUB_LAYERS
from turbo_rcm_patch.bench.report import format_seconds
from turbo_rcm_patch.bench.variants import EXACT_PATCH
from turbo_rcm_patch.config import PRESETS, SLA_TOPK
from turbo_rcm_patch.tables import table
from turbo_rcm_patch.tiers import EXACT, TIERS

from .block_rows import blocks_by_tier, rows_table, saved_outside_attention, shares_table, steps_by_tier

ATTENTION, LINEARS, REST = "attention", "linears", "norms, RoPE, GELU, skips"


def figures(results: dict, tiny: dict[str, dict]) -> dict[str, object]:
    """Return the names that the template may use. tiny: the tiny model's other measurements, as for `tiers_table`."""
    runs = results["runs"]
    blocks = {run["settings"]["config"]: parts_of_block(run)["compiled"] for run in _blocks(runs)}
    steps = {
        name: {v["name"]: milliseconds(v) for v in run["variants"]} | {"model": model_of(run)}
        for name, run in real_models(runs).items()
    }
    return {
        "environment": next(iter(real_models(runs).values()))["environment"],
        "round_trip": round_trip(runs),
        "block": blocks,
        "passes": {run["settings"]["config"]: _passes(run) for run in _blocks(runs)},
        "skip_saves": skip_saves(runs, blocks["wan2.1-1.3b"]),
        "shares_table": shares_table(blocks_by_tier(runs)),
        "rows_table": rows_table(runs, "wan2.1-1.3b"),
        "saved": saved_outside_attention(runs, "wan2.1-1.3b"),
        "sparse": replace(PRESETS["sparse"], topk=SLA_TOPK),
        "sparse_sentence": sparse_attention_sentence(runs),
        "tiny_table": tiers_table(evaluation_of(runs), **tiny),
        "steps": steps,
        "fastest_linear": max(r["teraflops"] for r in runs["ops"]["results"] if r["case"].startswith("linear")),
        "accuracy_table": accuracy_table(runs),
        "sparse_accuracy_table": sparse_accuracy_table(runs),
        "block_sparse": PRESETS["block_sparse"],
        "stages_table": stages_table(runs),
        "tiers": TIERS,
    }


def _blocks(runs: dict) -> list[dict]:
    return [run for run in runs.values() if run.get("settings", {}).get("case") == "Wan block"]


def _passes(run: dict) -> dict[str, float]:
    return {one["name"]: one["passes"] for one in run["implementations"] if one["refused"] is None}


def parts_of_block(run: dict) -> dict[str, dict[str, float]]:
    """Return the milliseconds of a block's kernels by part, in each implementation that the profiler ran."""
    parts = {}
    for one in run["implementations"]:
        if one["refused"] is None:
            times = dict.fromkeys((ATTENTION, LINEARS, REST), 0.0)
            for kernel in one["kernels"]:
                times[part_of(kernel["name"])] += 1e3 * (kernel["seconds"] or 0.0)
            parts[one["name"]] = times
    return parts


def part_of(kernel: str) -> str:
    """Return the part of a block that a kernel belongs to, by its name."""
    if any(word in kernel for word in ("sdpa_sm90", "attention_kernel", "flash_fwd", "_join_kernel")):
        return ATTENTION
    if "gemm" in kernel or "nvjet" in kernel:
        return LINEARS
    return REST


def round_trip(runs: dict) -> dict[str, object]:
    """Return the bytes that the attention module's last kernels read and write, in two passes and in one."""
    run = runs["traffic-attention"]
    kernels = {one["name"]: one["kernels"] for one in run["implementations"]}
    projection, skip = kernels["two_pass"][-2:]
    fused = kernels["triton_fused"][-1]
    moved = {"projection": projection, "skip": skip, "fused": fused}
    sizes = {name: {way: kernel[way] / 1e6 for way in ("read", "written")} for name, kernel in moved.items()}
    total = {name: sum(map(sum, (sizes[part].values() for part in parts))) for name, parts in TOTALS.items()}
    gpu = run["environment"]["gpu"]
    return {**sizes, **total, "tensor": run["pass_bytes"] / 1e6, "settings": run["settings"], "gpu": gpu}


TOTALS = {"two_passes": ("projection", "skip"), "one_pass": ("fused",)}


def skip_saves(runs: dict, block: dict[str, float]) -> float:
    """Return the share of a compiled 1.3B block that the fused skips of its three projections save."""
    speed = {OpKey.parse(result["case"]): result["timings"] for result in runs["ops"]["results"]}
    saved = 0.0
    for channels, count in ((1536, 2), (8960, 1)):
        times = speed[OpKey("linear_skip", (32760, 1536, channels))]
        saved += count * (times["torch + compiled"]["milliseconds"] - times["linear_skip"]["milliseconds"])
    return saved / sum(block.values())


def accuracy_table(runs: dict) -> str:
    """Return a row for each model and variant: the step's error to fp32, what its tier allows, the step's time."""
    rows = [["one step of", "variant", "rel. L2 to fp32", "the tier allows", "ms"]]
    for run in real_models(runs).values():
        errors = {variant["name"]: variant.get("step_error") for variant in run["variants"]}
        if None in errors.values():
            continue
        limits = TIERS[run["settings"].get("preset", "exact")].limits
        names = names_of(run)
        for variant in run["variants"]:
            name = variant["name"]
            allowed = f"{limits.step or limits.factor * errors['unpatched']:.1e}" if name == "patched" else ""
            label = model_of(run) if name == "unpatched" else ""
            rows.append([label, names[name], f"{errors[name]:.1e}", allowed, f"{milliseconds(variant):.0f}"])
    return table(rows, markdown=True)


def sparse_accuracy_table(runs: dict) -> str:
    """Return a table of real models' largest errors in the sparse tiers, with the tier's limits.

    They are the errors of blocks and of what their parts add.
    """
    rows = [["blocks of", "preset", "of", "largest rel. L2 to fp32", "the tier allows"]]
    for run in runs.values():
        preset = run.get("settings", {}).get("preset", EXACT.name)
        if "blocks" in run and run["settings"].get("config") and preset in ("sparse", "block_sparse"):
            limits = PRESETS[preset].tier.limits
            errors = {"a block": (run["blocks"]["patched_error"], limits.block)}
            for part in run["parts"]:
                if part["part"].rpartition(" ")[2] in SUB_LAYERS:  # perhaps after the name of a stream
                    errors[f"its {part['part'].replace('_', '-')}"] = part["error"], limits.part
            label = [model_of(run), preset]
            for of, (error, allowed) in errors.items():
                rows.append([*label, of, f"{error['largest']:.1e}", f"{allowed:.1e}"])
                label = ["", ""]
    return table(rows, markdown=True)


def stages_table(runs: dict) -> str:
    """Return where the seconds of a whole video go, a column for each variant."""
    run = runs["wan2.1-1.3b-decoded"]
    names = names_of(run)
    rows = [[f"{model_of(run)}, {run['settings']['num_inference_steps']} steps", *names.values()]]
    timings = {variant["name"]: variant["timings"] for variant in run["variants"]}
    stages = {"text_encoding": "text encoding", **STAGES} if start_of(run) == "prompt" else STAGES
    for stage, label in stages.items():
        seconds = (timings[name][stage] for name in names)
        rows.append([label, *(format_seconds(sum(s) if isinstance(s, list) else s) for s in seconds)])
    return table(rows, markdown=True)


STAGES = {"steps": "all steps", "vae_decode": "VAE decode", "output": "output", "total": "total"}


def plot_data(runs: dict) -> dict[str, dict]:
    """Return the data of each plot in plots.py: what it shows, to six digits, and the GPU's name."""
    data = {
        "step-parts": steps_by_tier(runs),
        "speed-accuracy": speed_and_accuracy(runs),
        "attention": attention_rates(runs),
    }
    return {name: {"gpu": gpu_of(real_models(runs)), "shown": _rounded(shown)} for name, shown in data.items()}


def speed_and_accuracy(runs: dict) -> dict[str, list[list[float]]]:
    """Return [denoising time, share of the captions shown] by number of steps, for each variant of the tiny model.

    The unit of time is a step of the unpatched model in the same run, because launches take longer on a busy host. The
    exact tier's time is from the quantized tier's run.
    """
    times = {}
    for name in ("compare-quantized", "compare-sparse", "compare"):
        steps = {v["name"]: statistics.median(v["timings"]["steps"]) for v in runs[name]["variants"]}
        tiers = {"patched": runs[name]["settings"]["preset"], EXACT_PATCH: "exact"}
        times = {tiers.get(v, v): step / steps["unpatched"] for v, step in steps.items()} | times
    points: dict[str, list[list[float]]] = {}
    for result in evaluation_of(runs)["results"]:
        variant = tier_of(result)
        if variant in SHOWN:
            point = [result["steps"] * times[variant], result["accuracy"]["overall"]["share"]]
            points.setdefault(SHOWN[variant], []).append(point)
    return points


SHOWN = {"unpatched": "eager diffusers", **{tier: f"patched ({tier})" for tier in ("exact", "quantized", "sparse")}}


def attention_rates(runs: dict) -> dict[str, dict[str, float]]:
    """Return the TFLOP/s of every contender for a self-attention, by case."""
    rates = {}
    for run in (runs["ops"], runs["ops-quantized"]):
        for result in run["results"]:
            op, (heads, tokens, *rest) = OpKey.parse(result["case"])
            keys = rest[0] if len(rest) == 2 else tokens
            if op in ("attention", "attention_8bit") and keys == tokens:
                flops = 4 * heads * tokens * keys * rest[-1]
                timed = {name: t["milliseconds"] for name, t in result["timings"].items() if t["milliseconds"]}
                rates[result["case"]] = {name: flops / time / 1e9 for name, time in timed.items()}
    return rates


def _rounded(data: object) -> object:
    if isinstance(data, dict):
        return {key: _rounded(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_rounded(value) for value in data]
    return float(f"{data:.6g}")
