"""Write results/README.md, its charts, the README's tables and results/writeup.md, from the JSON files in results/.

python scripts/tools/write_pages.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `scripts` can be imported

from scripts.tools.pages.block_sparsity import block_sparsity_page
from scripts.tools.pages.cards import cards_of, cards_table, host_memory, short_cards_table, text_encoder_table
from scripts.tools.pages.cells import chart, versions
from scripts.tools.pages.charts import draw_charts, whole_videos
from scripts.tools.pages.checks import attention_errors_table, kept_table, parts_table, verified_table
from scripts.tools.pages.conversion import CONVERSION, conversion_table
from scripts.tools.pages.ops import (
    OPS_QUANTIZED_HEADER,
    OPS_SPARSE_HEADER,
    first_step,
    group_offload_table,
    host_time,
    implementations_table,
    memory_cap,
    ops_table,
    sanitizers_sentence,
    tests_table,
    traffic_table,
)
from scripts.tools.pages.sound import sound_table
from scripts.tools.pages.steps import short_steps, steps_table, whole_videos_table
from scripts.tools.pages.tiny_model import (
    BLOCK_SPARSE,
    LORA,
    SIDE_BY_SIDE,
    SPARSE,
    TRAINING,
    evaluated,
    lora_table,
    side_by_side,
    sparse_table,
)
from scripts.tools.writeup import write as write_writeup

ROOT = Path(__file__).resolve().parents[2]
PAGE = "README.md"  # in the folder of results
MEASURED = "<!-- measured: written by scripts/tools/write_pages.py -->", "<!-- end of measured -->"
CARDS = "<!-- cards: written by scripts/tools/write_pages.py -->", "<!-- end of cards -->"
WRITEUP = "nvidia-h200.json"  # the GPU that the write-up is about
INTRODUCTION = """# Results

`python scripts/tools/write_pages.py` writes this page from the JSON files beside it. `python
scripts/benchmarks/gpu_session.py --results results` writes those files, except for six: `conversion.json` by
`conversion.py`, `block-sparse-tiny.json` by `measure_block_sparsity.py` and `sparse-tiny.json` by `evaluate_sparse.py`,
all in `scripts/benchmarks/`; `training.json` by `train_embedded.py` and `lora-tiny.json` by `train_lora.py` in
`scripts/training/`; and `side-by-side.json` by `turbo-rcm compare`. A result that misses its target is bold.
[The designs that were tried](../docs/designs.md) have a page of their own.
"""


def main() -> int:
    folder = ROOT / "results"
    for path in result_files(folder):
        draw_charts(json.loads(path.read_text())["runs"], path)
    (folder / PAGE).write_text(results_page(folder))
    readme = ROOT / "README.md"
    readme.write_text(with_results(readme.read_text(), folder))
    write_writeup(folder / WRITEUP, ROOT / "docs/writeup.md.jinja", folder)
    return 0


def result_files(folder: Path) -> list[Path]:
    """Return the results of each GPU."""
    others = (TRAINING, CONVERSION, BLOCK_SPARSE, SPARSE, LORA, SIDE_BY_SIDE)
    return [path for path in sorted(folder.glob("*.json")) if path.name not in others]


def with_results(text: str, folder: Path) -> str:
    """Return the README's text with the parts between its markers written anew.

    They show the results of the GPU with the most measurements, and steps that only another GPU has timed.
    """
    runs = {path: json.loads(path.read_text())["runs"] for path in result_files(folder)}
    if not runs:
        return text
    path = max(runs, key=lambda path: len(runs[path]))
    first = runs.pop(path)
    text = _between(text, CARDS, short_cards_table(cards_of(first)) if cards_of(first) else "")
    return _between(text, MEASURED, _short(path, first, runs.values()))


def _between(text: str, markers: tuple[str, str], part: str) -> str:
    """Return a text with the part between two markers, if it has them, written anew."""
    if markers[0] not in text:
        return text
    before, rest = text.split(markers[0])
    return f"{before}{markers[0]}\n{part}{markers[1]}{rest.split(markers[1])[1]}"


def _short(path: Path, runs: dict, others: Iterable[dict]) -> str:
    """Return the README's part on a GPU, or "" if no step of a real model was measured on it.

    others: the runs of each other GPU.
    """
    steps = short_steps(path, runs, {name: run for other in others for name, run in other.items() if name not in runs})
    return steps


def results_page(folder: Path) -> str:
    """Return the page of all tables: for each GPU what was measured, then what the embedded model shows."""
    training = json.loads((folder / TRAINING).read_text()) if (folder / TRAINING).exists() else None
    parts = [INTRODUCTION]
    for path in result_files(folder):
        results = json.loads(path.read_text())
        parts.append(f"## {results['gpu']}\n")
        parts.append(_measured(path, results["runs"], results.get("tests", [])))
        parts.append(sanitizers_sentence(results.get("sanitizers", {})))
        parts.append(evaluated(path.name, results["runs"], training))
    if (folder / BLOCK_SPARSE).exists():
        timed = (json.loads(path.read_text())["runs"].get("ops-sparse") for path in result_files(folder))
        measured = json.loads((folder / BLOCK_SPARSE).read_text())
        parts.append(block_sparsity_page(measured, BLOCK_SPARSE, next(filter(None, timed), None)))
    if (folder / SPARSE).exists():
        parts.append(sparse_table(json.loads((folder / SPARSE).read_text())))
    if (folder / LORA).exists():
        parts.append(lora_table(json.loads((folder / LORA).read_text())))
    if (folder / CONVERSION).exists():
        parts.append(conversion_table(json.loads((folder / CONVERSION).read_text())))
    if (folder / SIDE_BY_SIDE).exists():
        parts.append(side_by_side(json.loads((folder / SIDE_BY_SIDE).read_text())))
    return "\n".join(filter(None, parts))


def _measured(path: Path, runs: dict, tests: list[dict]) -> str:
    """Return the steps, ops, checks, traffic and modules of one GPU, and the versions with which its tests passed."""
    environments = {versions(run["environment"]): None for run in runs.values() if "environment" in run}
    parts = [f"From `{path.name}`: {'; '.join(environments)}.\n"] if environments else []
    if tests:
        parts.append(tests_table(tests))
    steps = {name: run for name, run in runs.items() if "variants" in run and name not in whole_videos(runs)}
    traffic = [run for run in runs.values() if "pass_bytes" in run]
    if steps:
        parts.append(chart(path, "steps", "Speed-up of a denoising step over eager diffusers"))
        parts.append(steps_table(steps))
    if whole_videos(runs):
        parts.append(whole_videos_table(whole_videos(runs)))
    if "first-step" in runs:
        parts.append(first_step(runs["first-step"]))
    if "host-time" in runs:
        parts.append(host_time(runs["host-time"]))
    parts += [sound_table(run) for run in runs.values() if "sound" in run]
    parts += [memory_cap(run) for run in runs.values() if "cap_bytes" in run]
    parts += [cards_table(run) for run in cards_of(runs)]
    parts += [host_memory(run) for run in runs.values() if "host_memory" in run]
    if "text-encoder" in runs:
        parts.append(text_encoder_table(runs["text-encoder"]))
    parts += [group_offload_table(run) for run in runs.values() if "offloaded_steps" in run]
    if "ops" in runs:
        parts.append(ops_table(runs["ops"]))
    if "ops-quantized" in runs:
        parts.append(ops_table(runs["ops-quantized"], OPS_QUANTIZED_HEADER))
    if "ops-sparse" in runs:
        parts.append(ops_table(runs["ops-sparse"], OPS_SPARSE_HEADER))
    verified = {name: run for name, run in runs.items() if "blocks" in run}
    if verified:
        parts.append(verified_table(verified))
    parts += [parts_table(run) for run in runs.values() if run.get("parts")]
    if "attention-error" in runs:
        parts.append(attention_errors_table(runs["attention-error"]))
    parts += [kept_table(name, run) for name, run in runs.items() if run.get("kept")]
    if traffic:
        parts += [chart(path, "traffic", "Memory traffic of a Wan block"), traffic_table(traffic)]
    if "implementations" in runs:
        parts.append(chart(path, "modules", "Speed-up of the attention modules"))
        parts.append(implementations_table(runs["implementations"]))
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
