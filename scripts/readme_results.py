"""Write the README's measured section from the JSON files in results/, so that no figure is typed by hand.

python scripts/readme_results.py
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- measured: written by scripts/readme_results.py -->", "<!-- end of measured -->"
HEADER = "| run | variant | step, ms | speed-up | peak memory, GiB | latents, rel. L2 to eager |\n" + "|---" * 6 + "|"
NAMES = {"unpatched": "eager diffusers", "torch.compile": "regional torch.compile", "patched": "patched (exact)"}


def main() -> int:
    readme = ROOT / "README.md"
    readme.write_text(with_measured_section(readme.read_text()))
    return 0


def with_measured_section(text: str) -> str:
    """The README's text with the section between the markers rendered from the results files."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    folders = sorted(path for path in (ROOT / "results").iterdir() if path.is_dir())
    sections = "\n".join(map(_folder_section, folders))
    return f"{before}{BEGIN}\n{sections}{END}{after}"


def _folder_section(folder: Path) -> str:
    runs = {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    runs = {name: run for name, run in runs.items() if "variants" in run}
    environment = next(iter(runs.values()))["environment"]
    versions = ", ".join(f"{name} {environment[name]}" for name in ("torch", "triton", "diffusers"))
    rows = [row for name, run in runs.items() for row in _rows(name, run)]
    return (
        f"\n{environment['gpu']}, {versions}. One denoising step, the median over steps of medians over repeats; all "
        f"variants timed in the same run. Files: `results/{folder.name}/`, written by "
        f"`python scripts/gpu_session.py --results results/{folder.name}`.\n\n{HEADER}\n" + "\n".join(rows) + "\n"
    )


def _rows(name: str, run: dict) -> list[str]:
    settings = run["settings"]
    size = f"{settings['num_frames']}×{settings['height']}×{settings['width']}"
    label = f"{settings.get('config') or settings['model']}, {size}, `{name}`"
    if "layers" in settings:
        label = label.replace(",", f" ({settings['layers']} layers),", 1)
    eager = run["variants"][0]
    return [_row(label if variant is eager else "", variant, eager) for variant in run["variants"]]


def _row(label: str, variant: dict, eager: dict) -> str:
    step, eager_step = (statistics.median(v["timings"]["steps"]) * 1e3 for v in (variant, eager))
    memory = variant["timings"]["peak_memory"] / 2**30
    error = "" if variant["latents"] is None else f"{variant['latents']['relative_l2']:.1e}"
    return f"| {label} | {NAMES[variant['name']]} | {step:.1f} | {eager_step / step:.2f}× | {memory:.2f} | {error} |"


if __name__ == "__main__":
    sys.exit(main())
