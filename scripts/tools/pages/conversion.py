"""Time and memory of loading and converting a whole checkpoint, from scripts/benchmarks/conversion.py."""

from __future__ import annotations

from .cells import table_of, versions

CONVERSION = "conversion.json"  # which needs no GPU
HEADER = ("file: what", "seconds", "peak of its own, GiB", "peak of mapped files, GiB", "file, GiB")
BYTES = ("own_peak_bytes", "mapped_peak_bytes", "file_bytes")


def conversion_table(results: dict) -> str:
    settings, environment = results["settings"], results["environment"]
    rows = [
        [row["what"], f"{row['seconds']:.1f}", *(f"{row[key] / 2**30:.2f}" for key in BYTES)] for row in results["rows"]
    ]
    return (
        "## A checkpoint in TurboDiffusion's naming, loaded and converted\n\n"
        f"`scripts/benchmarks/conversion.py` writes random weights of {settings['config']}'s size, "
        f'{settings["parameters"] / 1e9:.2f} billion, to a file in bf16 and to one as TurboDiffusion\'s "-quant" ones, '
        "and converts and loads each in a separate process. Peaks are the memory of that process. Pages of mapped "
        f"files are counted apart, because the system can drop them. {environment['gpu'] or environment['cpu']}, "
        f"{versions(environment)}. File: `{CONVERSION}`.\n\n" + table_of(HEADER, rows)
    )
