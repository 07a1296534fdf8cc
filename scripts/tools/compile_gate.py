"""Compile every kernel for every supported GPU architecture, without a GPU, and fail if one could not run well.

    python scripts/tools/compile_gate.py                                   # everything: about an hour on two cores
    python scripts/tools/compile_gate.py --ops linear_skip --architectures 90 120
    python scripts/tools/compile_gate.py --one-in 60                       # what CI has time for
    python scripts/tools/compile_gate.py --gluon --architectures 90        # Triton's releases differ most in Gluon

The cases are the launches of the calls in scripts/tools/every_launch.py. With --one-in N they are every N-th case of an
op, on each architecture others, and each kernel's first case once per generation (80, 90, 100, 120). A case fails on:

- register spills; in a kernel that multiplies matrices only in the innermost loops around products
- more shared memory than a program may take
- ptxas serialising wgmma (C7510-C7515)
- a matmul on sm_90 without tensor cores (no HGMMA, IGMMA or QGMMA), unless its tiles are smaller than theirs
- a compiler that raises or aborts
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
PROCESSES = 2
SMALLEST_WGMMA = 64  # rows of a tile
END = "all cases are compiled"
ROW = "{:<8}{:<22}{:>6}{:>11}{:>14}{:>7}  {}"


def main() -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    os.environ.pop("TRITON_INTERPRET", None)
    from scripts.tools.every_launch import LAUNCHES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", default=LAUNCHES, choices=LAUNCHES, metavar="NAME")
    parser.add_argument("--architectures", nargs="+", type=int, default=ARCHITECTURES, metavar="90")
    parser.add_argument("--one-in", type=int, default=1, metavar="N", help="compile about one case in N (default: all)")
    parser.add_argument("--gluon", action="store_true", help="compile the kernels in Gluon alone")
    arguments = parser.parse_args()
    if arguments.one_in < 1:
        parser.error(f"--one-in {arguments.one_in}: give 1 or more.")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        failures = run_all(arguments.ops, arguments.architectures, arguments.one_in, arguments.gluon)
    for failure in failures:
        print(f"FAILED {failure}")
    return 1 if failures else 0


def run_all(ops: list[str], architectures: list[int], one_in: int, gluon: bool) -> list[str]:
    """Compile one in `one_in` cases, print one row per architecture and op, and return the failures.

    gluon: True for the kernels in Gluon alone.
    """
    # A server imports the package once; every job is a fork of it, so that an aborting compiler ends only that job.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["turbo_rcm_patch.kernels"])
    jobs = [(op, architecture) for architecture in architectures for op in ops]
    print(ROW.format("arch", "op", "cases", "registers", "shared (KiB)", "limit", ""))
    failures, cases = [], 0
    with ThreadPoolExecutor(PROCESSES) as pool:
        results = pool.map(lambda job: run_job(context, *job, one_in, gluon), jobs)
        for (op, architecture), reports in zip(jobs, results, strict=True):
            failed = [f"sm_{architecture} {r['name']}: {problem}" for r in reports for problem in r["problems"]]
            print(_row(op, architecture, reports, failed), flush=True)
            failures += failed
            cases += len(reports)
    return failures if cases else ["no case was compiled"]


def _row(op: str, architecture: int, reports: list[dict], failed: list[str]) -> str:
    keys = ("registers", "shared", "limit")
    registers, shared, limit = (max((r.get(key, 0) for r in reports), default=0) for key in keys)
    verdict = f"{len(failed)} FAILED" if failed else "ok" if reports else "none here"
    return ROW.format(f"sm_{architecture}", op, len(reports), registers, shared >> 10, limit >> 10, verdict)


def run_job(context, op: str, architecture: int, one_in: int, gluon: bool) -> list[dict]:
    """Compile one in `one_in` of an op's cases, if it has any, for one architecture in a separate process."""
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=compile_cases, args=(op, architecture, one_in, gluon, sender))
    process.start()
    sender.close()
    reports = []
    # Wait for END, not for the exit code: a thread that starts a process takes the codes of finished ones.
    while not reports or reports[-1] != END:
        try:
            reports.append(receiver.recv())
        except EOFError:
            problem = f"the process ended early, after {len(reports)} cases"
            return [*reports, {"name": op, "problems": [problem]}]
    process.join()
    return reports[:-1]


def compile_cases(op: str, architecture: int, one_in: int, gluon: bool, sender) -> None:
    """Send a report on one in `one_in` of an op's cases on an architecture (90 for sm_90), then END."""
    from scripts.tools.compile_without_gpu import describe, inspect, shared_memory_limit

    capability = divmod(architecture, 10)
    limit = shared_memory_limit(capability)
    launches = [launch for launch in launches_of(op, capability) if not gluon or launch.kernel.is_gluon()]
    for launch in some_of(launches, architecture, one_in):
        try:
            inspection = inspect(launch, capability)
        except Exception as error:  # whatever the compiler raises is the case's result
            report = {"problems": [f"{type(error).__name__}: {str(error).strip()[-300:]}"]}
        else:
            if inspection is None:
                continue
            report = {"registers": inspection.registers, "shared": inspection.shared, "limit": limit}
            blocks = [launch.options[name] for name in ("BLOCK_M", "BLOCK_N") if name in launch.options]
            fits_no_wgmma = max(blocks, default=SMALLEST_WGMMA) < SMALLEST_WGMMA
            report["problems"] = find_problems(inspection, capability, limit, fits_no_wgmma)
        sender.send(report | {"name": describe(launch)})
    sender.send(END)


def launches_of(op: str, capability: tuple[int, int]) -> list:
    """Return all launches of an op on a GPU of this compute capability; many are compiled to the same."""
    from scripts.tools.compile_without_gpu import record_launches
    from scripts.tools.every_launch import LAUNCHES, without_gluon

    launches = record_launches(LAUNCHES[op], capability)
    with without_gluon():
        return launches + record_launches(LAUNCHES[op], capability)


def some_of(launches: list, architecture: int, one_in: int) -> list:
    """Return one in `one_in` of the distinct launches, and each kernel's first on a generation's oldest architecture.

    Each architecture gets other launches.
    """
    from scripts.tools.compile_without_gpu import describe

    architectures = sorted({*ARCHITECTURES, architecture})
    turn = architectures.index(architecture)
    is_oldest = architecture == min(other for other in architectures if other // 10 == architecture // 10)
    distinct, kernels, chosen = {describe(launch): launch for launch in launches}, set(), []
    for place, launch in enumerate(distinct.values()):
        if (place + turn) % one_in == 0 or (is_oldest and launch.kernel not in kernels):
            chosen.append(launch)
        kernels.add(launch.kernel)
    return chosen


def find_problems(inspection, capability: tuple[int, int], limit: int, fits_no_wgmma: bool = False) -> list[str]:
    """Return the reasons why a compiled case would run badly or not at all on this architecture.

    fits_no_wgmma: True if its tiles are smaller than those of sm_90's tensor cores.
    """
    problems = []
    if inspection.spills_matter:
        problems.append(f"{inspection.spills} bytes of register spills ({inspection.registers} registers)")
    if inspection.shared > limit:
        problems.append(f"{inspection.shared} bytes of shared memory; a program may take {limit}")
    problems += inspection.warnings
    # This comes last because it disassembles, which takes a third of a small kernel's compilation.
    should_use_wgmma = capability == (9, 0) and inspection.has_low_precision_dot and not fits_no_wgmma
    if should_use_wgmma and not any(inspection.count(opcode) for opcode in ("HGMMA", "IGMMA", "QGMMA")):
        problems.append("its matmul does not use wgmma")
    return problems


if __name__ == "__main__":
    sys.exit(main())
