"""Tables from which a user chooses a `mass`, from scripts/benchmarks/measure_block_sparsity.py."""

from __future__ import annotations

import re
from collections.abc import Mapping

from scripts.tools.pages.cells import folded, percent, with_error
from turbo_rcm_patch.bench.ops_sparse import DENSE
from turbo_rcm_patch.tables import table

HEADER = (
    "",
    "kept, %",
    "of a layer, %",
    "mean error",
    "largest",
    "right, %",
    "vs unpatched",
    "PSNR to exact, dB",
    "times dense, at real size",
)


def block_sparsity_page(measured: Mapping, file: str, ops: Mapping | None = None) -> str:
    """Return a section of the results page.

    measured: the contents of the JSON file `file`. ops: the run of sparse ops on a GPU, which gives the speeds.
    """
    settings, variants = measured["settings"], measured["variants"]
    block_q, block_k = settings["blocks"]
    exact = measured["exact"]["accuracy"]["overall"]["share"]
    times, where = _times_dense(ops)
    device = measured["environment"]["gpu"] or "a CPU"
    by_layer = [
        [f"`{layer['block']}`, step {layer['step']}", *(_kept_and_error(row["layers"][i]) for row in variants)]
        for i, layer in enumerate(variants[0]["layers"])
    ]
    layers = table([("layer", *(row["variant"] for row in variants)), *by_layer], markdown=True)
    return f"""
## Block-sparse attention, by mass

The accuracy of the embedded model with the preset `block_sparse`, in {settings["steps"]} steps
({settings["dtype"]} on {device}, nothing in 8 bits). The model was trained without it. A video has 700 tokens, so
blocks have {block_q} queries and {block_k} keys here. At real sizes they have 192 and 128 in 8 bits on an H100 or H200,
else 128 and 64, and more blocks can be left out.

- *Kept*: the share of key blocks.
- *Error*: the relative L2 of a layer's attention to a dense one, on one video, in the first and the last step.
- *Right*: the share of what {settings["n"]} held-out captions ask for that the videos show. The exact tier has
  {percent(exact)} %.

File: `{file}`.
{where}
{table([HEADER, *([*_cells(row), times.get(row["variant"], "")] for row in variants)], markdown=True)}

{folded("By layer, what is kept and the error", layers)}
"""


def _times_dense(ops: Mapping | None) -> tuple[dict[str, str], str]:
    """Return, by mass, the speed-up over dense attention with the share kept, and a line on where it was timed."""
    times, where = {}, ""
    commit = ((ops["environment"].get("commit") if ops else None) or "unknown")[:12]
    for result in ops["results"] if ops else ():
        case = re.match(r"block_sparse_attention\(mass=(.+)\) (.+)", result["case"])
        if case and result["best"] is not None:
            times[f"mass {case[1]}"] = f"{result['speedups'][DENSE]:.2f}× ({100 * result['kept']:.0f} % kept)"
            where = (
                "Times dense: how many times as fast as dense attention in 8 bits, both with their pre-pass, at "
                f"{case[2]}\non {ops['environment']['gpu']}, commit {commit}. The values are "
                "random, with structure, so a mass keeps another share of them.\n"
            )
    return times, where


def _cells(row: Mapping) -> list[str]:
    kept, errors = ([layer[key] for layer in row["layers"]] for key in ("kept", "error"))
    change = row["change"]
    return [
        row["variant"],
        f"{100 * sum(kept) / len(kept):.0f}",
        f"{100 * min(kept):.0f} to {100 * max(kept):.0f}",
        f"{sum(errors) / len(errors):.1e}",
        f"{max(errors):.1e}",
        with_error(row["accuracy"]["overall"]),
        f"{100 * change['share']:+.1f} ± {percent(change['standard_error'])}",
        f"{row['psnr_to_exact']:.1f}",
    ]


def _kept_and_error(layer: Mapping) -> str:
    return f"{100 * layer['kept']:.0f} %, {layer['error']:.1e}"
