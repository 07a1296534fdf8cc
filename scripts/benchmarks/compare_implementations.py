"""Time the attention modules against each other, after checking each against fp64: latency, error, memory.

    python scripts/benchmarks/compare_implementations.py --json modules.json
    python scripts/benchmarks/compare_implementations.py --sizes 4x2048x768 --dtypes bfloat16

Sizes are BxNxC: samples, tokens, channels, in heads of 64 channels. Exits with 1 if an implementation was refused
because it is wrong. An implementation slower than two_pass is not an error.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `scripts` can be imported

from scripts.benchmarks.implementations import DTYPES, MODES, REFUSED, benchmark_all_implementations
from scripts.tools.pages.ops import implementations_table
from turbo_rcm_patch.cli.files import json_file, write_json

SIZES = "4x512x512", "8x1024x512", "16x2048x768", "4x1024x768", "4x2048x768", "4x4096x768", "4x8192x768"
HEAD_DIM = 64


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    results = []
    for B, N, C in options.sizes:
        settings = {"dtypes": options.dtypes, "modes": options.modes, "repeats": options.repeats}
        one = benchmark_all_implementations(
            B, N, C, C // HEAD_DIM, **settings, device=options.device, compile_rivals=not options.no_compile
        )
        print(implementations_table(one.to_dict()))
        for row in one.rows:
            if row.note:
                print(f"{row.implementation} {row.status} ({row.dtype} {row.mode}): {row.note}", flush=True)
        results.append(one)
    merged = replace(results[0], rows=tuple(row for one in results for row in one.rows))
    if options.json is not None:
        write_json(options.json, merged.to_dict())
    return int(any(row.status == REFUSED for row in merged.rows))


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=_size, metavar="BxNxC", help=f"default: {' '.join(SIZES)}")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--repeats", type=int, default=10, help="timed calls of each (default 10)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU where there is one")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--json", type=json_file, help="write the rows with the GPU and versions")
    options = parser.parse_args(argv)
    if options.repeats < 2:
        parser.error(f"--repeats {options.repeats}: quartiles need at least 2.")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no CUDA GPU; use --device cpu with small --sizes.")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.sizes is None:
        if options.device == "cpu":
            parser.error("the default sizes are for a CUDA GPU, and this is the CPU; choose small ones with --sizes.")
        options.sizes = [_size(size) for size in SIZES]
    return options


def _size(text: str) -> tuple[int, int, int]:
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts) or int(parts[2]) % HEAD_DIM:
        raise argparse.ArgumentTypeError(f"{text!r} is no BxNxC with C a multiple of {HEAD_DIM}, such as 4x2048x768")
    return tuple(map(int, parts))


if __name__ == "__main__":
    sys.exit(main())
