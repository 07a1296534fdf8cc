"""Bytes that kernels move between the GPU and its memory, read from the GPU's counters by Nsight Compute.

A program marks the calls to measure with `profiled`; `measure` runs it under ``ncu``. There kernels run one at a time,
but caches are not flushed. Data that a kernel finds in the L2 cache is not counted as read. Data that it leaves there
is counted as written by the later kernel that displaces it. So a kernel's counts hold for its place in the program.
Copies and fills that the driver makes without a kernel (cudaMemcpy, cudaMemset) are not seen.
"""

from __future__ import annotations

import contextlib
import csv
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

READ, WRITTEN, DURATION = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"
NCU = [
    *("ncu", "--target-processes", "application-only", "--profile-from-start", "off"),
    *("--clock-control", "none", "--cache-control", "none", "--metrics", f"{READ},{WRITTEN},{DURATION}"),
    *("--csv", "--page", "raw", "--print-units", "base"),
]
MARKER = "spin_kernel"  # what torch.cuda._sleep launches

# Base units are asked for; where ncu scales them all the same, its prefixes are decimal.
SECONDS = {"": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
UNITS = {
    **{f"{prefix}byte": 1e3**power for power, prefix in enumerate(("", "K", "M", "G", "T"))},
    **{f"{prefix}{unit}": factor for prefix, factor in SECONDS.items() for unit in ("s", "second")},
}

DRIVER_PARAMETERS, PROCESS_STATUS = Path("/proc/driver/nvidia/params"), Path("/proc/self/status")
CAP_SYS_ADMIN, CAP_PERFMON = 21, 38  # bits of the capabilities in PROCESS_STATUS


class MeasurementError(RuntimeError):
    """Nsight Compute did not deliver the counts, for the reason given."""


@dataclass(frozen=True)
class KernelTraffic:
    """One launch of a kernel: bytes read from and written to DRAM, and its seconds."""

    name: str
    read: int
    written: int
    seconds: float


def why_not() -> str | None:
    """Return why counters cannot be read here and how to fix it, or None if no reason is known beforehand."""
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA GPU"
    if shutil.which(NCU[0]) is None:
        return (
            "there is no ncu on the PATH; it comes with the CUDA toolkit and with Nsight Compute "
            "(https://developer.nvidia.com/nsight-compute)"
        )
    if not _permitted():
        return (
            "the driver lets only administrators read its counters; run as root, in a container with "
            "--cap-add=SYS_ADMIN, or change the driver's option (https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
        )
    return None


def _permitted() -> bool:
    if not DRIVER_PARAMETERS.exists() or "RmProfilingAdminOnly: 1" not in DRIVER_PARAMETERS.read_text():
        return True
    status = dict(line.split(":", 1) for line in PROCESS_STATUS.read_text().splitlines())
    capabilities = int(status["CapEff"], 16)
    return any(capabilities >> bit & 1 for bit in (CAP_SYS_ADMIN, CAP_PERFMON))


@contextlib.contextmanager
def profiled() -> Iterator[None]:
    """Mark the kernels launched in this context as one range of `measure`, if it runs this program."""
    torch.cuda.synchronize()
    with torch.cuda.profiler.profile():
        torch.cuda._sleep(1)  # the ranges are told apart by this kernel
        yield
        torch.cuda.synchronize()


def measure(command: Sequence[str]) -> list[list[KernelTraffic]]:
    """Run a command under Nsight Compute. Return the kernels of its `profiled` ranges in the order of their launch.

    Raises MeasurementError when the command or the profiler fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        code = subprocess.run([*NCU, "--log-file", str(log), *command]).returncode
        text = log.read_text(errors="replace") if log.exists() else ""
    if code:
        raise MeasurementError(f"{_complaint(text) or 'the measured program failed'} (exit code {code})")
    return parse(text)


def parse(text: str) -> list[list[KernelTraffic]]:
    """Return the ranges in what ``ncu --csv --page raw`` prints: a row of names, a row of units, and a row per kernel.

    Raises MeasurementError for a text without them.
    """
    lines = text.splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        raise MeasurementError(_complaint(text) or "the profiler saw no kernel")
    header, units, *rows = csv.reader(lines[start:])
    missing = [name for name in ("Kernel Name", READ, WRITTEN, DURATION) if name not in header]
    if missing:
        raise MeasurementError(f"the profiler's table has no column {', '.join(missing)}")
    units = dict(zip(header, units, strict=True))
    ranges: list[list[KernelTraffic]] = []
    for row in rows:
        if len(row) != len(header):
            continue  # the profiler's or the program's own words
        kernel = _kernel(dict(zip(header, row, strict=True)), units)
        if MARKER in kernel.name:
            ranges.append([])
        elif ranges:
            ranges[-1].append(kernel)
    if not ranges:
        raise MeasurementError("the measured program marked nothing as profiled")
    return ranges


def _kernel(row: dict[str, str], units: dict[str, str]) -> KernelTraffic:
    values = {}
    for metric in (READ, WRITTEN, DURATION):
        try:
            values[metric] = float(row[metric].replace(",", "")) * UNITS[units[metric]]
        except (ValueError, KeyError):
            raise MeasurementError(
                f"the profiler gives {metric} of {row['Kernel Name']} as {row[metric]!r} in {units[metric]!r}"
            ) from None
    return KernelTraffic(row["Kernel Name"], round(values[READ]), round(values[WRITTEN]), values[DURATION])


def _complaint(text: str) -> str | None:
    """Return the profiler's first error."""
    mark = "==ERROR=="
    return next((line.removeprefix(mark).strip() for line in text.splitlines() if line.startswith(mark)), None)
