"""DRAM bytes that each implementation moves, from Nsight Compute's counters. The JSON file has every kernel.

    python scripts/benchmarks/profile_hbm.py --batch 32 --seq 2048 --dim 512 --json attention.json
    python scripts/benchmarks/profile_hbm.py --wan-block 1.3b

Exits with 1 if an implementation is refused because it is less accurate than the first, or if the counters cannot be
read.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `scripts` can be imported

from scripts.benchmarks import dram
from scripts.benchmarks.traffic import (
    AttentionCase,
    Case,
    Check,
    ImplementationTraffic,
    TrafficReport,
    WanBlockCase,
    check_and_profile,
    join,
)
from scripts.tools.pages.ops import traffic_table
from turbo_rcm_patch.bench.environment import describe_environment
from turbo_rcm_patch.cli.files import json_file, write_json

WAN_BLOCKS = {"1.3b": "wan2.1-1.3b", "14b": "wan2.1-14b", "tiny": "tiny"}
PASS_LIMITS = {"1.3b": 60}  # of the patched block


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = parse_options(argv)
    case = WanBlockCase(WAN_BLOCKS[options.wan_block]) if options.wan_block else AttentionCase(*_sizes(options))
    if options.profiled is not None:
        write_json(options.profiled, {"checks": [asdict(c) for c in check_and_profile(case, torch.device("cuda"))]})
        return 0
    if (reason := dram.why_not()) is not None:
        sys.exit(f"no counters are read: {reason}.")
    print(*(f"{name} {value}" for name, value in case.settings.items()), sep=", ")
    try:
        measured = measure(case, argv)
    except dram.MeasurementError as error:
        sys.exit(f"no counters are read: {error}.")
    report = TrafficReport(case.settings, describe_environment("cuda"), measured)
    print(traffic_table([report.to_dict()]))
    for one in report.implementations:
        if one.refused is not None:
            print(f"{one.name} is refused: {one.refused}")
    if options.wan_block in PASS_LIMITS:
        print(_verdict(report, PASS_LIMITS[options.wan_block]))
    if options.json is not None:
        write_json(options.json, report.to_dict())
    return int(any(one.refused is not None for one in report.implementations))


def measure(case: Case, argv: Sequence[str]) -> tuple[ImplementationTraffic, ...]:
    """Return the traffic that a second run of this script has under the profiler."""
    with tempfile.TemporaryDirectory() as folder:
        checks = Path(folder) / "checks.json"
        ranges = dram.measure([sys.executable, __file__, *argv, "--profiled", str(checks)])
        return join([Check(**entry) for entry in json.loads(checks.read_text())["checks"]], ranges)


def _verdict(report: TrafficReport, limit: int) -> str:
    patched = report.implementations[-1]
    if patched.refused is not None:
        return f"{patched.name} was refused, so that its passes are unknown; at most {limit} are asked for."
    passes = report.passes(patched)
    return f"{patched.name} moves {passes:.1f} passes, {'within' if passes <= limit else 'OVER'} the {limit} asked for"


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, help="samples that the attention module gets (default 32)")
    parser.add_argument("--seq", type=int, help="tokens per sample (default 2048)")
    parser.add_argument("--dim", type=int, help="channels (default 512)")
    parser.add_argument("--heads", type=int, help="default: dim / 64")
    parser.add_argument("--wan-block", choices=WAN_BLOCKS, help="a block of this Wan 2.1 model instead")
    parser.add_argument("--json", type=json_file, help="write all figures with the GPU and versions")
    parser.add_argument("--profiled", type=Path, help=argparse.SUPPRESS)  # this process runs under the profiler
    options = parser.parse_args(argv)
    if options.wan_block and any(getattr(options, name) is not None for name in ("batch", "seq", "dim", "heads")):
        parser.error("--wan-block has sizes of its own; leave out --batch, --seq, --dim and --heads.")
    batch, seq, dim, heads = _sizes(options)
    if min(batch, seq, dim, heads) < 1 or dim % heads:
        parser.error(f"--dim {dim} must be a positive multiple of --heads {heads}, and --batch and --seq at least 1.")
    return options


def _sizes(options: argparse.Namespace) -> tuple[int, int, int, int]:
    """Return batch, seq, dim and heads. Sizes that were not given have their defaults."""
    dim = 512 if options.dim is None else options.dim
    return (
        32 if options.batch is None else options.batch,
        2048 if options.seq is None else options.seq,
        dim,
        max(dim // 64, 1) if options.heads is None else options.heads,
    )


if __name__ == "__main__":
    sys.exit(main())
