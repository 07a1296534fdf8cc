"""Results for people: timings, comparison, verification and evaluation as tables, comparisons as plot and video."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ..tables import table
from .compare import Comparison, Variant
from .dram import KernelTraffic
from .evaluate import Accuracy, Change, Evaluation
from .implementations import LEFT_OUT, OK, REFUSED, ImplementationResults, Row
from .ops import OpResult
from .timing import StageTimings
from .traffic import COUNTERS, ImplementationTraffic, TrafficReport
from .verify import BlockCheck, PartCheck, Verification

_FIGURES = ["count", "read, MB", "written, MB", "passes", "ms"]
_SMALL = 0.005  # passes of kernels that share a line
_NAME_LENGTH = 60


def timings_table(timings: StageTimings, writing: float | None = None) -> str:
    """One line per stage. writing: seconds from the call's end to the finished file, where one was written."""
    lines = [*_stages(timings), ("total", timings.total)]
    if writing is not None:
        lines[-1:] = [("writing", writing), ("total, to the finished file", timings.total + writing)]
    cells = [[label, format_seconds(seconds)] for label, seconds in lines]
    if timings.peak_memory is not None:
        cells.append(["peak memory", _format_memory(timings)])
    return table(cells)


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
    if variants[0].step_error is not None:
        add("a step: relative L2 to fp32", lambda v: f"{v.step_error:.2e}" if v.step_error is not None else "")
    if variants[0].decode_error is not None:
        add("decoding: relative L2 to fp32", lambda v: f"{v.decode_error:.2e}")
    add("latents: relative L2", lambda v: f"{v.latents.relative_l2:.2e}" if v.latents else "")
    add("latents: cosine", lambda v: f"{v.latents.cosine:.6f}" if v.latents else "")
    if variants[0].video is not None:
        add("frames: relative L2", lambda v: f"{v.frames.relative_l2:.2e}" if v.frames else "")
        add("frames: cosine", lambda v: f"{v.frames.cosine:.6f}" if v.frames else "")
        add("frames: PSNR", lambda v: _format_psnr(v.frames.psnr_db) if v.frames else "")
    return table(rows)


def verification_table(verification: Verification) -> str:
    """One line per block and step, then what is worse than allowed, or that nothing is."""
    header = ["block", "step", "unpatched", "patched", "difference", "allowed", ""]
    tables = [table([header, *map(_check_cells, verification.all_checks)]), ""]
    if verification.parts:
        tables += [_parts_table(verification.parts), ""]
    if verification.kept:
        tables += [_kept_table(verification), ""]
    return "\n".join([*tables, *_verdict(verification)])


def _parts_table(parts: Sequence[PartCheck]) -> str:
    """One line per part: its error in the block and step where it is largest, and the mean of all."""
    rows = [["part", "largest error", "in", "mean error", "allowed", ""]]
    for name in dict.fromkeys(part.part for part in parts):
        same = [part for part in parts if part.part == name]
        worst = max(same, key=lambda part: part.error)
        mean = sum(part.error for part in same) / len(same)
        allowed = "" if worst.allowed is None else f"{worst.allowed:.2e}"
        where = f"{worst.block}, step {worst.step}"
        rows.append([name, f"{worst.error:.2e}", where, f"{mean:.2e}", allowed, "" if worst.ok else "WORSE"])
    return table(rows)


def _kept_table(verification: Verification) -> str:
    """One line per block and step of block-sparse attention: what it keeps, and the error of what it adds."""
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
    blocks = f"all {len({check.block for check in verification.checks})} blocks"
    return lines or [f"{blocks}{' and the VAE' if verification.decoding else ''} are within the allowed error"]


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
    return table(rows)


def ops_table(results: Sequence[OpResult]) -> str:
    """One line per contender: milliseconds, error, and for ours TFLOP/s and the speed-up over each rival, marked where
    missed."""
    rows = [["op", "contender", "ms", "error", "speed-up"]]
    for result in results:
        for name, timing in result.timings.items():
            milliseconds = timing.refused or f"{timing.milliseconds:.3f}"
            if name == result.best and timing.milliseconds > (result.most or math.inf):
                milliseconds += f" (above {result.most:g})"
            if name == result.best and result.teraflops is not None:
                milliseconds += f", {result.teraflops:.0f} TFLOP/s"
                milliseconds += f" (below {result.least:g})" if result.teraflops < (result.least or 0) else ""
            error = "-" if timing.error is None else f"{timing.error:.1e}"
            speedups = _format_speedups(result) if name == result.best else ""
            rows.append([case_with_share(result.case, result.kept), name, milliseconds, error, speedups])
    return table(rows)


def case_with_share(case: str, kept: float | None) -> str:
    """A case's name, with the share of the key blocks that sparse attention keeps, where it is known."""
    return case if kept is None else f"{case}, {100 * kept:.0f} % kept"


def _format_speedups(result: OpResult) -> str:
    parts = []
    for rival, speedup in result.speedups.items():
        target = result.targets.get(rival)
        missed = "" if target is None or speedup >= target else f" (below {target:g})"
        parts.append(f"{speedup:.3f} of {rival}{missed}")
    return ", ".join(parts)


def implementations_table(results: ImplementationResults) -> str:
    """One line per implementation, grouped by size, dtype and mode; what the columns are, and why some are empty."""
    cells = [["", "implementation", "ms", "speed-up", "output error", "gradient error", "peak MiB", "DRAM MB"]]
    group = None
    for row in results.rows:
        label = _group(row)
        cells.append(["" if label == group else label, row.implementation, *_implementation_cells(row)])
        group = label
    notes = dict.fromkeys(_note(row) for row in results.rows if row.note)
    legend = (
        f"ms: median of {results.repeats} {results.timing}; speed-up over two_pass; errors: relative L2 to fp64; "
        "DRAM: what a forward reads and writes, counted from shapes"
    )
    return "\n".join([table(cells), "", legend, *notes])


def _implementation_cells(row: Row) -> list[str]:
    def cell(value: float | None, form: str, unit: float = 1) -> str:
        return "-" if value is None else format(value / unit, form)

    traffic = None if row.dram_read is None else row.dram_read + row.dram_written
    gradient_error = None
    if row.input_gradient_error is not None:
        gradient_error = max(row.input_gradient_error, row.weight_gradient_error)
    return [
        cell(row.latency, ".3f", 1e-3) if row.status == OK else row.status,
        cell(row.speedup, ".2f"),
        cell(row.output_error, ".1e"),
        cell(gradient_error, ".1e"),
        cell(row.peak_memory, ".1f", 2**20),
        cell(traffic, ".1f", 1e6),
    ]


def _note(row: Row) -> str:
    where = f" ({_group(row)})" if row.status == REFUSED else ""
    return f"{row.implementation} {row.status}{where}: {row.note}"


def _group(row: Row) -> str:
    return f"{row.B}x{row.N}x{row.C} {row.dtype} {row.mode}"


def plot_implementations(results: ImplementationResults, path: str | Path) -> None:
    """Bars of the speed-ups over two_pass, by size, as an image file: dtypes down, modes across. Needs matplotlib."""
    from matplotlib.figure import Figure

    rows = [row for row in results.rows if row.status != LEFT_OUT]
    keys = ("dtype", "mode", "implementation")
    dtypes, modes, names = (list(dict.fromkeys(getattr(row, key) for row in rows)) for key in keys)
    sizes = list(dict.fromkeys((row.B, row.N, row.C) for row in rows))
    speedups = {(row.dtype, row.mode, row.implementation, (row.B, row.N, row.C)): row.speedup for row in rows}
    figure = Figure(figsize=(1.5 + 6 * len(modes), 1 + 3.5 * len(dtypes)), layout="constrained")
    width = 0.8 / len(names)
    grid = figure.subplots(len(dtypes), len(modes), squeeze=False)
    for dtype, line in zip(dtypes, grid, strict=True):
        for mode, axes in zip(modes, line, strict=True):
            for index, name in enumerate(names):
                heights = [speedups.get((dtype, mode, name, size)) or 0 for size in sizes]
                axes.bar(np.arange(len(sizes)) + index * width, heights, width, label=name)
            axes.axhline(1, color="black", linewidth=0.8)
            axes.set_xticks(np.arange(len(sizes)) + 0.4 - width / 2, ["x".join(map(str, size)) for size in sizes])
            axes.tick_params(axis="x", rotation=30)
            axes.set_ylabel("speed-up over two_pass")
            axes.set_title(f"{mode}, {dtype}")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names))
    figure.suptitle(results.environment.gpu or f"CPU ({results.environment.cpu})")
    figure.savefig(path, dpi=150)


def traffic_table(report: TrafficReport) -> str:
    """For each implementation a line per kernel, the largest first, and a total: launches, megabytes, passes, time."""
    measured = [one for one in report.implementations if one.refused is None]
    return "\n\n".join(table([[one.name, *_FIGURES], *_kernel_rows(one, report.pass_bytes)]) for one in measured)


def _kernel_rows(implementation: ImplementationTraffic, pass_bytes: int) -> list[list[str]]:
    groups: dict[str, list[KernelTraffic]] = defaultdict(list)
    for kernel in implementation.kernels:
        groups[_short_name(kernel.name)].append(kernel)
    passes = {name: sum(k.read + k.written for k in group) / pass_bytes for name, group in groups.items()}
    large = sorted((name for name in groups if passes[name] >= _SMALL), key=passes.get, reverse=True)
    small = [kernel for name in groups if passes[name] < _SMALL for kernel in groups[name]]
    lines = [(name, groups[name]) for name in large] + ([("others", small)] if small else [])
    return [[name, *_figures(group, pass_bytes)] for name, group in [*lines, ("total", implementation.kernels)]]


def _figures(group: Sequence[KernelTraffic], pass_bytes: int) -> list[str]:
    read, written = (sum(getattr(kernel, which) for kernel in group) for which in ("read", "written"))
    timed = all(kernel.seconds is not None for kernel in group)
    milliseconds = f"{1e3 * sum(kernel.seconds for kernel in group):.3f}" if timed else "-"
    megabytes = (f"{read / 1e6:.1f}", f"{written / 1e6:.1f}")
    return [str(len(group)), *megabytes, f"{(read + written) / pass_bytes:.2f}", milliseconds]


def _short_name(kernel: str) -> str:
    """A demangled kernel's name without return type, namespaces, template arguments and parameters.

    Of PyTorch's elementwise kernels, which have one name, also what they compute: ``elementwise_kernel MulFunctor``.
    """
    plain = re.sub(r"\(anonymous namespace\)::|<unnamed>::|^void ", "", kernel)
    name = re.split(r"[<(]", plain, maxsplit=1)[0].split("::")[-1]
    computed = re.findall(r"\w*Functor(?:_\w+)?|\w+_kernel_cuda|\w+KernelImpl", plain)
    if name.endswith("elementwise_kernel") and computed:
        name = f"{name} {computed[-1]}"
    return name if len(name) <= _NAME_LENGTH else f"{name[: _NAME_LENGTH - 1]}…"


def traffic_totals_table(report: TrafficReport) -> str:
    """A line per implementation, with the first one's passes over its own; then why others were refused."""
    rows = [["", "kernels", *_FIGURES[1:4], "ratio", "error"]]
    measured = [one for one in report.implementations if one.refused is None]
    for one in measured:
        count, read, written, passes, _ = _figures(one.kernels, report.pass_bytes)
        ratio = f"{report.passes(measured[0]) / report.passes(one):.2f}"
        rows.append([one.name, count, read, written, passes, ratio, "-" if one.error is None else f"{one.error:.1e}"])
    refused = [f"{one.name} refused: {one.refused}" for one in report.implementations if one.refused is not None]
    return "\n".join([table(rows), *refused])


def plot_traffic(report: TrafficReport, path: str | Path) -> None:
    """Passes read and written by each implementation as bars, in an image file. Needs matplotlib."""
    from matplotlib.figure import Figure

    shown = [one for one in report.implementations if one.refused is None]
    names = [one.name for one in shown]
    read, written = ([getattr(one, which) / report.pass_bytes for one in shown] for which in ("read", "written"))
    figure = Figure(figsize=(8, 1.5 + 0.6 * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.barh(names, read, label="read", edgecolor="white")
    axes.barh(names, written, left=read, label="written", edgecolor="white")
    axes.invert_yaxis()
    axes.set_xlabel("passes of one [tokens, dim] bf16 tensor")
    origin = f"measured on {report.environment.gpu}" if report.source == COUNTERS else "counted from shapes"
    axes.set_title(f"{report.settings['case']}, {report.settings['tokens']}×{report.settings['dim']}: {origin}")
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=150)


def _format_percent(value: Accuracy | Change | None, sign: str = "", with_error: bool = True) -> str:
    if value is None or value.share is None:
        return "-"
    error = value.standard_error if with_error else None
    return f"{100 * value.share:{sign}.1f}" + (f" ± {100 * error:.1f}" if error is not None else "")


def _format_decibels(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def side_by_side(comparison: Comparison) -> tuple[np.ndarray, int]:
    """The variants' videos next to each other, and at the end the amplified difference of the last one, the patched
    one's, to the first one: [F, H, (variants + 1) * W, 3] in [0, 1]; and by what it is multiplied."""
    difference, gain = comparison.difference()
    return np.concatenate([*(variant.video for variant in comparison.variants), difference], axis=2), gain


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
    after = [("VAE decode", timings.vae_decode), ("output", timings.output)]
    return [("text encoding", timings.text_encoding), *steps, *after]


def _format_memory(timings: StageTimings) -> str:
    return f"{timings.peak_memory / 2**30:.2f} GiB"


def _format_psnr(decibels: float | None) -> str:
    return "identical" if decibels is None else f"{decibels:.1f} dB"
