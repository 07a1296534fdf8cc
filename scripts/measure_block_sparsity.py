"""What block-sparse attention costs the embedded model on the CPU, in fp32, by `mass`: for a user to choose from.

    python scripts/measure_block_sparsity.py --json results/block-sparse-tiny.json

For each mass: what each layer's attention errs and keeps in the first and the last of four steps, on the inputs of an
unpatched generation; and over held-out captions how much of them the videos show, and how far the frames are from those
of the exact tier. The model has 700 tokens; blocks have 16 queries and 16 keys.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

import torch

from turbo_rcm_patch.bench.environment import describe_environment
from turbo_rcm_patch.bench.evaluate import EMBEDDED_CALL, evaluate
from turbo_rcm_patch.bench.report import evaluation_table
from turbo_rcm_patch.bench.verify import Verification, verify
from turbo_rcm_patch.cli.files import json_file, write_json
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.embedded import load_embedded_pipeline
from turbo_rcm_patch.patching import use_rcm
from turbo_rcm_patch.shapes.grammar import EXAMPLES

MASSES = (0.5, 0.7, 0.8, 0.9, 0.95)
BLOCKS = (16, 16)
STEPS = 4


def config_of(mass: float) -> PatchConfig:
    options = {"attention": "block_sparse", "mass": mass, "min_tokens": 0, "blocks": BLOCKS}
    return PatchConfig(tier="sparse", quantize=(), **options)


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    pipe = load_embedded_pipeline(torch.float32, torch.device("cpu"))
    pipe.set_progress_bar_config(disable=True)
    use_rcm(pipe)
    rows = []
    for mass in options.masses:
        call = {**EMBEDDED_CALL, "prompt": EXAMPLES[0], "num_inference_steps": STEPS}
        rows.append({"mass": mass, "layers": layers_of(verify(pipe, call, seed=options.seed, config=config_of(mass)))})
        for layer in rows[-1]["layers"]:
            print(f"mass {mass}", *(f"{name} {value}" for name, value in layer.items()), sep=", ", flush=True)
    evaluation = evaluate(
        pipe,
        n=options.n,
        steps=(STEPS,),
        config={f"mass {mass:g}": config_of(mass) for mass in options.masses},
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
                "environment": asdict(describe_environment("cpu")),
                "settings": {
                    "n": options.n,
                    "seed": options.seed,
                    "steps": STEPS,
                    "blocks": BLOCKS,
                    "dtype": "float32",
                },
                "exact": results["exact"],
                "masses": [{**row, **results[f"mass {row['mass']:g}"]} for row in rows],
            },
        )
    return 0


def layers_of(verification: Verification) -> list[dict[str, object]]:
    """By block and step: what its attention keeps, and the relative L2 error of what it adds."""
    errors = {(p.block, p.step): p.error for p in verification.parts if p.part == "self_attention"}
    return [{**asdict(kept), "error": errors[kept.block, kept.step]} for kept in verification.kept]


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=16, help="held-out captions (default 16)")
    parser.add_argument("--masses", type=float, nargs="+", default=MASSES, help=f"default {' '.join(map(str, MASSES))}")
    parser.add_argument("--seed", type=int, default=0, help="of captions and noise (default 0)")
    parser.add_argument("--batch-size", type=int, default=8, help="videos made at a time (default 8)")
    parser.add_argument("--json", type=json_file, help="write all figures with the versions")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
