"""Time the first patched step and decode: with an empty Triton cache, and in a new process with a filled one.

    python scripts/benchmarks/first_step.py --config wan2.1-1.3b --json first-step.json

Each process runs both unpatched first, so that what PyTorch itself loads and sets up does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict

import torch

from turbo_rcm_patch.bench.cases import build_pipeline, install_few_steps, random_inputs
from turbo_rcm_patch.bench.environment import describe_environment
from turbo_rcm_patch.bench.timing import timed_generation
from turbo_rcm_patch.cli.files import json_file, write_json
from turbo_rcm_patch.patching import patch
from turbo_rcm_patch.patching.families import CASES

STEPS = ("unpatched", "first patched", "second patched")


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    if options.child:
        print(json.dumps(measure(options.config, options.frames)))
        return 0
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--child", "--config", options.config]
        if options.frames is not None:
            command += ["--frames", str(options.frames)]
        seconds = {name: run_child(command, cache) for name in ("empty cache", "filled cache")}
    for name, steps in seconds.items():
        print(f"{name:14}", *(f"{step} {value:.2f} s" for step, value in steps.items()), sep="  ")
    if options.json is not None:
        environment = asdict(describe_environment(torch.device("cuda")))
        settings = {"config": options.config, "frames": options.frames or CASES[options.config].frames}
        write_json(options.json, {"settings": settings, "environment": environment, "seconds": seconds})
    return 0


def run_child(command: list[str], cache: str) -> dict[str, float]:
    child = subprocess.run(command, env={**os.environ, "TRITON_CACHE_DIR": cache}, stdout=subprocess.PIPE, check=True)
    return json.loads(child.stdout.splitlines()[-1])


def measure(config: str, frames: int | None) -> dict[str, float]:
    """Return the seconds of three generations' denoising steps, by the names in STEPS, and of their decodes.

    A decode's name is the step's with " decode" behind it.
    """
    case = CASES[config]
    pipe = build_pipeline(case, torch.bfloat16, torch.device("cuda"))
    install_few_steps(pipe)
    pipe.set_progress_bar_config(disable=True)
    call = {
        **random_inputs(pipe),
        "height": case.height,
        "width": case.width,
        "num_frames": frames or case.frames,
        "num_inference_steps": 1,
        "guidance_scale": 1.0,
        "output_type": "pt",
    }
    timings = [timed_generation(pipe, **call).timings]
    with patch(pipe):
        timings += [timed_generation(pipe, **call).timings for _ in STEPS[1:]]
    steps = {name: timing.steps[0] for name, timing in zip(STEPS, timings, strict=True)}
    return steps | {f"{name} decode": timing.vae_decode for name, timing in zip(STEPS, timings, strict=True)}


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=CASES, default="wan2.1-1.3b")
    parser.add_argument("--frames", type=int, help="default: the config's usual size")
    parser.add_argument("--json", type=json_file, help="write the figures with the GPU and versions")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA GPU, and these sizes are for one.")
    return options


if __name__ == "__main__":
    sys.exit(main())
