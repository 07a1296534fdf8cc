"""Compare eager, torch.compile (on a GPU) and patched generation at real model sizes, with random weights.

    python scripts/benchmarks/end_to_end.py --config wan2.1-1.3b --json benchmark.json
    python scripts/benchmarks/end_to_end.py --config wan2.1-14b --layers 4 --decode
    python scripts/benchmarks/end_to_end.py --config wan2.1-1.3b --prompt --decode --other-vaes --preset sparse
    python scripts/benchmarks/end_to_end.py --config wan2.1-14b --layers 4 --ulysses 2 --preset exact quantized
    python scripts/benchmarks/end_to_end.py --config wan2.1-14b --layers 4 --height 480 --width 832 --lora 64

The prompt is random embeddings and the image random features: no encoder runs. With --prompt, UMT5-XXL with random
weights encodes 512 random tokens, and the patch includes the text encoder's. With --other-vaes, the patched pipeline
also decodes in 8 bits, and with a tiny VAE. That one's weights are random too, so its frames are not compared with the
VAE's.

A step is one call of the transformer and the sampler. Its error to fp32 is measured first. Nothing is timed if the
patch errs more than its tier may. In the sparse tiers weights and inputs resemble trained ones, which decides what
attention leaves out. With --unstructured they do not, and block-sparse attention keeps nearly all blocks. The error is
not measured in these tiers, because it would be that of leaving blocks out; verify measures it layer by layer.

Several presets are timed one after another; on one GPU the exact tier's figures come from the run of the quantized one.
torch.compile runs in turns with each of them, but compiles the blocks only for the first. With LoRA adapters a step is
also timed without them, and with a new scale or another adapter at each step. torch.compile's step after a new scale is
timed once.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, DiffusionPipeline

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `scripts` can be imported

from scripts.benchmarks.comparison import compare_checked
from scripts.benchmarks.lora import add_random_lora, lora_variants, rescaled_once
from scripts.benchmarks.stand_ins import TOKENS, add_text_encoder, tiny_file
from turbo_rcm_patch.bench.cases import (
    add_random_projections,
    add_structure,
    build_pipeline,
    install_few_steps,
    needs_projections,
    random_inputs,
    structured_inputs,
)
from turbo_rcm_patch.bench.compare import Comparison
from turbo_rcm_patch.bench.report import comparison_table
from turbo_rcm_patch.bench.variants import COMPILED, EXACT_PATCH, PATCHED, UNPATCHED
from turbo_rcm_patch.cli.arguments import spelled
from turbo_rcm_patch.cli.errors import CommandError
from turbo_rcm_patch.cli.files import json_file, write_json
from turbo_rcm_patch.cli.generation_checks import check_at_least_one
from turbo_rcm_patch.cli.sizes import size_rules
from turbo_rcm_patch.config import PRESETS, VAE_8BIT, BlockSparse, PatchConfig, Sparse, resolve_config
from turbo_rcm_patch.patching import Patch, patch, patch_text_encoder, use_tiny_vae
from turbo_rcm_patch.patching.families import CASES, family_of

WITHOUT_GRAPHS = "patched, without CUDA graphs"
IN_8_BITS, TINY_VAE = "patched, VAE in 8 bits", "patched, tiny VAE"


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    if options.ulysses == 1:
        measure_presets(options, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    else:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (options, f"file://{folder}/rendezvous")
            torch.multiprocessing.spawn(measure_in_parallel, arguments, nprocs=options.ulysses)
    return 0


def measure_in_parallel(rank: int, options: argparse.Namespace, rendezvous: str) -> None:
    """Run one of several processes, each on the GPU of its rank. The first one reports."""
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    torch.distributed.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=options.ulysses)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(sys.stdout if rank == 0 else nowhere):
        measure_presets(options, device, is_first=rank == 0)
    torch.distributed.destroy_process_group()  # not after an error: NCCL would wait for the others, which wait for this


def measure_presets(options: argparse.Namespace, device: torch.device, *, is_first: bool = True) -> None:
    """Measure one preset after another. After each, write the figures so far: by preset if several were asked for.

    On one GPU the exact tier takes turns with the quantized one, so that it needs no run of its own beside that.
    Variants of the exact tier itself, such as those with a LoRA, do need one.
    """
    figures, alone = {}, options.lora or options.without_graphs or options.ulysses > 1
    takes_turns = not alone and {"exact", "quantized"} <= set(options.preset)
    for preset in options.preset:
        if preset == "exact" and takes_turns:
            continue
        gc.collect()  # frees the last preset's pipeline before the next one is built
        comparison = measure(options, preset, device, is_first=is_first)
        print(comparison.patch_summary, comparison_table(comparison), sep="\n\n")
        figures[preset] = comparison.to_dict()
        if preset == "quantized" and takes_turns:
            figures["exact"] = exact_part(comparison).to_dict()
        if options.json is not None and is_first:
            write_json(options.json, figures if len(options.preset) > 1 else figures[preset])


def exact_part(comparison: Comparison) -> Comparison:
    """Return the exact tier beside eager and torch.compile, from its turns with another tier. It has no summary."""
    names = {UNPATCHED: UNPATCHED, COMPILED: COMPILED, EXACT_PATCH: PATCHED}
    variants = [replace(each, name=names[each.name]) for each in comparison.variants if each.name in names]
    settings = {**comparison.settings, "preset": "exact"}
    return replace(comparison, settings=settings, variants=tuple(variants), patch_summary="")


def measure(options: argparse.Namespace, preset: str, device: torch.device, *, is_first: bool = True) -> Comparison:
    """Return the comparison with the patch of one preset, for a pipeline that is built anew."""
    config = config_of(options, preset)
    is_sparse = isinstance(config, (Sparse, BlockSparse))
    is_structured = is_sparse and not options.unstructured
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pipe = prepared_pipeline(options, config, dtype, device)
    pipe.set_progress_bar_config(disable=not is_first)
    case = CASES[options.config]
    size = {
        "height": options.height or case.height,
        "width": options.width or case.width,
        "num_frames": options.frames or case.frames,
    }
    call = {
        **size,
        "num_inference_steps": options.steps,
        "guidance_scale": 1.0,
        # Only the first process's frames are looked at. Those of the others stay on the GPU.
        "output_type": ("np" if is_first else "pt") if options.decode else "latent",
    }
    layers = sum(1 for _ in family_of(pipe.transformer).every_block(pipe.transformer))
    settings = {"config": options.config, "layers": layers, "dtype": str(dtype), **call, "preset": preset}
    if isinstance(config, BlockSparse):
        settings["mass"] = config.mass
    if options.vae_dtype:
        settings["vae_dtype"] = options.vae_dtype
    if is_structured:
        settings["structured"] = True
    if options.prompt:
        settings["tokens"] = TOKENS
    if options.lora:
        settings["lora_ranks"] = options.lora
    print(*(f"{name} {value}" for name, value in settings.items()), sep=", ")
    beside = lora_variants(pipe, config) if options.lora else {}
    if options.without_graphs:
        beside[WITHOUT_GRAPHS] = lambda: patched(pipe, replace(config, cuda_graph="off"))
    if options.other_vaes and preset != "exact":
        beside[IN_8_BITS] = lambda: patched(pipe, replace(config, vae=VAE_8BIT))
        beside[TINY_VAE] = lambda: patched_with_tiny_vae(pipe, config)
    inputs = structured_inputs(pipe, **size) if is_structured else random_inputs(pipe)
    if options.prompt:
        inputs |= {"prompt_embeds": None, "prompt": "a prompt", "max_sequence_length": TOKENS}
    comparison = compare_checked(
        pipe,
        {**call, **inputs},
        config=config,
        with_compile=False if options.no_compile else None,
        with_oracle=not is_sparse,
        ulysses=options.ulysses,
        repeats=options.repeats,
        settings={
            **settings,
            "repeats": options.repeats,
            "cuda_graph": config.cuda_graph,
            **({"ulysses": options.ulysses} if options.ulysses > 1 else {}),
        },
        beside=beside,
        changed=(lambda: rescaled_once(pipe)) if options.lora else None,
        patched=partial(patched, pipe),
    )
    return without_frames(comparison, TINY_VAE)


@contextlib.contextmanager
def patched(pipe: DiffusionPipeline, config: PatchConfig) -> Iterator[Patch]:
    """Patch a pipeline, with its text encoder if it has one."""
    has_encoder = getattr(pipe, "text_encoder", None) is not None
    with patch_text_encoder(pipe) if has_encoder else contextlib.nullcontext(), patch(pipe, config) as applied:
        yield applied


@contextlib.contextmanager
def patched_with_tiny_vae(pipe: DiffusionPipeline, config: PatchConfig) -> Iterator[Patch]:
    """Patch a pipeline, and let a tiny VAE with random weights decode."""
    vae = pipe.vae
    with (
        tempfile.TemporaryDirectory() as folder,
        patched(pipe, config) as applied,
        use_tiny_vae(vae, tiny_file(vae, Path(folder))),
    ):
        latents = torch.zeros(1, vae.config.z_dim, 1, 2, 2, dtype=vae.dtype, device=vae.device)
        vae.decode(latents)  # its weights go to the GPU in the first call
        yield applied


def without_frames(comparison: Comparison, name: str) -> Comparison:
    """Return a comparison without a variant's frames, and without their difference to the unpatched ones."""
    variants = (replace(one, frames=None, video=None) if one.name == name else one for one in comparison.variants)
    return replace(comparison, variants=tuple(variants))


def config_of(options: argparse.Namespace, preset: str) -> PatchConfig:
    config = resolve_config(preset)
    return config if options.mass is None else replace(config, mass=options.mass)


def prepared_pipeline(
    options: argparse.Namespace, config: PatchConfig, dtype: torch.dtype, device: torch.device
) -> DiffusionPipeline:
    """Return a pipeline with random weights, which have structure if the tier leaves key blocks out."""
    pipe = build_pipeline(CASES[options.config], dtype, device, layers=options.layers)
    install_few_steps(pipe)
    if isinstance(config, Sparse) and needs_projections(pipe):
        add_random_projections(pipe)
    if isinstance(config, (Sparse, BlockSparse)) and not options.unstructured:
        add_structure(pipe)
    if options.vae_dtype:
        pipe.vae.to(getattr(torch, options.vae_dtype))
    if options.lora:
        add_random_lora(pipe.transformer, options.lora)
    if options.prompt:
        add_text_encoder(pipe)
    return pipe


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=CASES, default="wan2.1-1.3b")
    parser.add_argument("--layers", type=int, help="build only so many blocks")
    parser.add_argument("--frames", type=int, help="default: the config's usual size, as for height and width")
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5, help="measured generations per variant (default 5)")
    parser.add_argument("--ulysses", type=int, default=1, help="split a sample among so many GPUs, as diffusers does")
    parser.add_argument("--preset", nargs="+", choices=PRESETS, default=["exact"], help="tiers (default exact)")
    parser.add_argument("--mass", type=float, help="share that block-sparse attention keeps (default: the preset's)")
    parser.add_argument("--unstructured", action="store_true", help="block-sparse attention on plain random numbers")
    parser.add_argument("--without-graphs", action="store_true", help="time the patch without CUDA graphs too")
    parser.add_argument("--lora", type=int, nargs="+", metavar="RANK", help="add a random LoRA adapter of each rank")
    parser.add_argument("--prompt", action="store_true", help="encode a prompt, with Wan's text encoder")
    parser.add_argument("--decode", action="store_true", help="decode the latents too")
    parser.add_argument("--vae-dtype", choices=("float32", "bfloat16"), help="default: that of the transformer")
    parser.add_argument(
        "--other-vaes", action="store_true", help="decode in 8 bits and with a tiny VAE too, not in the exact tier"
    )
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--json", type=json_file, help="write all figures with the GPU and versions")
    options = parser.parse_args(argv)
    try:
        _check_sizes(options)
    except CommandError as error:
        parser.error(str(error))
    for option, is_given in {"--mass": options.mass is not None, "--unstructured": options.unstructured}.items():
        if is_given and options.preset != ["block_sparse"]:
            parser.error(f"{option} is of block_sparse alone; --preset is {' '.join(options.preset)}.")
    if options.mass is not None and not 0 < options.mass <= 1:
        parser.error(f"--mass {options.mass:g}: give a share above 0 and at most 1.")
    for option, is_given in {"--prompt": options.prompt, "--other-vaes": options.other_vaes}.items():
        if is_given and CASES[options.config].vae_class is not AutoencoderKLWan:
            parser.error(f"{option} is for Wan's models; --config is {options.config}.")
    if options.other_vaes and not options.decode:
        parser.error("--other-vaes decode; give --decode too.")
    if options.other_vaes and options.preset == ["exact"]:
        parser.error("--other-vaes are not timed in the exact tier; give another --preset.")
    if options.lora and options.ulysses > 1:
        parser.error("--lora is timed on one GPU; leave --ulysses out.")
    if options.lora and options.prompt:
        parser.error("--lora is timed from embeddings; leave --prompt out.")
    if options.lora and options.steps < 2:
        parser.error("--lora is timed with changes between two steps; --steps must be 2 at least.")
    if torch.cuda.is_available() and options.ulysses > torch.cuda.device_count():
        parser.error(f"--ulysses {options.ulysses}: PyTorch finds {torch.cuda.device_count()} CUDA GPUs.")
    return options


def _check_sizes(options: argparse.Namespace) -> None:
    """Raise CommandError for a count below 1, or for a size that the pipeline would refuse or round."""
    for name in ("layers", "steps", "repeats", "ulysses"):
        check_at_least_one(spelled(name), getattr(options, name))
    for rank in options.lora or ():
        check_at_least_one("--lora", rank)
    case = CASES[options.config]
    size_rules(case.vae, case.transformer).check(options.height, options.width, options.frames)


if __name__ == "__main__":
    sys.exit(main())
