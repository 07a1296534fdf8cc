"""Draw a contact sheet of the embedded model: a row for each of a few captions, frames from first to last.

python scripts/tools/contact_sheet.py                              # results/contact-sheet.png
python scripts/tools/contact_sheet.py --model PATH --output x.png  # of another pipeline trained on the same captions
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import WanPipeline
from PIL import Image, ImageDraw, ImageFont

from turbo_rcm_patch.embedded import FRAMES, HEIGHT, WIDTH, load_embedded_pipeline
from turbo_rcm_patch.patching import use_rcm

ROOT = Path(__file__).resolve().parents[2]
CAPTIONS = (  # of combinations that training never showed
    "a red circle moves up",
    "a large blue square moves down slowly, on white",
    "a small yellow triangle moves right quickly, on black",
    "a large green circle moves right slowly while a small purple square moves right, on white",
    "a small orange cross moves up while a large blue triangle moves up slowly, on gray",
    "a large yellow circle moves down quickly while a small purple cross moves down, on black",
)

COLUMNS = 5
COLUMN_WIDTH = 160  # pixels
GAP = 6  # pixels between frames and around captions
FONT = ImageFont.load_default(size=15)
LEVELS = 17  # that each channel is rounded to: faint noise would otherwise make the PNG many times as large


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "results/contact-sheet.png")
    parser.add_argument("--model", type=Path, help="folder of a pipeline (default: the embedded one)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, nargs=3, metavar=("HEIGHT", "WIDTH", "FRAMES"))
    options = parser.parse_args(argv)
    pipe = load_embedded_pipeline() if options.model is None else WanPipeline.from_pretrained(options.model)
    pipe.to(options.device).set_progress_bar_config(disable=True)
    use_rcm(pipe)
    size = options.size or (HEIGHT, WIDTH, FRAMES)
    videos = [generate(pipe, caption, size, options.steps, options.seed) for caption in CAPTIONS]
    contact_sheet(CAPTIONS, videos).save(options.output, optimize=True)
    print(f"wrote {options.output}: {options.output.stat().st_size / 1024:.0f} KiB")
    return 0


def generate(pipe: WanPipeline, caption: str, size: Sequence[int], steps: int, seed: int) -> torch.Tensor:
    """Return one video [F, 3, H, W] in [0, 1]. size: its height, width and frames."""
    height, width, frames = size
    return pipe(
        caption,
        height=height,
        width=width,
        num_frames=frames,
        num_inference_steps=steps,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(seed),
        output_type="pt",
    ).frames[0]


def contact_sheet(captions: Sequence[str], videos: Sequence[torch.Tensor]) -> Image.Image:
    """Draw videos [F, 3, H, W] in [0, 1] as rows of COLUMNS frames, evenly spread over time, under their captions."""
    rows = [_row(caption, video) for caption, video in zip(captions, videos, strict=True)]
    sheet = Image.new("RGB", (rows[0].width, sum(row.height for row in rows)), "white")
    top = 0
    for row in rows:
        sheet.paste(row, (0, top))
        top += row.height
    step = 255 / (LEVELS - 1)
    return sheet.point(lambda value: round(round(value / step) * step))


def _row(caption: str, video: torch.Tensor) -> Image.Image:
    frames, _, height, width = video.shape
    column_height = round(COLUMN_WIDTH * height / width)
    top = FONT.size + 3 * GAP
    row = Image.new("RGB", (COLUMNS * (COLUMN_WIDTH + GAP) + GAP, top + column_height + GAP), "white")
    draw = ImageDraw.Draw(row)
    draw.text((GAP, GAP), caption, fill="black", font=FONT)
    pixels = (video.float().clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    for column, frame in enumerate(torch.linspace(0, frames - 1, COLUMNS).round().int().tolist()):
        left = GAP + column * (COLUMN_WIDTH + GAP)
        picture = Image.fromarray(pixels[frame]).resize((COLUMN_WIDTH, column_height), Image.Resampling.LANCZOS)
        row.paste(picture, (left, top))
        draw.rectangle((left - 1, top - 1, left + COLUMN_WIDTH, top + column_height), outline="#c0c0c0")
    return row


if __name__ == "__main__":
    sys.exit(main())
