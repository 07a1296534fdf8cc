"""Wan 2.1 text to video with TurboDiffusion's weights: sparse-linear attention in 8 bits, four steps.

python examples/turbowan.py TurboWan2.1-T2V-1.3B-480P.pth                                # a file that you downloaded
python examples/turbowan.py TurboWan2.1-T2V-14B-480P.pth --model Wan-AI/Wan2.1-T2V-14B-Diffusers
"""

import argparse

import torch
from diffusers import WanPipeline
from diffusers.utils import export_to_video

import turbo_rcm_patch as trp

parser = argparse.ArgumentParser()
parser.add_argument("weights", help="TurboWan's .pth file, also a -quant one")
parser.add_argument(
    "--model", default="Wan-AI/Wan2.1-T2V-1.3B-Diffusers", help="the Wan it is for: a folder or a hub id"
)
parser.add_argument("--attention", default="sagesla", choices=("sagesla", "sla"), help="in 8 bits, or in bf16")
parser.add_argument("--prompt", default="A red fox leaps through fresh snow, slow motion")
parser.add_argument("--size", type=int, nargs=3, metavar=("HEIGHT", "WIDTH", "FRAMES"), default=(480, 832, 81))
parser.add_argument("--output", default="video.mp4")
options = parser.parse_args()

# The VAE too is loaded in bf16: in fp32 its convolutions would be PyTorch's.
pipe = WanPipeline.from_pretrained(options.model, dtype=torch.bfloat16)
if torch.cuda.is_available():
    pipe.to("cuda")

print(trp.load_turbodiffusion(options.weights, pipe, attention=options.attention).summary())
trp.use_rcm(pipe)

height, width, num_frames = options.size
video = pipe(
    options.prompt,
    height=height,
    width=width,
    num_frames=num_frames,
    num_inference_steps=4,
    guidance_scale=1.0,
    generator=torch.Generator().manual_seed(0),
).frames[0]
export_to_video(video, options.output, fps=16)
