"""Time what the sound costs in a step of LTX-2: the patched transformer, whole and with the video's work alone.

    python scripts/benchmarks/sound.py --config ltx2-19b --layers 8 --json sound.json

The video's work is its self-attention, its attention to the prompt and to the sound, and its feed-forward. The rest is
the sound's own sub-layers, and its attention to the video. Each tier runs with CUDA graphs and without.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `scripts` can be imported

from scripts.benchmarks.host_time import repeated
from scripts.tools.pages.sound import sound_table
from turbo_rcm_patch.bench.cases import build_pipeline, install_few_steps, random_inputs
from turbo_rcm_patch.bench.environment import describe_environment
from turbo_rcm_patch.bench.timing import in_turns
from turbo_rcm_patch.cli.files import json_file, write_json
from turbo_rcm_patch.config import PRESETS
from turbo_rcm_patch.patching import patch
from turbo_rcm_patch.patching.families.family import graph_of
from turbo_rcm_patch.patching.families.ltx2.cases import CASES
from turbo_rcm_patch.patching.families.ltx2.sub_layers import BlockPlan, Inputs

TIERS = ("exact", "quantized", "sparse")
ROUNDS, CALLS, WARM_UP = 3, 5, 3  # a graph is recorded in the second call


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    device = torch.device("cuda")
    rows = measure(options, device, gpu_time)
    layers = options.layers or CASES[options.config].transformer["num_layers"]
    settings = {"config": options.config, "layers": layers, **size_of(options)}
    figures = {"settings": settings, "environment": asdict(describe_environment(device)), "sound": rows}
    print(sound_table(figures))
    if options.json is not None:
        write_json(options.json, figures)
    return 0


def size_of(options: argparse.Namespace) -> dict[str, int]:
    case = CASES[options.config]
    return {
        "height": options.height or case.height,
        "width": options.width or case.width,
        "num_frames": options.frames or case.frames,
    }


@torch.no_grad()
def measure(
    options: argparse.Namespace, device: torch.device, timed: Callable[[Callable[[], object]], float]
) -> list[dict[str, object]]:
    """Return the milliseconds of a step and of its video alone, in each tier with CUDA graphs and without.

    timed: (call) -> the milliseconds that it takes. They are medians over ROUNDS rounds in turns.
    """
    pipe = build_pipeline(CASES[options.config], torch.bfloat16, device, layers=options.layers)
    install_few_steps(pipe)
    pipe.set_progress_bar_config(disable=True)
    transformer, size = pipe.transformer, {**size_of(options), "num_inference_steps": 1, "output_type": "latent"}
    step = repeated(transformer, lambda: pipe(**random_inputs(pipe), **size))
    rows = []
    for tier in TIERS:
        for graphs in ("off", "on"):
            times = {"step": [], "video_alone": []}
            with patch(transformer, replace(PRESETS[tier], cuda_graph=graphs)) as applied:
                for _, name in in_turns(times, ROUNDS):
                    graph_of(transformer).release()  # of the other work
                    with video_alone() if name == "video_alone" else contextlib.nullcontext():
                        times[name].append(timed(step))
                if graphs == "on" and device.type == "cuda" and applied.graph_count == 0:
                    raise RuntimeError(f"no step was a CUDA graph:\n{applied.summary()}")
            medians = {name: statistics.median(values) for name, values in times.items()}
            rows.append({"preset": tier, "cuda_graph": graphs, **medians})
    return rows


@contextlib.contextmanager
def video_alone() -> Iterator[None]:
    """A context in which blocks of LTX-2 leave the sound as it is."""
    with mock.patch.object(BlockPlan, "run", _run_video):
        yield


def _run_video(plan: BlockPlan, given: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    x = plan.video_self.run(given.x, given.video_self)
    x = plan.video_text.run(x, given.video_text, given.context)
    kept = plan.residual.audio
    seen_video, seen_audio = plan.seen_between(x, (given.audio / kept.scale).to(kept.dtype))
    if plan.audio_to_video is not None:
        x = plan.audio_to_video.run(x, given.audio_to_video, seen_audio, seen_video)
    return plan.video_ff.run(x, given.video_ff), given.audio


def gpu_time(call: Callable[[], object]) -> float:
    """Return the mean milliseconds of a call on the GPU, its launches included."""
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(CALLS):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / CALLS


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=CASES, default="ltx2-19b")
    parser.add_argument("--layers", type=int, help="build only so many blocks")
    for option in ("--height", "--width", "--frames"):
        parser.add_argument(option, type=int, help="default: the config's usual size")
    parser.add_argument("--json", type=json_file, help="write the figures with the GPU and versions")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA GPU, and these are times of one.")
    return options


if __name__ == "__main__":
    sys.exit(main())
