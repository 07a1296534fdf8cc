"""Reading Nsight Compute's tables, and running a program under it; without a GPU another program stands in for it."""

import os
import sys

import pytest
import torch

from scripts.benchmarks import dram
from scripts.benchmarks.dram import DURATION, READ, WRITTEN, KernelTraffic, MeasurementError, measure, parse, why_not

COLUMNS = ["ID", "Process ID", "Process Name", "Kernel Name", "Block Size", "Device", "CC", READ, WRITTEN, DURATION]
SPIN = "at::cuda::<unnamed>::spin_kernel(long)"
GEMM = 'void gemm<float, "tile, 8">(T1 *, T2 *)'


def table(*kernels, units=("byte", "byte", "ns"), columns=COLUMNS):
    """A table as ncu prints it: every cell quoted, quotes in cells doubled."""
    rows = [columns, [""] * (len(columns) - 3) + list(units)]
    for index, (name, *values) in enumerate(kernels):
        rows.append([str(index), "77", "python3", name, "(128, 1, 1)", "0", "9.0", *values])
    return "\n".join(",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows) + "\n"


TWO_RANGES = table(
    (SPIN, "0", "0", "1,024"),
    (GEMM, "1,048,576", "2048", "10,500"),
    ("skip", "4096", "0", "1000"),
    (SPIN, "0", "0", "900"),
    ("skip", "64", "32", "500"),
)
TWO_RANGES_READ = [
    [KernelTraffic(GEMM, 1048576, 2048, pytest.approx(10.5e-6)), KernelTraffic("skip", 4096, 0, pytest.approx(1e-6))],
    [KernelTraffic("skip", 64, 32, pytest.approx(5e-7))],
]


def test_kernels_are_grouped_by_range_in_the_order_of_their_launch():
    assert parse(TWO_RANGES) == TWO_RANGES_READ


def test_other_output_around_the_table_is_passed_over():
    before = '==PROF== Connected to process 77 (/usr/bin/python3)\nloading, "quickly"\n==PROF== Profiling "gemm" - 0\n'
    lines = TWO_RANGES.splitlines(keepends=True)
    between = [*lines[:4], '==PROF== Profiling "skip" - 1: 1 pass\n', *lines[4:]]
    assert parse(before + "".join(between) + "==PROF== Disconnected from process 77\n") == TWO_RANGES_READ


@pytest.mark.parametrize(
    ("units", "values", "expected"),
    [
        (("Kbyte", "Mbyte", "us"), ("1,234.50", "2", "3"), (1_234_500, 2_000_000, 3e-6)),
        (("Gbyte", "byte", "msecond"), ("0.25", "7", "1,000"), (250_000_000, 7, 1.0)),
        (("Mbyte", "Kbyte", "usecond"), ("1.5", "0.032", "2.5"), (1_500_000, 32, 2.5e-6)),
    ],
)
def test_units_are_scaled(units, values, expected):
    ((kernel,),) = parse(table((SPIN, "0", "0", "1"), ("copy", *values), units=units))
    read, written, seconds = expected
    assert (kernel.read, kernel.written, kernel.seconds) == (read, written, pytest.approx(seconds))


def test_a_marked_range_may_be_empty_but_must_exist():
    assert parse(table((SPIN, "0", "0", "1"))) == [[]]
    with pytest.raises(MeasurementError, match="marked nothing as profiled"):
        parse(table(("gemm", "1", "1", "1")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (table((SPIN, "0", "0", "1"), ("gemm", "n/a", "1", "1")), r"dram__bytes_read.sum of gemm as 'n/a' in 'byte'"),
        (table((SPIN, "0", "0", "1"), units=("byte", "sector", "ns")), r"'0' in 'sector'"),
        (table(columns=[name if name != WRITTEN else "other" for name in COLUMNS]), rf"no column {WRITTEN}$"),
        ("==PROF== Connected\n==WARNING== No kernels were profiled.\n", "saw no kernel"),
        ("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - The user\n", "^ERR_NVGPUCTRPERM - The user$"),
        ("", "saw no kernel"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_says_why(text, message):
    with pytest.raises(MeasurementError, match=message):
        parse(text)


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Puts a program called ncu on the PATH that prints a table into its log, and its arguments into a file."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def install(text, code=0):
        (tmp_path / "table").write_text(text)
        (folder / "ncu").write_text(
            f"#!{sys.executable}\n"
            "import pathlib, subprocess, sys\n"
            "at = sys.argv.index('--log-file')\n"
            f"pathlib.Path({str(tmp_path / 'arguments')!r}).write_text(' '.join(sys.argv[1:at]))\n"
            f"pathlib.Path(sys.argv[at + 1]).write_text(pathlib.Path({str(tmp_path / 'table')!r}).read_text())\n"
            f"sys.exit(subprocess.run(sys.argv[at + 2:]).returncode or {code})\n"
        )
        (folder / "ncu").chmod(0o755)

    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return install


def test_the_program_is_run_and_its_table_read(ncu, tmp_path):
    ncu(TWO_RANGES)
    made = tmp_path / "made"
    assert measure([sys.executable, "-c", f"open({str(made)!r}, 'w')"]) == TWO_RANGES_READ
    assert made.exists()
    arguments = (tmp_path / "arguments").read_text()
    assert f"--metrics {READ},{WRITTEN},{DURATION}" in arguments
    for option in ("--profile-from-start off", "--clock-control none", "--cache-control none", "--csv --page raw"):
        assert option in arguments


def test_a_failing_program_or_profiler_is_an_error(ncu):
    ncu("==ERROR== The application returned an error code (3).\n")
    with pytest.raises(MeasurementError, match=r"returned an error code \(3\)\. \(exit code 3\)"):
        measure([sys.executable, "-c", "raise SystemExit(3)"])
    ncu("", code=1)
    with pytest.raises(MeasurementError, match=r"the measured program failed \(exit code 1\)"):
        measure([sys.executable, "-c", ""])


def test_why_not_names_the_first_thing_that_is_missing(ncu, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert why_not() == "PyTorch finds no CUDA GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with monkeypatch.context() as nowhere:
        nowhere.setenv("PATH", str(tmp_path))
        assert "https://developer.nvidia.com/nsight-compute" in why_not()
    ncu("")
    parameters, status = tmp_path / "params", tmp_path / "status"
    monkeypatch.setattr(dram, "DRIVER_PARAMETERS", parameters)
    monkeypatch.setattr(dram, "PROCESS_STATUS", status)
    assert why_not() is None
    parameters.write_text("RmPerfmonPermitted: 1\nRmProfilingAdminOnly: 1\n")
    status.write_text("Name:\tpython3\nCapEff:\t0000000000000000\n")
    assert "--cap-add=SYS_ADMIN" in why_not()
    for bit in (21, 38):
        status.write_text(f"Name:\tpython3\nCapEff:\t{1 << bit:016x}\n")
        assert why_not() is None
    status.write_text("Name:\tpython3\nCapEff:\t0000000000000000\n")
    parameters.write_text("RmProfilingAdminOnly: 0\n")
    assert why_not() is None


PROGRAM = """
import torch
from scripts.benchmarks.dram import profiled
x = torch.zeros(1 << 28, device="cuda")
y = torch.empty_like(x)
torch.add(x, 1, out=y)
for scale in (1, 2):
    with profiled():
        torch.add(x, scale, out=y)
x.zero_()
"""


@pytest.mark.gpu
def test_a_kernel_reads_and_writes_its_tensors_once():
    if why_not() is not None:
        pytest.skip(why_not())
    size, cache = 4 << 28, torch.cuda.get_device_properties(0).L2_cache_size
    ranges = measure([sys.executable, "-c", PROGRAM])
    assert len(ranges) == 2
    for (kernel,) in ranges:
        for count in (kernel.read, kernel.written):
            assert size - cache <= count <= 1.25 * size  # what other programs move at the same time is in it
        assert 1e11 < (kernel.read + kernel.written) / kernel.seconds < 1e14
