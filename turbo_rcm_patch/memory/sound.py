"""The memory of LTX-2's pipelines: their text encoder, connectors, both VAEs and the vocoder.

A pipeline with guidance computes two samples at once, and keeps the hidden states of all the text encoder's layers
until it ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from ..latents import latent_size
from ..patching.families.ltx2.call import FRAME_RATE, TEXT_TOKENS
from .traced import traced_bytes

# Tensors of all layers' hidden states that are alive together: after the encoder as they are, stacked and repeated.
IN_ENCODER, IN_CONNECTORS = 3, 6


def has_sound(models: Mapping[str, nn.Module]) -> bool:
    """True for the models of a pipeline that makes sound."""
    return "audio_vae" in models


def prompt_bytes(models: Mapping[str, nn.Module]) -> int:
    """Return the bytes of a prompt's hidden states of all layers, or 0 for models without connectors."""
    connectors = models.get("connectors")
    config = getattr(connectors, "config", {})
    channels, layers = config.get("caption_channels", 0), config.get("text_proj_in_factor", 0)
    return 0 if connectors is None else TEXT_TOKENS * channels * layers * connectors.dtype.itemsize


def kept_prompts_bytes(models: Mapping[str, nn.Module], samples: int) -> int:
    """Return the bytes of hidden states that a pipeline keeps: the prompt's, or with guidance both prompts' in one
    tensor, and those of one again."""
    return prompt_bytes(models) * (1 if samples == 1 else samples + 1)


def cache_bytes(encoder: nn.Module) -> int:
    """Return the bytes of the keys and values that the text encoder keeps, as if it went on to write."""
    config = getattr(encoder.config, "text_config", encoder.config)
    if not getattr(config, "use_cache", False):
        return 0
    keys = TEXT_TOKENS * config.num_key_value_heads * config.head_dim * next(encoder.parameters()).itemsize
    return 2 * config.num_hidden_layers * keys


def logits_bytes(encoder: nn.Module) -> int:
    """Return the bytes of the text encoder's logits, which a pipeline does not use. 0 for an encoder without them."""
    head = getattr(encoder, "lm_head", None)
    return 0 if head is None else TEXT_TOKENS * head.weight.shape[0] * head.weight.itemsize


def video_decoding_bytes(vae: nn.Module, height: int, width: int, frames: int, *, in_tiles: bool = False) -> int | None:
    """Return the bytes that diffusers takes to decode a video of this size, with its frames in the VAE's dtype.

    None: diffusers cannot decode this size in tiles.
    """
    size = latent_size(vae.config, height, width, frames)
    if in_tiles and not _has_tiles(vae, *size[1:]):
        return None

    def run(twin: nn.Module) -> None:
        vars(twin).update(_tiles(vae), use_tiling=in_tiles)
        twin.decode(torch.empty(1, vae.config.latent_channels, *size, dtype=vae.dtype), None, return_dict=False)

    return traced_bytes(vae, run, ("decode", size, in_tiles, *_tiles(vae).items()))


def video_encoding_bytes(vae: nn.Module, height: int, width: int, frames: int, *, in_tiles: bool = False) -> int:
    """Return the bytes that diffusers takes to encode a video of this size."""

    def run(twin: nn.Module) -> None:
        vars(twin).update(_tiles(vae), use_tiling=in_tiles)
        twin.encode(torch.empty(1, vae.config.in_channels, frames, height, width, dtype=vae.dtype))

    return traced_bytes(vae, run, ("encode", height, width, frames, in_tiles, *_tiles(vae).items()))


def _has_tiles(vae: nn.Module, height: int, width: int) -> bool:
    """True if every tile of latents of this size has the two rows and columns that reflecting padding needs."""
    if vae.config.decoder_spatial_padding_mode != "reflect":
        return True
    strides = vae.tile_sample_stride_height, vae.tile_sample_stride_width
    pairs = zip((height, width), strides, strict=True)
    return all((size - 1) % (stride // vae.spatial_compression_ratio) for size, stride in pairs)


def _tiles(vae: nn.Module) -> dict[str, int]:
    """Return the attributes with the sizes of a VAE's tiles."""
    return {name: value for name, value in sorted(vars(vae).items()) if name.startswith("tile_")}


def sound_steps(models: Mapping[str, nn.Module], frames: int) -> Iterator[tuple[str, str, int]]:
    """Yield the name, the model and the bytes of each step from the sound's latents to its waveform."""
    audio = models["audio_vae"]
    config = audio.config
    per_second = config.sample_rate / config.mel_hop_length / audio.temporal_compression_ratio
    length, mel_bins = round(frames / FRAME_RATE * per_second), config.mel_bins // audio.mel_compression_ratio

    def decode(twin: nn.Module) -> None:
        twin.decode(torch.empty(1, config.latent_channels, length, mel_bins, dtype=audio.dtype), return_dict=False)

    yield "decoding the sound", "audio_vae", traced_bytes(audio, decode, ("decode", length))
    if (vocoder := models.get("vocoder")) is not None:
        mel = 1, config.output_channels, length * audio.temporal_compression_ratio, config.mel_bins
        speak = lambda twin: twin(torch.empty(mel, dtype=vocoder.dtype))  # noqa: E731
        yield "making the waveform", "vocoder", traced_bytes(vocoder, speak, mel)
