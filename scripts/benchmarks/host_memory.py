"""Measure the host's memory while a model in 8 bits is loaded and fitted into a card.

    python scripts/benchmarks/host_memory.py --config wan2.1-14b --vram 8GB --json host.json

A transformer with random weights is saved in bf16 and converted, on a disk with room for both. A second expert has the
same weights, converted to files of its own. A new process then loads the converted folder and calls `trp.fit`. What
counts is its own memory (not the pages of mapped files, which the system can drop) and what PyTorch has pinned. Exits
with 1 if the peak is above the share of the 8-bit weights that is wanted.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import init_empty_weights
from diffusers import WanPipeline

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `scripts` can be imported

import turbo_rcm_patch as trp
from scripts.benchmarks.memory_cap import with_random_weights
from scripts.tools.pages.cards import HOST_MEMORY, host_memory
from turbo_rcm_patch.bench.environment import describe_environment
from turbo_rcm_patch.cli.files import json_file, write_json
from turbo_rcm_patch.patching.families.wan.cases import CASES
from turbo_rcm_patch.patching.weights.store import convert_model


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    if options.load is not None:
        print(json.dumps(load(options)))
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        convert(options, Path(folder))
        command = [sys.executable, __file__, *sys.argv[1:], "--load", f"{folder}/converted"]
        figures = json.loads(
            subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
        )
    experts = CASES[options.config].experts
    settings = {"config": options.config, "experts": experts, "vram": options.vram}
    environment = asdict(describe_environment(torch.device(options.device)))
    run = {"settings": settings, "environment": environment, "host_memory": figures}
    print(host_memory(run), f"Loading takes {figures['seconds']:.0f} s.", sep="")
    if options.json is not None:
        write_json(options.json, run)
    return 0 if figures["peak"] / figures["weights"] <= HOST_MEMORY[experts] else 1


def convert(options: argparse.Namespace, folder: Path) -> None:
    """Write the converted transformers of a pipeline."""
    device, case = torch.device(options.device), CASES[options.config]
    first, *experts = (folder / "model" / name for name in case.transformer_names)
    with_random_weights(lambda: case.transformer_class(**case.transformer), device).save_pretrained(first)
    for expert in experts:
        expert.symlink_to(first)
    convert_model(folder / "model", folder / "converted", trp.Quantized(), device=device, report=print)


def load(options: argparse.Namespace) -> dict[str, float]:
    """Load a converted pipeline and fit it into a card. Return the peak of the host's memory in bytes."""
    case = CASES[options.config]
    with init_empty_weights():
        transformers = {name: case.transformer_class(**case.transformer) for name in case.transformer_names}
    vae = with_random_weights(lambda: case.vae_class(**case.vae))
    others = {"tokenizer": None, "text_encoder": None, "vae": vae, "scheduler": trp.RCMScheduler()}
    pipe = WanPipeline(**others, **transformers, **case.pipeline_options)
    before, start = own_memory(), time.perf_counter()
    with watched() as peak:
        trp.load_converted(options.load, pipe, device="cpu")
        plan = trp.fit(pipe, options.vram, height=480, width=832, num_frames=81, device=options.device)
        seconds = time.perf_counter() - start
    weights = sum(tensor.nbytes for tensor in (*pipe.transformer.parameters(), *pipe.transformer.buffers()))
    print(plan)
    return {"peak": peak[0] - before, "pinned": pinned_memory(), "weights": weights, "seconds": seconds}


def own_memory() -> int:
    """Return the bytes of this process's memory without mapped files, and those that PyTorch has pinned."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) + pinned_memory()


def pinned_memory() -> int:
    """Return the bytes that PyTorch has pinned, which do not count as a process's own."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return 0
    return torch.cuda.host_memory_stats()["allocated_bytes.current"]


@contextmanager
def watched():
    """A context that gives a list with the peak of `own_memory`, looked at every 10 ms."""
    peak, done = [own_memory()], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], own_memory())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
        peak[0] = max(peak[0], own_memory())


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=CASES, default="wan2.1-14b")
    parser.add_argument("--vram", default="8GB", help="the card, such as 8GB")
    parser.add_argument("--device", default="cuda", help="the device that converts and runs")
    parser.add_argument("--folder", help="where the models are written for the time being (default: the system's)")
    parser.add_argument("--json", type=json_file, help="write all figures with the GPU and versions")
    parser.add_argument("--load", help=argparse.SUPPRESS)  # the second process's part
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
