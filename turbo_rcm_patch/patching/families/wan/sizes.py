"""The sizes of tensors in Wan's blocks, by a transformer's config."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from operator import itemgetter

from ....tiers import EXACT, QUANTIZED, Tier
from ..family import Sizes
from .sub_layers import TEXT_TOKENS

FP32_BYTES = 4


def tokens(config: Mapping[str, object], latent: tuple[int, int, int]) -> int:
    """Return the tokens of a sample whose latent has these frames, height and width."""
    patch = config.get("patch_size") or (1, 2, 2)
    return math.prod(length // edge for length, edge in zip(latent, patch, strict=True))


def ops(config: Mapping[str, object], tokens: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the ops of a block that there is a choice of kernels for, with their sizes."""
    heads, head_dim, ffn = config["num_attention_heads"], config.get("attention_head_dim") or 128, config["ffn_dim"]
    C = heads * head_dim
    yield "attention", (heads, tokens, tokens, head_dim)
    yield "attention", (heads, tokens, TEXT_TOKENS, head_dim)
    yield "linear_skip", (tokens, C, C)
    yield "linear_skip", (tokens, C, ffn)
    yield "linear_gelu", (tokens, ffn, C)
    yield "linear_qkv", (tokens, C, C)


def bytes_per_token(config: Mapping[str, object], wide: int, tier: Tier) -> int:
    """Return the bytes per token of the largest set of a block's tensors that are alive together.

    In the self-attention these are the residual and q, k and v before and after their norm, or in 8 bits, or for
    sparse-linear attention in both. In an attention to an image too these are six tensors of the model's width. In the
    feed-forward they are the block's input, the residual, the normed and the wide tensor. The rotary embeddings are
    there in every block, and VACE's hints in the first one. wide: bytes of a value in the model's dtype.
    """
    C, ffn = config["num_attention_heads"] * config["attention_head_dim"], config["ffn_dim"]
    beside = 2 * FP32_BYTES * config["attention_head_dim"] + _hints(config) * wide * C
    if tier == EXACT:
        return wide * max(6 * C, 3 * C + ffn) + beside
    attention = 4 * wide + 3 if tier == QUANTIZED else max(6 * wide, 5 * wide + 3)
    if config.get("added_kv_proj_dim") is not None:
        attention = max(attention, 6 * wide)
    return max(attention * C, (2 * wide + 1) * C + ffn) + beside


def _hints(config: Mapping[str, object]) -> int:
    """Return how many tensors of the model's width VACE's control blocks leave: their hints and their last states."""
    layers = config.get("vace_layers")
    return 0 if layers is None else len(layers) + 1


def bytes_with_modulation(config: Mapping[str, object], wide: int, tier: Tier) -> int:
    """Return what `bytes_per_token` does for a model that always keeps a modulation of each token.

    The time embedding and its six-fold projection are then alive through all blocks.
    """
    in_blocks, _ = bytes_with_timesteps(config, wide, wide, bytes_per_token(config, wide, tier))
    return in_blocks


def bytes_with_timesteps(config: Mapping[str, object], wide: int, table: int, block: int) -> tuple[int, int]:
    """Return the bytes per token in a block and after the blocks if each token has its own timestep.

    In a block the time embedding and its six-fold projection are alive too. The output norm takes these, the hidden
    states, a shift and a scale in the table's dtype, and three tensors in fp32: an H200 measured 32 bytes for each of
    TI2V-5B's channels, with all of it in bf16.

    wide: bytes of a value in the model's dtype. table: the same in scale_shift_table, which `from_pretrained` keeps in
    fp32. block: the bytes without these timesteps.
    """
    C = config["num_attention_heads"] * config["attention_head_dim"]
    return block + 7 * wide * C, (8 * wide + 2 * table + 3 * FP32_BYTES) * C


def unpatched_bytes_per_token(config: Mapping[str, object], wide: int, lora: int, own_timesteps: bool) -> int:
    """Return the bytes per token of the largest set of tensors that are alive together in diffusers' own block.

    In the feed-forward these are the block's input, the residual, the attention's output, the normed tensor, and the
    wide tensor before and after GELU. A LoRA makes three wide tensors, and casts its input. After the feed-forward
    there are five tensors of the model's width, and three in fp32. The rotary embeddings are there in every block.

    wide: bytes of a value in the model's dtype. lora: the same for the LoRAs, or 0 without one. own_timesteps: True if
    each token has its own timestep. Its embedding, the six-fold projection and its modulation are then alive too.
    """
    C, ffn = config["num_attention_heads"] * config["attention_head_dim"], config["ffn_dim"]
    widest = max(wide, lora)
    inside = 4 * wide * C + (3 * widest * ffn + (widest - wide) * C if lora else 2 * wide * ffn)
    block = max(inside, (5 * wide + 3 * FP32_BYTES) * C)
    if own_timesteps:
        block = max(block + (7 * wide + 6 * FP32_BYTES) * C, (8 * wide + 12 * FP32_BYTES) * C)
    return block + 2 * FP32_BYTES * config["attention_head_dim"] + _hints(config) * wide * C


def unpatched_bytes_with_modulation(config: Mapping[str, object], wide: int, lora: int, own_timesteps: bool) -> int:
    """Return what `unpatched_bytes_per_token` does for a model that always keeps a modulation of each token."""
    return unpatched_bytes_per_token(config, wide, lora, own_timesteps=True)


SIZES = Sizes(
    ("num_attention_heads", "ffn_dim"),
    tokens,
    ops,
    bytes_per_token,
    bytes_with_timesteps,
    unpatched_bytes_per_token,
    feed_forward=itemgetter("ffn_dim"),
)
