"""LTX-2 with TurboT2AV's weights, from a file that you downloaded: video with sound in four steps, in 8 bits.

python examples/turbot2av.py model.pth
python examples/turbot2av.py model.pth --size 1024 1792 121 --prompt "Waves break on a rocky shore, gulls cry"
"""

import argparse
import sys
from pathlib import Path

from turbo_rcm_patch.cli.arguments import check_video
from turbo_rcm_patch.cli.errors import why_not_loaded
from turbo_rcm_patch.cli.quiet_imports import quiet_imports
from turbo_rcm_patch.cli.sizes import SizeRules

with quiet_imports():  # other packages warn while they are imported
    import torch
    from diffusers import LTX2Pipeline

    from turbo_rcm_patch import load_turbodiffusion, use_distilled
    from turbo_rcm_patch.cli.files import Sound, write_video

FPS = 24
parser = argparse.ArgumentParser()
parser.add_argument("weights", help="TurboT2AV's model.pth")
parser.add_argument("--model", default="Lightricks/LTX-2", help="LTX-2: a folder or a hub id")
attention = "sparse in 8 bits, sparse in bf16, or to all keys in bf16"
parser.add_argument("--attention", default="sagesla", choices=("sagesla", "sla", "dense"), help=attention)
parser.add_argument("--prompt", default="A red fox leaps through fresh snow, slow motion. The snow crunches.")
parser.add_argument("--size", type=int, nargs=3, default=(512, 768, 121), metavar=("HEIGHT", "WIDTH", "FRAMES"))
parser.add_argument("--output", type=Path, default="video.mp4")
options = parser.parse_args()
check_video(parser, options, SizeRules(height=32, width=32, temporal=8))
if not Path(options.weights).exists():  # before LTX-2 is downloaded
    parser.error(f"{options.weights}: no such file; download TurboT2AV's model.pth first.")

try:
    pipe = LTX2Pipeline.from_pretrained(options.model, dtype=torch.bfloat16)
except OSError as error:
    sys.exit(f"cannot load {options.model}: {why_not_loaded(error)}")
if torch.cuda.is_available():
    pipe.transformer.to("cuda")  # which puts its weights into 8 bits
patch = load_turbodiffusion(options.weights, pipe, attention=options.attention)
use_distilled(pipe, recipe="turbot2av")
if torch.cuda.is_available():
    pipe.enable_model_cpu_offload()  # the text encoder alone has 12 billion parameters

height, width, num_frames = options.size
video, sound = pipe(
    prompt=options.prompt,
    height=height,
    width=width,
    num_frames=num_frames,
    frame_rate=float(FPS),
    num_inference_steps=4,
    generator=torch.Generator().manual_seed(0),
    output_type="np",
    return_dict=False,
)
frames = (255 * video[0]).round().astype("uint8")
of_video = Sound(sound[0].float().cpu().numpy(), pipe.vocoder.config.output_sampling_rate)
write_video(options.output, [frames], FPS, of_video)
print(patch.summary())  # after the video, as how many key blocks are kept depends on its size
