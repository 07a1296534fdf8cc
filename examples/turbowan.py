"""Wan with TurboDiffusion's weights, from files that you downloaded: sparse-linear attention in 8 bits, four steps.

python examples/turbowan.py TurboWan2.1-T2V-1.3B-480P.pth                                              # Wan 2.1, 1.3B
python examples/turbowan.py TurboWan2.1-T2V-14B-480P.pth --model Wan-AI/Wan2.1-T2V-14B-Diffusers
python examples/turbowan.py TurboWan2.2-I2V-A14B-high-720P.pth TurboWan2.2-I2V-A14B-low-720P.pth --image fox.png
python examples/turbowan.py TurboWan2.1-T2V-1.3B-480P.pth --vram 8GB                     # for a card with less memory
"""

import argparse
import sys
from pathlib import Path

from turbo_rcm_patch.cli.arguments import check_video
from turbo_rcm_patch.cli.errors import why_not_loaded
from turbo_rcm_patch.cli.quiet_imports import quiet_imports

with quiet_imports():  # other packages warn while they are imported
    import torch
    from diffusers import WanImageToVideoPipeline, WanPipeline
    from diffusers.utils import export_to_video, load_image

    from turbo_rcm_patch import Sparse, fit, load_turbodiffusion, use_distilled

parser = argparse.ArgumentParser()
parser.add_argument("weights", nargs="+", help="TurboWan's .pth file, also a -quant one; of Wan 2.2 both, high and low")
parser.add_argument("--image", help="where the video starts: a file or a URL; for image to video")
parser.add_argument("--model", help="the Wan it is for: a folder or a hub id (default: Wan 2.1 1.3B, or 2.2 I2V A14B)")
parser.add_argument("--vram", help="the card's memory, such as 8GB: models that do not fit stream there")
parser.add_argument("--prompt", default="A red fox leaps through fresh snow, slow motion")
parser.add_argument("--size", type=int, nargs=3, metavar=("HEIGHT", "WIDTH", "FRAMES"))
parser.add_argument("--output", default="video.mp4")
options = parser.parse_args()
check_video(parser, options)
if missing := [path for path in options.weights if not Path(path).exists()]:  # before Wan is downloaded
    parser.error(f"{missing[0]}: no such file; download TurboWan's weights first.")
if (len(options.weights) == 2) != (options.image is not None):
    parser.error("image to video takes two files of weights, high and low, and --image; text to video one file.")

if options.image:
    pipeline, model, size = WanImageToVideoPipeline, "Wan-AI/Wan2.2-I2V-A14B-Diffusers", (720, 1280, 81)
else:
    pipeline, model, size = WanPipeline, "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", (480, 832, 81)

# The VAE too is loaded in bf16: in fp32 its convolutions would be PyTorch's.
try:
    pipe = pipeline.from_pretrained(options.model or model, dtype=torch.bfloat16)
except OSError as error:
    sys.exit(f"cannot load {options.model or model}: {why_not_loaded(error)}")
if torch.cuda.is_available() and not options.vram:
    pipe.to("cuda")

# restorable=False frees the bf16 weights, which restore() would need.
patch = load_turbodiffusion(options.weights, pipe, Sparse(restorable=not options.vram))
use_distilled(pipe, recipe="turbowan-i2v" if options.image else "turbowan")

height, width, num_frames = options.size or size
if options.vram:
    print(fit(pipe, options.vram, height=height, width=width, num_frames=num_frames))
video = pipe(
    prompt=options.prompt,
    **({"image": load_image(options.image)} if options.image else {}),
    height=height,
    width=width,
    num_frames=num_frames,
    num_inference_steps=4,
    guidance_scale=1.0,
    generator=torch.Generator().manual_seed(0),
).frames[0]
export_to_video(video, options.output, fps=16)
print(patch.summary())  # after the video, as how many key blocks are kept depends on its size
