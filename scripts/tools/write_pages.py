"""Write results/README.md, its charts, the README's figures and results/writeup.md, from the JSON files in results/.

python scripts/tools/write_pages.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `scripts` can be imported

from scripts.tools.pages.block_sparsity import block_sparsity_page
from scripts.tools.pages.cards import cards_of, cards_table, host_memory, text_encoder_table
from scripts.tools.pages.cells import chart, folded, versions_and_commits
from scripts.tools.pages.charts import chart_data, draw_charts, step_runs, whole_videos
from scripts.tools.pages.checks import attention_errors_table, kept_table, parts_table, verified_table
from scripts.tools.pages.conversion import CONVERSION, conversion_table
from scripts.tools.pages.ops import (
    OPS_QUANTIZED_HEADER,
    OPS_SPARSE_HEADER,
    exchange_table,
    first_step,
    first_video_table,
    group_offload_table,
    host_time,
    implementations_table,
    memory_cap,
    ops_table,
    sanitizers_sentence,
    tests_table,
    traffic_table,
)
from scripts.tools.pages.readme import INSTALL, headline, install_line, tiers_table
from scripts.tools.pages.readme import cards_table as readme_cards
from scripts.tools.pages.sound import sound_table
from scripts.tools.pages.steps import short_tables, steps_table, whole_videos_table
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
from scripts.tools.pages.vae import vae_table
from scripts.tools.writeup import write as write_writeup

ROOT = Path(__file__).resolve().parents[2]
PAGE = "README.md"  # in the folder of results
WRITTEN = "<!-- {0}: written by scripts/tools/write_pages.py -->", "<!-- end of {0} -->"  # around parts of the README
WRITEUP = "nvidia-h200.json"  # the GPU that the write-up is about
# Runs of single ops, with the title of their table and its header if it is another one.
OPS = {
    "ops": ("Single ops in the model's dtype",),
    "ops-quantized": ("Single ops in 8 bits", OPS_QUANTIZED_HEADER),
    "ops-sparse": ("Single sparse ops", OPS_SPARSE_HEADER),
}
# The newest first. Others come before these.
GPUS = ("nvidia-h200", "nvidia-h100")
INTRODUCTION = """# Results

All figures that were measured. Each GPU, the newest first, begins with a summary. Its tables open at a click. ✗ marks
a result that misses its target. "4 layers" means that so many of a model's layers ran, all of which take the same time.
[The designs that were tried](../docs/designs.md) have a page of their own.

<details markdown="1"><summary>Where the figures come from</summary>

`python scripts/tools/write_pages.py` writes this page from the JSON files beside it. `python
scripts/benchmarks/gpu_session.py --results results` writes those files, except for seven: `conversion.json` by
`conversion.py`, `block-sparse-tiny.json` by `measure_block_sparsity.py`, `sparse-tiny.json` by `evaluate_sparse.py` and
`install.json` by `install_size.py`, all in `scripts/benchmarks/`; `training.json` by `train_embedded.py` and
`lora-tiny.json` by `train_lora.py` in
`scripts/training/`; and `side-by-side.json` by `turbo-rcm compare`.

</details>
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
    others = (TRAINING, CONVERSION, BLOCK_SPARSE, SPARSE, LORA, SIDE_BY_SIDE, INSTALL)
    return [path for path in sorted(folder.glob("*.json")) if path.name not in others]


def with_results(text: str, folder: Path) -> str:
    """Return the README's text with the parts between its markers written anew.

    They show the results of the GPU with the most measurements.
    """
    results = [json.loads(path.read_text()) for path in result_files(folder)]
    if not results:
        return text
    most = max(results, key=lambda one: len(one["runs"]))
    parts = {
        "figures": headline(most),
        "tiers": tiers_table(most["runs"]),
        "cards": readme_cards(chain.from_iterable(cards_of(most["runs"]))),
    }
    if (folder / INSTALL).exists():
        parts["install"] = install_line(json.loads((folder / INSTALL).read_text()))
    for name, part in parts.items():
        text = _between(text, [marker.format(name) for marker in WRITTEN], part)
    return text


def _between(text: str, markers: Sequence[str], part: str) -> str:
    """Return a text with the part between two markers, if it has them, written anew."""
    if markers[0] not in text:
        return text
    before, rest = text.split(markers[0])
    return f"{before}{markers[0]}\n{part}{markers[1]}{rest.split(markers[1])[1]}"


def results_page(folder: Path) -> str:
    """Return the page of all tables: for each GPU what was measured, then what the embedded model shows.

    Details are folded.
    """
    training = json.loads((folder / TRAINING).read_text()) if (folder / TRAINING).exists() else None
    parts = [INTRODUCTION]
    for path in sorted(result_files(folder), key=_age):
        results = json.loads(path.read_text())
        parts.append(f"## {results['gpu']}\n")
        parts.append(_measured(path, results["runs"], results.get("tests", [])))
        parts.append(folded("The tiny model's accuracy", evaluated(path.name, results["runs"], training)))
        parts.append(sanitizers_sentence(results.get("sanitizers", {})))
    if (folder / BLOCK_SPARSE).exists():
        timed = (json.loads(path.read_text())["runs"].get("ops-sparse") for path in result_files(folder))
        measured = json.loads((folder / BLOCK_SPARSE).read_text())
        parts.append(block_sparsity_page(measured, BLOCK_SPARSE, next(filter(None, timed), None)))
    others = {SPARSE: sparse_table, LORA: lora_table, CONVERSION: conversion_table, SIDE_BY_SIDE: side_by_side}
    for name, table in others.items():
        if (folder / name).exists():
            parts.append(table(json.loads((folder / name).read_text())))
    return "\n".join(filter(None, parts))


def _age(path: Path) -> int:
    """Return the place of a GPU's results on the page, the newest GPU first."""
    return next((place for place, name in enumerate(GPUS, 1) if path.stem.startswith(name)), 0)


def _measured(path: Path, runs: dict, tests: list[dict]) -> str:
    """Return a summary of what one GPU ran, then all tables, folded."""
    environments = [run["environment"] for run in runs.values() if "environment" in run]
    steps = step_runs(runs)
    verified = {name: run for name, run in runs.items() if "blocks" in run}
    traffic = [run for run in runs.values() if "pass_bytes" in run]
    parts = [
        chart(path, "tiers", "Speed-up of a denoising step over torch.compile") if "tiers" in chart_data(runs) else "",
        short_tables(runs),
        folded(
            "Versions, and the tests on this GPU",
            f"From `{path.name}`: {versions_and_commits(environments)}.\n" if environments else "",
            tests_table(tests) if tests else "",
        ),
        folded("All variants of a denoising step", steps_table(steps) if steps else ""),
        folded("All variants of a whole video", whole_videos_table(whole_videos(runs)) if whole_videos(runs) else ""),
        folded("Models within a cap of memory, and streaming", *_within_memory(runs)),
        folded("The first step, and the host's time", *_host(runs)),
        folded(
            "An attention that several GPUs share",
            *(exchange_table(run) for name, run in runs.items() if name.startswith("exchange-")),
        ),
        folded("Video with sound", *(sound_table(run) for run in runs.values() if "sound" in run)),
        *(folded(title, ops_table(runs[name], *header)) for name, (title, *header) in OPS.items() if name in runs),
        folded(
            "Errors of blocks, of their parts and of decoding",
            verified_table(verified) if verified else "",
            *(parts_table(run) for run in runs.values() if run.get("parts")),
            attention_errors_table(runs["attention-error"]) if "attention-error" in runs else "",
        ),
        folded(
            "The key blocks that layers keep",
            *(kept_table(name, run) for name, run in runs.items() if run.get("kept")),
        ),
    ]
    if traffic:
        table = traffic_table(traffic)
        parts.append(folded("Memory traffic", chart(path, "traffic", "Memory traffic of a Wan block"), table))
    if "implementations" in runs:
        parts.append(folded("The attention modules against each other", implementations_table(runs["implementations"])))
    return "\n".join(filter(None, parts))


def _within_memory(runs: dict) -> Iterator[str]:
    yield from (cards_table(pipeline) for pipeline in cards_of(runs))
    if "text-encoder" in runs:
        yield text_encoder_table(runs["text-encoder"])
    yield from (vae_table(run) for run in runs.values() if "vae" in run)
    yield from (memory_cap(run) for run in runs.values() if "cap_bytes" in run)
    yield from (host_memory(run) for run in runs.values() if "host_memory" in run)
    yield from (group_offload_table(run) for run in runs.values() if "offloaded_steps" in run)


def _host(runs: dict) -> Iterator[str]:
    if "first-step" in runs:
        yield first_step(runs["first-step"])
    if "first-video" in runs:
        yield first_video_table(runs["first-video"])
    yield from (host_time(run) for name, run in runs.items() if name.startswith("host-time"))


if __name__ == "__main__":
    sys.exit(main())
