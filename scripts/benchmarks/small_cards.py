"""Time whole pipelines, prompt to frames, within a cap on the GPU's memory, beside the same without a cap.

    python scripts/benchmarks/small_cards.py --config wan2.1-1.3b --vram 6GB --json cards.json

The weights are random, with Wan's own text encoder at its real size, and the prompt is random tokens. `trp.fit` plans
for the card; torch may then allocate no more than the card has, less what CUDA itself takes. The predicted peak of the
plan stands beside the measured one. Exits with 1 if a run does not fit.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from diffusers import WanPipeline
from transformers import BatchEncoding, UMT5EncoderModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `scripts` can be imported

import turbo_rcm_patch as trp
from scripts.benchmarks.memory_cap import with_random_weights
from turbo_rcm_patch.amounts import in_gb, parse_amount
from turbo_rcm_patch.bench.environment import describe_environment
from turbo_rcm_patch.cli.files import json_file, write_json
from turbo_rcm_patch.memory.plan import CONTEXT
from turbo_rcm_patch.patching.families import CASES
from turbo_rcm_patch.patching.families.wan.cases import UMT5_XXL
from turbo_rcm_patch.scheduler import RCMScheduler
from turbo_rcm_patch.tables import table

TOKENS, STEPS = 512, 4


class RandomTokens:
    """Stands in for the tokenizer: a prompt is always the same random tokens, as many as the pipeline asks for."""

    def __call__(self, prompts: list[str], *, max_length: int, **_: object) -> BatchEncoding:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(1, UMT5_XXL.vocab_size, (len(prompts), max_length), generator=generator)
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    device = torch.device("cuda")
    size = {"height": options.height, "width": options.width, "num_frames": options.frames}
    pipe = random_pipeline(options.config, options.experts)
    trp.use_rcm(pipe)
    pipe.set_progress_bar_config(disable=True)
    preset = trp.Quantized(restorable=False) if options.preset == "quantized" else options.preset
    trp.patch(pipe, preset)
    rows = list(measure_all(pipe, options.vram, size, options.repeats, device))
    header = ("card", "what streams", "VAE", "predicted peak, GB", "peak, GB", "video, s", "of a step, s")
    print(table([header, *map(cells, rows)]))
    if options.json is not None:
        settings = {"config": options.config, "experts": options.experts, "preset": options.preset, **size}
        settings |= {"steps": STEPS, "repeats": options.repeats}
        write_json(
            options.json, {"settings": settings, "environment": asdict(describe_environment(device)), "cards": rows}
        )
    return 0 if all(row["seconds"] is not None for row in rows) else 1


def measure_all(
    pipe: WanPipeline, cards: list[str], size: dict[str, int], repeats: int, device: torch.device
) -> Iterator[dict]:
    """Yield a row for each card, and first one for the whole GPU."""
    total = torch.cuda.get_device_properties(device).total_memory
    for card in (None, *cards):
        torch.cuda.set_per_process_memory_fraction(
            1.0 if card is None else min(1.0, (parse_amount(card) - CONTEXT) / total)
        )
        plan = trp.fit(pipe, card, **size, device=device)
        print(plan, flush=True)
        try:
            figures = measure(pipe, size, repeats)
        except torch.OutOfMemoryError as error:
            print(f"{card}: {error}")
            figures = {"seconds": None, "step_seconds": None, "allocated": None, "reserved": None}
        plan.undo()
        gc.collect()
        torch.cuda.empty_cache()
        yield {
            "card": card,
            "streaming": sorted(plan.placement.streaming),
            "tiles": plan.placement.tiles,
            "predicted": plan.peaks,
            **figures,
        }


def measure(pipe: WanPipeline, size: dict[str, int], repeats: int) -> dict:
    """Return the median time of a video and of a step, and the peaks of torch's memory in bytes."""
    videos, steps = [], []
    for run in range(1 + repeats):  # the first one compiles, and learns the order of the blocks
        torch.cuda.synchronize()
        if run == 1:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        ends = []
        start = time.perf_counter()
        frames = pipe("a prompt", **size, **call_options(ends, pipe._execution_device)).frames
        videos.append(time.perf_counter() - start)
        steps += [later - earlier for earlier, later in itertools.pairwise(ends)] if run else []
        assert math.isfinite(float(frames.mean()))
        del frames
    return {
        "seconds": statistics.median(videos[1:]),
        "step_seconds": statistics.median(steps),
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def call_options(ends: list[float], device: torch.device) -> dict[str, object]:
    """Return the arguments of a call that appends the time at the end of each step."""

    def at_step_end(*_: object) -> dict:
        torch.cuda.synchronize(device)
        ends.append(time.perf_counter())
        return {}

    return {
        "num_inference_steps": STEPS,
        "guidance_scale": 1.0,
        "max_sequence_length": TOKENS,
        "output_type": "np",
        "generator": torch.Generator(device).manual_seed(0),
        "callback_on_step_end": at_step_end,
    }


def random_pipeline(config: str, experts: int) -> WanPipeline:
    """Return a pipeline on the CPU in bf16, with one transformer or with two of the same size."""
    case = CASES[config]
    transformers = [with_random_weights(lambda: case.transformer_class(**case.transformer)) for _ in range(experts)]
    second = {"transformer_2": transformers[1], "boundary_ratio": 0.875} if experts == 2 else {}
    return WanPipeline(
        tokenizer=RandomTokens(),
        text_encoder=with_random_weights(lambda: UMT5EncoderModel(UMT5_XXL)),
        vae=with_random_weights(lambda: case.vae_class(**case.vae)),
        transformer=transformers[0],
        scheduler=RCMScheduler(),
        expand_timesteps=case.expand_timesteps,
        **second,
    )


def cells(row: dict) -> tuple[str, ...]:
    """Return a row of the table."""
    measured = (
        ("no", "no", "no")
        if row["seconds"] is None
        else (
            in_gb(row["reserved"]),
            f"{row['seconds']:.2f}",
            f"{row['step_seconds']:.3f}",
        )
    )
    streaming = ", ".join(row["streaming"]) or "nothing"
    return (
        row["card"] or "whole",
        streaming,
        "tiles" if row["tiles"] else "whole",
        in_gb(max(row["predicted"].values())),
        *measured,
    )


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=CASES, default="wan2.1-1.3b")
    parser.add_argument("--experts", type=int, choices=(1, 2), default=1, help="2: two transformers, as A14B has")
    parser.add_argument("--preset", choices=("exact", "quantized"), default="quantized")
    parser.add_argument("--vram", nargs="+", default=["8 GB"], help="cards, such as 8GB")
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=json_file, help="write all figures with the GPU and versions")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA GPU, whose memory this is about.")
    return options


if __name__ == "__main__":
    sys.exit(main())
