"""Pipelines at their real sizes with random weights, which need no download."""

from __future__ import annotations

import math

import torch
from diffusers import DiffusionPipeline
from PIL import Image

from ..memory.empty_models import cast_as_loaded
from ..patching.families import family_of, pipeline_of
from ..patching.families.family import Case
from ..patching.steps.sparse_linear import PROJ_L
from ..scheduler import RCMScheduler

TEXT_TOKENS, PROMPT_TOKENS = 512, 77  # tokens of a prompt; those of a structured prompt before its padding
OUTLIER_CHANNELS, OUTLIER = 4, 10.0  # hidden channels far above the others, whose values are about 1
QUERY_GAIN = 6.0  # a factor on attention scores; at 1 random weights attend to all keys about equally


def build_pipeline(
    case: Case, dtype: torch.dtype, device: torch.device, *, layers: int | None = None, seed: int = 0
) -> DiffusionPipeline:
    """Return the case's pipeline without encoders, drawn on the device from the seed; layers: fewer blocks, if given.

    Modules that diffusers keeps in fp32 stay so. The global random state is left alone.
    """
    config = dict(case.transformer) if layers is None else {**case.transformer, "num_layers": layers}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        transformer = case.transformer_class(**config)
        for blocks in family_of(transformer).blocks:
            for _, block in blocks.of(transformer):
                blocks.random_weights.strengthen_gates(block)
        vae = case.vae_class(**case.vae)
    return case.pipeline_class(
        tokenizer=None,
        text_encoder=None,
        vae=cast_as_loaded(vae.eval(), dtype),
        transformer=cast_as_loaded(transformer.eval(), dtype),
        scheduler=RCMScheduler(),
        expand_timesteps=case.expand_timesteps,
    )


def random_prompt(pipe: DiffusionPipeline, seed: int = 0) -> torch.Tensor:
    """Return random embeddings [1, 512, text_dim] in place of an encoded prompt."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(1, TEXT_TOKENS, pipe.transformer.config.text_dim, generator=generator)
    return embeddings.to(pipe.transformer.device, pipe.transformer.dtype)


def random_inputs(pipe: DiffusionPipeline, seed: int = 0) -> dict[str, object]:
    """Return random inputs for a call of the pipeline: prompt embeddings, and an image for image-to-video models."""
    return {"prompt_embeds": random_prompt(pipe, seed), **_image_of(pipe)}


def _image_of(pipe: DiffusionPipeline) -> dict[str, Image.Image]:
    """Return the arguments with a picture for a pipeline that requires one. The picture itself is unused."""
    found = pipeline_of(pipe)
    return {"image": Image.new("RGB", (64, 64))} if found is not None and found.starts_from == "image" else {}


def add_structure(pipe: DiffusionPipeline, seed: int = 0) -> None:
    """Give random weights, in place, two properties of trained ones.

    They are a few hidden channels far above all others, and attention that picks out a few keys. On Gaussian
    activations and near-uniform attention many errors average out.
    """
    transformer = pipe.transformer
    family = family_of(transformer)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        bias = transformer.get_submodule(family.first_layer).bias
        channels = torch.randperm(len(bias), generator=generator)[:OUTLIER_CHANNELS].to(bias.device)
        bias[channels] = OUTLIER
        for blocks in family.blocks:
            for _, block in blocks.of(transformer):
                blocks.random_weights.undo_outliers(block, channels, OUTLIER)
                blocks.random_weights.sharpen_attention(block, QUERY_GAIN)


def add_random_projections(pipe: DiffusionPipeline, seed: int = 0) -> None:
    """Give every self-attention a random proj_l, which training with sparse-linear attention adds."""
    transformer = pipe.transformer
    generator = torch.Generator().manual_seed(seed)
    for _, attn, _ in family_of(transformer).self_attentions(transformer):
        like = attn.to_out[0].weight
        size = attn.inner_dim // attn.heads
        linear = torch.nn.utils.skip_init(torch.nn.Linear, size, size, device=like.device, dtype=like.dtype)
        with torch.no_grad():
            linear.weight.copy_(torch.randn(size, size, generator=generator) * size**-0.5)
            linear.bias.zero_()
        setattr(attn, PROJ_L, linear.requires_grad_(False))


def structured_inputs(
    pipe: DiffusionPipeline, *, height: int, width: int, num_frames: int, seed: int = 0
) -> dict[str, object]:
    """Return arguments of the pipeline's call that resemble a video and a prompt, rather than white noise.

    latents [1, C, f, h, w] in fp32: waves that drift across the frames, different in each channel, with a little noise.
    prompt_embeds [1, 512, text_dim]: tokens that share a direction and have outlying channels, zeros as padding.
    image: where one starts the video.
    """
    generator = torch.Generator().manual_seed(seed)
    text_dim, channels = pipe.transformer.config.text_dim, pipe.vae.config.z_dim
    shape = (
        (num_frames - 1) // pipe.vae_scale_factor_temporal + 1,
        height // pipe.vae_scale_factor_spatial,
        width // pipe.vae_scale_factor_spatial,
    )
    frame, row, column = torch.meshgrid(*(torch.linspace(0, 1, size) for size in shape), indexing="ij")
    cycles = 2 * torch.rand(3, channels, generator=generator)
    phase = torch.rand(channels, 1, 1, 1, generator=generator)
    waves = sum(c.view(-1, 1, 1, 1) * axis for c, axis in zip(cycles, (frame, row, column), strict=True))
    noise = torch.randn(channels, *shape, generator=generator)
    latents = 1.4 * (2 * math.pi * (waves + phase)).sin() + 0.2 * noise

    prompt = torch.zeros(1, TEXT_TOKENS, text_dim)
    tokens = torch.randn(PROMPT_TOKENS, text_dim, generator=generator)
    prompt[0, :PROMPT_TOKENS] = tokens + 2 * torch.randn(text_dim, generator=generator)
    prompt[0, :PROMPT_TOKENS, :OUTLIER_CHANNELS] *= 10
    device = pipe.transformer.device
    inputs = {"latents": latents[None].to(device), "prompt_embeds": prompt.to(device, pipe.transformer.dtype)}
    return {**inputs, **_image_of(pipe)}
