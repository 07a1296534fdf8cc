"""The memory of `verify` and `evaluate`, for a plan of it: what their stages compute with, beside weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from ..config import Exact, PatchConfig, Sparse
from ..kernels.sparse_linear.sparse_linear_reference import GATHERED_VALUES
from ..memory.components import blocks_of
from ..memory.stages import TEXT_TOKENS, Patched, Stage, Video, lora_itemsize, stages_of, tokens_of, unpatched_stages
from ..patching.families import family_of
from ..patching.families.vae import is_vae
from ..patching.families.vae.chunks import unpatched_decoding_bytes
from ..tiers import EXACT, is_low_precision
from .keep_out import FEW
from .metrics import AT_ONCE

FP32_BYTES, FP64_BYTES = torch.float32.itemsize, torch.float64.itemsize
# What `trace_in_fp32` keeps of a block, and its largest set: tensors of the model's width, and of the feed-forward's.
KEPT, WIDE_KEPT, LARGEST = 20, 2, 22
GATHERED = 6 * FP32_BYTES * GATHERED_VALUES  # of the reference of sparse-linear attention: keys, values and scores
ATTENTION_PARTS = 45  # bytes per channel: q, k and v of `self_attention_inputs`, rounded, in 8 bits, and three results


def evaluation_stages(videos: int, variants: int, patched: Patched, video: Video) -> Iterator[Stage]:
    """Yield the stages of `evaluate`.

    videos: made at a time. The frames of all variants stay on the GPU in fp32 until they are judged.
    """
    held = (variants + 1) * videos * 3 * video.frames * video.height * video.width * FP32_BYTES
    for stage in stages_of(patched._replace(beside=unpatched_stages), video):
        yield Stage(
            f"{stage.name}, {videos} at a time",
            stage.runs,
            videos * stage.computing + held,
            in_tiles=None if stage.in_tiles is None else videos * stage.in_tiles + held,
            after_blocks=videos * stage.after_blocks + held,
        )


def checking_stages(patched: Patched, video: Video) -> Iterator[Stage]:
    """Yield the checks of `verify`, whose weights are those of the patched pipeline."""
    for name, model in patched.models.items():
        if family_of(model) is not None:
            yield Stage("checking a block", (name,), _block_bytes(name, patched, video))
    if (vae := patched.models.get("vae")) is not None and is_vae(vae):
        checks = [_decoding_bytes(vae, video, in_tiles=tiles) for tiles in (False, True)]
        yield Stage("checking the decoding", ("vae",), *checks)


def searching_stages(patched: Patched, video: Video) -> Iterator[Stage]:
    """Yield the stages of `verify --keep-out`: the search, and the checks after it.

    A block runs beside its oracle's output, perhaps all of it in the model's dtype. The transformer's inputs and
    outputs of a few steps stay, with and without guidance.
    """
    for name, model in patched.models.items():
        if family_of(model) is None:
            continue
        config, sizes = model.config, family_of(model).blocks[0].sizes
        wide, high = _itemsizes(model)
        exact, own = (sizes.bytes_per_token(config, wide, tier) for tier in (EXACT, patched.config.tier))
        patch = config.get("patch_size") or (1, 2, 2)
        latents = (patch if type(patch) is int else math.prod(patch)) * (config["in_channels"] + config["out_channels"])
        C = config["num_attention_heads"] * config["attention_head_dim"]
        of_token = high * C + max(0, exact - own) + 2 * FEW * wide * latents
        text = 2 * FEW * TEXT_TOKENS * wide * (config.get("text_dim") or C)
        taken = _block_bytes(name, patched, video) + tokens_of(name, patched, video) * of_token + text
        yield Stage("searching a block", (name,), taken)
    yield from checking_stages(patched, video)


def _block_bytes(name: str, patched: Patched, video: Video) -> int:
    """Return the bytes of a block's oracle with its weights, and of the block's input and results."""
    model, own = patched.models[name], patched.own_timesteps
    family, tokens = family_of(model), tokens_of(name, patched, video)
    config, sizes = model.config, family.blocks[0].sizes
    wide, high = _itemsizes(model)
    C = config["num_attention_heads"] * config["attention_head_dim"]
    oracle = sizes.unpatched_bytes_per_token(config, high, high if lora_itemsize(model) else 0, own)
    parts = 0 if isinstance(patched.config, Exact) else _parts_bytes(config, patched.config, wide, own, sizes)
    of_token = (3 + 6 * own) * wide * C + max(oracle, parts)
    weights = max(sum(p.numel() for p in block.parameters()) for block in blocks_of(model))
    # PyTorch has no fused attention in fp64, so the scores of all pairs of tokens are alive.
    scores = 3 * config["num_attention_heads"] * tokens**2 * high if high == FP64_BYTES else 0
    gathered = GATHERED if isinstance(patched.config, Sparse) else 0
    return tokens * of_token + weights * high + scores + gathered + 3 * FP64_BYTES * AT_ONCE


def _itemsizes(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of a value in a transformer's dtype, and in that of its oracle."""
    dtype = family_of(model).compute_dtype(model)
    return dtype.itemsize, FP32_BYTES if is_low_precision(dtype) else FP64_BYTES


def _parts_bytes(config: Mapping[str, object], tier: PatchConfig, wide: int, own: bool, sizes) -> int:
    """Return the bytes per token of a trace in fp32, and of the largest set of tensors beside it."""
    C, ffn = config["num_attention_heads"] * config["attention_head_dim"], sizes.feed_forward(config)
    trace = FP32_BYTES * (KEPT * C + WIDE_KEPT * ffn) + 2 * FP32_BYTES * config["attention_head_dim"]
    terms = 4 * FP32_BYTES * C + sizes.bytes_per_token(config, wide, tier.tier)
    timesteps = 2 * 6 * FP32_BYTES * C if own else 0  # of each token, before and after the block's own are added
    return trace + timesteps + max(FP32_BYTES * (LARGEST - KEPT) * C, ATTENTION_PARTS * C, terms)


def _decoding_bytes(vae: nn.Module, video: Video, *, in_tiles: bool) -> int:
    """Return the bytes of the VAE's oracle with its weights, and of the patched and the unpatched frames."""
    high = FP32_BYTES if is_low_precision(vae.dtype) else FP64_BYTES
    weights = sum(parameter.numel() for parameter in vae.parameters()) * high
    frames = 3 * video.frames * video.height * video.width * vae.dtype.itemsize
    oracle = high // vae.dtype.itemsize * unpatched_decoding_bytes(vae, *video, in_tiles=in_tiles)
    return weights + 2 * frames + oracle
