"""Results for people: timings, comparison, verification and evaluation as tables, a comparison as plot and video."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from .compare import Comparison, Variant
from .evaluate import Accuracy, Change, Evaluation
from .ops import OpResult
from .timing import StageTimings
from .verify import BlockCheck, Verification


def timings_table(timings: StageTimings) -> str:
    """One line per stage."""
    lines = [*_stages(timings), ("total", timings.total)]
    cells = [[label, format_seconds(seconds)] for label, seconds in lines]
    if timings.peak_memory is not None:
        cells.append(["peak memory", _format_memory(timings)])
    return _aligned(cells)


def comparison_table(comparison: Comparison) -> str:
    """Stages, speed-ups, memory and differences down; variants across."""
    variants = comparison.variants
    rows = [["", *(variant.name for variant in variants)]]

    def add(label: str, cell: Callable[[Variant], str]) -> None:
        rows.append([label, *map(cell, variants)])

    for index, (label, _) in enumerate(_stages(variants[0].timings)):
        add(label, lambda v, i=index: format_seconds(_stages(v.timings)[i][1]))
    add("total", lambda v: format_seconds(v.timings.total))
    add("speed-up of the total", lambda v: f"{v.total_speedup:.2f}x")
    add("speed-up of the steps", lambda v: f"{v.steps_speedup:.2f}x")
    if variants[0].timings.peak_memory is not None:
        add("peak memory", lambda v: _format_memory(v.timings))
    add("latents: relative L2", lambda v: f"{v.latents.relative_l2:.2e}" if v.latents else "")
    add("latents: cosine", lambda v: f"{v.latents.cosine:.6f}" if v.latents else "")
    if variants[0].video is not None:
        add("frames: relative L2", lambda v: f"{v.frames.relative_l2:.2e}" if v.frames else "")
        add("frames: cosine", lambda v: f"{v.frames.cosine:.6f}" if v.frames else "")
        add("frames: PSNR", lambda v: _format_psnr(v.frames.psnr_db) if v.frames else "")
    return _aligned(rows)


def verification_table(verification: Verification) -> str:
    """One line per block and step, then what is worse than allowed, or that nothing is."""
    header = ["block", "step", "unpatched", "patched", "difference", "allowed", ""]
    return "\n".join([_aligned([header, *map(_check_cells, verification.checks)]), "", *_verdict(verification)])


def _check_cells(check: BlockCheck) -> list[str]:
    errors = (check.unpatched_error, check.patched_error, check.difference, check.allowed)
    return [check.block, str(check.step), *(f"{error:.2e}" for error in errors), "" if check.ok else "WORSE"]


def _verdict(verification: Verification) -> list[str]:
    lines = [
        f"{c.block}, step {c.step}: {c.judged} {c.judged_error:.3e} is over the allowed {c.allowed:.3e}"
        for c in verification.failed
    ]
    lines += [f"{block}: no step reached it; use more steps" for block in verification.unreached]
    return lines or [f"all {len({check.block for check in verification.checks})} blocks are within the allowed error"]


def evaluation_table(evaluation: Evaluation) -> str:
    """One line per number of steps and variant: percent right overall, its change, per attribute; PSNR."""
    *attributes, overall = evaluation.results[0].accuracy
    rows = [["variant", "steps", f"{overall} %", "vs unpatched", *attributes, "dB to fp32", "dB to exact"]]
    for result in evaluation.results:
        percentages = [_format_percent(result.accuracy[name], with_error=False) for name in attributes]
        decibels = [_format_decibels(value) for value in (result.psnr_to_fp32, result.psnr_to_exact)]
        share = _format_percent(result.accuracy[overall])
        change = _format_percent(result.change, "+")
        rows.append([result.variant, str(result.steps), share, change, *percentages, *decibels])
    return _aligned(rows)


def ops_table(results: Sequence[OpResult]) -> str:
    """One line per contender: milliseconds, error, and for ours the speed-up over each rival, marked where missed."""
    rows = [["op", "contender", "ms", "error", "speed-up"]]
    for result in results:
        for name, timing in result.timings.items():
            milliseconds = timing.refused or f"{timing.milliseconds:.3f}"
            error = "-" if timing.error is None else f"{timing.error:.1e}"
            speedups = _format_speedups(result) if name == result.best else ""
            rows.append([result.case, name, milliseconds, error, speedups])
    return _aligned(rows)


def _format_speedups(result: OpResult) -> str:
    parts = []
    for rival, speedup in result.speedups.items():
        target = result.targets.get(rival)
        missed = "" if target is None or speedup >= target else f" (below {target:g})"
        parts.append(f"{speedup:.2f} of {rival}{missed}")
    return ", ".join(parts)


def _format_percent(value: Accuracy | Change | None, sign: str = "", with_error: bool = True) -> str:
    if value is None or value.share is None:
        return "-"
    error = value.standard_error if with_error else None
    return f"{100 * value.share:{sign}.1f}" + (f" ± {100 * error:.1f}" if error is not None else "")


def _format_decibels(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def side_by_side(comparison: Comparison) -> np.ndarray:
    """The variants' videos next to each other, [F, H, variants * W, 3] in [0, 1]."""
    return np.concatenate([variant.video for variant in comparison.variants], axis=2)


def plot(comparison: Comparison, path: str | Path) -> None:
    """Stacked bars of the stages, one bar per variant, as an image file. Needs matplotlib."""
    from matplotlib.figure import Figure

    names = [variant.name for variant in comparison.variants]
    figure = Figure(figsize=(8, 1.5 + 0.6 * len(names)), layout="constrained")
    axes = figure.subplots()
    left = np.zeros(len(names))
    for index, (label, _) in enumerate(_stages(comparison.variants[0].timings)):
        seconds = np.array([_stages(variant.timings)[index][1] for variant in comparison.variants])
        axes.barh(names, seconds, left=left, label=label, edgecolor="white")
        left += seconds
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(comparison.environment.gpu or f"CPU ({comparison.environment.cpu})")
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=150)


def format_seconds(seconds: float) -> str:
    """Seconds from 1 s on, milliseconds below."""
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"


def _stages(timings: StageTimings) -> list[tuple[str, float]]:
    steps = [(f"step {index}", seconds) for index, seconds in enumerate(timings.steps, start=1)]
    return [("text encoding", timings.text_encoding), *steps, ("VAE decode", timings.vae_decode)]


def _format_memory(timings: StageTimings) -> str:
    return f"{timings.peak_memory / 2**30:.2f} GiB"


def _format_psnr(decibels: float | None) -> str:
    return "identical" if decibels is None else f"{decibels:.1f} dB"


def _aligned(rows: list[list[str]]) -> str:
    """Columns padded to their widest cell, the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        for row in rows
    ]
    return "\n".join("  ".join(line).rstrip() for line in lines)
