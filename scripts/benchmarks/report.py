"""Print ops, attention modules and DRAM traffic as tables."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence

from turbo_rcm_patch.bench.ops import OpResult
from turbo_rcm_patch.tables import table

from .dram import KernelTraffic
from .implementations import OK, REFUSED, ImplementationResults, Row
from .traffic import ImplementationTraffic, TrafficReport

_FIGURES = ["count", "read, MB", "written, MB", "passes", "ms"]
_SMALL = 0.005  # passes of kernels that share a line
_NAME_LENGTH = 60


def ops_table(results: Sequence[OpResult]) -> str:
    """Return one line per contender: milliseconds, error, and for ours TFLOP/s and the speed-up over each rival.

    Speed-ups below their target are marked.
    """
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
    """Return a case's name, with the share of the key blocks that sparse attention keeps, where it is known."""
    return case if kept is None else f"{case}, {100 * kept:.0f} % kept"


def _format_speedups(result: OpResult) -> str:
    parts = []
    for rival, speedup in result.speedups.items():
        target = result.targets.get(rival)
        missed = "" if target is None or speedup >= target else f" (below {target:g})"
        parts.append(f"{speedup:.3f} of {rival}{missed}")
    return ", ".join(parts)


def implementations_table(results: ImplementationResults) -> str:
    """Return one line per implementation, by size, dtype and mode, then what the columns are and why some are empty."""
    cells = [["", "implementation", "ms", "speed-up", "output error", "gradient error", "peak MiB"]]
    group = None
    for row in results.rows:
        label = _group(row)
        cells.append(["" if label == group else label, row.implementation, *_implementation_cells(row)])
        group = label
    notes = dict.fromkeys(_note(row) for row in results.rows if row.note)
    legend = f"ms: median of {results.repeats} {results.timing}; speed-up over two_pass; errors: relative L2 to fp64"
    return "\n".join([table(cells), "", legend, *notes])


def _implementation_cells(row: Row) -> list[str]:
    def cell(value: float | None, form: str, unit: float = 1) -> str:
        return "-" if value is None else format(value / unit, form)

    gradient_error = None
    if row.input_gradient_error is not None:
        gradient_error = max(row.input_gradient_error, row.weight_gradient_error)
    return [
        cell(row.latency, ".3f", 1e-3) if row.status == OK else row.status,
        cell(row.speedup, ".2f"),
        cell(row.output_error, ".1e"),
        cell(gradient_error, ".1e"),
        cell(row.peak_memory, ".1f", 2**20),
    ]


def _note(row: Row) -> str:
    where = f" ({_group(row)})" if row.status == REFUSED else ""
    return f"{row.implementation} {row.status}{where}: {row.note}"


def _group(row: Row) -> str:
    return f"{row.B}x{row.N}x{row.C} {row.dtype} {row.mode}"


def traffic_table(report: TrafficReport) -> str:
    """Return a line per kernel of each implementation, largest first, and a total: launches, MB, passes, time."""
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
    megabytes = (f"{read / 1e6:.1f}", f"{written / 1e6:.1f}")
    milliseconds = f"{1e3 * sum(kernel.seconds for kernel in group):.3f}"
    return [str(len(group)), *megabytes, f"{(read + written) / pass_bytes:.2f}", milliseconds]


def _short_name(kernel: str) -> str:
    """Return a demangled kernel's name without return type, namespaces, template arguments and parameters.

    PyTorch's elementwise kernels share a name, so theirs includes the function: ``elementwise_kernel MulFunctor``.
    """
    plain = re.sub(r"\(anonymous namespace\)::|<unnamed>::|^void ", "", kernel)
    name = re.split(r"[<(]", plain, maxsplit=1)[0].split("::")[-1]
    computed = re.findall(r"\w*Functor(?:_\w+)?|\w+_kernel_cuda|\w+KernelImpl", plain)
    if name.endswith("elementwise_kernel") and computed:
        name = f"{name} {computed[-1]}"
    return name if len(name) <= _NAME_LENGTH else f"{name[: _NAME_LENGTH - 1]}…"


def traffic_totals_table(report: TrafficReport) -> str:
    """Return a line per implementation, with the first one's passes over its own; then why others were refused."""
    rows = [["", "kernels", *_FIGURES[1:4], "ratio", "error"]]
    measured = [one for one in report.implementations if one.refused is None]
    for one in measured:
        count, read, written, passes, _ = _figures(one.kernels, report.pass_bytes)
        ratio = f"{report.passes(measured[0]) / report.passes(one):.2f}"
        rows.append([one.name, count, read, written, passes, ratio, f"{one.error:.1e}"])
    refused = [f"{one.name} refused: {one.refused}" for one in report.implementations if one.refused is not None]
    return "\n".join([table(rows), *refused])
