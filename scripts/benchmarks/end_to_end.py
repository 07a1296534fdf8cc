"""Compare eager, torch.compile (on a GPU) and patched generation at real model sizes, with random weights.

    python scripts/benchmarks/end_to_end.py --config wan2.1-1.3b --json benchmark.json
    python scripts/benchmarks/end_to_end.py --config wan2.1-14b --layers 4 --decode
    python scripts/benchmarks/end_to_end.py --config wan2.1-14b --layers 4 --ulysses 2
    python scripts/benchmarks/end_to_end.py --config wan2.1-14b --layers 4 --height 480 --width 832 --lora 64

The prompt is random embeddings and the image random features: no encoder runs. With --structured, weights and inputs
resemble trained ones, which decides what a sparse attention leaves out. A step is one call of the transformer and the
sampler. Its error to fp32 is measured first. Nothing is timed if the patch errs more than its tier may. --no-oracle
skips this check, for sparse attention, whose error dense attention in fp32 does not show. With LoRA adapters a step is
also timed without them, and with a new scale or another adapter at each step. torch.compile's step after a new scale is
timed once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `scripts` can be imported

from scripts.benchmarks.lora import add_random_lora, lora_variants, rescaled_once
from turbo_rcm_patch.bench.cases import (
    add_random_projections,
    add_structure,
    build_pipeline,
    install_few_steps,
    needs_projections,
    random_inputs,
    structured_inputs,
)
from turbo_rcm_patch.bench.compare import compare
from turbo_rcm_patch.bench.report import comparison_table
from turbo_rcm_patch.cli.files import json_file, write_json
from turbo_rcm_patch.config import CUDA_GRAPH_MODES, VAE_8BIT, BlockSparse, Sparse, resolve_config
from turbo_rcm_patch.patching import patch
from turbo_rcm_patch.patching.families import CASES, family_of

WITHOUT_GRAPHS = "patched, without CUDA graphs"


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    if options.ulysses == 1:
        measure(options, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    else:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (options, f"file://{folder}/rendezvous")
            torch.multiprocessing.spawn(measure_in_parallel, arguments, nprocs=options.ulysses)
    return 0


def measure_in_parallel(rank: int, options: argparse.Namespace, rendezvous: str) -> None:
    """Run one of several processes, each on the GPU of its rank. The first one reports."""
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", rank), options.backend
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    torch.distributed.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=options.ulysses)
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(sys.stdout if rank == 0 else nowhere):
            measure(options, device, is_first=rank == 0)
    finally:
        torch.distributed.destroy_process_group()


def measure(options: argparse.Namespace, device: torch.device, *, is_first: bool = True) -> None:
    case = CASES[options.config]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pipe = build_pipeline(case, dtype, device, layers=options.layers)
    pipe.set_progress_bar_config(disable=not is_first)
    install_few_steps(pipe)
    config = replace(resolve_config(options.preset), cuda_graph=options.cuda_graph)
    if options.vae is not None:
        config = replace(config, vae=options.vae)
    if options.mass is not None:
        config = replace(config, mass=options.mass)
    if isinstance(config, Sparse) and needs_projections(pipe):
        add_random_projections(pipe)
    if options.vae_dtype:
        pipe.vae.to(getattr(torch, options.vae_dtype))
    if options.lora:
        add_random_lora(pipe.transformer, options.lora)
    call = {
        "height": options.height or case.height,
        "width": options.width or case.width,
        "num_frames": options.frames or case.frames,
        "num_inference_steps": options.steps,
        "guidance_scale": 1.0,
        "output_type": "np" if options.decode else "latent",
    }
    layers = sum(1 for _ in family_of(pipe.transformer).every_block(pipe.transformer))
    settings = {"config": options.config, "layers": layers, "dtype": str(dtype), **call}
    settings["preset"] = options.preset
    if isinstance(config, BlockSparse):
        settings["mass"] = config.mass
    if options.vae_dtype:
        settings["vae_dtype"] = options.vae_dtype
    if options.vae is not None:
        settings["vae"] = config.vae
    inputs = random_inputs(pipe)
    if options.structured:
        settings["structured"] = True
        add_structure(pipe)
        size = {name: call[name] for name in ("height", "width", "num_frames")}
        inputs = structured_inputs(pipe, **size)
    if options.lora:
        settings["lora_ranks"] = options.lora
    print(*(f"{name} {value}" for name, value in settings.items()), sep=", ")
    beside = lora_variants(pipe, config) if options.lora else {}
    if options.without_graphs:
        beside[WITHOUT_GRAPHS] = lambda: patch(pipe, replace(config, cuda_graph="off"))
    comparison = compare(
        pipe,
        {**call, **inputs},
        config=config,
        with_compile=False if options.no_compile else None,
        with_oracle=not options.no_oracle,
        ulysses=options.ulysses,
        warmups=options.warmups,
        repeats=options.repeats,
        settings={
            **settings,
            "repeats": options.repeats,
            "cuda_graph": options.cuda_graph,
            **({"ulysses": options.ulysses} if options.ulysses > 1 else {}),
        },
        beside=beside,
        changed=(lambda: rescaled_once(pipe)) if options.lora else None,
    )
    print(comparison.patch_summary, comparison_table(comparison), sep="\n\n")
    if options.json is not None and is_first:
        write_json(options.json, comparison.to_dict())


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=CASES, default="wan2.1-1.3b")
    parser.add_argument("--layers", type=int, help="build only so many blocks")
    parser.add_argument("--frames", type=int, help="default: the config's usual size, as for height and width")
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5, help="measured generations per variant (default 5)")
    parser.add_argument("--warmups", type=int, default=1, help="generations per variant before them (default 1)")
    parser.add_argument("--ulysses", type=int, default=1, help="split a sample among so many GPUs, as diffusers does")
    parser.add_argument("--backend", default="cpu:gloo,cuda:nccl", help="of torch.distributed's process group")
    parser.add_argument("--preset", default="exact", help="of the patch (default exact)")
    parser.add_argument("--mass", type=float, help="of block-sparse attention (default: the preset's)")
    parser.add_argument("--structured", action="store_true", help="weights and inputs that are like trained ones")
    parser.add_argument("--cuda-graph", choices=CUDA_GRAPH_MODES, default="auto", help="of the patch (default auto)")
    parser.add_argument("--without-graphs", action="store_true", help="time the patch without CUDA graphs too")
    parser.add_argument("--lora", type=int, nargs="+", metavar="RANK", help="add a random LoRA adapter of each rank")
    parser.add_argument("--decode", action="store_true", help="decode the latents too")
    parser.add_argument("--vae-dtype", choices=("float32", "bfloat16"), help="default: that of the transformer")
    parser.add_argument("--vae", choices=(VAE_8BIT,), help="decode in 8 bits (on a GPU)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--no-oracle", action="store_true", help="do not check a step against fp32, for want of memory")
    parser.add_argument("--json", type=json_file, help="write all figures with the GPU and versions")
    options = parser.parse_args(argv)
    if options.lora and options.ulysses > 1:
        parser.error("--lora is timed on one GPU; leave --ulysses out.")
    if options.lora and options.steps < 2:
        parser.error("--lora is timed with changes between two steps; --steps must be 2 at least.")
    if torch.cuda.is_available() and options.ulysses > torch.cuda.device_count():
        parser.error(f"--ulysses {options.ulysses}: PyTorch finds {torch.cuda.device_count()} CUDA GPUs.")
    return options


if __name__ == "__main__":
    sys.exit(main())
