"""Time every op against its rivals at Wan's sizes, after checking that it is right.

    python scripts/benchmarks/ops.py --json ops.json
    python scripts/benchmarks/ops.py --only linear_skip layer_norm

Exits with 1 if an op is less accurate than allowed. A missed speed-up is marked in the table and is not an error.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `scripts` can be imported

from scripts.benchmarks.contests import conv, exact, quantized, sparse
from scripts.tools.pages.ops import OPS_HEADER, op_rows
from turbo_rcm_patch.bench.environment import describe_environment
from turbo_rcm_patch.bench.ops import OpCase, OpResult, measure_copy_bandwidth, run_case
from turbo_rcm_patch.cli.files import json_file, write_json
from turbo_rcm_patch.tables import table
from turbo_rcm_patch.tiers import TIERS

CASES = (*exact.CASES, *conv.CASES, *quantized.CASES, *sparse.CASES)


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    device = torch.device("cuda")
    bandwidth = measure_copy_bandwidth(device)
    results: list[OpResult] = []
    for case in CASES:
        if case.tier.name in options.tier and (options.only is None or _is_named(case, options.only)):
            results.append(run_case(case, device, copy_bandwidth=bandwidth, rounds=options.rounds))
            show(results[-1:])
            torch.cuda.empty_cache()
    print(f"\ncopy: {bandwidth / 1e12:.2f} TB/s read and written\n")
    show(results)
    if options.json is not None:
        report = {"copy_bandwidth": bandwidth, "rounds": options.rounds, "results": [asdict(one) for one in results]}
        write_json(options.json, {"environment": asdict(describe_environment(device)), **report})
    return int(any(result.best is None for result in results))


def show(results: list[OpResult]) -> None:
    """Print results as the results page has them, and why a contender was not timed."""
    print(table([OPS_HEADER, *(row for result in results for row in op_rows(asdict(result)))]))
    for result in results:
        for name, timing in result.timings.items():
            if timing.refused is not None:
                print(f"{result.case}: {name} is refused: {timing.refused}")
    sys.stdout.flush()


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="cases whose name contains one of these")
    parser.add_argument("--tier", nargs="+", choices=TIERS, default=tuple(TIERS), help="tiers to time (default: all)")
    parser.add_argument("--rounds", type=int, default=20, help="timed runs per contender (default 20)")
    parser.add_argument("--json", type=json_file, help="write all figures with the GPU and versions")
    options = parser.parse_args(argv)
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: quartiles need at least 2.")
    if options.only is not None and not any(part in case.name for part in options.only for case in CASES):
        parser.error(f"--only {' '.join(options.only)}: no case has that in its name; there are {_names()}.")
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA GPU, and these sizes are for one.")
    return options


def _is_named(case: OpCase, parts: list[str]) -> bool:
    return any(part in case.name for part in parts)


def _names() -> str:
    return ", ".join(case.name for case in CASES)


if __name__ == "__main__":
    sys.exit(main())
