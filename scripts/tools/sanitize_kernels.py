"""Run every kernel once at small sizes under compute-sanitizer, and fail on its findings. Needs a GPU.

    python scripts/tools/sanitize_kernels.py --tool memcheck     # accesses outside of what was allocated
    python scripts/tools/sanitize_kernels.py --tool racecheck    # shared memory that threads use in no certain order

The kernels run in parts, side by side, because the tool spends most of the time on the CPU, where it rewrites kernels.
Each part runs first without the tool, because Triton would compile many times slower under it.

Racecheck reports hazards at the start of warp-specialised kernels, even if they compute nothing
(warp_specialized_probes.py). Triton's first warpgroup writes the role of each other warp to shared memory, a byte each,
and the others read theirs. At the end it writes "done" in the same place. In PTX all warps join barrier 1 between write
and read, and again between read and the next write. Each joins from its own place in the code, so racecheck does not
see one barrier. So a race is Triton's own if one side reads a role, which is the only 8-bit load from shared memory in
the compiled code. All other races fail. One of the probes has a real race, which must be reported: otherwise racecheck
would not find such races.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `scripts` can be imported

from scripts.tools.every_launch import without_gluon
from scripts.tools.sanitizer_launches import PARTS, few_multiprocessors
from scripts.tools.sanitizer_reports import find_role_reads, judge_memory, judge_races
from turbo_rcm_patch.kernels.dispatch import is_sm90
from turbo_rcm_patch.kernels.launch import compile_ahead

ROOT = Path(__file__).resolve().parents[2]

OF_BOTH = ("--print-limit", "0", "--show-backtrace", "no", "--target-processes", "application-only")
# Each run waits for its program on one of these ports, and longer than 10 s, as imports take with all at once.
CONNECTION = ("--max-connections", "64", "--launch-timeout", "300")
OPTIONS = {
    "memcheck": ("--report-api-errors", "no"),
    # Left to itself it may count a kernel's mbarriers too low, and miss what they order.
    "racecheck": ("--racecheck-report", "analysis", "--num-cuda-barriers", "64"),
}
PROCESSES = 15  # parts that run at a time
CACHE = "cache"  # of compiled kernels, in the folder of the reports
PROBES = "probes"  # warp_specialized_probes.py, beside the parts below


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--tool", choices=OPTIONS, help="run the kernels under this tool, and judge its reports")
    action.add_argument("--launch", metavar="PART", choices=(*PARTS, PROBES), help="only run a part of the kernels")
    parser.add_argument("--portable", action="store_true", help="with --launch: those that other GPUs than sm_90 take")
    parser.add_argument("--logs", type=Path, help="folder for the tool's reports; default: runs/<the tool>")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA GPU.")
    if options.launch is not None:
        launch(options.launch, options.portable)
        return 0
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    if sanitizer is None:
        parser.error("compute-sanitizer, of the CUDA toolkit, is neither on the PATH nor in /usr/local/cuda/bin.")
    logs = options.logs or ROOT / "runs" / options.tool
    problems = check_all(sanitizer, options.tool, logs.resolve(), is_sm90(torch.device("cuda")))
    for problem in problems:
        print(f"FAILED {problem}")
    return int(bool(problems))


def check_all(sanitizer: str, tool: str, logs: Path, sm90: bool) -> list[str]:
    """Run each part under the tool, and return what is wrong."""
    shutil.rmtree(logs / CACHE, ignore_errors=True)  # other versions of the compiled kernels
    logs.mkdir(parents=True, exist_ok=True)
    jobs = [(part, portable) for part in PARTS for portable in ((False, True) if sm90 else (False,))]
    jobs += [(PROBES, False)] if sm90 else []
    command = (sanitizer, "--tool", tool, *OF_BOTH, *CONNECTION, *OPTIONS[tool])
    with ThreadPoolExecutor(PROCESSES) as pool:
        list(pool.map(lambda job: run_part("compile", (), logs, *job), jobs))
        runs = list(pool.map(lambda job: run_part(tool, command, logs, *job), jobs))
    role_reads = find_role_reads(logs / CACHE) if tool == "racecheck" else {}
    print(f"the reports are in {logs}")
    problems = []
    for (part, portable), (code, report) in zip(jobs, runs, strict=True):
        name = name_of(part, portable)
        print(f"\n{name}")
        found = judge_races(report, role_reads, part == PROBES) if tool == "racecheck" else judge_memory(report)
        found += [f"the program exited with {code}"] if code != 0 else []
        problems += [f"{name}: {problem}" for problem in found]
    return problems


def run_part(what: str, under: tuple[str, ...], logs: Path, part: str, portable: bool) -> tuple[int, str]:
    """Run a part under a command. Return the exit code and the output of both, which is also written to a log."""
    launch = (sys.executable, __file__, "--launch", part, *(("--portable",) if portable else ()))
    environment = os.environ | {"TRITON_CACHE_DIR": str(logs / CACHE), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    log = logs / f"{what}-{name_of(part, portable)}.log"
    start = time.perf_counter()
    with open(log, "w") as file:
        code = subprocess.run((*under, *launch), env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
    print(f"{what} {name_of(part, portable)}: {time.perf_counter() - start:.0f} s", flush=True)
    return code, log.read_text()


def name_of(part: str, portable: bool) -> str:
    return f"{part}-portable" if portable else part


def launch(part: str, portable: bool) -> None:
    """Launch a part of the kernels, or the probes. portable: True for the kernels that GPUs without sm_90 use."""
    if part == PROBES:
        from warp_specialized_probes import launch_probes

        launch_probes()
    else:
        with without_gluon() if portable else few_multiprocessors():
            compile_ahead(lambda: PARTS[part](torch.device("cuda")))
            PARTS[part](torch.device("cuda"))
    torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
