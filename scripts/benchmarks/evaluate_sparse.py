"""Measure what a kept share of key blocks costs the embedded model, with and without its fine-tuning to SLA.

    python scripts/benchmarks/evaluate_sparse.py -n 256 --json results/sparse-tiny.json

"block sparse" is softmax attention to the kept blocks only, with the dense model's weights. "SLA" has the fine-tuned
weights with their linear branch. Both choose blocks in the same way. Every variant makes the videos of the same
held-out captions from the same noise, in the model's own dtype, with the decoder in bf16. Variants that the file
already has do not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from diffusers import WanPipeline

import turbo_rcm_patch as trp
from turbo_rcm_patch.bench.environment import describe_environment
from turbo_rcm_patch.bench.evaluate import EMBEDDED_CALL, generate_videos, held_out_scenes, judge_videos, summarise
from turbo_rcm_patch.bench.metrics import frame_psnr
from turbo_rcm_patch.cli.files import json_file, write_json
from turbo_rcm_patch.embedded import SLA_BLOCKS
from turbo_rcm_patch.modules import SparseLinearAttention

KEPT = (0.1, 0.15, 0.2, 0.3)
STEPS = (1, 2, 4)
EXACT, BLOCK_SPARSE, SLA = "exact", "block sparse", "SLA"
VARIANTS = ((EXACT, None), *((name, kept) for name in (BLOCK_SPARSE, SLA) for kept in KEPT))
BATCH = 8


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    settings = {"n": options.n, "seed": options.seed, "blocks": list(SLA_BLOCKS), **EMBEDDED_CALL}
    exact: dict[int, torch.Tensor] = {}
    for name, kept in VARIANTS:
        if name != EXACT and (name not in options.variants or is_known(options.json, settings, name, kept)):
            continue
        videos = make_videos(name, kept, options)
        exact = exact or videos
        rows = [row(name, kept, steps, videos[steps], exact[steps], options) for steps in STEPS]
        add(options.json, settings, rows, options.device)
        print(*(f"{name} {kept}, {r['steps']} steps: {r['accuracy']['overall']['share']:.3f}" for r in rows), sep="\n")
    return 0


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=256, help="captions (default 256)")
    parser.add_argument("--seed", type=int, default=0, help="seed for captions and noise (default 0)")
    parser.add_argument("--variants", nargs="+", default=(BLOCK_SPARSE, SLA), choices=(BLOCK_SPARSE, SLA))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=json_file, required=True, help="the file of results, which is added to")
    return parser.parse_args(argv)


def make_videos(name: str, kept: float | None, options: argparse.Namespace) -> dict[int, torch.Tensor]:
    """Return a variant's videos [n, F, 3, H, W] by the number of steps."""
    pipe = load(name, options.device)
    scenes = held_out_scenes(options.n, options.seed)
    config = trp.Exact() if name == EXACT else trp.Sparse(quantize=(), topk=kept, blocks=SLA_BLOCKS)
    batches = [range(start, min(start + BATCH, options.n)) for start in range(0, options.n, BATCH)]
    with trp.patch(pipe, config):
        return {
            steps: torch.cat(
                [
                    generate_videos(pipe, scenes, batch, {**EMBEDDED_CALL, "num_inference_steps": steps}, options.seed)
                    for batch in batches
                ]
            )
            for steps in STEPS
        }


def load(name: str, device: str) -> WanPipeline:
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    pipe = trp.load_embedded_pipeline(dtype, device, sla=name == SLA)
    pipe.vae.to(torch.bfloat16)
    if name == BLOCK_SPARSE:  # SLA whose linear branch adds nothing
        for block in pipe.transformer.blocks:
            projection = SparseLinearAttention(pipe.transformer.config.attention_head_dim).proj_l
            block.attn1.proj_l = projection.to(device, dtype)
    trp.use_rcm(pipe)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def row(
    name: str, kept: float | None, steps: int, videos: torch.Tensor, exact: torch.Tensor, options: argparse.Namespace
) -> dict[str, object]:
    """Return a row of results. accuracy: as in `evaluate`. psnr_to_exact: mean dB, or None for the exact model."""
    accuracy = summarise(judge_videos(videos, held_out_scenes(options.n, options.seed)))
    psnr = None if videos is exact else frame_psnr(videos, exact).mean().item()
    shares = {attribute: asdict(value) for attribute, value in accuracy.items()}
    return {"variant": name, "kept": kept, "steps": steps, "accuracy": shares, "psnr_to_exact": psnr}


def results_in(path: Path, settings: dict[str, object]) -> list[dict]:
    """Return the rows that a file of the same settings holds."""
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    if content["settings"] != settings:
        raise SystemExit(f"{path} has {content['settings']}, and this run {settings}; give another --json.")
    return content["results"]


def is_known(path: Path, settings: dict[str, object], name: str, kept: float | None) -> bool:
    return any((one["variant"], one["kept"]) == (name, kept) for one in results_in(path, settings))


def add(path: Path, settings: dict[str, object], rows: list[dict], device: str) -> None:
    """Write the rows to the file in the order of VARIANTS. They replace its rows of the same variant."""
    variant = rows[0]["variant"], rows[0]["kept"]
    others = [one for one in results_in(path, settings) if (one["variant"], one["kept"]) != variant]
    results = sorted(others + rows, key=lambda one: VARIANTS.index((one["variant"], one["kept"])))
    environment = asdict(describe_environment(device))
    write_json(path, {"settings": settings, "environment": environment, "results": results})


if __name__ == "__main__":
    sys.exit(main())
