"""Denoising steps and whole videos: their targets and measurements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scripts.benchmarks.comparison import COMPILED_AFTER_A_CHANGE
from scripts.benchmarks.end_to_end import IN_8_BITS, TINY_VAE
from scripts.benchmarks.lora import ALONE, RESCALED, SWITCHED, WITHOUT
from scripts.tools.pages.charts import (
    ON_THE_PAGE_ALONE,
    end_of,
    milliseconds,
    model_of,
    names_of,
    real_models,
    start_of,
    tier_of_run,
)
from turbo_rcm_patch.bench.variants import COMPILED, DENSE_PATCH, EXACT_PATCH, PATCHED
from turbo_rcm_patch.tiers import EXACT, TIERS

from .cells import marked, speedup, table_of
from .ops import WEIGHTS

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
    "text, s",
    "steps, s",
    "decode, s",
    "output, s",
    "sound, s",
    "total, s",
    "total over compile",
    "decode over eager",
    "decode over compile",
    "TFLOP/s",
    "targets",
    "peak memory, GiB",
    "rel. L2 of decoding to fp32",
)
# The summary's: of a run the stage that counts; of decoding also with which VAE.
SHORT_SECONDS = (
    ("wan2.1-1.3b-decoded", "total", None),
    ("wan2.1-1.3b-decoded-quantized", "total", None),
    ("wan2.1-1.3b-decoded-sparse", "total", None),
    ("wan2.2-5b-decoded", "total", None),
    ("wan2.2-5b-decoded-quantized", "total", None),
    ("wan2.2-a14b-decoded", "total", None),
    ("ltx2-19b-1024p-sparse", "total", None),
    ("ltx2-19b-sparse", "total", None),
    ("wan2.1-1.3b-decoded", "vae_decode", "Wan 2.1's VAE"),
    ("wan2.1-14b-1-layer-decoded", "vae_decode", "Wan 2.1's VAE"),
    ("wan2.2-5b-1-layer-decoded", "vae_decode", "TI2V-5B's VAE"),
)
SHORT_SECONDS_HEADER = (
    "a whole video, or its decoding",
    "eager, s",
    "compile, s",
    "patched, s",
    "over eager",
    "over compile",
    "memory over eager's",
)
SHORT_STEPS_HEADER = (
    "one step of",
    "tier",
    "eager, ms",
    "compile, ms",
    "torchao float8, ms",
    "patched, ms",
    "over compile",
    "memory over compile's",
    "rel. L2 to fp32",
)
# The targets of a patched step: a speed-up over a variant, and below that memory as a multiple of a variant's.
STEP_TARGETS = {
    "wan2.1-1.3b": {"unpatched": 1.45, "torch.compile": 1.2},
    "wan2.1-1.3b-17-frames": {"torch.compile": 1.2},
    "wan2.1-14b-4-layers": {"torch.compile": 1.12},
    "wan2.2-5b-8-layers": {"torch.compile": 1.11},
    "wan2.2-5b-8-layers-image": {"torch.compile": 1.11},
    "wan2.1-i2v-14b-4-layers": {"torch.compile": 1.11},
    **{f"wan2.1-14b-4-layers-{gpus}-gpus": {"torch.compile": 1.12} for gpus in (2, 4)},
    "wan2.1-14b-4-layers-quantized-2-gpus": {"torch.compile": 1.55},
    "wan2.1-14b-4-layers-quantized-4-gpus": {"torch.compile": 1.5},
    "wan2.1-14b-4-layers-sparse-4-gpus": {"torch.compile": 3.5},
    "wan2.1-1.3b-2-gpus": {"torch.compile": 1.16},
    "wan2.1-1.3b-4-gpus": {"torch.compile": 1.1},
    "wan2.1-1.3b-quantized-2-gpus": {"torch.compile": 1.5},
    "wan2.1-1.3b-quantized-4-gpus": {"torch.compile": 1.4},
    "wan2.1-1.3b-quantized": {"torch.compile": 1.7},
    "wan2.1-14b-4-layers-quantized": {"torch.compile": 1.5},
    "wan2.2-5b-8-layers-quantized": {"torch.compile": 1.48},
    "wan2.1-1.3b-sparse": {"torch.compile": 4.2},
    "wan2.1-14b-4-layers-sparse": {"torch.compile": 4.4},
    "ltx2-19b-8-layers-sparse": {"torch.compile": 3.0},
    "ltx2-19b-8-layers-1024p-sparse": {"torch.compile": 3.0},
    "ltx2-19b-sparse": {"torch.compile": 3.0},
    "ltx2-19b-1024p-sparse": {"torch.compile": 3.0},
}
# The largest allowed ratio of a step's time with LoRA to its time without.
LORA_TARGETS = {"wan2.1-14b-4-layers-lora-64": 1.03}
OTHER_LORA_TARGET = 1.06
# The variant that a step after a change is compared with, and the milliseconds that it may add to a patched step.
UNCHANGED = {RESCALED: "patched", SWITCHED: ALONE, COMPILED_AFTER_A_CHANGE: "torch.compile"}
CHANGE_LIMIT = 5
MEMORY_TARGETS = {
    **dict.fromkeys(("wan2.2-5b-8-layers", "wan2.2-5b-8-layers-image", "wan2.1-i2v-14b-4-layers"), (COMPILED, 1.15)),
    "wan2.1-1.3b-quantized": (EXACT_PATCH, 1.0),
    "wan2.1-14b-4-layers-quantized": (EXACT_PATCH, 1.0),
    "wan2.2-5b-8-layers-quantized": (EXACT_PATCH, 1.0),
}
# The targets of a patched decoding (a speed-up over a variant's), and of a whole video's stages (seconds, and speed-ups
# over a variant's), also with other VAEs.
DECODE_TARGETS = {
    "wan2.1-1.3b-decoded": {"torch.compile": 1.75},
    "wan2.1-14b-1-layer-decoded": {"unpatched": 3.0, "torch.compile": 1.6},
    "wan2.2-5b-1-layer-decoded": {"unpatched": 2.0, "torch.compile": 1.25},
}
STAGE_LIMITS = {
    "wan2.1-1.3b-decoded": {"vae_decode": 0.5, "output": 0.1, "total": 2.2},
    "wan2.1-1.3b-decoded-quantized": {"total": 1.65},
    "wan2.1-1.3b-decoded-sparse": {"steps": 0.57, "total": 1.05},
    "wan2.1-1.3b-decoded-4-gpus": {"total": 0.8},
    "wan2.1-1.3b-decoded-sparse-4-gpus": {"total": 0.42},
    "wan2.2-5b-1-layer-decoded": {"vae_decode": 2.0},
    "wan2.2-5b-decoded": {"vae_decode": 2.0},
    "wan2.2-5b-decoded-quantized": {"vae_decode": 2.0},
    "wan2.2-a14b-decoded": {"total": 8.0},
}
STAGE_TARGETS = {
    "wan2.2-5b-decoded": {"total": {COMPILED: 1.5}},
    "wan2.2-5b-decoded-quantized": {"total": {COMPILED: 2.0}},
}
VAE_8BIT_LIMITS = {"wan2.1-1.3b-decoded-quantized": {"total": 1.45}, "wan2.1-1.3b-decoded-sparse": {"total": 0.85}}
TINY_VAE_LIMITS = {"wan2.1-1.3b-decoded-sparse": {"vae_decode": 0.06, "total": 0.6}}
ACCURACY_FACTOR = EXACT.limits.factor  # the limit of a step's error to fp32, as a multiple of torch.compile's


def steps_table(runs: dict) -> str:
    """Return a row per variant of every run."""
    return (
        "One denoising step: the median over steps of the medians over repeats. All variants run in turns in one "
        "process, or with several GPUs in one process per GPU.\n\n"
        "- Targets are the speed-ups over eager and over compile, and the memory over compile's. In 8 bits they are "
        "the memory over the exact tier's, and the weights' memory over bf16's. Block-sparse attention may be no "
        "slower than dense attention in 8 bits.\n"
        "- The memory of whole videos is in their own table, because decoding counts in it.\n"
        "- Weights outside the blocks stay in bf16. Their share is larger in models with fewer layers.\n"
        "- Runs with torchao before commit 56fbabd counted its weights as twice what they take. The peaks of all their "
        "variants came out too low by the rest, so they are left out.\n"
        "- The embedded model's latents are far from eager's if an error changes what it draws. This happens with this "
        "prompt in 8 bits and with torchao. `evaluate` counts how often it matters.\n\n"
        + table_of(STEPS_HEADER, [row for name, run in runs.items() for row in step_rows(name, run)])
    )


def short_tables(runs: dict) -> str:
    """Return tables of steps and whole videos with a row for each real model and tier, or "" without a real model."""
    steps = {name: run for name, run in real_models(runs).items() if name not in ON_THE_PAGE_ALONE}
    if not steps:
        return ""
    ordered = sorted(steps.items(), key=lambda step: list(TIERS).index(tier_of_run(step[1])))
    rows = [short_step_row(name, run) for name, run in ordered]
    tables = [table_of(SHORT_STEPS_HEADER, rows)]
    seconds = [_short_seconds_row(name, runs[name], stage, vae) for name, stage, vae in SHORT_SECONDS if name in runs]
    tables += [table_of(SHORT_SECONDS_HEADER, seconds)] if seconds else []
    return "\n".join(tables)


def short_step_row(name: str, run: dict) -> list[str]:
    tier = tier_of_run(run)
    eager, compiled, patched = _short_milliseconds(run, ("unpatched", "torch.compile", "patched"))
    (torchao,) = [""] if tier == "exact" else _short_milliseconds(run, ("torchao float8 + torch.compile",))
    error = next(variant.get("step_error") for variant in run["variants"] if variant["name"] == "patched")
    ratios = _over_compile(name, run), _memory_ratio(name, run)
    error = "" if error is None else f"{error:.1e}"
    return [model_of(run), tier, eager, compiled, torchao, patched, *ratios, error]


def _short_seconds_row(name: str, run: dict, stage: str, vae: str | None) -> list[str]:
    """Return a row of seconds. A whole video's targets are seconds; decoding also has speed-ups as targets."""
    timings = {variant["name"]: variant["timings"] for variant in run["variants"]}
    variants = ("unpatched", COMPILED, "patched")
    seconds = {variant: timings[variant][stage] for variant in variants if variant in timings}
    limit = STAGE_LIMITS.get(name, {}).get(stage, seconds["patched"])
    shown = [f"{seconds[variant]:.2f}" if variant in seconds else "not run" for variant in variants]
    shown[-1] = marked(shown[-1], seconds["patched"] > limit)
    targets = DECODE_TARGETS.get(name, {}) if vae else STAGE_TARGETS.get(name, {}).get(stage, {})
    speedups = [speedup(seconds.get(rival), seconds["patched"], targets.get(rival, 0.0)) for rival in variants[:-1]]
    label = _whole_video(run) if vae is None else f"decoding alone, {vae}, {_size(run)}"
    return [label, *shown, *speedups, _ratio(timings["patched"]["peak_memory"], timings["unpatched"]["peak_memory"])]


def _ratio(peak: int | None, other: int | None) -> str:
    """Return a peak over another, with ✗ where it is above 1, or "" if they are not known."""
    return "" if peak is None else marked(f"{peak / other:.2f}×", peak > other)


def gibibytes(peak: int | None) -> str:
    """Return a peak of memory in GiB, or "" if it is not known."""
    return "" if peak is None else f"{peak / 2**30:.2f}"


def _whole_video(run: dict) -> str:
    steps, start = run["settings"]["num_inference_steps"], start_of(run)
    return f"a whole video of {model_of(run)}, {steps} steps, {tier_of_run(run)}, {start} to {end_of(run)}"


def _size(run: dict) -> str:
    return "×".join(str(run["settings"][key]) for key in ("num_frames", "height", "width"))


def _short_milliseconds(run: dict, variants: Sequence[str]) -> Iterator[str]:
    steps = {variant["name"]: milliseconds(variant) for variant in run["variants"]}
    return (f"{steps[name]:.0f}" if name in steps else "not run" for name in variants)


def _over_compile(name: str, run: dict) -> str:
    steps = {variant["name"]: milliseconds(variant) for variant in run["variants"]}
    target = STEP_TARGETS.get(name, {}).get("torch.compile", 0.0)
    return speedup(steps.get("torch.compile"), steps["patched"], target)


def _memory_ratio(name: str, run: dict, rival: str = COMPILED) -> str:
    """Return the patched peak over a variant's, with ✗ where it is above the target."""
    peaks = {variant["name"]: variant["timings"]["peak_memory"] for variant in run["variants"]}
    if peaks.get(rival) is None:
        return ""
    ratio = peaks["patched"] / peaks[rival]
    target, most = MEMORY_TARGETS.get(name, (rival, ratio))
    return marked(f"{ratio:.2f}×", target == rival and ratio > most)


def _memory_beside(name: str, run: dict) -> tuple[str, str]:
    """Return the patched peak over its rival's, in 8 bits also the weights' share of bf16's, and the targets."""
    rival, most = MEMORY_TARGETS[name]
    shown, asked = _memory_ratio(name, run, rival) or "memory not known", f"memory {most}"
    weights = {variant["name"]: variant.get("weights") for variant in run["variants"]}
    if rival == EXACT_PATCH and weights["patched"] is not None:
        share = weights["patched"] / weights["unpatched"]
        shown += f", weights {marked(f'{share:.2f}×', share > WEIGHTS)}"
        asked += f", weights {WEIGHTS}"
    return shown, asked


def step_rows(name: str, run: dict) -> list[list[str]]:
    label = f"{model_of(run)}, `{name}`"
    steps = {variant["name"]: milliseconds(variant) for variant in run["variants"]}
    errors = {variant["name"]: variant.get("step_error") for variant in run["variants"]}
    rows = []
    for variant in run["variants"]:
        step = steps[variant["name"]]
        targets = STEP_TARGETS.get(name, {}) if variant["name"] == "patched" else {}
        rivals = ("unpatched", "torch.compile")
        speedups = [speedup(steps.get(rival), step, targets.get(rival, 0.0)) for rival in rivals]
        asked = " / ".join(str(targets.get(rival, "–")) for rival in rivals) if targets else ""
        memory = gibibytes(variant["timings"]["peak_memory"])
        if targets and name in MEMORY_TARGETS:
            beside, asked_of_memory = _memory_beside(name, run)
            memory += f" ({beside})"
            asked += f", {asked_of_memory}"
        limit = _error_limit(run, errors.get("torch.compile")) if variant["name"] == "patched" else None
        error = _step_error(errors[variant["name"]], limit)
        drift = "" if variant["latents"] is None else f"{variant['latents']['relative_l2']:.1e}"
        shown = f"{step:.1f}"
        if variant["name"] == "patched" and WITHOUT in steps:
            most = LORA_TARGETS.get(name, OTHER_LORA_TARGET)
            ratio = f"{step / steps[WITHOUT]:.3f}×"
            shown += f" ({marked(ratio, step > most * steps[WITHOUT])} without LoRA)"
            asked = f"≤ {most}× without LoRA"
        if variant["name"] in UNCHANGED:
            shown += f" ({_cost_of_a_change(variant, step - steps[UNCHANGED[variant['name']]])})"
            if variant["name"] != COMPILED_AFTER_A_CHANGE:
                asked = f"≤ {CHANGE_LIMIT} ms on top, nothing compiled"
        if variant["name"] == "patched" and DENSE_PATCH in steps:
            ratio = f"{steps[DENSE_PATCH] / step:.2f}"
            shown += f" ({marked(f'{ratio}×', float(ratio) < 1)} over dense in 8 bits)"
        cells = [names_of(run)[variant["name"]], shown, *speedups, asked, memory, error, drift]
        rows.append(["" if rows else label, *cells])
    return rows


def _cost_of_a_change(variant: dict, more: float) -> str:
    """Return the milliseconds that a change adds to a step, and the compilations. A patched step's misses have ✗."""
    is_ours, compiled = variant["name"] != COMPILED_AFTER_A_CHANGE, variant["compiled"]
    on_top = marked(f"{more:+.1f} ms", is_ours and more > CHANGE_LIMIT)
    return f"{on_top}, {marked(f'{compiled} compiled', is_ours and compiled > 0)}"


def whole_videos_table(runs: dict) -> str:
    """Return the stages from the prompt or its embeddings to the frames on the CPU, a row per variant."""
    rows = [row for name, run in runs.items() for row in _video_rows(name, run)]
    return (
        "Whole videos, from a prompt to frames in numpy, with LTX-2 also to the sound, medians over repeats. A prompt "
        "has 512 tokens, and patched variants have a patched text encoder; videos without a time for the text begin "
        "with the prompt's embeddings, those of LTX-2 with embeddings as its connectors give them. The peaks of those "
        "from a prompt include the text encoder. Targets are seconds, and speed-ups: of the total over compile, and of "
        "decoding over eager and over compile, which compiles the decoder too. A decode may not take more memory than "
        f"eager, or have more than {ACCURACY_FACTOR} times its error. The error is that of the first 33 frames. "
        "TFLOP/s count the multiplications of diffusers' decoder, which convolves enlarged images and every frame by "
        "itself; ours has fewer:\n\n" + table_of(VIDEOS_HEADER, rows)
    )


def _video_rows(name: str, run: dict) -> Iterator[list[str]]:
    timings_of = {variant["name"]: variant["timings"] for variant in run["variants"]}
    totals, decodes = ({of: timings[key] for of, timings in timings_of.items()} for key in ("total", "vae_decode"))
    errors = {variant["name"]: variant.get("decode_error") for variant in run["variants"]}
    most_memory = timings_of["unpatched"]["peak_memory"]
    limits_of = {PATCHED: STAGE_LIMITS, IN_8_BITS: VAE_8BIT_LIMITS, TINY_VAE: TINY_VAE_LIMITS}
    for variant, shown in names_of(run).items():
        timings, is_ours = timings_of[variant], variant == PATCHED
        targets, limits = DECODE_TARGETS.get(name, {}) if is_ours else {}, limits_of.get(variant, {}).get(name, {})
        text = f"{timings['text_encoding']:.3f}" if start_of(run) == "prompt" else ""
        stages = {"steps": sum(timings["steps"]), **{key: timings[key] for key in ("vae_decode", "output", "total")}}
        over = STAGE_TARGETS.get(name, {}) if is_ours else {}
        seconds = [
            marked(f"{value:.2f}", value > limits.get(key, value)) + _over_rivals(run, key, value, over.get(key, {}))
            for key, value in stages.items()
        ]
        seconds.insert(-1, f"{timings['sound']:.3f}" if timings.get("sound") else "")
        rivals = ("unpatched", "torch.compile")
        speedups = [speedup(totals.get(COMPILED), totals[variant], 0.0)]
        speedups += [speedup(decodes.get(rival), decodes[variant], targets.get(rival, 0.0)) for rival in rivals]
        asked = [f"{targets.get(rival, '–')}×" for rival in rivals] if targets else []
        asked += [f"{key.removeprefix('vae_')} {limit} s" for key, limit in limits.items()]
        for key, others in over.items():
            asked += [f"{key.removeprefix('vae_')} {least}× over {rival}" for rival, least in others.items()]
        limit = ACCURACY_FACTOR * errors["unpatched"] if is_ours and errors["unpatched"] is not None else None
        memory = marked(gibibytes(peak := timings["peak_memory"]), is_ours and peak is not None and peak > most_memory)
        is_counted = run.get("decode_flops") and variant != TINY_VAE
        rate = f"{run['decode_flops'] / decodes[variant] / 1e12:.0f}" if is_counted else ""
        cells = [text, *seconds, *speedups, rate, " / ".join(asked), memory]
        label = f"{model_of(run)}, `{name}`" if variant == "unpatched" else ""
        yield [label, shown, *cells, _step_error(errors[variant], limit)]


def _over_rivals(run: dict, stage: str, seconds: float, targets: dict[str, float]) -> str:
    """Return a stage's speed-ups over variants in brackets, with ✗ where they miss their targets."""
    rivals = {variant["name"]: variant["timings"][stage] for variant in run["variants"] if variant["name"] in targets}
    return "".join(f" ({speedup(other, seconds, targets[name])} over {name})" for name, other in rivals.items())


def _error_limit(run: dict, compiled: float | None) -> float | None:
    """Return the error allowed for a step: ACCURACY_FACTOR times torch.compile's error, or the tier's own limit."""
    tier = TIERS[tier_of_run(run)]
    if tier is not EXACT:
        return tier.limits.step
    return None if compiled is None else ACCURACY_FACTOR * compiled


def _step_error(error: float | None, limit: float | None) -> str:
    """Return a step's error, with ✗ if it is above the limit."""
    if error is None:
        return ""
    return marked(f"{error:.1e}", limit is not None and error > limit)
