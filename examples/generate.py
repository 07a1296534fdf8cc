"""Text to video in four steps: the rCM sampler and fused blocks on a Wan pipeline.

python examples/generate.py                       # the embedded tiny model: abstract patterns, no download
python examples/generate.py --model PATH_OR_ID    # Wan weights distilled for few steps
"""

import argparse

import torch
from diffusers import WanPipeline
from diffusers.utils import export_to_video

import turbo_rcm_patch as trp

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a Wan text-to-video pipeline in diffusers format")
parser.add_argument("--output", default="fox.mp4")
options = parser.parse_args()

if options.model:
    pipe = WanPipeline.from_pretrained(options.model, dtype=torch.bfloat16).to("cuda")
    size = {"height": 480, "width": 832, "num_frames": 81}
else:
    pipe = trp.load_embedded_pipeline()
    size = {"height": 96, "width": 160, "num_frames": 17}

trp.use_rcm(pipe)
print(trp.patch(pipe).summary())

video = pipe(
    "A red fox leaps through fresh snow, slow motion",
    num_inference_steps=4,
    guidance_scale=1.0,
    generator=torch.Generator(pipe.device).manual_seed(0),
    **size,
).frames[0]
export_to_video(video, options.output, fps=16)
