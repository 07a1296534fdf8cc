"""Wan 2.2 text to video in four steps: two LoRAs, one for each of its transformers, and fused blocks.

python examples/lightning.py                                              # from the hub, for a GPU with 80 GB
python examples/lightning.py --offload                                    # one transformer on the GPU at a time
python examples/lightning.py --loras high.safetensors low.safetensors     # other files; or one folder with both
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

    from turbo_rcm_patch import patch, use_distilled

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Wan-AI/Wan2.2-T2V-A14B-Diffusers", help="a folder or a hub id")
parser.add_argument(
    "--loras", nargs="+", default=["lightx2v/Wan2.2-Lightning/Wan2.2-T2V-A14B-4steps-lora-rank64-Seko-V1.1"]
)
parser.add_argument("--prompt", default="A red fox leaps through fresh snow, slow motion")
parser.add_argument("--size", type=int, nargs=3, metavar=("HEIGHT", "WIDTH", "FRAMES"), default=(480, 832, 81))
parser.add_argument("--offload", action="store_true", help="keep only the running model on the GPU")
parser.add_argument("--output", default="video.mp4")
options = parser.parse_args()
check_video(parser, options)

# The VAE too is loaded in bf16: in fp32 its convolutions would be PyTorch's.
try:
    pipe = WanPipeline.from_pretrained(options.model, dtype=torch.bfloat16)
except OSError as error:
    sys.exit(f"cannot load {options.model}: {why_not_loaded(error)}")

print(use_distilled(pipe, options.loras[0] if len(options.loras) == 1 else options.loras))
print(patch(pipe).summary())
if options.offload:
    pipe.enable_model_cpu_offload()
elif torch.cuda.is_available():
    pipe.to("cuda")

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
