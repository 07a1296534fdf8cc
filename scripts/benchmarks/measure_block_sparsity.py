"""Measure what block-sparse attention costs the embedded model at each `mass`, in fp32.

    python scripts/benchmarks/measure_block_sparsity.py --json results/block-sparse-tiny.json

Each mass is measured twice, some also with the first step exact. First, each layer's error and kept share in the first
and last of four steps, on the q, k and v of an unpatched generation. Second, over held-out captions, how much of them
the videos show, and how far the frames are from the exact tier's. The model has 700 tokens; blocks have 16 queries and
16 keys.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator
from dataclasses import asdict

import torch
from diffusers import WanPipeline

from turbo_rcm_patch import kernels
from turbo_rcm_patch.bench.environment import describe_environment
from turbo_rcm_patch.bench.evaluate import EMBEDDED_CALL, evaluate
from turbo_rcm_patch.bench.metrics import relative_l2
from turbo_rcm_patch.bench.parts import self_attention_inputs, trace_of
from turbo_rcm_patch.bench.report import evaluation_table
from turbo_rcm_patch.cli.files import json_file, write_json
from turbo_rcm_patch.config import BlockSparse
from turbo_rcm_patch.embedded import load_embedded_pipeline
from turbo_rcm_patch.patching import use_rcm
from turbo_rcm_patch.shapes.grammar import EXAMPLES

MASSES = (0.6, 0.7, 0.9, 0.95, 0.98)
FIRST_STEP_EXACT = (0.7, 0.9)  # masses that are measured so as well
BLOCKS = (16, 16)
STEPS = 4


def config_of(mass: float, exact_steps: tuple[int, int] | None = None) -> BlockSparse:
    options = {"mass": mass, "min_tokens": 0, "blocks": BLOCKS, "exact_steps": exact_steps}
    # In plain torch on a GPU too: no kernel takes blocks of 16.
    return BlockSparse(quantize=(), implementation="torch", **options)


def configs() -> dict[str, BlockSparse]:
    """Return the configs by name."""
    named = {f"mass {mass:g}": config_of(mass) for mass in MASSES}
    return named | {f"mass {mass:g}, first step exact": config_of(mass, (1, 0)) for mass in FIRST_STEP_EXACT}


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    pipe = load_embedded_pipeline(torch.float32, torch.device(options.device))
    pipe.set_progress_bar_config(disable=True)
    use_rcm(pipe)
    layers = {name: list(layers_at(pipe, config, options.seed)) for name, config in configs().items()}
    evaluation = evaluate(
        pipe,
        n=options.n,
        steps=(STEPS,),
        configs=configs(),
        seed=options.seed,
        batch_size=options.batch_size,
        report=lambda line: print(line, flush=True),
    )
    print(evaluation_table(evaluation))
    if options.json is not None:
        results = {result["variant"]: result for result in evaluation.to_dict()["results"]}
        write_json(
            options.json,
            {
                "environment": asdict(describe_environment(options.device)),
                "settings": {
                    "n": options.n,
                    "seed": options.seed,
                    "steps": STEPS,
                    "blocks": BLOCKS,
                    "dtype": "float32",
                },
                "exact": results["exact"],
                "variants": [{**results[name], "layers": layers[name]} for name in configs()],
            },
        )
    return 0


def layers_at(pipe: WanPipeline, config: BlockSparse, seed: int) -> Iterator[dict[str, object]]:
    """Yield a row per block and step: the share of key blocks kept, and the relative L2 error to dense attention."""
    first, _ = config.exact_steps or (0, 0)
    for step, name, qkv in attention_inputs(pipe, seed):
        sizes = {"mass": 1.0 if step <= first else config.mass, "block_q": BLOCKS[0], "block_k": BLOCKS[1]}
        dense, sparse = kernels.attention(*qkv), kernels.block_sparse_attention(*qkv, **sizes)
        row = {"block": name, "step": step, "kept": kernels.kept_share(*qkv[:2], **sizes)}
        yield {**row, "error": relative_l2(sparse, dense)}


@functools.lru_cache
def attention_inputs(pipe: WanPipeline, seed: int) -> list[tuple[int, str, tuple[torch.Tensor, ...]]]:
    """Yield step, block, and the self-attention's q, k, v [1, S, H, D], for a generation's first and last step."""
    calls: dict[str, list[tuple]] = {}
    blocks = dict(pipe.transformer.blocks.named_children())
    for name, block in blocks.items():
        block.register_forward_pre_hook(lambda _, args, name=name: calls.setdefault(name, []).append(args))
    call = {**EMBEDDED_CALL, "prompt": EXAMPLES[0], "num_inference_steps": STEPS, "output_type": "latent"}
    pipe(**call, generator=torch.Generator().manual_seed(seed))
    for block in blocks.values():
        block._forward_pre_hooks.clear()
    return [
        (step, f"blocks.{name}", self_attention_inputs(trace_of(block, args, {})))
        for step in (1, STEPS)
        for name, block in blocks.items()
        for args in [calls[name][step - 1]]
    ]


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=6, help="held-out captions (default 6)")
    parser.add_argument("--seed", type=int, default=0, help="seed for captions and noise (default 0)")
    parser.add_argument("--batch-size", type=int, default=6, help="videos made at a time (default 6)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=json_file, help="write all figures with the versions")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
