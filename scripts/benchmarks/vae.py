"""Time, memory and error of a VAE alone: decoding and encoding a video, and its output, unpatched and patched.

    python scripts/benchmarks/vae.py --config wan2.1-1.3b --json vae.json

The weights are random, and so is the video. The memory is what the work takes beside the VAE's weights and its input,
with the result. The error is that of a short video's result against diffusers' own code in fp32, which decodes and
encodes whole frames; in tiles it includes their blending. "Little memory" is the patch with no memory to spare: as few
frames at a time as it can. A tiny VAE, whose weights are random too, decodes in place of the VAE, and its error is not
measured. "8 bits" is the decoder with ``vae="8bit"``; its PSNR is that of the short video's frames to exact patched
decoding. A strip is the part of each frame that one of several GPUs decodes, without the exchange of frames. The output
is what a pipeline does to the decoded video: conversion to numpy or PIL, on the CPU.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from diffusers.video_processor import VideoProcessor
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `scripts` can be imported

import turbo_rcm_patch as trp
from scripts.benchmarks.memory_cap import with_random_weights
from scripts.benchmarks.stand_ins import tiny_file
from scripts.tools.pages.vae import NUMPY, PIL, vae_table
from turbo_rcm_patch.bench.coding import coded, coding_oracle
from turbo_rcm_patch.bench.environment import describe_environment
from turbo_rcm_patch.bench.metrics import psnr, relative_l2
from turbo_rcm_patch.cli.files import json_file, write_json
from turbo_rcm_patch.latents import latent_size
from turbo_rcm_patch.patching.families import CASES
from turbo_rcm_patch.patching.families.vae.chunks import (
    LIMIT,
    decoding_bytes,
    encoding_bytes,
    frames_at_once,
    output_shape,
)
from turbo_rcm_patch.patching.families.vae.decoder import decoded
from turbo_rcm_patch.patching.families.vae.forward import joined, plan_for
from turbo_rcm_patch.patching.families.vae.strips import cuts_of, strips_of
from turbo_rcm_patch.patching.families.vae.video_output import postprocess_video

UNPATCHED, COMPILED, PATCHED = "unpatched", "torch.compile", "patched"
LITTLE_MEMORY, IN_TILES, TINY = "patched, little memory", "patched, in tiles", "tiny VAE"
IN_8_BITS = "patched, 8 bits"
STRIPS = {f"patched, a strip of {count}": count for count in (2, 4)}
OUTPUT = "output"  # the name of a third work
CONVERSIONS = {UNPATCHED: VideoProcessor.postprocess_video, PATCHED: postprocess_video}
NOT_JUDGED = {"error": None, "predicted": None, "psnr": None}
SHORT = 9  # frames of the video that the error is measured on


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    device = torch.device(options.device)
    case = CASES[options.config]
    size = options.height or case.height, options.width or case.width, options.frames or case.frames
    vae = with_random_weights(lambda: case.vae_class(**case.vae), device)
    if device.type == "cpu":
        vae.float()  # bf16 takes many times as long there
    rows = []
    for work in options.work:
        rows_of_work = output_rows if work == OUTPUT else partial(rows_of, work=work)
        for row in rows_of_work(vae, size=size, repeats=options.repeats):
            print(f"{row['work']}, {row['variant']}: {row['seconds']:.3f} s", flush=True)
            rows.append(row)
    names = ("height", "width", "num_frames")
    settings = {"config": options.config, **dict(zip(names, size, strict=True)), "repeats": options.repeats}
    figures = {"settings": settings, "environment": asdict(describe_environment(device)), "vae": rows}
    print(vae_table(figures))
    if options.json is not None:
        write_json(options.json, figures)
    return 0


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=CASES, default="wan2.1-1.3b", help="the model whose VAE it is")
    works = ("decode", "encode", OUTPUT)
    parser.add_argument("--work", nargs="+", choices=works, default=works)
    parser.add_argument("--height", type=int, help="default: the config's usual size, as for width and frames")
    parser.add_argument("--width", type=int)
    parser.add_argument("--frames", type=int)
    parser.add_argument("--repeats", type=int, default=3, help="calls timed for each row")
    parser.add_argument("--device", default="cuda", help="the device that decodes and encodes")
    parser.add_argument("--json", type=json_file, help="write the figures to this file")
    options = parser.parse_args(argv)
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: give 1 or more.")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: PyTorch finds no CUDA GPU; give --device cpu.")
    return options


@torch.no_grad()
def rows_of(vae: nn.Module, work: str, size: tuple[int, int, int], repeats: int) -> Iterator[dict]:
    """Yield a row for each variant. work: "decode" or "encode". size: height, width and frames of the video."""
    short = input_of(vae, work, (*size[:2], min(SHORT, size[2])))
    exact = coding_oracle(vae, work, short, torch.float32)
    video = input_of(vae, work, size)
    for variant in variants_of(vae, work):
        with as_variant(vae, variant) as model:
            result = None if variant == TINY else coded(model, work, short)
            taken = measure(partial(coded, model, work, video), video.is_cuda, repeats)
        if variant == PATCHED:
            patched = result
        yield {"work": work, "variant": variant, **taken} | {
            "error": None if result is None else relative_l2(result, exact),
            "predicted": predicted_bytes(vae, work, variant, size),
            "psnr": psnr(result, patched, peak=2.0) if variant == IN_8_BITS else None,
        }
    for variant, count in STRIPS.items() if work == "decode" else ():
        with trp.patch(vae):
            taken = measure(partial(decoded_strip, vae, video, count), video.is_cuda, repeats)
        yield {"work": work, "variant": variant, **taken} | NOT_JUDGED


@torch.no_grad()
def output_rows(vae: nn.Module, size: tuple[int, int, int], repeats: int) -> Iterator[dict]:
    """Yield a row for each output type of a decoded video, by diffusers and patched."""
    latents, processor = input_of(vae, "decode", size), VideoProcessor()
    for variant, convert in CONVERSIONS.items():
        with as_variant(vae, variant) as model:
            video = coded(model, "decode", latents)
        for work, output_type in {NUMPY: "np", PIL: "pil"}.items():
            taken = measure(partial(convert, processor, video, output_type), video.is_cuda, repeats)
            yield {"work": work, "variant": variant, **taken} | NOT_JUDGED


def decoded_strip(vae: nn.Module, z: torch.Tensor, count: int) -> torch.Tensor:
    """Return the frames of one of `count` strips: the one in the middle, or the second of two."""
    cuts = cuts_of(vae.decoder, strips_of(*z.shape[-2:], count)[count // 2])
    frames = frames_at_once(vae, z, None, shares=cuts.shares)
    return joined(decoded(vae, z, plan_for(vae, z), frames, cuts), output_shape(vae, z)[2])


def variants_of(vae: nn.Module, work: str) -> tuple[str, ...]:
    """Return the variants that do the work and that a device can run: no 8 bits on a CPU, where torch.compile would
    take too long."""
    on_gpu = vae.device.type == "cuda"
    compiled, in_8_bits = ((COMPILED,), (IN_8_BITS,)) if on_gpu else ((), ())
    decoders = (*in_8_bits, TINY) if work == "decode" else ()
    return UNPATCHED, *compiled, PATCHED, LITTLE_MEMORY, IN_TILES, *decoders


@contextmanager
def as_variant(vae: nn.Module, variant: str) -> Iterator[nn.Module]:
    """A context with the VAE as a variant has it."""
    with ExitStack() as stack:
        if variant == COMPILED:
            stack.callback(torch.compiler.reset)
            vae = compiled(vae)
        elif variant == TINY:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(trp.use_tiny_vae(vae, tiny_file(vae, Path(folder))))
        elif variant != UNPATCHED:
            stack.enter_context(trp.patch(vae, trp.Exact(vae="8bit" if variant == IN_8_BITS else True)))
        if variant == LITTLE_MEMORY:
            vars(vae)[LIMIT] = 0
            stack.callback(vars(vae).pop, LIMIT)
        if variant == IN_TILES:
            vae.enable_tiling()
            stack.callback(vae.disable_tiling)
        yield vae


def compiled(vae: nn.Module) -> nn.Module:
    """Return a copy whose encoder and decoder are compiled, with channels-last weights.

    Compiling the VAE itself would reach neither: diffusers calls them frame by frame.
    """
    twin = copy.deepcopy(vae)
    for module in twin.modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d)):
            last = torch.channels_last if isinstance(module, nn.Conv2d) else torch.channels_last_3d
            module.weight.data = module.weight.data.contiguous(memory_format=last)
    twin.encoder.compile()
    twin.decoder.compile()
    return twin


def input_of(vae: nn.Module, work: str, size: tuple[int, int, int]) -> torch.Tensor:
    """Return random latents to decode, or random pixels to encode, for a video of this size."""
    generator = torch.Generator(vae.device).manual_seed(0)
    height, width, frames = size
    channels, shape = vae.config.z_dim, latent_size(vae.config, *size)
    if work == "encode":
        channels, shape = 3, (frames, height, width)
    x = torch.randn(1, channels, *shape, generator=generator, device=vae.device, dtype=vae.dtype)
    return x if work == "decode" else x.clamp_(-1, 1)


def measure(call: Callable[[], object], on_gpu: bool, repeats: int) -> dict:
    """Return the median time of a call, and the peak of the memory that it takes in bytes, or None on a CPU."""
    call()  # compiles kernels
    gc.collect()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else None
    seconds = [seconds_of(call, on_gpu) for _ in range(repeats)]
    taken = torch.cuda.max_memory_allocated() - before if on_gpu else None
    return {"seconds": statistics.median(seconds), "bytes": taken}


def seconds_of(call: Callable[[], object], on_gpu: bool) -> float:
    start = time.perf_counter()
    call()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def predicted_bytes(vae: nn.Module, work: str, variant: str, size: tuple[int, int, int]) -> int | None:
    """Return the bytes that a plan counts for a patched variant, or None for another.

    The plan of an encode counts the video too, which is there before.
    """
    if variant in (UNPATCHED, COMPILED, TINY):
        return None
    in_tiles, free = variant == IN_TILES, 0 if variant == LITTLE_MEMORY else None
    if work == "decode":
        return decoding_bytes(vae, *size, in_tiles=in_tiles, free=free, in_8_bits=variant == IN_8_BITS)
    height, width, frames = size
    video = 3 * frames * height * width * vae.dtype.itemsize
    return encoding_bytes(vae, *size, in_tiles=in_tiles) - 2 * video


if __name__ == "__main__":
    raise SystemExit(main())
