"""Time Python's work for the launches of one block: unpatched, in every tier, and with CUDA graphs.

    python scripts/benchmarks/host_time.py --config wan2.1-1.3b --json host-time.json

With --ulysses 4 the model is one of four that share the tokens, whose collectives return at once without the others.

The GPU sleeps during the calls, so that nothing waits for it. If a block's kernels take less time than Python's work,
the GPU waits for Python, unless a CUDA graph replays them. A block's time in a CUDA-graph step is its share of it.
All variants take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial

import torch
from diffusers import ContextParallelConfig

from turbo_rcm_patch.bench.cases import (
    add_random_projections,
    build_pipeline,
    install_few_steps,
    needs_projections,
    random_inputs,
)
from turbo_rcm_patch.bench.environment import describe_environment
from turbo_rcm_patch.bench.oracle import first_call
from turbo_rcm_patch.bench.timing import in_turns
from turbo_rcm_patch.cli.files import json_file, write_json
from turbo_rcm_patch.config import PRESETS
from turbo_rcm_patch.patching import patch
from turbo_rcm_patch.patching.families import CASES, family_of

UNPATCHED, TIERS = "unpatched", ("exact", "quantized", "sparse")
CALLS = 8  # at a time: a GPU's queue holds about a thousand launches, and a block makes dozens
ROUNDS = 6
WARM_UP = 3
SLEEPS = 1 << 29, 1 << 31, 1 << 33  # cycles of the GPU, a quarter of a second and more; the next where one is too short


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    device = torch.device("cuda")
    with others(options.ulysses):
        sizes = {"layers": options.layers, "ulysses": options.ulysses}
        milliseconds = measure(options.config, options.frames, device, host_time, **sizes)
    for name, value in milliseconds.items():
        print(f"{name:{max(map(len, milliseconds))}} {value:6.2f} ms a block")
    if options.json is not None:
        settings = {"config": options.config, "frames": options.frames or CASES[options.config].frames}
        settings |= {"ulysses": options.ulysses} if options.ulysses > 1 else {}
        settings |= {"layers": options.layers} if options.layers is not None else {}
        environment = asdict(describe_environment(device))
        write_json(options.json, {"settings": settings, "environment": environment, "milliseconds": milliseconds})
    return 0


@torch.no_grad()
def measure(
    config: str,
    frames: int | None,
    device: torch.device,
    timed: Callable[[Callable[[], object]], float],
    rounds: int = ROUNDS,
    layers: int | None = None,
    ulysses: int = 1,
) -> dict[str, float]:
    """Return the milliseconds of one block's call, unpatched and in the TIERS, and its share of a CUDA-graph step.

    timed: (call) -> the milliseconds that it takes. They are medians over the rounds. layers: the blocks that are
    built, or None for all. ulysses: the processes of the default process group, which share the tokens if there are
    several.
    """
    case = CASES[config]
    pipe = build_pipeline(case, torch.bfloat16, device, layers=layers)
    install_few_steps(pipe)
    pipe.set_progress_bar_config(disable=True)
    transformer = pipe.transformer
    if ulysses > 1:
        transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=ulysses))
    blocks = [block for _, block in family_of(transformer).every_block(transformer)]
    size = {"height": case.height, "width": case.width, "num_frames": frames or case.frames}
    options = {"num_inference_steps": 1, "guidance_scale": 1.0, "output_type": "latent"}
    generate = lambda: pipe(**{**size, **options, **random_inputs(pipe)})  # noqa: E731
    block, step = (repeated(module, generate) for module in (blocks[0], transformer))
    if needs_projections(pipe):
        add_random_projections(pipe)  # for the sparse tier; the others leave them alone

    @contextlib.contextmanager
    def patched(tier: str, cuda_graph: str) -> Iterator[None]:
        with patch(transformer, replace(PRESETS[tier], cuda_graph=cuda_graph)) as applied:
            yield
            if cuda_graph == "on" and device.type == "cuda" and applied.graph_count == 0:
                raise RuntimeError(f"no step was a CUDA graph:\n{applied.summary()}")

    variants = {UNPATCHED: (contextlib.nullcontext, block, 1)}
    for tier in TIERS:
        variants[tier] = partial(patched, tier, "off"), block, 1
        variants[f"{tier}, CUDA graph"] = partial(patched, tier, "on"), step, len(blocks)
    milliseconds = {name: [] for name in variants}
    for _, name in in_turns(variants, rounds):
        switch, call, count = variants[name]
        with switch():
            milliseconds[name].append(timed(call) / count)
    return {name: statistics.median(times) for name, times in milliseconds.items()}


@contextlib.contextmanager
def others(ulysses: int) -> Iterator[None]:
    """Pretend that there are so many processes: collectives do nothing. With one there is no process group."""
    if ulysses == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=ulysses, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def repeated(module: torch.nn.Module, run: Callable[[], object]) -> Callable[[], object]:
    """Return a function that calls the module with the inputs of its first call in a run."""
    inputs, named = first_call(module, run)
    return lambda: module(*inputs, **named)


def host_time(call: Callable[[], object]) -> float:
    """Return the milliseconds that a call takes on the host while the GPU sleeps."""
    for _ in range(WARM_UP):
        call()
    return _behind_a_sleep(call)


def _behind_a_sleep(call: Callable[[], object]) -> float:
    for cycles in SLEEPS:
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        awake = torch.cuda.Event()
        awake.record()
        milliseconds = mean_time(call, CALLS)
        if not awake.query():
            return milliseconds
    raise RuntimeError("the GPU woke before the last call, which may have waited for it; let it sleep longer.")


def mean_time(call: Callable[[], object], calls: int) -> float:
    """Return the mean milliseconds of this many calls, without waiting for the work that they launched."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e3


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=CASES, default="wan2.1-1.3b")
    parser.add_argument("--frames", type=int, help="default: the config's usual size")
    parser.add_argument("--layers", type=int, help="build only so many blocks")
    parser.add_argument("--ulysses", type=int, default=1, help="time one of so many GPUs that share the tokens")
    parser.add_argument("--json", type=json_file, help="write the figures with the GPU and versions")
    options = parser.parse_args(argv)
    if options.layers is not None and options.layers < 1:
        parser.error(f"--layers {options.layers}: give 1 or more.")
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA GPU, and these are the launches for one.")
    return options


if __name__ == "__main__":
    sys.exit(main())
