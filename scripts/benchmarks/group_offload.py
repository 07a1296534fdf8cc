"""Measure quantized steps with diffusers' group offloading: their time, peak memory, and what stays on the GPU.

    python scripts/benchmarks/group_offload.py --config wan2.1-14b --json offload.json
    python scripts/benchmarks/group_offload.py --config wan2.1-14b --reuse-host-memory

The weights are random. A step runs with all weights on the GPU, and with block-level offloading on a stream.
Offloading is enabled after the patch, or before it. The step without offloading is timed before the first of these and
after it, because a GPU slows down as it warms. ``record_stream=True`` spares the host a wait for the GPU after each
block. diffusers moves the weights that are in no block to new memory of the host in each step, which may be slow to
get. With ``--reuse-host-memory`` PyTorch and glibc reuse it, by environment variables. The exit code is 1 if a step
with offloading

- peaks above 3.5 GiB,
- leaves more than two blocks' weights on the GPU, or
- takes more than 1.1 times the step without offloading.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `scripts` can be imported

import turbo_rcm_patch as trp
from scripts.benchmarks.memory_cap import empty_cache, random_latents, with_random_weights
from scripts.tools.pages.ops import group_offload_table
from turbo_rcm_patch.bench.environment import describe_environment
from turbo_rcm_patch.cli.files import json_file, write_json
from turbo_rcm_patch.memory.streaming import stop_streaming
from turbo_rcm_patch.patching.families.wan.cases import CASES

GIB = 2**30
MOST_GIB, MOST_TIMES = 3.5, 1.1  # a step's peak, and its time beside a resident one's
REUSED = {  # PyTorch and glibc read these when a process begins
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_MMAP_THRESHOLD_": str(8 * GIB),
    "MALLOC_TRIM_THRESHOLD_": str(16 * GIB),
}
TIER = "quantized"
RESIDENT = "resident"
AFTER, BEFORE = (f"offloading enabled {when} the patch, record_stream" for when in ("after", "before"))


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    if options.reuse_host_memory and not REUSED.items() <= os.environ.items():
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **REUSED})
    device, case = torch.device("cuda"), CASES[options.config]
    config = {**case.transformer, "num_layers": options.layers or case.transformer["num_layers"]}
    model = with_random_weights(lambda: WanTransformer3DModel(**config), device)
    inputs = random_latents(model, case.frames, options.height, options.width, device)
    rows = list(measure_all(model, inputs, options.repeats, device))
    settings = {"config": options.config, "layers": len(model.blocks), "frames": case.frames}
    settings |= {"height": options.height, "width": options.width, "repeats": options.repeats}
    if options.reuse_host_memory:
        settings["variables"] = REUSED
    figures = {"settings": settings, "environment": asdict(describe_environment(device)), "offloaded_steps": rows}
    print(group_offload_table(figures))
    if options.json is not None:
        write_json(options.json, figures)
    faults = list(faults_of(rows))
    print(*faults, sep="\n")
    return 1 if faults else 0


def measure_all(model: WanTransformer3DModel, inputs: tuple, repeats: int, device: torch.device) -> Iterator[dict]:
    """Yield a row for each place of the weights. The model is on the device.

    One patch serves three turns, because a machine may take seconds to give memory for each new copy of the weights.
    """
    turns = []
    with trp.patch(model, TIER):
        turns.append((RESIDENT, measure(model, inputs, repeats)))
        with offloaded(model, device):
            turns.append((AFTER, measure(model, inputs, repeats)))
        model.to(device)
        turns.append((RESIDENT, measure(model, inputs, repeats)))
        model.to("cpu")
    empty_cache()  # else the host holds the pinned weights of both turns
    with offloaded(model, device), trp.patch(model, TIER):
        turns.append((BEFORE, measure(model, inputs, repeats)))
    for place in (RESIDENT, AFTER, BEFORE):
        yield {"tier": TIER, "weights": place, **merged([run for name, run in turns if name == place])}


@contextlib.contextmanager
def offloaded(model: WanTransformer3DModel, device: torch.device) -> Iterator[None]:
    """A context in which the model offloads its blocks. The weights are on the CPU afterwards."""
    offload(model, device)
    yield
    stop_streaming(model)


def offload(model: WanTransformer3DModel, device: torch.device) -> None:
    """Enable diffusers' block-level offloading on a stream."""
    options = {"offload_type": "block_level", "num_blocks_per_group": 1, "use_stream": True, "record_stream": True}
    model.enable_group_offload(device, torch.device("cpu"), **options)


def measure(model: WanTransformer3DModel, inputs: tuple, repeats: int) -> dict:
    """Time steps; the first two are not counted, because they compile kernels and learn the order of the groups."""
    seconds, between = [], 0
    torch.cuda.empty_cache()
    for step in range(2 + repeats):
        torch.cuda.synchronize()
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with torch.no_grad():
            sample = model(*inputs, return_dict=False)[0]
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        finite = bool(sample.isfinite().all())
        del sample
        between = max(between, torch.cuda.memory_allocated())
    return {
        "step_seconds": seconds[2:],
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "bytes_between_steps": between,
        "block_bytes": sum(parameter.nbytes for parameter in model.blocks[0].parameters()),
        "other_bytes": sum(p.nbytes for name, p in model.named_parameters() if not name.startswith("blocks.")),
        "finite": finite,
    }


def merged(runs: Sequence[dict]) -> dict:
    """Return the figures of several runs of `measure` as one row's: medians of times, and the largest of memory."""
    most = ("peak_bytes", "bytes_between_steps", "block_bytes", "other_bytes")
    return {
        "step_seconds": statistics.median(second for run in runs for second in run["step_seconds"]),
        **{name: max(run[name] for run in runs) for name in most},
        "finite": all(run["finite"] for run in runs),
    }


def faults_of(rows: list[dict]) -> Iterator[str]:
    """Yield the limits that a step with offloading misses, as sentences."""
    seconds = next(row["step_seconds"] for row in rows if row["weights"] == RESIDENT)
    for row in rows:
        if not row["finite"]:
            yield f"{row['weights']}: the result is not finite."
        if row["weights"] == RESIDENT:
            continue
        if row["peak_bytes"] > MOST_GIB * GIB:
            yield f"{row['weights']}: the peak is {row['peak_bytes'] / GIB:.2f} GiB, above {MOST_GIB} GiB."
        if (times := row["step_seconds"] / seconds) > MOST_TIMES:
            yield f"{row['weights']}: a step takes {times:.2f} times the resident one, above {MOST_TIMES}."
        if row["bytes_between_steps"] > 2 * row["block_bytes"] + row["other_bytes"] + GIB // 8:
            yield f"{row['weights']}: more than two blocks' weights stay on the GPU between steps."


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=CASES, default="wan2.1-14b")
    parser.add_argument("--layers", type=int, help="blocks of the model (default: all)")
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each turn (default 5)")
    parser.add_argument("--reuse-host-memory", action="store_true", help=f"set {', '.join(REUSED)}")
    parser.add_argument("--json", type=json_file, help="write all figures with the GPU and versions")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA GPU, whose memory this is about.")
    return options


if __name__ == "__main__":
    sys.exit(main())
