"""Time a process's first video and its second, from a prompt to frames, in each tier, with a filled Triton cache.

    python scripts/benchmarks/first_video.py --json first-video.json

One process fills the cache: it makes both videos in every tier, and its times do not count. Then each tier has a
process of its own. This builds a pipeline with random weights and Wan's text encoder, patches both, and makes the same
video twice. No model runs before the first video, so it also pays for what PyTorch sets up at a model's first call.
CUDA itself starts while the pipeline is built. Building and patching are timed apart.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `scripts` can be imported

from scripts.benchmarks import end_to_end
from scripts.benchmarks.first_step import run_child
from scripts.benchmarks.stand_ins import TOKENS
from scripts.tools.pages.ops import first_video_table
from turbo_rcm_patch.bench.environment import describe_environment
from turbo_rcm_patch.bench.timing import timed_generation
from turbo_rcm_patch.cli.files import json_file, write_json
from turbo_rcm_patch.config import resolve_config
from turbo_rcm_patch.patching.families import CASES

TIERS = ("exact", "quantized", "sparse")
STEPS = 4


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    if options.child:
        print(json.dumps({preset: measure(options.config, preset) for preset in options.presets}))
        return 0
    command = [sys.executable, __file__, "--child", "--config", options.config, "--presets"]
    with tempfile.TemporaryDirectory() as cache:
        run_child([*command, *options.presets], cache)
        videos = {preset: run_child([*command, preset], cache)[preset] for preset in options.presets}
    case = CASES[options.config]
    size = {"height": case.height, "width": case.width, "frames": case.frames}
    settings = {"config": options.config, **size, "steps": STEPS, "tokens": TOKENS}
    environment = asdict(describe_environment(device()))
    figures = {"settings": settings, "environment": environment, "first_videos": videos}
    print(first_video_table(figures))
    if options.json is not None:
        write_json(options.json, figures)
    return 0


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure(config: str, preset: str) -> dict[str, object]:
    """Return the seconds of building and of patching a pipeline, and the timings of its first two videos."""
    gc.collect()  # frees the last tier's pipeline, in the process that fills the cache
    tier, options = resolve_config(preset), end_to_end.parse_options(["--config", config, "--prompt"])
    dtype = torch.bfloat16 if device().type == "cuda" else torch.float32
    start = time.perf_counter()
    pipe = end_to_end.prepared_pipeline(options, tier, dtype, device())
    pipe.set_progress_bar_config(disable=True)
    built = seconds_now()
    with end_to_end.patched(pipe, tier):
        patched = seconds_now()
        first, second = (asdict(timed_generation(pipe, **call_of(config)).timings) for _ in range(2))
    return {"build": built - start, "patch": patched - built, "first": first, "second": second}


def seconds_now() -> float:
    """Return the time once the GPU has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def call_of(config: str) -> dict[str, object]:
    """Return the arguments of a pipeline's call, from a prompt to frames."""
    case = CASES[config]
    return {
        "prompt": "a prompt",
        "max_sequence_length": TOKENS,
        "height": case.height,
        "width": case.width,
        "num_frames": case.frames,
        "num_inference_steps": STEPS,
        "guidance_scale": 1.0,
        "output_type": "np",
        "generator": torch.Generator().manual_seed(0),
    }


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=CASES, default="wan2.1-1.3b", help="a model of Wan's (default %(default)s)")
    parser.add_argument("--presets", nargs="+", choices=TIERS, default=TIERS, help="tiers (default: all three)")
    parser.add_argument("--json", type=json_file, help="write the figures with the GPU and versions")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if CASES[options.config].vae_class is not AutoencoderKLWan:
        parser.error(f"Wan's text encoder is for Wan's models; --config is {options.config}.")
    return options


if __name__ == "__main__":
    sys.exit(main())
