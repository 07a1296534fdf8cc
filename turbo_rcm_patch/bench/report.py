"""Show timings, comparison, verification and evaluation as tables, and comparisons also as a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ..tables import table
from ..wording import counted
from .compare import Comparison, Variant
from .evaluate import Accuracy, Change, Evaluation
from .keep_out import KeepOut
from .timing import StageTimings
from .verify import BlockCheck, PartCheck, Verification


def timings_table(timings: StageTimings, writing: float | None = None) -> str:
    """Return one line per stage, all steps in one. writing: seconds from the call's end to the finished file, or None
    without one."""
    text, (steps, seconds), *after = stages(timings)
    median = f", median {format_seconds(statistics.median(timings.steps))}" if len(timings.steps) > 1 else ""
    lines = [text, (steps + median, seconds), *after, ("total", timings.total)]
    if writing is not None:
        lines[-1:] = [("writing", writing), ("total, to the finished file", timings.total + writing)]
    cells = [[label, format_seconds(seconds)] for label, seconds in lines]
    if timings.peak_memory is not None:
        cells.append(["peak memory", _format_memory(timings)])
    return table(cells)


NO_SPEED_UPS = "without a GPU times say nothing about the kernels, so there are no speed-ups here"


def comparison_table(comparison: Comparison) -> str:
    """Return a table with stages, speed-ups, memory and differences down, and variants across.

    Without a GPU a line takes the place of the speed-ups, which would be those of PyTorch's fallbacks on a CPU.
    """
    variants = comparison.variants
    rows = [["", *(variant.name for variant in variants)]]

    def add(label: str, cell: Callable[[Variant], str]) -> None:
        rows.append([label, *map(cell, variants)])

    for index, (label, _) in enumerate(stages(variants[0].timings, each_step=True)):
        add(label, lambda v, i=index: format_seconds(stages(v.timings, each_step=True)[i][1]))
    add("total", lambda v: format_seconds(v.timings.total))
    has_gpu = comparison.environment.gpu is not None
    if has_gpu:
        add("speed-up of the total", lambda v: f"{v.total_speedup:.2f}x")
        add("speed-up of the steps", lambda v: f"{v.steps_speedup:.2f}x")
    if variants[0].timings.peak_memory is not None:
        add("peak memory", lambda v: _format_memory(v.timings))
    if variants[0].step_error is not None:
        add("a step: relative L2 to fp32", lambda v: f"{v.step_error:.2e}" if v.step_error is not None else "")
    if variants[0].decode_error is not None:
        add("decoding: relative L2 to fp32", lambda v: f"{v.decode_error:.2e}" if v.decode_error is not None else "")
    add("latents: relative L2", lambda v: f"{v.latents.relative_l2:.2e}" if v.latents else "")
    add("latents: cosine", lambda v: f"{v.latents.cosine:.6f}" if v.latents else "")
    if variants[0].video is not None:
        add("frames: relative L2", lambda v: f"{v.frames.relative_l2:.2e}" if v.frames else "")
        add("frames: cosine", lambda v: f"{v.frames.cosine:.6f}" if v.frames else "")
        add("frames: PSNR", lambda v: _format_psnr(v.frames.psnr_db) if v.frames else "")
        add("frames: SSIM", lambda v: f"{v.frames.ssim:.4f}" if v.frames and v.frames.ssim is not None else "")
    return table(rows) if has_gpu else f"{table(rows)}\n{NO_SPEED_UPS}"


def verification_table(verification: Verification) -> str:
    """Return one line per block and step, then the ones above their limit, or that there are none."""
    header = ["block", "step", "unpatched", "patched", "difference", "allowed", ""]
    tables = [table([header, *map(_check_cells, verification.all_checks)]), ""]
    if verification.parts:
        tables += [_parts_table(verification.parts), ""]
    if verification.kept:
        tables += [_kept_table(verification), ""]
    return "\n".join([*tables, *_verdict(verification)])


def _parts_table(parts: Sequence[PartCheck]) -> str:
    """Return one line per part: its largest error, with block and step, and the mean."""
    rows = [["part", "largest error", "in", "mean error", "allowed", ""]]
    for name in dict.fromkeys(part.part for part in parts):
        same = [part for part in parts if part.part == name]
        worst = max(same, key=lambda part: (not part.ok, part.error))
        mean = sum(part.error for part in same) / len(same)
        allowed = "" if worst.allowed is None else f"{worst.allowed:.2e}"
        where = f"{worst.block}, step {worst.step}"
        rows.append([name, f"{worst.error:.2e}", where, f"{mean:.2e}", allowed, "" if worst.ok else "WORSE"])
    return table(rows)


def _kept_table(verification: Verification) -> str:
    """Return one line per block and step of block-sparse attention: the share it keeps, and its error."""
    errors = {(part.block, part.step): part.error for part in verification.parts if part.part == "self_attention"}
    rows = [["block-sparse attention of", "step", "kept %", "error"]]
    for one in verification.kept:
        error = errors.get((one.block, one.step))
        cells = [one.block, str(one.step), f"{100 * one.share:.1f}", "" if error is None else f"{error:.2e}"]
        rows.append(cells)
    kept = sum(one.share for one in verification.kept) / len(verification.kept)
    return table([*rows, ["all", "", f"{100 * kept:.1f}", ""]])


def _check_cells(check: BlockCheck) -> list[str]:
    errors = (check.unpatched_error, check.patched_error, check.difference)
    allowed = f"{check.judged} up to {check.allowed:.2e}"
    return [check.block, str(check.step), *(f"{error:.2e}" for error in errors), allowed, "" if check.ok else "WORSE"]


def _verdict(verification: Verification) -> list[str]:
    lines = [
        f"{c.block}, step {c.step}: {c.judged} {c.judged_error:.3e} is over the allowed {c.allowed:.3e}"
        for c in verification.failed
    ]
    lines += [
        f"{p.block}, step {p.step}, {p.part}: error {p.error:.3e} is over the allowed {p.allowed:.3e}"
        for p in verification.failed_parts
    ]
    lines += [f"{block}: no step reached it; use more steps" for block in verification.unreached]
    count, and_vae = len({check.block for check in verification.checks}), " and the VAE" * bool(verification.decoding)
    blocks, verb = (f"all {count} blocks", "are") if count > 1 else ("the block", "are" if and_vae else "is")
    return lines or [f"{blocks}{and_vae} {verb} within the allowed error"]


def keep_out_table(found: KeepOut) -> str:
    """Return one line per part that leaves 8 bits, with its error and its costs, and one per step.

    Without a GPU the times are left out, and a line says so.
    """
    header = ["leave in the model's dtype", "error alone in 8 bits", "allowed", "measured in", "MB"]
    is_timed = any(part.milliseconds is not None for part in found.parts)
    rows = [[*header, *["ms"] * is_timed]]
    for part in found.parts:
        alone = part.alone
        where = f"{alone.what} of {alone.where}, step {alone.step}"
        costs = [f"{part.nbytes / 1e6:.1f}", *([f"{part.milliseconds:.3f}"] if is_timed else [])]
        rows.append([part.name, f"{alone.error:.2e}", f"{alone.allowed:.2e}", where, *costs])
    if is_timed:
        total = sum(part.milliseconds for part in found.parts)
        rows.append(["all", "", "", "", f"{sum(part.nbytes for part in found.parts) / 1e6:.1f}", f"{total:.3f}"])
    lines = [table(rows)] if found.parts else ["nothing has to leave 8 bits"]
    if found.parts and not is_timed:
        lines.append("without a GPU times say nothing about the kernels, so there are none here")
    lines += [
        f"{step.transformer}, step {step.step}: {_noise(step.in_8_bits)} dB in 8 bits, {_noise(step.with_list)} dB "
        f"with the list; at least {_noise(step.allowed)} dB"
        for step in found.steps
    ]
    lines += [
        f"{judged.where}, step {judged.step}, {judged.what}: error {judged.error:.3e} is over the allowed "
        f"{judged.allowed:.3e} whatever leaves 8 bits"
        for judged in found.unmet
    ]
    return "\n".join(lines)


def _noise(error: float) -> str:
    """Return the signal-to-noise ratio in dB that a relative L2 error stands for."""
    return f"{-20 * math.log10(error):.1f}" if error > 0 else "inf"


def evaluation_table(evaluation: Evaluation) -> str:
    """Return one line per number of steps and variant: percent right overall, its change, per attribute; PSNR."""
    *attributes, overall = evaluation.results[0].accuracy
    rows = [["variant", "steps", f"{overall} %", "vs unpatched", *attributes, "dB to fp32", "dB to exact"]]
    for result in evaluation.results:
        percentages = [_format_percent(result.accuracy[name], with_error=False) for name in attributes]
        decibels = [_format_decibels(value) for value in (result.psnr_to_fp32, result.psnr_to_exact)]
        share = _format_percent(result.accuracy[overall])
        change = _format_percent(result.change, "+")
        rows.append([result.variant, str(result.steps), share, change, *percentages, *decibels])
    return table(rows)


def _format_percent(value: Accuracy | Change | None, sign: str = "", with_error: bool = True) -> str:
    if value is None or value.share is None:
        return "-"
    error = value.standard_error if with_error else None
    return f"{100 * value.share:{sign}.1f}" + (f" ± {100 * error:.1f}" if error is not None else "")


def _format_decibels(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def plot(comparison: Comparison, path: str | Path) -> None:
    """Draw stacked bars of the stages, one bar per variant, into an image file. Needs matplotlib."""
    from matplotlib.figure import Figure

    names = [variant.name for variant in comparison.variants]
    figure = Figure(figsize=(7, 2 + 0.6 * len(names)), layout="constrained")
    axes = figure.subplots()
    left = np.zeros(len(names))
    by_variant = [stages(variant.timings) for variant in comparison.variants]
    for index, (label, _) in enumerate(by_variant[0]):
        seconds = np.array([each[index][1] for each in by_variant])
        axes.barh(names, seconds, left=left, label=label, edgecolor="white")
        left += seconds
    axes.bar_label(axes.containers[-1], [format_seconds(seconds) for seconds in left], padding=3)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set_xlabel("seconds; shorter is better")
    axes.set_title(f"One video on {comparison.environment.gpu or f'a CPU ({comparison.environment.cpu})'}")
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=100)


def format_seconds(seconds: float) -> str:
    """Return a time in seconds from 1 s on, and in milliseconds below."""
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"


def stages(timings: StageTimings, *, each_step: bool = False) -> list[tuple[str, float]]:
    """Return the names and seconds of the stages, with all steps in one unless each_step is True."""
    steps = [(counted(len(timings.steps), "step"), sum(timings.steps))]
    if each_step:
        steps = [(f"step {index}", seconds) for index, seconds in enumerate(timings.steps, start=1)]
    sound = [("sound", timings.sound)] if timings.sound else []
    after = [("VAE decode", timings.vae_decode), ("output", timings.output), *sound]
    return [("text encoding", timings.text_encoding), *steps, *after]


def _format_memory(timings: StageTimings) -> str:
    return f"{timings.peak_memory / 2**30:.2f} GiB"


def _format_psnr(decibels: float | None) -> str:
    return "identical" if decibels is None else f"{decibels:.1f} dB"
