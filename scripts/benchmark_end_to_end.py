"""Compare eager, torch.compile (on a GPU) and patched generation at real model sizes, with random weights.

    python scripts/benchmark_end_to_end.py --config wan2.1-1.3b --json benchmark.json
    python scripts/benchmark_end_to_end.py --config wan2.1-14b --layers 4 --decode

The prompt is random embeddings: the text encoder is not run. A step is one call of the transformer and the sampler; its
error to fp32 is measured first, and nothing is timed where the patch errs more than diffusers does.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import torch

from turbo_rcm_patch.bench.cases import CASES, build_pipeline, random_prompt
from turbo_rcm_patch.bench.compare import compare
from turbo_rcm_patch.bench.report import comparison_table
from turbo_rcm_patch.cli.files import json_file, write_json
from turbo_rcm_patch.config import CUDA_GRAPH_MODES, resolve_config
from turbo_rcm_patch.patching import use_rcm


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    case = CASES[options.config]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pipe = build_pipeline(case, dtype, device, layers=options.layers)
    use_rcm(pipe)
    call = {
        "height": options.height or case.height,
        "width": options.width or case.width,
        "num_frames": options.frames or case.frames,
        "num_inference_steps": options.steps,
        "guidance_scale": 1.0,
        "output_type": "np" if options.decode else "latent",
    }
    settings = {"config": options.config, "layers": len(pipe.transformer.blocks), "dtype": str(dtype), **call}
    print(*(f"{name} {value}" for name, value in settings.items()), sep=", ")
    comparison = compare(
        pipe,
        {**call, "prompt_embeds": random_prompt(pipe)},
        config=replace(resolve_config(options.preset), cuda_graph=options.cuda_graph),
        with_compile=False if options.no_compile else None,
        with_oracle=not options.no_oracle,
        repeats=options.repeats,
        settings={**settings, "repeats": options.repeats, "cuda_graph": options.cuda_graph},
    )
    print(comparison.patch_summary, comparison_table(comparison), sep="\n\n")
    if options.json is not None:
        write_json(options.json, comparison.to_dict())
    return 0


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=CASES, default="wan2.1-1.3b")
    parser.add_argument("--layers", type=int, help="build only so many blocks")
    parser.add_argument("--frames", type=int, help="default: the config's usual size, as for height and width")
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5, help="measured generations per variant (default 5)")
    parser.add_argument("--preset", default="exact", help="of the patch (default exact)")
    parser.add_argument("--cuda-graph", choices=CUDA_GRAPH_MODES, default="auto", help="of the patch (default auto)")
    parser.add_argument("--decode", action="store_true", help="decode the latents too")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--no-oracle", action="store_true", help="do not check a step against fp32, for want of memory")
    parser.add_argument("--json", type=json_file, help="write all figures with the GPU and versions")
    options = parser.parse_args(argv)
    return options


if __name__ == "__main__":
    sys.exit(main())
