"""The videos of `turbo-rcm compare` side by side, each under its name: an mp4, an animated picture, or three frames."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..bench.compare import Comparison
from .files import replacing, write_video

ANIMATED = (".gif", ".webp")
QUALITY = 90  # of a WebP
GREY = "#dddddd"
STRIP = 16  # mp4 files have sizes that this divides


def write_side_by_side(path: Path, comparison: Comparison, fps: int) -> str:
    """Write the comparison, and return a sentence on it. A PNG gets the first, middle and last frame, one below the
    other."""
    difference, gain = comparison.difference()
    videos = np.concatenate([*(variant.video for variant in comparison.variants), difference], axis=2)
    videos = np.nan_to_num(videos, nan=1.0)  # NaN is white
    names = [variant.name for variant in comparison.variants]
    frames = under_names(np.round(255 * videos).astype(np.uint8), [*names, f"difference, times {gain}"])
    suffix = path.suffix.lower()
    if suffix == ".png":
        with replacing(path) as temporary:
            Image.fromarray(np.concatenate([frames[0], frames[len(frames) // 2], frames[-1]])).save(temporary)
    elif suffix in ANIMATED:
        first, *others = map(Image.fromarray, frames)
        with replacing(path) as temporary:
            options = {"save_all": True, "append_images": others, "duration": round(1000 / fps), "loop": 0}
            first.save(temporary, quality=QUALITY, **options)
    else:
        write_video(path, [frames], fps=fps)
    return f"wrote {path}: {', '.join(names)}, and {names[-1]} minus {names[0]}, times {gain}"


def under_names(videos: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Return videos, [F, H, n * W, 3] in uint8, under a grey strip with the n names, one at each column's left."""
    _, height, width, _ = videos.shape
    strip = Image.new("RGB", (width, strip_height(height)), GREY)
    draw, font = ImageDraw.Draw(strip), ImageFont.load_default(size=round(0.75 * strip.height))
    for index, name in enumerate(names):
        left = index * width // len(names)
        draw.line((left, 0, left, strip.height), fill="white", width=2)
        draw.text((left + 4, 0), name, fill="black", font=font)
    above = np.broadcast_to(np.asarray(strip), (len(videos), *np.asarray(strip).shape))
    return np.concatenate([above, videos], axis=1)


def strip_height(height: int) -> int:
    """Return the height of the strip over frames of this height: the larger the frames, the larger the names."""
    return STRIP * -(-height // 320)
