"""Write the README's measured and evaluated sections from the JSON files in results/: no figure is typed by hand.

python scripts/readme_results.py
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MEASURED = "<!-- measured: written by scripts/readme_results.py -->", "<!-- end of measured -->"
HEADER = "| run | variant | step, ms | speed-up | peak memory, GiB | latents, rel. L2 to eager |\n" + "|---" * 6 + "|"
EVALUATED = "<!-- evaluated: written by scripts/readme_results.py -->", "<!-- end of evaluated -->"
EVALUATION, TRAINING = "evaluate-embedded.json", "training.json"
NAMES = {"unpatched": "eager diffusers", "torch.compile": "regional torch.compile", "patched": "patched (exact)"}


def main() -> int:
    readme = ROOT / "README.md"
    readme.write_text(with_results(readme.read_text(), ROOT / "results"))
    return 0


def with_results(text: str, results: Path) -> str:
    """The README's text with the sections between the markers rendered from the files of the results folder."""
    folders = sorted(path for path in results.iterdir() if path.is_dir())
    text = _replace(text, MEASURED, map(_folder_section, folders))
    return _replace(text, EVALUATED, map(_evaluation_section, folders))


def _replace(text: str, markers: tuple[str, str], sections: Iterable[str]) -> str:
    before, rest = text.split(markers[0])
    after = rest.split(markers[1])[1]
    return f"{before}{markers[0]}\n" + "\n".join(filter(None, sections)) + f"{markers[1]}{after}"


def _folder_section(folder: Path) -> str:
    runs = {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    runs = {name: run for name, run in runs.items() if "variants" in run}
    if not runs:
        return ""
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


def _evaluation_section(folder: Path) -> str:
    """Prompt accuracy of the embedded model and of its teacher; empty for a folder without an evaluation."""
    if not (folder / EVALUATION).exists():
        return ""
    evaluation = json.loads((folder / EVALUATION).read_text())
    attributes, rows, origin = list(evaluation["results"][0]["accuracy"]), [], ""
    if (folder / TRAINING).exists():
        training = json.loads((folder / TRAINING).read_text())
        taught = training["stages"]["teacher accuracy"]
        rows.append(["teacher, guided", taught["steps"], taught["accuracy"], None, None, None])
        minutes = training["seconds"] / 60
        origin = f"Trained in {minutes:.1f} minutes on one {training['environment']['gpu']} (`{TRAINING}`). "
    for result in evaluation["results"]:
        psnr = result["psnr_to_fp32"], result["psnr_to_exact"]
        rows.append([result["variant"], result["steps"], result["accuracy"], result["change"], *psnr])
    header = ["variant", "steps", *attributes, "vs unpatched", "PSNR to fp32, dB", "to exact, dB"]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for variant, steps, accuracy, change, *psnr in rows:
        shares = [_percent(accuracy[name]["share"]) for name in attributes]
        shares[-1] += f" ± {_percent(accuracy['overall']['standard_error'])}"
        changed = "" if change is None else f"{100 * change['share']:+.1f} ± {_percent(change['standard_error'])}"
        cells = [variant, str(steps), *shares, changed, *map(_decibels, psnr)]
        lines.append("| " + " | ".join(cells) + " |")
    environment = evaluation["environment"]
    return (
        f"\nShare of what {evaluation['settings']['n']} held-out captions ask for that the videos show, in %, overall "
        f"with its standard error; {environment['gpu']}, torch {environment['torch']}. {origin}"
        f"File: `results/{folder.name}/{EVALUATION}`.\n\n" + "\n".join(lines) + "\n"
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _decibels(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
