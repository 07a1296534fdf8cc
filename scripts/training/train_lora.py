"""Train a LoRA with which the embedded model paints every shape red, and count what it then shows, patched or not.

    python scripts/training/train_lora.py --output runs/lora --json results/lora-tiny.json

The JSON file says how long training took, and on what. The teacher is the model itself, asked for the same scene in
red. The folder then holds ``pytorch_lora_weights.safetensors``, for ``pipe.load_lora_weights``. Every variant makes the
videos of the same held-out captions from the same noise. No caption says red. The judge says which colours it sees.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from diffusers import WanPipeline, WanTransformer3DModel
from peft import LoraConfig, get_peft_model_state_dict

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `scripts` can be imported

import turbo_rcm_patch as trp
from scripts.training.embedded.data import token_ids
from scripts.training.embedded.text import embed
from scripts.training.embedded.trajectory import STEPS, latent_shape, trajectory
from turbo_rcm_patch.bench.environment import describe_environment
from turbo_rcm_patch.bench.evaluate import EMBEDDED_CALL, generate_videos, judge_videos
from turbo_rcm_patch.bench.metrics import frame_psnr
from turbo_rcm_patch.cli.files import json_file, write_json
from turbo_rcm_patch.shapes.grammar import Scene, draw_scene

COLOUR = "red"
RANK, LINEARS = 8, ("to_q", "to_k", "to_v", "to_out.0")
BATCH, LEARNING_RATE, UPDATES = 2, 4e-3, 240
VIDEOS_AT_ONCE = 8
WITHOUT, UNPATCHED = "without it, unpatched", "with it, unpatched"
TIERS = {"with it, patched (exact)": "exact", "with it, patched (quantized)": "quantized"}


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    start = time.perf_counter()
    train(options)
    training = {"updates": options.updates, "seconds": time.perf_counter() - start}
    settings = {"n": options.n, "seed": options.seed, "colour": COLOUR, "rank": RANK, "steps": STEPS, **EMBEDDED_CALL}
    environment, rows = asdict(describe_environment(options.device)), count(options)
    write_json(options.json, {"settings": settings, "training": training, "environment": environment, "results": rows})
    print(*(f"{row['variant']}: {row['colour']:.3f} {COLOUR}, {row['asked']:.3f} as asked" for row in rows), sep="\n")
    return 0


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the LoRA")
    parser.add_argument("--updates", type=int, default=UPDATES, help=f"updates of the training (default {UPDATES})")
    parser.add_argument("-n", type=int, default=32, help="captions to count with (default 32)")
    parser.add_argument("--seed", type=int, default=0, help="seed of captions, noise and weights (default 0)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=json_file, required=True, help="file for the counts")
    return parser.parse_args(argv)


def train(options: argparse.Namespace) -> None:
    """Write the LoRA to the output folder."""
    torch.manual_seed(options.seed)
    pipe = load(options.device, torch.float32)
    teacher, student = pipe.transformer, with_lora(copy.deepcopy(pipe.transformer))
    learned = [parameter for parameter in student.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.updates)
    scenes = scenes_to_paint(options.seed, held_out=False)
    for update in range(options.updates):
        batch = [next(scenes) for _ in range(BATCH)]
        asked, painted = (text_of(pipe, captions) for captions in (batch, map(in_colour, batch)))
        for velocity, wanted in trajectory(student, teacher, asked, painted, latent_shape(pipe, EMBEDDED_CALL)):
            error = (velocity - wanted).square().mean() / wanted.square().mean()
            error.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        print(f"update {update + 1} of {options.updates}: error of the last step {error.item():.4f}", flush=True)
    WanPipeline.save_lora_weights(options.output, transformer_lora_layers=get_peft_model_state_dict(student))


def load(device: str, dtype: torch.dtype) -> WanPipeline:
    pipe = trp.load_embedded_pipeline(dtype, device)
    trp.use_rcm(pipe)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def with_lora(transformer: WanTransformer3DModel) -> WanTransformer3DModel:
    transformer.requires_grad_(False)
    transformer.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(LINEARS)))
    return transformer


def scenes_to_paint(seed: int, *, held_out: bool) -> Iterator[Scene]:
    """Return scenes of one shape of another colour."""
    generator = random.Random(seed)
    while True:
        scene = draw_scene(generator, held_out=held_out)
        if len(scene.objects) == 1 and scene.objects[0].colour != COLOUR:
            yield scene


def in_colour(scene: Scene) -> Scene:
    return replace(scene, objects=tuple(replace(shape, colour=COLOUR) for shape in scene.objects))


def text_of(pipe: WanPipeline, scenes) -> torch.Tensor:
    with torch.no_grad():
        return embed(pipe.text_encoder, token_ids(pipe.tokenizer, list(map(str, scenes))).to(pipe.device))


def count(options: argparse.Namespace) -> list[dict[str, object]]:
    """Return a row per variant.

    colour, asked: shares of the shapes in COLOUR, and in the caption's colour.
    psnr: dB between the frames and the unpatched frames with the LoRA. None for these, and for frames without the LoRA.
    """
    pipe = load(options.device, torch.bfloat16 if options.device.startswith("cuda") else torch.float32)
    scenes = [scene for scene, _ in zip(scenes_to_paint(options.seed, held_out=True), range(options.n), strict=False)]
    videos = {WITHOUT: make_videos(pipe, scenes, options.seed)}
    pipe.load_lora_weights(options.output)
    videos[UNPATCHED] = make_videos(pipe, scenes, options.seed)
    for variant, preset in TIERS.items():
        with trp.patch(pipe, preset):
            videos[variant] = make_videos(pipe, scenes, options.seed)
    rows = []
    for variant, made in videos.items():
        psnr = frame_psnr(made, videos[UNPATCHED]).mean().item() if variant in TIERS else None
        shares = {"colour": share(map(in_colour, scenes), made), "asked": share(scenes, made)}
        rows.append({"variant": variant, **shares, "psnr": psnr})
    return rows


def make_videos(pipe: WanPipeline, scenes: list[Scene], seed: int) -> torch.Tensor:
    call = {**EMBEDDED_CALL, "num_inference_steps": STEPS}
    starts = range(0, len(scenes), VIDEOS_AT_ONCE)
    batches = (range(start, min(start + VIDEOS_AT_ONCE, len(scenes))) for start in starts)
    return torch.cat([generate_videos(pipe, scenes, batch, call, seed) for batch in batches])


def share(scenes, videos: torch.Tensor) -> float:
    """Return the share of shapes that are seen in the scenes' colours."""
    counts = [scores["colour"] for scores in judge_videos(videos, list(scenes))]
    return sum(right for right, _ in counts) / sum(asked for _, asked in counts)


if __name__ == "__main__":
    sys.exit(main())
