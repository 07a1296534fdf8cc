"""Check that `turbo-rcm tune` without the shipped measurements chooses as well as they do: each op, and a step's time.

    python scripts/check_tune.py --config wan2.1-1.3b --json tune.json

What is kept on this machine is hidden too, and left as it is. The step is of the config's usual size, with random
weights, timed in turns by the shipped choices and by tune's. Exits with 1 where tune's make it more than 2 % slower.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping

import torch

from turbo_rcm_patch import cli
from turbo_rcm_patch.bench.cases import CASES, build_pipeline, random_inputs
from turbo_rcm_patch.bench.environment import describe_environment
from turbo_rcm_patch.bench.tune_check import (
    SHIPPED,
    TUNED,
    Choices,
    TuneCheck,
    check_table,
    compare_choices,
    shipped_choices,
    time_steps,
    tuned_choices,
)
from turbo_rcm_patch.cli.files import json_file, write_json
from turbo_rcm_patch.patching import use_rcm


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    check = measure(options, torch.device("cuda"), lambda: run_tune(options.config))
    print("", check_table(check), sep="\n")
    if options.json is not None:
        write_json(options.json, check.to_dict())
    return 0 if check.is_ok else 1


def run_tune(config: str) -> None:
    """The command itself. Exits as it does where it fails."""
    code = cli.main(["tune", "--config", config])
    if code != 0:
        sys.exit(code)


def measure(options: argparse.Namespace, device: torch.device, tune: Callable[[], object]) -> TuneCheck:
    """tune: as for `tuned_choices`; it runs before there is a model, as it does for a user."""
    tuned, seconds = tuned_choices(tune)
    choices = {SHIPPED: shipped_choices(), TUNED: tuned}
    gpu, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    settings, milliseconds, summaries = measure_steps(options, device, choices)
    return TuneCheck(
        settings,
        describe_environment(device),
        seconds,
        compare_choices(*choices.values(), gpu, tuple(capability)),
        milliseconds,
        summaries,
    )


def measure_steps(
    options: argparse.Namespace, device: torch.device, choices: Mapping[str, Choices]
) -> tuple[dict[str, object], dict[str, float], dict[str, str]]:
    """The settings, and what `time_steps` says of the config's pipeline."""
    case = CASES[options.config]
    pipe = build_pipeline(case, torch.bfloat16, device, layers=options.layers)
    use_rcm(pipe)
    call = {
        "height": case.height,
        "width": case.width,
        "num_frames": case.frames,
        "num_inference_steps": options.steps,
        "guidance_scale": 1.0,
        "output_type": "latent",
    }
    settings = {"config": options.config, "layers": len(pipe.transformer.blocks), **call, "repeats": options.repeats}
    return settings, *time_steps(pipe, {**call, **random_inputs(pipe)}, choices, options.repeats)


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=CASES, default="wan2.1-1.3b")
    parser.add_argument("--layers", type=int, help="build only so many blocks")
    parser.add_argument("--steps", type=int, default=4, help="of a generation (default 4)")
    parser.add_argument("--repeats", type=int, default=5, help="measured generations by either choices (default 5)")
    parser.add_argument("--json", type=json_file, help="write all figures with the GPU and versions")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA GPU, and tune times kernels on one.")
    return options


if __name__ == "__main__":
    sys.exit(main())
