"""The number of frames that the encoder and each stage of the decoder take at a time, and the memory with them.

All frames of a video at once take too much memory. One latent frame at a time leaves a GPU idle if frames are small. So
a stage takes as many frames as fill WORKING_SET, but at least one latent frame's, as diffusers does. It takes KEPT
frames if they are LARGE and twice as many do not fit in WORKING_SET. The chunk itself is then what a convolution keeps
for the next one, so nothing is copied. A stage takes fewer frames if memory is short, down to one. The encoder takes
FRAMES then. Frames that fill WORKING_SET are an even number, because convolutions multiply pairs of them.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ....kernels.conv.conv_pairs_sm90 import takes_channels
from ....latents import latent_size
from .classes import (
    CAUSAL,
    RESAMPLE,
    RESIDUAL_BLOCK,
    RESIDUAL_DOWN_BLOCK,
    RESIDUAL_UP_BLOCK,
    patch_size_of,
    resnets_for_8_bits,
)
from .encoder import FRAMES, PIXEL
from .steps import SMALL, kernel_size

WORKING_SET = 1 << 30  # bytes of activations: a few frames of 832×480 in full resolution
KEPT = 2  # frames that a causal convolution keeps
LARGE = 1 << 28  # bytes of a frame's activations: two such frames fill a GPU
TILES_WORKING_SET = 1 << 27  # the same for a tile: users decode in tiles to save memory
SHARES = (1, 3 / 4, 1 / 2, 1 / 4)  # of these frames, tried one after the other where memory is short
MOST_ELEMENTS = 2**31 - 1  # elements of a tensor that PyTorch's convolutions index with 32 bits
ROOM = 1.1  # times the estimate, for workspaces and for gaps in the allocator's memory
LIMIT = "turbo_rcm_patch_decoding_bytes"  # the attribute of a VAE that limits the memory of a decode


class Stage(NamedTuple):
    """The middle block or an up block, in elements for each pixel of a latent frame.

    alive: elements that are alive at once for each input frame, with the frame itself.
    given: those of an input frame.
    made: those of the frames that an input frame becomes.
    growth: the number of these frames.
    doublings: how often the number of frames was doubled before.
    kept: the frames before a chunk, of all convolutions. They stay from one chunk to the next. An image has none.
    """

    alive: int
    given: int
    made: int
    growth: int
    doublings: int
    kept: int

    def of_share(self, share: float) -> Stage:
        """Return the stage for this share of a frame."""
        elements = {name: math.ceil(share * getattr(self, name)) for name in ("alive", "given", "made", "kept")}
        return self._replace(**elements)


def output_shape(vae: nn.Module, z: torch.Tensor) -> tuple[int, ...]:
    """Return the shape [B, C, F, H, W] of the decoder's output for latents z, before it is unpatchified."""
    resamples = [module for module in vae.decoder.modules() if type(module) in RESAMPLE]
    batch, _, frames, height, width = z.shape
    edge, doublings = 2 ** len(resamples), sum(module.mode == "upsample3d" for module in resamples)
    channels = vae.decoder.conv_out.out_channels
    return batch, channels, 1 + (frames - 1) * 2**doublings, height * edge, width * edge


def frames_at_once(
    vae: nn.Module,
    z: torch.Tensor,
    latents: int | None,
    *,
    working_set: int = WORKING_SET,
    free: int | None = None,
    shares: Sequence[float] | None = None,
    in_8_bits: bool = False,
) -> list[int]:
    """Return the number of frames that each stage takes at a time, for z [B, C, F, H, W].

    latents: every stage takes the frames of this many latent frames. None: memory decides. working_set: bytes of
    activations. free: bytes that are free for them, if that is known. shares: of a frame, those that each stage takes
    (strips.py). None: all of it. in_8_bits: True if convolutions run in 8 bits.
    """
    batch, _, count, height, width = z.shape
    stages, size = stages_of(vae.decoder, is_image=count == 1, in_8_bits=in_8_bits), batch * height * width
    if shares is not None:
        stages = [stage.of_share(share) for stage, share in zip(stages, shares, strict=True)]
    frames = []
    for stage in stages:
        frame, of_one_latent = stage.alive * size, 2**stage.doublings
        filled = working_set // (frame * z.itemsize)
        if latents:
            wanted = latents * of_one_latent
        elif frame * z.itemsize >= LARGE and filled < 2 * KEPT:
            wanted = KEPT
        else:
            wanted = max(filled - filled % 2, of_one_latent)
        frames.append(max(1, min(wanted, MOST_ELEMENTS // frame)))
    if latents or free is None:
        return frames
    for share in SHARES:
        fewer = [max(1, int(share * most)) for most in frames]
        if ROOM * peak_elements(stages, fewer, count) * size * z.itemsize <= free:
            return fewer
    return [1] * len(frames)


def peak_elements(stages: Sequence[Stage], frames: Sequence[int], count: int) -> int:
    """Return the elements that are alive at once while `count` latent frames are decoded, for each latent pixel.

    A stage runs while the earlier ones hold their results, of which its own input is a part. frames: as of
    `frames_at_once`.
    """
    kept = sum(stage.kept for stage in stages) if count > 1 else 0
    most = held = 0
    for stage, at_once in zip(stages, frames, strict=True):
        taken = min(at_once, count)
        most = max(most, held + taken * (stage.alive - stage.given))
        held += taken * stage.made
        count = taken * stage.growth
    return most + kept


def decoding_bytes(
    vae: nn.Module,
    height: int,
    width: int,
    frames: int,
    *,
    in_tiles: bool = False,
    free: int | None = None,
    in_8_bits: bool = False,
    latents: int | None = None,
) -> int:
    """Return the bytes that decoding a video computes with.

    An H200 measured between 5 % less and 4 % more, for videos of a second and longer.

    height, width: of the video in pixels. in_tiles: as after ``vae.enable_tiling()``. free: the bytes that are free for
    it. None: enough. in_8_bits: True if convolutions run in 8 bits, which was not measured. latents: as of
    `frames_at_once`.
    """
    size = latent_size(vae.config, height, width, frames)
    z = torch.empty(1, vae.config.z_dim, *size, dtype=vae.dtype, device="meta")
    sample = math.prod(output_shape(vae, z)) * z.itemsize
    edges = [edge // vae.spatial_compression_ratio for edge in (vae.tile_sample_min_height, vae.tile_sample_min_width)]
    working_set, held = WORKING_SET, sample
    if in_tiles and any(whole > edge for whole, edge in zip(size[1:], edges, strict=True)):
        z, working_set = z[..., : edges[0], : edges[1]], TILES_WORKING_SET
        tile = math.prod(output_shape(vae, z)) * z.itemsize
        across = -(-width // vae.tile_sample_stride_width)
        blended = 1 - vae.tile_sample_stride_height / vae.tile_sample_min_height  # of each tile of the row above
        held += round(tile * (2 + blended * across))
    held += weights_bytes(vae.decoder, in_8_bits, is_image=size[0] == 1)
    stages = stages_of(vae.decoder, is_image=size[0] == 1, in_8_bits=in_8_bits)
    pixels = z.shape[-2] * z.shape[-1] * z.itemsize
    left = None if free is None else free - held
    at_once = frames_at_once(vae, z, latents, working_set=working_set, free=left, in_8_bits=in_8_bits)
    return held + peak_elements(stages, at_once, size[0]) * pixels


def unpatched_decoding_bytes(vae: nn.Module, height: int, width: int, frames: int, *, in_tiles: bool = False) -> int:
    """Return the bytes that diffusers takes to decode a video of this size in pixels, a latent frame at a time.

    Three H200 runs took between 0 and 3 % more. diffusers keeps all tiles until it joins them.
    """
    patch, tile = patch_size_of(vae), (vae.tile_sample_min_height, vae.tile_sample_min_width)
    sample = 3 * frames * height * width * vae.dtype.itemsize
    if not in_tiles or (height <= tile[0] and width <= tile[1]):
        return sample + _latent_frame_bytes(vae, height * width // patch**2, frames)
    strides = vae.tile_sample_stride_height, vae.tile_sample_stride_width
    covered = [
        sum(min(edge, length - start) for start in range(0, length, stride))
        for length, edge, stride in zip((height, width), tile, strides, strict=True)
    ]
    tiles = math.prod(covered) * sample // (height * width)
    pixels = min(height, tile[0]) * min(width, tile[1]) // patch**2
    return tiles + max(_latent_frame_bytes(vae, pixels, frames), 3 * sample)


def _latent_frame_bytes(vae: nn.Module, pixels: int, frames: int) -> int:
    """Return the bytes that diffusers takes to decode one of a video's latent frames.

    The most is alive in a convolution of the last up block: the block's input, with its copy in TI2V-5B's VAE, the
    resnet's, the convolution's, the same with the frames before, the frames to keep, and the result. cuDNN lays the
    input and the result out anew.

    pixels: of a frame at the end of the decoder.
    """
    stages, block = stages_of(vae.decoder), vae.decoder.up_blocks[-1]
    given, made = block.resnets[0].in_dim, block.resnets[0].out_dim
    count = min(frames, 2 ** stages[-1].doublings)
    padded = 2 * (count + 2) + 2  # frames: with those before, laid out anew, and those to keep
    of_input = count * given * (2 if type(block) in RESIDUAL_UP_BLOCK else 1)
    alive = of_input + max(given * (count + padded) + 3 * count * made, made * (4 * count + padded))
    edge = 2 ** sum(type(module) in RESAMPLE for module in vae.decoder.modules())
    kept = sum(stage.kept for stage in stages) / edge**2
    return round((kept + alive) * pixels) * vae.dtype.itemsize


def frames_of_a_latent(encoder: nn.Module) -> int:
    """Return the number of frames that become one latent frame, after frame 0."""
    return 2 ** sum(type(m) in RESAMPLE and m.mode == "downsample3d" for m in encoder.modules())


def frames_to_encode(
    vae: nn.Module,
    pixels: int,
    itemsize: int,
    latents: int | None,
    *,
    working_set: int = WORKING_SET,
    free: int | None = None,
) -> int:
    """Return the number of frames that the encoder takes at a time, a multiple of FRAMES.

    pixels: of a frame of all samples, after patchifying. latents: the frames of this many latent frames. None: memory
    decides. working_set: bytes of activations. free: bytes that are free for them, if that is known.
    """
    alive, kept = _alive_in_encoder(vae.encoder)
    frame = round(alive * pixels)
    wanted = FRAMES * latents if latents else working_set // (frame * itemsize)
    frames = max(FRAMES, min(wanted, MOST_ELEMENTS // frame) // FRAMES * FRAMES)
    is_too_much = latents is None and free is not None and ROOM * (frames * alive + kept) * pixels * itemsize > free
    return FRAMES if is_too_much else frames


def encoding_bytes(
    vae: nn.Module, height: int, width: int, frames: int, *, in_tiles: bool = False, latents: int | None = None
) -> int:
    """Return the bytes that encoding a video of this size in pixels computes with, with the video and a copy of it.

    latents: as of `frames_at_once`.
    """
    pixels, working_set = _pixels_to_encode(vae, height, width, in_tiles)
    alive, kept = _alive_in_encoder(vae.encoder)
    at_once = min(frames, frames_to_encode(vae, pixels, vae.dtype.itemsize, latents, working_set=working_set))
    elements = round((kept * (frames > 1) + at_once * alive) * pixels + _video_twice(vae, height, width, frames))
    return elements * vae.dtype.itemsize + weights_bytes(vae.encoder, is_image=frames == 1)


def unpatched_encoding_bytes(vae: nn.Module, height: int, width: int, frames: int, *, in_tiles: bool = False) -> int:
    """Return the bytes that diffusers takes to encode a video of this size in pixels, with the video and a copy of it.

    It takes four frames at a time, after the first. An H200 measured 7.5 such tensors of the first convolution's width
    beside the frames that convolutions keep.
    """
    pixels, _ = _pixels_to_encode(vae, height, width, in_tiles)
    _, kept = _alive_in_encoder(vae.encoder)
    alive = 7.5 * min(frames, FRAMES) * vae.encoder.conv_in.out_channels
    return round((kept + alive) * pixels + _video_twice(vae, height, width, frames)) * vae.dtype.itemsize


def _pixels_to_encode(vae: nn.Module, height: int, width: int, in_tiles: bool) -> tuple[int, int]:
    """Return the pixels of a frame or a tile that is encoded, after patchifying, and the working set for it."""
    edges, patch = (vae.tile_sample_min_height, vae.tile_sample_min_width), patch_size_of(vae)
    size = height // patch, width // patch
    if in_tiles and (height > edges[0] or width > edges[1]):
        return math.prod(map(min, size, edges)), TILES_WORKING_SET
    return math.prod(size), WORKING_SET


def _video_twice(vae: nn.Module, height: int, width: int, frames: int) -> int:
    channels = vae.encoder.conv_in.in_channels // patch_size_of(vae) ** 2
    return 2 * channels * frames * height * width


def _alive_in_encoder(encoder: nn.Module) -> tuple[float, float]:
    """Return the elements for each pixel of a frame: those alive at once for each frame, and those of frames kept.

    Alive in a resnet are its input, and either a convolution's input and result, or for the second one the shortcut's
    result too if it is a convolution. A residual block's input stays alive.
    """
    alive, kept = PIXEL + encoder.conv_in.out_channels, _kept(encoder.conv_in)
    pixels = frames = 1.0  # those that one pixel and one frame have become
    block_input = 0
    for module in encoder.modules():
        if type(module) in RESIDUAL_DOWN_BLOCK:
            block_input = module.resnets[0].in_dim
        elif type(module) in RESIDUAL_BLOCK:
            given, made = module.in_dim, module.out_dim
            second = (_copies(module.conv2) + (2 if given != made else 1)) * made  # at least as much as the first
            alive = max(alive, pixels * frames * (block_input + given + max(2 * given, second)))
            kept += pixels * _kept(module)
        elif type(module) in RESAMPLE:
            alive = max(alive, pixels * frames * (block_input + 2.25 * module.dim))
            pixels /= 4
            kept += pixels * _kept(module)
            frames /= 2 if module.mode == "downsample3d" else 1
    return alive, kept + pixels * _kept(encoder.conv_out)


def weights_bytes(network: nn.Module, in_8_bits: bool = False, *, is_image: bool = False) -> int:
    """Return the bytes of the weights that an encode or a decode makes: small ones packed, and those in 8 bits.

    A small weight counts twice if it multiplies pairs of frames: as the usual kernel takes it, and as the sums of its
    three frames, which are four.
    """
    halved = _convolutions_8bit(network) if in_8_bits else set()
    unpaired = set(network.modules()) if is_image else halved
    convolutions = (conv for conv in network.modules() if isinstance(conv, (nn.Conv2d, nn.Conv3d)))
    small = [conv for conv in convolutions if conv.weight.nbytes <= SMALL]
    of_pairs = (conv.weight.nbytes * 4 // 3 for conv in small if _copies(conv, unpaired) > 1)
    return sum(conv.weight.nbytes for conv in small) + sum(of_pairs) + sum(conv.weight.numel() for conv in halved)


def _convolutions_8bit(decoder: nn.Module) -> set[nn.Module]:
    both = (conv for resnet in resnets_for_8_bits(decoder) for conv in (resnet.conv1, resnet.conv2))
    return {conv for conv in both if type(conv) in CAUSAL}


def stages_of(decoder: nn.Module, *, is_image: bool = False, in_8_bits: bool = False) -> list[Stage]:
    """Return the stages of a decoder in their order.

    is_image: True for one latent frame, which becomes one frame. in_8_bits: True if convolutions run in 8 bits. The
    frames that these keep then take half.

    The last convolution takes less than the last block, also with its products in fp32: 518 of 576 bytes per pixel of a
    frame in Wan 2.1's decoder, 1496 of 2048 in TI2V-5B's (calculated, bf16).
    """
    halved = _convolutions_8bit(decoder) if in_8_bits else set()
    unpaired = set(decoder.modules()) if is_image else halved
    channels, doublings, pixels = decoder.conv_in.out_channels, 0, 1
    middle = decoder.mid_block
    # Six tensors are alive in the attention block: its input, q, k, v, the attention's output and the projection's.
    kept = _kept(decoder.conv_in) + _kept(middle)
    stages = [Stage(6 * channels, channels, channels, 1, 0, kept)]
    for block in decoder.up_blocks:
        resample = next((module for module in block.modules() if type(module) in RESAMPLE), None)
        given, kept = pixels * block.resnets[0].in_dim, pixels * _kept(block, halved)
        alive = pixels * _alive_in_resnets(block, unpaired)
        if resample is None:
            stages.append(Stage(alive, given, 0, 1, doublings, kept + pixels * _kept(decoder.conv_out)))
            continue
        growth = 1 if is_image or resample.mode == "upsample2d" else 2
        alive = max(alive, pixels * _alive_in_resample(block, resample, growth))
        made = 4 * pixels * growth * resample.resample[1].out_channels
        stages.append(Stage(alive, given, made, growth, doublings, kept))
        doublings, pixels = doublings + growth - 1, 4 * pixels
    return stages


def _alive_in_resnets(block: nn.Module, unpaired: Container[nn.Module]) -> int:
    """Return the channels that are alive at once in a block's resnets.

    The block's input is alive, and the largest of three sets: a norm's result, twice if frames are prepended to a copy
    of it; the first convolution's input and result; or a resnet's input or shortcut, a convolution's input, and its
    result. unpaired: as of `_copies`.
    """
    resnet = block.resnets[0]
    given, made = resnet.in_dim, resnet.out_dim
    first = _copies(resnet.conv1, unpaired) * given + made
    return given + max(2 * given, first, (2 + _copies(resnet.conv2, unpaired)) * made)


def _copies(conv: nn.Module, unpaired: Container[nn.Module] = ()) -> int:
    """Return how many times its size a convolution's input takes: 2 as planes of pairs of frames, else 1.

    Planes are counted for every GPU, though only sm_90 has them. unpaired: convolutions that do not multiply pairs.
    """
    is_causal = type(conv) in CAUSAL and kernel_size(conv) == (3, 3, 3) and conv.weight.dtype == torch.bfloat16
    return 2 if is_causal and conv not in unpaired and takes_channels(conv.in_channels, conv.out_channels) else 1


def _alive_in_resample(block: nn.Module, resample: nn.Module, growth: int) -> int:
    """Return the channels, per pixel of the block's input, that are alive at once in its upsampling to `growth` frames.

    They are the block's input, the last resnet's result, the doubled frames, and these enlarged and convolved. With a
    shortcut more may be alive later: the block's input, the upsampled result, and two copies of the shortcut.
    """
    given, channels, made = block.resnets[0].in_dim, resample.dim, resample.resample[1].out_channels
    frames = 2 if growth > 1 else 0
    grown = 4 * growth  # times as many pixels, of all frames
    alive = given + channels + frames * channels + grown * (channels + made)
    return max(alive, given + 3 * grown * made) if getattr(block, "avg_shortcut", None) else alive


def _kept(module: nn.Module, halved: Container[nn.Module] = ()) -> int:
    """Return the channels of the frames that the causal convolutions of a module keep, halved for some of them."""
    convolutions = (conv for conv in module.modules() if type(conv) in CAUSAL)
    return sum((conv.kernel_size[0] - 1) * conv.in_channels // (1 + (conv in halved)) for conv in convolutions)


def free_memory(device: torch.device) -> int:
    """Return the bytes of a GPU that this process can still allocate, including unused memory of its allocator."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    limit = math.floor(torch.cuda.get_per_process_memory_fraction(device) * total) - reserved
    return min(free, limit) + reserved - torch.cuda.memory_allocated(device)


def free_for_decoding(vae: nn.Module, device: torch.device) -> int | None:
    """Return the bytes of a GPU that a decode may take: what is free, or less if LIMIT says so. None: not on a GPU."""
    limit = vars(vae).get(LIMIT)
    if device.type != "cuda":
        return limit
    return free_memory(device) if limit is None else min(limit, free_memory(device))
