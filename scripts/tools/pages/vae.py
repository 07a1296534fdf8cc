"""The table of a VAE alone: what decoding, encoding and the output take, unpatched, compiled and patched."""

from __future__ import annotations

import math
from collections.abc import Iterator

from turbo_rcm_patch.amounts import in_gb

from .cells import marked, table_of, versions

# The names of variants, and of the work after decoding, in scripts/benchmarks/vae.py.
UNPATCHED, COMPILED, PATCHED = "unpatched", "torch.compile", "patched"
IN_8_BITS, TINY = "patched, 8 bits", "tiny VAE"
NUMPY, PIL = "output, numpy", "output, PIL"
ENCODING = {UNPATCHED: 2.5, COMPILED: 1.5}  # how many times as fast the patched encoder has to be
OVER_PATCHED, PSNR = 1.5, 42  # how many times as fast as patched 8 bits have to be, and how near to it in dB
# The most seconds, by work, variant and the video's size.
SECONDS = {("decode", PATCHED, "121×704×1280"): 2.0, ("decode", TINY, "81×480×832"): 0.06}
HEADER = (
    "work",
    "variant",
    "s",
    "over unpatched",
    "over compile",
    "memory beside the weights, GB",
    "predicted",
    "error",
    "PSNR to patched, dB",
)


def vae_table(run: dict) -> str:
    """Return a row for each variant. ✗ marks what misses its target, and memory over diffusers'."""
    settings = run["settings"]
    size = f"{settings['num_frames']}×{settings['height']}×{settings['width']}"
    works = dict.fromkeys(row["work"] for row in run["vae"])
    rows = [cells for work in works for cells in _rows_of(run["vae"], work, size)]
    wanted = [
        f"encoding {ENCODING[UNPATCHED]}× over unpatched and {ENCODING[COMPILED]}× over compile",
        f"8 bits {OVER_PATCHED}× over patched and {PSNR} dB",
        "no more memory than unpatched",
        "PIL no slower than numpy",
        *(f"{name}: a {work} in {most:g} s" for (work, name, of), most in SECONDS.items() if of == size),
    ]
    return (
        f"The VAE of {settings['config']} alone, {size}, random weights ({versions(run['environment'])}; median of "
        f"{settings['repeats']}). The error is relative L2 to fp32, of a short video. Wanted: {'; '.join(wanted)}.\n\n"
        + table_of(HEADER, rows)
    )


def _rows_of(rows: list[dict], work: str, size: str) -> Iterator[list[str]]:
    named = {row["variant"]: row for row in rows if row["work"] == work}
    as_numpy = (row["seconds"] for row in rows if (row["work"], row["variant"]) == (NUMPY, PATCHED))
    limits = {(PIL, PATCHED, size): next(as_numpy, math.inf), **SECONDS}
    for variant, row in named.items():
        memory, unpatched = row["bytes"], named[UNPATCHED]["bytes"]
        most = limits.get((work, variant, size), math.inf)
        yield [
            work,
            variant,
            marked(f"{row['seconds']:.3f}", row["seconds"] > most),
            *(_speed_up(row, named, rival, work) for rival in (UNPATCHED, COMPILED)),
            "" if memory is None else marked(in_gb(memory), variant == PATCHED and memory > unpatched),
            "" if row["predicted"] is None else in_gb(row["predicted"]),
            "" if row["error"] is None else f"{row['error']:.1e}",
            "" if (psnr := row.get("psnr")) is None else marked(f"{psnr:.1f}", psnr < PSNR),
        ]


def _speed_up(row: dict, named: dict[str, dict], rival: str, work: str) -> str:
    if rival not in named:
        return ""
    times = named[rival]["seconds"] / row["seconds"]
    is_missed = work == "encode" and row["variant"] == PATCHED and times < ENCODING[rival]
    if row["variant"] == IN_8_BITS:
        is_missed = named[PATCHED]["seconds"] / row["seconds"] < OVER_PATCHED
    return marked(f"{times:.2f}×", is_missed)
