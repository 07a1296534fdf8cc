"""Text to video in four steps: the rCM sampler and fused blocks on a Wan pipeline.

python examples/generate.py                       # the embedded tiny model: moving shapes, no download
python examples/generate.py --model PATH_OR_ID    # Wan weights distilled for few steps
"""

import argparse
import sys

from turbo_rcm_patch.cli.arguments import check_video
from turbo_rcm_patch.cli.errors import why_not_loaded
from turbo_rcm_patch.cli.quiet_imports import quiet_imports

with quiet_imports():  # other packages warn while they are imported
    import torch
    from diffusers import WanPipeline
    from diffusers.utils import export_to_video

    from turbo_rcm_patch import load_embedded_pipeline, patch, use_rcm

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a Wan text-to-video pipeline in diffusers format")
parser.add_argument("--size", type=int, nargs=3, metavar=("HEIGHT", "WIDTH", "FRAMES"))
parser.add_argument("--output", default="video.mp4")
options = parser.parse_args()
check_video(parser, options)

device = "cuda" if torch.cuda.is_available() else "cpu"
if options.model:
    try:
        pipe = WanPipeline.from_pretrained(options.model, dtype=torch.bfloat16).to(device)
    except OSError as error:
        sys.exit(f"cannot load {options.model}: {why_not_loaded(error)}")
    prompt, size = "A red fox leaps through fresh snow, slow motion", (480, 832, 81)
else:
    pipe = load_embedded_pipeline(device=device)
    prompt, size = "a large red circle moves up slowly while a small blue square moves left, on white", (160, 224, 17)

use_rcm(pipe)
print(patch(pipe).summary())

height, width, num_frames = options.size or size
video = pipe(
    prompt,
    height=height,
    width=width,
    num_frames=num_frames,
    num_inference_steps=4,
    guidance_scale=1.0,
    generator=torch.Generator(pipe.device).manual_seed(0),
).frames[0]
export_to_video(video, options.output, fps=16)
