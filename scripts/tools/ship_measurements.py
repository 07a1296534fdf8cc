"""Copy the speed of each op from a results file into the package, which chooses its kernels by it.

python scripts/tools/ship_measurements.py results/nvidia-h200.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from turbo_rcm_patch.bench.ops import OpKey
from turbo_rcm_patch.bench.tune import row_of
from turbo_rcm_patch.kernels.choice.measured import FOLDER, OPS

VERSIONS = ("driver", "cuda", "torch", "triton", "turbo_rcm_patch")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a results file with an ops run")
    source = parser.parse_args(argv).results
    run = json.loads(source.read_text(encoding="utf-8")).get("runs", {}).get("ops")
    if run is None:
        parser.error(f"{source} has no ops run; scripts/benchmarks/ops.py makes one.")
    target = FOLDER / source.name
    target.write_text(as_text(reduce_ops_run(run)), encoding="utf-8")
    print(f"wrote {target}")
    return 0


def reduce_ops_run(run: dict) -> dict:
    """Return what the package needs from an ops run: see kernels/choice/measured.py."""
    environment = run["environment"]
    major, minor = int(environment["capability"][3:-1]), int(environment["capability"][-1])  # "sm_120" is 12.0
    results = [(OpKey.parse(result["case"]), result) for result in run["results"]]
    return {
        "gpu": environment["gpu"],
        "capability": [major, minor],
        "versions": {name: environment[name] for name in VERSIONS},
        "rows": [row_of(key, result) for key, result in results if key.op in OPS],
    }


def as_text(measured: dict) -> str:
    """Return JSON with a line per row."""
    rows = ",\n".join(f"    {json.dumps(row, ensure_ascii=False)}" for row in measured["rows"])
    head = json.dumps({**measured, "rows": []}, indent=2, ensure_ascii=False)
    return head.replace('"rows": []', f'"rows": [\n{rows}\n  ]') + "\n"


if __name__ == "__main__":
    sys.exit(main())
