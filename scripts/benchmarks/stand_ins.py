"""Parts of a pipeline that are otherwise downloaded, at their real sizes: a text encoder, its tokenizer, a tiny VAE."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from safetensors.torch import save_file
from torch import nn
from transformers import BatchEncoding, UMT5EncoderModel

from scripts.benchmarks.memory_cap import with_random_weights
from turbo_rcm_patch.patching.families.wan.cases import UMT5_XXL
from turbo_rcm_patch.patching.tiny_vae.network import EDGE, TinyDecoder

TOKENS = 512  # of a prompt for Wan


class RandomTokens:
    """Stands in for the tokenizer: a prompt is always the same random tokens, as many as the pipeline asks for.

    vocabulary: the number of tokens that there are. LTX-2's pipeline reads and sets the attributes.
    """

    padding_side, pad_token, model_max_length = "left", "<pad>", TOKENS

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary

    def __call__(self, prompts: list[str], *, max_length: int, **_: object) -> BatchEncoding:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(1, self.vocabulary, (len(prompts), max_length), generator=generator)
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def add_text_encoder(pipe: DiffusionPipeline) -> None:
    """Give one of Wan's pipelines UMT5-XXL with random weights, on the transformer's device and in its dtype."""
    encoder = with_random_weights(lambda: UMT5EncoderModel(UMT5_XXL), pipe.transformer.device)
    pipe.register_modules(text_encoder=encoder.to(pipe.transformer.dtype), tokenizer=RandomTokens(UMT5_XXL.vocab_size))


def tiny_file(vae: nn.Module, folder: Path) -> Path:
    """Write a tiny VAE for a VAE's latents, with random weights in fp16, as they are published."""
    patch_size = vae.spatial_compression_ratio // EDGE
    network = TinyDecoder("base", vae.config.z_dim, patch_size).half()
    save_file(network.state_dict(), file := folder / "taew2_1.safetensors")
    return file
