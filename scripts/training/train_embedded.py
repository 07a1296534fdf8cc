"""Train the embedded model: autoencoder, rectified-flow teacher, rCM student. One GPU, under 25 minutes on an H200.

    python scripts/training/train_embedded.py --output runs/embedded

Run the same command again and it goes on where it stopped. The folder then holds ``pipeline/`` (the weights
that ship), ``training.json`` (the summary of its log), and what the stages wrote in between.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from diffusers import WanPipeline

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `scripts` can be imported

from scripts.training.embedded.data import LatentPool
from scripts.training.embedded.models import train_tokenizer
from scripts.training.embedded.progress import OutOfTime, Run
from scripts.training.embedded.student import GUIDANCE, train_student
from scripts.training.embedded.teacher import train_teacher
from scripts.training.embedded.vae import train_vae
from turbo_rcm_patch.bench.environment import describe_environment
from turbo_rcm_patch.bench.evaluate import EMBEDDED_CALL, held_out_scenes, prompt_accuracy

STEPS = {"vae": 7000, "teacher": 18000, "student": 10000}
VIDEOS = {"vae": 2048, "pool": 24576}  # to train the autoencoder on, and the other networks on their latents
TEACHER_STEPS = 50
SUMMARY = "training.json"
TEACHER_PROMPTS = 256


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for checkpoints, the log and the pipeline")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after these, with a checkpoint")
    parser.add_argument("--until", choices=STEPS, default="student", help="the last stage to run")
    parser.add_argument("--fraction", type=float, default=1.0, help="the share of all steps to make, to try the script")
    options = parser.parse_args(argv)
    run = Run(options.output, options.seed, options.minutes)
    try:
        train(run, options.fraction, options.until)
    except OutOfTime:
        print("time is over; run the same command again to go on")
        return 75
    return 0


def train(run: Run, fraction: float, until: str) -> None:
    """Run the stages that are left, up to the named one."""
    if (run.folder / SUMMARY).exists():
        return
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # one per shape, gradient mode and network
    steps = {stage: math.ceil(count * fraction) for stage, count in STEPS.items()}
    vae = train_vae(run, steps["vae"], math.ceil(VIDEOS["vae"] * fraction))
    if until == "vae":
        return
    start = time.monotonic()
    pool = LatentPool(run, vae, train_tokenizer(), math.ceil(VIDEOS["pool"] * fraction))
    run.log("pool", videos=len(pool.latents), seconds=time.monotonic() - start)
    teacher = train_teacher(run, vae, pool, steps["teacher"])
    if not run.has_logged("teacher accuracy"):
        judge_teacher(run, teacher, math.ceil(TEACHER_PROMPTS * fraction))
    if until == "teacher":
        return
    save_half(train_student(run, teacher, pool, steps["student"]), run.folder / "pipeline")
    write_summary(run, steps)


def judge_teacher(run: Run, teacher: WanPipeline, prompts: int) -> None:
    """Log the prompt accuracy of the teacher's own sampler, with guidance, on held-out captions."""
    call = {**EMBEDDED_CALL, "num_inference_steps": TEACHER_STEPS, "guidance_scale": GUIDANCE}
    accuracy = prompt_accuracy(teacher, held_out_scenes(prompts, run.seed), call, seed=run.seed, batch_size=64)
    shares = {name: asdict(value) for name, value in accuracy.items()}
    run.log("teacher accuracy", steps=TEACHER_STEPS, guidance_scale=GUIDANCE, prompts=prompts, accuracy=shares)


def save_half(pipe: WanPipeline, folder: Path) -> None:
    """Write the pipeline in fp16: half the size, and closer to the trained weights than bf16."""
    parts = {name: copy.deepcopy(getattr(pipe, name)) for name in ("transformer", "vae", "text_encoder")}
    for model in parts.values():
        for parameter in model.parameters():
            parameter.data = parameter.data.half()
    WanPipeline(tokenizer=pipe.tokenizer, scheduler=pipe.scheduler, **parts).save_pretrained(folder)
    for path in folder.rglob("*.json"):
        config = json.loads(path.read_text())
        if config.pop("_name_or_path", None) is not None:  # where this run lay on this machine
            path.write_text(json.dumps(config, indent=2) + "\n")


def write_summary(run: Run, steps: dict[str, int]) -> None:
    """Write ``training.json`` with each stage's duration and last losses, and the teacher's quality."""
    stages = {name: run.last_log(name) for name in (*steps, "pool", "autoencoder", "teacher accuracy")}
    summary = {
        "seed": run.seed,
        "steps": steps,
        "seconds": sum(stages[name]["seconds"] for name in (*steps, "pool")),
        "environment": asdict(describe_environment(run.device)),
        "stages": stages,
    }
    (run.folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
