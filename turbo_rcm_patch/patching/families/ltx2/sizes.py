"""The sizes of tensors in LTX-2's blocks, by a transformer's config: those of the video. Its sound is 1/50 of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ....tiers import EXACT, FP32_BYTES, Tier
from ..family import Sizes
from .call import TEXT_TOKENS


def tokens(config: Mapping[str, object], latent: tuple[int, int, int]) -> int:
    """Return the video tokens of a sample whose latent has these frames, height and width."""
    edge, edge_t = config.get("patch_size") or 1, config.get("patch_size_t") or 1
    return math.prod(length // size for length, size in zip(latent, (edge_t, edge, edge), strict=True))


def ops(config: Mapping[str, object], tokens: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the ops of the video stream that there is a choice of kernels for, with their sizes."""
    C, inner = _widths(config)
    heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
    yield "attention", (heads, tokens, tokens, head_dim)
    yield "attention", (heads, tokens, TEXT_TOKENS, head_dim)
    yield "linear_skip", (tokens, C, C)
    yield "linear_skip", (tokens, C, inner)
    yield "linear_skip", (tokens, C, 4 * C)
    yield "linear_gelu", (tokens, 4 * C, C)
    yield "linear_qkv", (tokens, C, C)


def bytes_per_token(config: Mapping[str, object], wide: int, tier: Tier) -> int:
    """Return the bytes per video token of the largest set of a block's tensors that are alive together.

    In the self-attention these are the residual and q, k and v before and after their norm, and in 8 bits. In the
    feed-forward they are the block's input, the residual, the normed and the wide tensor. The RoPE tables are alive
    throughout. wide: bytes of a value in the model's dtype.
    """
    C, _ = _widths(config)
    tables = _bytes_of_tables(config)
    if tier == EXACT:
        return tables + wide * 7 * C
    return tables + max((6 * wide + 3) * C, (2 * wide + 1) * C + 4 * C)


def bytes_with_timesteps(config: Mapping[str, object], wide: int, table: int, block: int) -> tuple[int, int]:
    """Return the bytes per token in a block if each token has its own timestep, and 0: less is alive after the blocks.

    Beside the block's tensors these are the time embedding and its projections for the block and between the streams.
    Tokens with equal timesteps share their rows of modulation in a block.
    """
    C, _ = _widths(config)
    return block + wide * C * (1 + _rows(config)), 0


def unpatched_bytes_per_token(config: Mapping[str, object], wide: int, lora: int, own_timesteps: bool) -> int:
    """Return the bytes per token of the largest set of tensors that are alive together in diffusers' own block.

    In the self-attention these are the residual, the normed tensor, q, k and v, and three tensors in fp32 of the
    rotation. In the feed-forward they are the block's input, the residual, the normed tensor, and the wide tensor
    before and after GELU. A LoRA makes three wide tensors, and casts its input. The RoPE tables are alive throughout.

    wide: bytes of a value in the model's dtype. lora: the same for the LoRAs, or 0 without one. own_timesteps: True if
    each token has its own timestep: its embedding and the rows of modulation are then alive too.
    """
    C, _ = _widths(config)
    widest = max(wide, lora)
    feed_forward = 3 * wide * C + (3 * widest * 4 * C + (widest - wide) * C if lora else 2 * wide * 4 * C)
    block = max(feed_forward, (5 * wide + 3 * FP32_BYTES) * C) + _bytes_of_tables(config)
    return block + (wide * C * (1 + 2 * _rows(config)) if own_timesteps else 0)


def _widths(config: Mapping[str, object]) -> tuple[int, int]:
    """Return the channels of the video, and of the attentions between the streams."""
    of_audio = config["audio_num_attention_heads"] * config["audio_attention_head_dim"]
    return config["num_attention_heads"] * config["attention_head_dim"], of_audio


def _rows(config: Mapping[str, object]) -> int:
    """Return the rows of modulation of the video in a block: of the block, and between the streams."""
    return (9 if config.get("cross_attn_mod") else 6) + 5


def _bytes_of_tables(config: Mapping[str, object]) -> int:
    """Return the bytes per token of the video in RoPE tables, in fp32: for its self-attention and between streams."""
    columns = 1 if config.get("rope_type", "interleaved") == "split" else 2  # cos and sin, perhaps in pairs
    return FP32_BYTES * columns * sum(_widths(config))


NEEDED = ("num_attention_heads", "attention_head_dim", "audio_num_attention_heads", "audio_attention_head_dim")
SIZES = Sizes(
    NEEDED,
    tokens,
    ops,
    bytes_per_token,
    bytes_with_timesteps,
    unpatched_bytes_per_token,
    feed_forward=lambda config: 4 * _widths(config)[0],
)
