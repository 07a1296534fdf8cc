"""Wan 2.2 Animate: Wan's block under a class of its own, with a face adapter between every fifth and the next."""

from __future__ import annotations

from collections.abc import Mapping

from diffusers.models.transformers.transformer_wan_animate import (
    WanAnimateTransformer3DModel,
    WanAttention,
    WanTransformerBlock,
)

from ...tiers import Tier
from .family import Family
from .wan import sizes as wan_sizes
from .wan.forward import wan_block
from .wan.names import WAN_NAMES
from .wan.parts import FIRST_LAYER, wan_blocks


def bytes_per_token(config: Mapping[str, object], wide: int, tier: Tier) -> int:
    """Return what Wan's function of this name does. The pose and the last face adapter's output are alive too."""
    return wan_sizes.bytes_per_token(config, wide, tier) + _more(config, wide)


def unpatched_bytes_per_token(config: Mapping[str, object], wide: int, lora: int, own_timesteps: bool) -> int:
    """Return what Wan's function of this name does, with what `bytes_per_token` adds."""
    return wan_sizes.unpatched_bytes_per_token(config, wide, lora, own_timesteps) + _more(config, wide)


def _more(config: Mapping[str, object], wide: int) -> int:
    return 2 * wide * config["num_attention_heads"] * config["attention_head_dim"]


def bytes_after_blocks(config: Mapping[str, object], wide: int) -> int:
    """Return the bytes per token of the largest set of tensors that are alive after the blocks.

    They are the pose, the last face adapter's output, and three tensors in fp32 of the output norm and its modulation.
    One tensor of the model's width stands for the prompts, latents and tables.
    """
    C = config["num_attention_heads"] * config["attention_head_dim"]
    return (3 * wide + 3 * wan_sizes.FP32_BYTES) * C


def given_bytes(
    config: Mapping[str, object], height: int, width: int, frames: int, wide: int, vae_wide: int
) -> tuple[int, int]:
    """Return the bytes of the videos of the pose and the face, while the VAE encodes a segment and after that.

    Both are in fp32. A step has the face twice in the model's dtype. The VAE's inputs are two videos in its dtype.
    """
    video, face = 3 * frames * height * width, 3 * frames * config["motion_encoder_size"] ** 2
    given = wan_sizes.FP32_BYTES * (video + face)
    return given + 2 * vae_wide * video, given + 2 * wide * face


SIZES = wan_sizes.SIZES._replace(
    bytes_per_token=bytes_per_token,
    unpatched_bytes_per_token=unpatched_bytes_per_token,
    bytes_after_blocks=bytes_after_blocks,
    given_images=1,
    given_bytes=given_bytes,
)
WAN_ANIMATE = Family(
    WanAnimateTransformer3DModel,
    "Wan 2.2 Animate",
    (wan_blocks("blocks", WanTransformerBlock, wan_block(WanAttention), sizes=SIZES),),
    FIRST_LAYER,
    WAN_NAMES,
    notes=lambda transformer: [
        f"not fused: {len(transformer.face_adapter)} face adapters between the blocks, motion and face encoders; no "
        "CUDA graphs"
    ],
)
