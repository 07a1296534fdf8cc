"""Fine-tune the embedded model to sparse-linear attention (SLA) and write the difference that ships beside its weights.

    python scripts/training/train_sparse.py --output runs/sparse

Minutes on one GPU, most of a day on a CPU. Run the same command again and it goes on where it stopped. The folder then
holds ``difference.safetensors``, for turbo_rcm_patch/embedded/weights/sla.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `scripts` can be imported

import turbo_rcm_patch as trp
from scripts.training.embedded.progress import OutOfTime, Run
from scripts.training.embedded.sparse import train_sparse
from scripts.training.embedded.trajectory import latent_shape
from turbo_rcm_patch.bench.evaluate import EMBEDDED_CALL

STEPS = 600


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the checkpoint, the log and the result")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after these, with a checkpoint")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"updates (default {STEPS})")
    options = parser.parse_args(argv)
    run = Run(options.output, options.seed, options.minutes)
    pipe = trp.load_embedded_pipeline(device=run.device)
    try:
        learned = train_sparse(run, pipe, latent_shape(pipe, EMBEDDED_CALL), options.steps)
    except OutOfTime:
        print("time is over; run the same command again to go on")
        return 75
    halves = {name: tensor.to("cpu", torch.float16).contiguous() for name, tensor in learned.items()}
    save_file(halves, options.output / "difference.safetensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
