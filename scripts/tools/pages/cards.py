"""The tables of whole pipelines within a cap on the GPU's memory, and of their text encoder."""

from __future__ import annotations

from collections.abc import Mapping

from scripts.tools.pages.cells import bold, table_of, versions
from turbo_rcm_patch.amounts import in_gb

HOST_MEMORY = {1: 1.25, 2: 2.5}  # by the number of transformers, times the 8-bit weights of one, wanted at most


def cards_of(runs: Mapping[str, dict]) -> list[dict]:
    """Return the runs of pipelines within a cap."""
    return [run for run in runs.values() if "cards" in run]


def cards_table(run: dict) -> str:
    """Return the results page's part on a pipeline: every variant and card, and the peak of each stage."""
    settings = run["settings"]
    rows = [
        [
            row["variant"],
            row["card"] or "no cap",
            ", ".join(row["streaming"]) or "nothing",
            "in tiles" if row["tiles"] else "few frames at a time" if row.get("decoding") else "whole frames",
            _seconds(row, settings["repeats"]),
            "" if row["seconds"] is None else f"{row['step_seconds']:.3f}",
            _stages(row),
        ]
        for row in run["cards"]
    ]
    header = ["variant", "card", "what streams", "VAE", "video, s", "a step, s", "peak of each stage, measured, GB"]
    bus = settings["bus_bytes_per_second"] / 1e9
    return (
        f"{_name(settings)} from a prompt of {settings['tokens']} tokens to frames, {settings['steps']} steps, on a "
        f"GPU whose memory is capped ({versions(run['environment'])}; median of {settings['repeats']}; a copy "
        f"from pinned memory moves {bus:.0f} GB/s). "
        "Predictions stand in brackets:\n\n" + table_of(header, rows)
    )


def _seconds(row: dict, repeats: int) -> str:
    if row["seconds"] is None:
        return "does not fit"
    once = ", once" if row.get("videos", repeats) < repeats else ""
    return f"{row['seconds']:.2f}{once}"


def host_memory(run: dict) -> str:
    """Return the results page's sentence on the host's memory of a converted model that is fitted into a card."""
    settings, figures = run["settings"], run["host_memory"]
    share, wanted = figures["peak"] / figures["weights"], HOST_MEMORY[settings["experts"]]
    experts = ", two experts" if settings["experts"] == 2 else ""
    times = bold(f"{share:.2f}×", share > wanted)
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
            f"{row['seconds'] * 1e3:.1f}",
            in_gb(row["weights"]),
            "" if row["beside"] is None else in_gb(row["beside"]),
            f"{row['of_bf16']:.2f}×",
        ]
        for row in run["rows"]
    ]
    header = ["text encoder", "tokens", "ms", "weights on the GPU, GB", "beside them, GB", "error over bf16's"]
    return (
        f"UMT5-XXL with random weights ({versions(run['environment'])}), prompts padded to {run['settings']['padded']} "
        "tokens. The error is that of the embeddings against fp32:\n\n" + table_of(header, rows)
    )


def _name(settings: dict) -> str:
    experts = ", two experts" if settings["experts"] == 2 else ""
    size = f"{settings['num_frames']}×{settings['height']}×{settings['width']}"
    return f"{settings['config']}{experts}, {size}"


def _stages(row: dict) -> str:
    """Return the measured peak of each stage, with the predicted one in brackets."""
    predicted = row.get("peaks", {})
    stages = ("text encoding", "image encoding", "VAE encoding", "denoising", "decoding")
    return ", ".join(
        f"{stage} {in_gb(row['allocated'][stage])}" + (f" ({in_gb(predicted[stage])})" if stage in predicted else "")
        for stage in stages
        if stage in row["allocated"]
    )
