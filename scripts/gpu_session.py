"""Everything that needs a GPU in one call: the GPU tests, verify, compare and evaluate, and all benchmarks.

    python scripts/gpu_session.py --results results                         # all, into results/<the GPU>.json
    python scripts/gpu_session.py --results results --only tests ops        # the other runs in the file stay

Every step that measures, but first-step, checks first that what it measures is right. A table of what passed comes
last.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent

CLI = ("-m", "turbo_rcm_patch.cli")
TRAFFIC = ("scripts/profile_hbm.py",)
END_TO_END = ("scripts/benchmark_end_to_end.py", "--config")
# Steps that show whether something holds, and those whose figures go into the results file.
CHECKS = {
    "tests": ("-m", "pytest", "-m", "gpu", "-q", "-n", "4", "tests"),
    "info": (*CLI, "info"),
}
MEASUREMENTS = {
    "verify": (*CLI, "verify"),
    "verify-wan2.1-1.3b": (*CLI, "verify", "--config", "wan2.1-1.3b"),
    "compare": (*CLI, "compare"),
    "evaluate": (*CLI, "evaluate", "--batch-size", "64"),
    "ops": ("scripts/benchmark_ops.py",),
    "implementations": ("scripts/compare_implementations.py",),
    "traffic-attention": (*TRAFFIC, "--batch", "32", "--seq", "2048", "--dim", "512"),
    "traffic-wan2.1-1.3b": (*TRAFFIC, "--wan-block", "1.3b"),
    "traffic-wan2.1-14b": (*TRAFFIC, "--wan-block", "14b"),
    "first-step": ("scripts/benchmark_first_step.py",),
    "wan2.1-1.3b": (*END_TO_END, "wan2.1-1.3b"),
    "wan2.1-1.3b-17-frames": (*END_TO_END, "wan2.1-1.3b", "--frames", "17"),
    "wan2.1-14b-4-layers": (*END_TO_END, "wan2.1-14b", "--layers", "4", "--repeats", "3"),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="folder of the results files, one per GPU")
    parser.add_argument("--logs", type=Path, default=ROOT / "runs/gpu-session", help="folder for the steps' output")
    parser.add_argument("--only", nargs="+", choices=(*CHECKS, *MEASUREMENTS), help="run these steps alone")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA GPU, and every step needs one.")
    options.logs.mkdir(parents=True, exist_ok=True)
    options.results.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, command in (CHECKS | MEASUREMENTS).items():
        if options.only is None or name in options.only:
            figures = options.logs / f"{name}.json" if name in MEASUREMENTS else None
            rows.append((name, *run(command, options.logs / f"{name}.log", figures)))
            if figures is not None and figures.exists():
                keep(options.results, torch.cuda.get_device_name(), name, json.loads(figures.read_text()))
    width = max(len(name) for name, _, _ in rows)
    print(f"\n{'step':{width}}  result    seconds")
    for name, code, seconds in rows:
        print(f"{name:{width}}  {'passed' if code == 0 else f'failed {code}':8} {seconds:8.1f}")
    return int(any(code for _, code, _ in rows))


def run(command: tuple[str, ...], log: Path, figures: Path | None) -> tuple[int, float]:
    """Run one step, show its output and keep it; returns the exit code and the seconds taken.

    figures: the file that it shall write its figures to, as new.
    """
    print(f"\n== {log.stem}", flush=True)
    if figures is not None:
        figures.unlink(missing_ok=True)
        command = (*command, "--json", str(figures.resolve()))
    start = time.perf_counter()
    with open(log, "w") as file:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for line in process.stdout:
            print(line, end="", flush=True)
            file.write(line)
    return process.wait(), time.perf_counter() - start


def keep(folder: Path, gpu: str, name: str, figures: dict) -> None:
    """Put a run into the results file of a GPU, in place of an older one of its name."""
    path = folder / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"
    results = json.loads(path.read_text()) if path.exists() else {"gpu": gpu, "runs": {}}
    runs = {**results["runs"], name: figures}
    results["runs"] = {known: runs[known] for known in MEASUREMENTS if known in runs}
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
