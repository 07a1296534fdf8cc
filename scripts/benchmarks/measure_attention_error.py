"""Measure the error of attention in 8 bits on normal values, structured values and the embedded model's values.

    python scripts/benchmarks/measure_attention_error.py --json attention-error.json

Without a GPU the torch reference computes it. Exits with 1 if an error exceeds the quantized tier's limits.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `scripts` can be imported

from scripts.benchmarks.attention_error import measure
from scripts.tools.pages.checks import attention_errors_table
from turbo_rcm_patch.bench.environment import describe_environment
from turbo_rcm_patch.cli.files import json_file, write_json

SIZE = {"tokens": 4096, "heads": 4, "head_dim": 128}  # of the values that are drawn


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=json_file, help="write the figures with the GPU and versions")
    options = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.no_grad():
        errors = list(measure(device, **SIZE))
    rows = [asdict(error) | {"missed": error.missed()} for error in errors]
    report = {"environment": asdict(describe_environment(device)), "settings": SIZE, "attention_errors": rows}
    print(attention_errors_table(report))
    for error in errors:
        for name in error.missed():
            print(f"{error.values}: {name} {getattr(error, name):.4g} is beyond the limit")
    if options.json is not None:
        write_json(options.json, report)
    return int(any(error.missed() for error in errors))


if __name__ == "__main__":
    sys.exit(main())
