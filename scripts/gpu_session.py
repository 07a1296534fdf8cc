"""Everything that needs a GPU in one call: the GPU tests, verify, compare and evaluate on the embedded model, the
benchmarks.

    python scripts/gpu_session.py --results results/h200                    # all
    python scripts/gpu_session.py --results results/h200 --only tests compare

Each step's output goes to a log beside its JSON; a table of what passed and how long it took comes last.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def steps(results: Path) -> dict[str, list[str]]:
    """The command of every step by its name."""
    cli = ["-m", "turbo_rcm_patch.cli"]
    end_to_end = ["scripts/benchmark_end_to_end.py", "--config"]
    return {
        "tests": ["-m", "pytest", "-m", "gpu", "-q", "-n", "4", "tests"],
        "info": [*cli, "info"],
        "verify": [*cli, "verify", "--json", f"{results}/verify-embedded.json"],
        "compare": [*cli, "compare", "--json", f"{results}/compare-embedded.json"],
        "evaluate": [*cli, "evaluate", "--batch-size", "64", "--json", f"{results}/evaluate-embedded.json"],
        "wan2.1-1.3b": [*end_to_end, "wan2.1-1.3b", "--json", f"{results}/end-to-end-wan2.1-1.3b.json"],
        "wan2.1-14b-4-layers": [
            *[*end_to_end, "wan2.1-14b", "--layers", "4", "--repeats", "3"],
            *["--json", f"{results}/end-to-end-wan2.1-14b-4-layers.json"],
        ],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="folder for the JSON files and logs")
    parser.add_argument("--only", nargs="+", choices=steps(Path()), help="run these steps alone")
    options = parser.parse_args(argv)
    results = options.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, command in steps(results).items():
        if options.only is None or name in options.only:
            rows.append((name, *run(name, command, results)))
    print("\nstep                   result   seconds")
    for name, code, seconds in rows:
        print(f"{name:22} {'passed' if code == 0 else f'failed {code}':8} {seconds:7.1f}")
    return int(any(code for _, code, _ in rows))


def run(name: str, command: list[str], results: Path) -> tuple[int, float]:
    """Run one step, show its output and keep it; returns the exit code and the seconds taken."""
    print(f"\n== {name}", flush=True)
    start = time.perf_counter()
    with open(results / f"{name}.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for line in process.stdout:
            print(line, end="", flush=True)
            log.write(line)
    return process.wait(), time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
