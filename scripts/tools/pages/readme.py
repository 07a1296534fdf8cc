"""The README's generated parts: a line of figures, the tiers, and the cards.

The results page says which figures miss their target.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator

from scripts.tools.pages.charts import (
    frames_of,
    name_of,
    runs_of_tiers,
    speedups_by_tier,
    start_of,
    tier_of_run,
    title_of,
    whole_videos,
)
from turbo_rcm_patch.amounts import in_gb, parse_amount
from turbo_rcm_patch.bench.variants import COMPILED, PATCHED, UNPATCHED
from turbo_rcm_patch.config import PRESETS
from turbo_rcm_patch.tiers import EXACT, TIERS

from .cells import table_of

USES = {
    "exact": "every model; no block may err more than {factor} times as much as the unpatched one",
    "quantized": "every model; `verify --keep-out` finds layers that 8 bits do not suit",
    "sparse": "weights that were trained with it: TurboWan, TurboT2AV",
    "block_sparse": "every model, without training, from {tokens} tokens on; `verify` shows what it leaves out",
}
TIERS_HEADER = (
    "preset",
    "a step over `torch.compile`",
    "peak memory over `torch.compile`'s",
    "error of a step to fp32",
    "for",
)
INSTALL = "install.json"  # from install_size.py
IN_8_BITS = "before `fit`: `trp.patch_text_encoder(pipe, in_8_bits=True)`"  # the line that a row takes
CARDS_HEADER = (
    "card tried",
    "pipeline, video",
    "tier",
    "peak, GB",
    "RAM, GB",
    "a video, s",
    "the same with all memory, s",
)


def headline(results: dict) -> str:
    """Return the line of figures of a GPU: the steps of the first model in every tier, and whole videos of it."""
    steps = speedups_by_tier(results["runs"])
    if not steps:
        return ""
    model, tiers = next(iter(steps.items()))
    named = [f"{ratio:.2f}× ({tier})" for tier, ratio in tiers.items()]
    line = (
        f"On one **{results['gpu']}** a denoising step of {' at '.join(model.splitlines())}, is {_and(named)} as fast "
        f"as with `torch.compile`.{_seconds(results['runs'], model)}"
    )
    return _wrapped(line)


def _seconds(runs: dict, model: str) -> str:
    """Return a sentence on the whole videos of a model that one GPU made, with its VAE as it is, or "" without any.

    They are those from a prompt, or from embeddings if there are none.
    """
    videos = [
        run for run in whole_videos(runs).values() if title_of(run) == model and "vae_dtype" not in run["settings"]
    ]
    if not videos:
        return ""
    videos = [run for run in videos if start_of(run) == "prompt"] or videos
    totals = {tier_of_run(run): _total(run, PATCHED) for run in videos}
    ours = _and([f"{seconds:.2f} s ({tier})" for tier, seconds in totals.items()])
    compiled, unpatched = (_range([_total(run, name) for run in videos], _tenths) for name in (COMPILED, UNPATCHED))
    count = videos[0]["settings"]["num_inference_steps"]
    return (
        f" A {count}-step video, {start_of(videos[0])} to frames, takes {ours}; with "
        f"`torch.compile` {compiled} s, in diffusers {unpatched} s."
    )


def _total(run: dict, name: str) -> float:
    return next(variant["timings"]["total"] for variant in run["variants"] if variant["name"] == name)


def _and(parts: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def tiers_table(runs: dict) -> str:
    """Return a row for each tier, with the range of each figure over the models that ran in it."""
    models = runs_of_tiers(runs).values()
    rows = []
    for tier in TIERS:
        found = [tiers[tier] for tiers in models if tier in tiers]
        if not found:
            continue
        steps, compiled = ([variants[name] for variants in found] for name in (tier, COMPILED))
        ratios = [one.milliseconds / ours.milliseconds for one, ours in zip(compiled, steps, strict=True)]
        memory = [ours.peak / one.peak for one, ours in zip(compiled, steps, strict=True) if ours.peak is not None]
        errors = [ours.error for ours in steps if ours.error is not None]
        name = f'`"{tier}"`' + (", the default" if tier == EXACT.name else "")
        error = _range(errors, _percent) if errors else "the model's own: `verify`"
        use = USES[tier].format(factor=EXACT.limits.factor, tokens=PRESETS["block_sparse"].min_tokens)
        rows.append([name, _range(ratios, _times), _range(memory, _times) if memory else "", error, use])
    unpatched = [run[UNPATCHED].error for tiers in models for run in tiers.values() if UNPATCHED in run]
    return table_of([*TIERS_HEADER[:3], _error_header(unpatched), *TIERS_HEADER[4:]], rows)


def _error_header(unpatched: Iterable[float | None]) -> str:
    """Return the header of the errors, with the range of those of the unpatched models."""
    errors = [error for error in unpatched if error is not None]
    return TIERS_HEADER[3] + (f"; unpatched {_range(errors, _percent)}" if errors else "")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×"


def _tenths(seconds: float) -> str:
    return f"{seconds:.1f}"


def _range(values: Iterable[float], shown: Callable[[float], str]) -> str:
    low, high = shown(min(values)), shown(max(values))
    return low if low == high else f"{low} to {high}"


def cards_table(runs: Iterable[dict]) -> str:
    """Return a row for each pipeline and video in 8 bits: the smallest card that it fits, in the fastest way."""
    rows: dict[tuple[str, int], tuple[float, list[str]]] = {}
    for run in runs:
        for key, row in _fitted(run):
            rows[key] = min(rows.get(key, row), row, key=lambda one: round(one[0], 1))  # as shown; the first of equals
    smallest: dict[str, int] = {}
    for pipeline, card in sorted(rows):
        smallest.setdefault(pipeline, card)
    return table_of(CARDS_HEADER, [rows[key][1] for key in sorted(smallest.items(), key=lambda item: item[::-1])])


def _fitted(run: dict) -> Iterator[tuple[tuple[str, int], tuple[float, list[str]]]]:
    """Yield pipeline and card, and the seconds with the row's cells, of what fits."""
    whole = {row["variant"]: row["seconds"] for row in run["cards"] if row["card"] is None}
    pipeline = f"{name_of(run['settings'])}, {frames_of(run['settings'])}"
    for row in run["cards"]:
        variant, card, seconds = row["variant"], row["card"], row["seconds"]
        if card is None or seconds is None or variant not in whole or not variant.startswith("quantized"):
            continue
        peak, ram = in_gb(max(row["allocated"].values())), f"{_on_host(row) / 1e9:.0f}"
        tier = variant.replace("text encoder in 8 bits", IN_8_BITS)
        cells = [card.replace("GB", " GB"), pipeline, tier, peak, ram, f"{seconds:.1f}", f"{whole[variant]:.1f}"]
        yield (pipeline, parse_amount(card)), (seconds, cells)


def _on_host(row: dict) -> int:
    """Return the bytes of a row's models that stay on the host, without the weights that restore() needs."""
    return sum(one["blocks"] + one["table"] for one in row["components"] if one["name"] in row["streaming"])


def install_line(sizes: dict) -> str:
    """Return how large an environment with this package is."""
    gpu, cpu = sizes["gpu"], sizes["cpu"]
    line = (
        f"The install takes {gpu['bytes'] / 1e9:.1f} GB with torch {gpu['torch']} for CUDA, of which this package is "
        f"{gpu['package_bytes'] / 1e6:.0f} MB. For a CPU alone it takes {cpu['bytes'] / 1e9:.1f} GB: the first "
        "line is then `pip install torch --index-url https://download.pytorch.org/whl/cpu`."
    )
    return _wrapped(line)


def _wrapped(line: str) -> str:
    return textwrap.fill(line, 120, break_long_words=False, break_on_hyphens=False) + "\n"
