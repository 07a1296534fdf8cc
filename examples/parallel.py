"""One video on all GPUs of a machine: each computes a share of every step, and decodes a strip of the frames.

torchrun --nproc-per-node 4 examples/parallel.py                                              # the embedded tiny model
torchrun --nproc-per-node 4 examples/parallel.py --model PATH_OR_ID --preset quantized        # distilled Wan weights

torchrun starts a process for each GPU. If one of them fails, torchrun ends all and shows its error.
"""

import argparse
import os
import sys
import time

from turbo_rcm_patch.cli.arguments import check_video
from turbo_rcm_patch.cli.quiet_imports import quiet_imports

with quiet_imports():  # other packages warn while they are imported
    import torch
    import torch.distributed as dist
    from diffusers import ContextParallelConfig, WanPipeline
    from diffusers.utils import export_to_video
    from torch.distributed.elastic.multiprocessing.errors import record

    from turbo_rcm_patch import load_embedded_pipeline, patch, use_rcm


@record  # gives this process's error to torchrun
def main(arguments=None):
    try:
        make_video(arguments)
    except Exception:
        time.sleep(1)  # the other processes fail when this one ends, and torchrun shows the first error that it sees
        raise


def make_video(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a Wan text-to-video pipeline in diffusers format")
    parser.add_argument("--preset", default="exact", help="the tier of the patch (default exact)")
    parser.add_argument("--size", type=int, nargs=3, metavar=("HEIGHT", "WIDTH", "FRAMES"))
    parser.add_argument("--output", default="video.mp4")
    options = parser.parse_args(arguments)
    check_video(parser, options)
    if "LOCAL_RANK" not in os.environ:
        sys.exit("start this file by: torchrun --nproc-per-node 2 examples/parallel.py")
    if torch.accelerator.device_count() == 0:
        sys.exit("diffusers shares a video among GPUs alone, and PyTorch finds none.")

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    is_first = dist.get_rank() == 0

    if options.model:
        pipe = WanPipeline.from_pretrained(options.model, dtype=torch.bfloat16).to(device)
        prompt, size = "A red fox leaps through fresh snow, slow motion", (480, 832, 81)
    else:
        pipe = load_embedded_pipeline(device=device)
        prompt = "a large red circle moves up slowly while a small blue square moves left, on white"
        size = 160, 224, 17

    use_rcm(pipe)
    pipe.set_progress_bar_config(disable=not is_first)
    patched = patch(pipe, options.preset)
    # Heads and tokens must divide by the number of processes: 40 heads and 32,760 tokens do by 2 and 4.
    for transformer in patched.transformers.values():
        transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=dist.get_world_size()))

    height, width, num_frames = options.size or size
    video = pipe(
        prompt,
        height=height,
        width=width,
        num_frames=num_frames,
        num_inference_steps=4,
        guidance_scale=1.0,
        output_type="np" if is_first else "pt",  # "pt" stays on the GPU: one copy on the CPU will do
        generator=torch.Generator(device).manual_seed(0),  # the same seed in all processes
    ).frames[0]
    if is_first:
        print(patched.summary())
        export_to_video(video, options.output, fps=16)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
