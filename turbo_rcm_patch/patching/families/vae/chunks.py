"""The number of frames that each stage of the decoder takes at a time.

All frames of a video at once take too much memory. One latent frame at a time leaves a GPU idle if frames are small. So
a stage takes as many frames as fill WORKING_SET, but at least one latent frame's, as diffusers does. It takes
fewer if memory is short.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    AutoencoderKLWan,
    WanCausalConv3d,
    WanDecoder3d,
    WanResample,
)
from torch import nn

from .sizes import latent_size

WORKING_SET = 1 << 30  # bytes of activations: a few frames of 832×480 in full resolution
TILES_WORKING_SET = 1 << 27  # the same for a tile: users decode in tiles to save memory
BETWEEN_STAGES = 440 << 20  # bytes of results that earlier stages hold while later ones run, at most
MOST_ELEMENTS = 2**31 - 1  # elements of a tensor that PyTorch's convolutions index with 32 bits


def output_shape(vae: AutoencoderKLWan, z: torch.Tensor) -> tuple[int, ...]:
    """Return the shape [B, C, F, H, W] of the decoder's output for latents z, before it is unpatchified."""
    resamples = [module for module in vae.decoder.modules() if type(module) is WanResample]
    batch, _, frames, height, width = z.shape
    edge, doublings = 2 ** len(resamples), sum(module.mode == "upsample3d" for module in resamples)
    channels = vae.decoder.conv_out.out_channels
    return batch, channels, 1 + (frames - 1) * 2**doublings, height * edge, width * edge


def frames_at_once(
    vae: AutoencoderKLWan, z: torch.Tensor, latents: int | None, *, working_set: int = WORKING_SET, beside: int = 0
) -> list[int]:
    """Return the number of frames that each stage takes at a time, for z [B, C, F, H, W].

    latents: every stage takes the frames of this many latent frames. None: memory decides, if the device tells how much
    is free. working_set: bytes of activations. beside: bytes of the free memory that are for something else.
    """
    batch, _, _, height, width = z.shape
    stages, size = list(_stages(vae.decoder)), batch * height * width
    frames = []
    for elements, doublings, _ in stages:
        frame = elements * size
        wanted = latents * 2**doublings if latents else max(working_set // (frame * z.itemsize), 2**doublings)
        frames.append(max(1, min(wanted, MOST_ELEMENTS // frame)))
    if latents or z.device.type != "cuda":
        return frames
    # With one frame at a time, about twice the largest stage's activations are alive. Half of the rest is for outputs
    # that earlier stages still hold, and for the convolutions' workspaces.
    per_frame = [elements * size * z.itemsize for elements, *_ in stages]
    kept = sum(kept for *_, kept in stages) * size * z.itemsize
    rest = max(0, free_memory(z.device) - beside - kept - 2 * max(per_frame)) / 2
    return [min(most, 1 + int(rest // taken)) for most, taken in zip(frames, per_frame, strict=True)]


def decoding_bytes(vae: AutoencoderKLWan, height: int, width: int, frames: int, *, in_tiles: bool) -> int:
    """Return the bytes that decoding a video computes with, as measured on an H200 and a little more.

    height, width: of the video in pixels. in_tiles: as after ``vae.enable_tiling()``.
    """
    size = latent_size(vae.config, height, width, frames)
    z = torch.empty(1, vae.config.z_dim, *size, dtype=vae.dtype, device="meta")
    sample = math.prod(output_shape(vae, z)) * z.itemsize
    if in_tiles:
        return 2 * sample + 2 * TILES_WORKING_SET
    stages, pixels = list(_stages(vae.decoder)), size[1] * size[2] * z.itemsize
    at_once = frames_at_once(vae, z, None)
    alive = max(count * elements for count, (elements, *_) in zip(at_once, stages, strict=True))
    kept = sum(kept for *_, kept in stages) * pixels
    return round(kept + 1.1 * alive * pixels) + 2 * sample + min(BETWEEN_STAGES, kept // 4)


def _stages(decoder: WanDecoder3d) -> Iterator[tuple[int, int, int]]:
    """Yield three numbers for the middle block and for each up block.

    1. The live elements for each input frame.
    2. How often the number of frames was doubled before the block.
    3. The elements that its convolutions keep from one chunk for the next.

    Elements are per pixel of a latent frame.
    """
    channels = decoder.conv_in.out_channels
    # Six tensors are alive in the attention block: its input, q, k, v, the attention's output and the projection's.
    yield 6 * channels, 0, _kept(decoder.conv_in) + _kept(decoder.mid_block)
    doublings, pixels = 0, 1
    for block in decoder.up_blocks:
        resample = next((module for module in block.modules() if type(module) is WanResample), None)
        alive = max(_alive_in_resnets(block), 0 if resample is None else _alive_in_resample(block, resample))
        kept = _kept(block) + (_kept(decoder.conv_out) if resample is None else 0)
        yield pixels * alive, doublings, pixels * kept
        if resample is not None:
            doublings, pixels = doublings + (resample.mode == "upsample3d"), 4 * pixels


def _alive_in_resnets(block: nn.Module) -> int:
    """Return the channels that are alive at once in a block's resnets.

    They are the block's input and the larger of two: a norm's result, alone and behind the frames before; or a resnet's
    input or shortcut, the input of a convolution, and its result.
    """
    given, made = block.resnets[0].in_dim, block.resnets[0].out_dim
    return given + max(2 * given, 3 * made)


def _alive_in_resample(block: nn.Module, resample: WanResample) -> int:
    """Return the channels, per pixel of the block's input, that are alive at once in its upsampling.

    They are the block's input, the last resnet's result, the doubled frames, and these enlarged and convolved. With a
    shortcut they are the block's input, that result, and the shortcut's twice while it is laid out.
    """
    given, channels, made = block.resnets[0].in_dim, resample.dim, resample.resample[1].out_channels
    frames = 2 if resample.mode == "upsample3d" else 0
    grown = 4 * max(frames, 1)  # times as many pixels, of all frames
    alive = given + channels + frames * channels + grown * (channels + made)
    return max(alive, given + 3 * grown * made) if getattr(block, "avg_shortcut", None) else alive


def _kept(module: nn.Module) -> int:
    convolutions = (conv for conv in module.modules() if type(conv) is WanCausalConv3d)
    return sum((conv.kernel_size[0] - 1) * conv.in_channels for conv in convolutions)


def free_memory(device: torch.device) -> int:
    """Return the bytes of a GPU that this process can still allocate, including unused memory of its allocator."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    limit = math.floor(torch.cuda.get_per_process_memory_fraction(device) * total) - reserved
    return min(free, limit) + reserved - torch.cuda.memory_allocated(device)
