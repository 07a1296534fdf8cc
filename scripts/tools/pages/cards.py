"""The tables of whole pipelines within a cap on the GPU's memory, and of their text encoder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from scripts.tools.pages.cells import marked, table_of, versions
from turbo_rcm_patch.amounts import in_gb

HOST_MEMORY = {1: 1.25, 2: 2.5}  # by the number of transformers, times the 8-bit weights of one, wanted at most
DIFFUSERS = "-diffusers"  # the end of the name of a run that times diffusers' own offloading
PREDICTED = 1.10  # a predicted peak over the measured one, at most; at least 1
IN_BF16 = ("patched", "patched, CUDA graph")  # variants of scripts/benchmarks/text_encoder.py
ENCODER_TOKENS, ENCODER_MS = 512, 15  # the longest prompt, and what these may take for it


class Limits(NamedTuple):
    """The limits of a run within a cap.

    video, step: the largest ratio of the time to that without a cap. peak: the most bytes of a step.
    """

    video: float = 1.10
    step: float = math.inf
    peak: float = math.inf


def cards_of(runs: Mapping[str, dict]) -> list[list[dict]]:
    """Return the runs of each pipeline within a cap: diffusers' own offloading, if it was timed, then ours."""
    names = {name.removesuffix(DIFFUSERS): None for name, run in runs.items() if "cards" in run}
    return [[runs[one] for one in (name + DIFFUSERS, name) if one in runs] for name in names]


def cards_table(runs: Sequence[dict]) -> str:
    """Return the results page's part on a pipeline: every variant and card of its runs, and the peak of each stage."""
    settings = runs[-1]["settings"]
    limits = _limits(settings)
    rows = [cells for run in runs for cells in _cells(run, limits)]
    header = ["variant", "card", "what streams", "VAE", "video, s", "a step, s", "peak of each stage, measured, GB"]
    bus = settings["bus_bytes_per_second"] / 1e9
    made = "frames and sound" if settings.get("sound") else "frames"
    return (
        f"{_name(settings)} from a prompt of {settings['tokens']} tokens to {made}, {settings['steps']} steps, on a "
        f"GPU whose memory is capped ({_versions(runs)}; median of {settings['repeats']}; a copy "
        f"from pinned memory moves {bus:.0f} GB/s). In brackets stand the peaks that were predicted before the run "
        f"(1.00 to {PREDICTED:.2f}× is wanted) and times over those without a cap ({_wanted(limits)}):\n\n"
        + table_of(header, rows)
    )


def _versions(runs: Sequence[dict]) -> str:
    """Return the versions of our run, and those of diffusers' own offloading if they are others."""
    ours, *others = dict.fromkeys(versions(run["environment"]) for run in reversed(runs))
    return "; diffusers' offloading with ".join((ours, *others))


def _limits(settings: dict) -> Limits:
    if settings["experts"] == 2:
        return Limits(video=1.15)
    if (settings["config"], settings["height"]) == ("wan2.1-14b", 480):
        return Limits(step=1.05, peak=3.5 * 2**30)
    return Limits()


def _wanted(limits: Limits) -> str:
    wanted = f"at most {limits.video:.2f}× is wanted"
    if limits.step < math.inf:
        wanted += f", for a step {limits.step:.2f}× and, while denoising, a peak of {in_gb(limits.peak)} GB"
    return wanted


def _cells(run: dict, limits: Limits) -> Iterator[list[str]]:
    """Yield the rows of a run's variants and cards. Our times within a cap stand beside those without it."""
    whole = {row["variant"]: row for row in run["cards"] if row["card"] is None}
    for row in run["cards"]:
        seconds, step = "does not fit", ""
        if row["seconds"] is not None:
            beside = whole.get(row["variant"]) if row["card"] else None
            once = ", once" if row.get("videos", run["settings"]["repeats"]) < run["settings"]["repeats"] else ""
            seconds = _time(f"{row['seconds']:.2f}{once}", row, beside, "seconds", limits.video)
            step = _time(f"{row['step_seconds']:.3f}", row, beside, "step_seconds", limits.step)
        yield [
            row["variant"],
            row["card"] or "no cap",
            ", ".join(row["streaming"]) or "nothing",
            "in tiles" if row["tiles"] else "few frames at a time" if row.get("decoding") else "whole frames",
            seconds,
            step,
            _stages(row, math.inf if row["card"] is None else limits.peak),
        ]


def _time(text: str, row: dict, whole: dict | None, key: str, most: float) -> str:
    """Return a time with how many times it is that without a cap, with ✗ where that is above the limit."""
    if whole is None or whole["seconds"] is None:
        return text
    ratio = row[key] / whole[key]
    return marked(f"{text} ({ratio:.2f}×)", ratio > most)


def host_memory(run: dict) -> str:
    """Return the results page's sentence on the host's memory of a converted model that is fitted into a card."""
    settings, figures = run["settings"], run["host_memory"]
    share, wanted = figures["peak"] / figures["weights"], HOST_MEMORY[settings["experts"]]
    experts = ", two experts" if settings["experts"] == 2 else ""
    times = marked(f"{share:.2f}×", share > wanted)
    return (
        f"`load_converted` and `fit` of {settings['config']}{experts} for {settings['vram']} take "
        f"{in_gb(figures['peak'])} GB of the host's memory at most, {in_gb(figures['pinned'])} GB of it pinned. "
        f"That is {times} one transformer's {in_gb(figures['weights'])} GB in 8 bits ({wanted}× is wanted at most).\n"
    )


def text_encoder_table(run: dict) -> str:
    """Return the results page's part on the text encoder: each variant with its time, memory and error."""
    rows = [
        [
            row["variant"],
            str(row["tokens"]),
            _encoder_time(row),
            in_gb(row["weights"]),
            "" if row["beside"] is None else in_gb(row["beside"]),
            f"{row['of_bf16']:.2f}×",
        ]
        for row in run["rows"]
    ]
    header = ["text encoder", "tokens", "ms", "weights on the GPU, GB", "beside them, GB", "error over bf16's"]
    return (
        f"UMT5-XXL with random weights ({versions(run['environment'])}), prompts padded to {run['settings']['padded']} "
        f"tokens. The error is that of the embeddings against fp32. With all weights on the GPU in bf16, {ENCODER_MS} "
        f"ms are wanted at most for {ENCODER_TOKENS} tokens:\n\n" + table_of(header, rows)
    )


def _encoder_time(row: dict) -> str:
    """Return the milliseconds of a prompt, with ✗ where they are above the limit."""
    ms = row["seconds"] * 1e3
    is_limited = row["variant"] in IN_BF16 and row["tokens"] == ENCODER_TOKENS
    return marked(f"{ms:.1f}", is_limited and ms > ENCODER_MS)


def _name(settings: dict) -> str:
    experts = ", two experts" if settings["experts"] == 2 else ""
    size = f"{settings['num_frames']}×{settings['height']}×{settings['width']}"
    return f"{settings['config']}{experts}, {size}"


def _stages(row: dict, most: float) -> str:
    """Return the measured peak of each stage, with the predicted one in brackets, both with ✗ where they miss a limit.

    The stages come in the order in which they ran. most: the bytes of a step's peak.
    """
    return ", ".join(_peak(row, stage, most) for stage in row["allocated"])


def _peak(row: dict, stage: str, most: float) -> str:
    measured, predicted = row["allocated"][stage], row.get("peaks", {}).get(stage)
    text = f"{stage} {marked(in_gb(measured), stage == 'denoising' and predicted is not None and measured > most)}"
    if predicted is None:
        return text
    return f"{text} ({marked(in_gb(predicted), not measured <= predicted <= PREDICTED * measured)})"
