"""Pipelines at their real sizes with random weights, which need no download."""

from __future__ import annotations

import inspect
import math
from itertools import chain

import torch
from diffusers import DiffusionPipeline
from torch import nn

from ..memory.empty_models import cast_as_loaded
from ..patching import use_rcm
from ..patching.apply import transformers_of
from ..patching.families import family_of
from ..patching.families.family import Case, PipelineInputs
from ..patching.steps.sparse_linear import PROJ_L
from ..scheduler import RCMScheduler

PROMPT_TOKENS = 77  # of a structured prompt before its padding
OUTLIER_CHANNELS, OUTLIER = 4, 10.0  # hidden channels far above the others, whose values are about 1
QUERY_GAIN = 6.0  # a factor on attention scores; at 1 random weights attend to all keys about equally


def build_pipeline(
    case: Case, dtype: torch.dtype, device: torch.device, *, layers: int | None = None
) -> DiffusionPipeline:
    """Return the case's pipeline without encoders, drawn on the device from a seed; layers: fewer blocks, if given.

    Modules that diffusers keeps in fp32 stay so. The global random state is left alone.
    """
    config = dict(case.transformer) if layers is None else {**case.transformer, "num_layers": layers}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        transformers = {name: case.transformer_class(**config) for name in case.transformer_names}
        for transformer in transformers.values():
            for blocks in family_of(transformer).blocks:
                for _, block in blocks.of(transformer):
                    blocks.random_weights.strengthen_gates(block)
        # Cast before the others are built: in fp32 LTX-2's transformer takes 75 GB.
        parts = {name: cast_as_loaded(model.eval(), dtype) for name, model in transformers.items()}
        others = {name: kind for name, kind in case.others.items() if name not in case.stand_ins}
        others |= {name: (model_class, {}) for name, model_class in case.stand_ins.items()}
        for name, (model_class, options) in {"vae": (case.vae_class, case.vae), **others}.items():
            parts[name] = cast_as_loaded(model_class(**options).eval(), dtype)
    parameters = inspect.signature(case.pipeline_class).parameters.values()
    left_out = {parameter.name: None for parameter in parameters if parameter.default is parameter.empty}
    return case.pipeline_class(**{**left_out, **parts, **case.pipeline_options, "scheduler": case.scheduler()})


def install_few_steps(pipe: DiffusionPipeline) -> None:
    """Install rCM's sampler, unless the case's pipeline has a scheduler of another kind."""
    if isinstance(pipe.scheduler, RCMScheduler):
        use_rcm(pipe)


def random_prompt(pipe: DiffusionPipeline) -> torch.Tensor:
    """Return random embeddings [1, tokens, channels] in place of an encoded prompt."""
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(1, *_inputs_of(pipe).prompt, generator=generator)
    return embeddings.to(pipe.transformer.device, pipe.transformer.dtype)


def random_inputs(pipe: DiffusionPipeline) -> dict[str, object]:
    """Return random inputs for a call of the pipeline: prompt embeddings, and what else its class requires."""
    return {"prompt_embeds": random_prompt(pipe), **_inputs_of(pipe).more}


def _inputs_of(pipe: DiffusionPipeline) -> PipelineInputs:
    return family_of(pipe.transformer).inputs(pipe)


def add_structure(pipe: DiffusionPipeline) -> None:
    """Give random weights of all transformers, in place, two properties of trained ones.

    They are a few hidden channels far above all others, and attention that picks out a few keys. On Gaussian
    activations and near-uniform attention many errors average out.
    """
    generator = torch.Generator().manual_seed(0)
    for transformer in transformers_of(pipe).values():
        _add_structure(transformer, generator)


def _add_structure(transformer: nn.Module, generator: torch.Generator) -> None:
    family = family_of(transformer)
    with torch.no_grad():
        bias = transformer.get_submodule(family.first_layer).bias
        channels = torch.randperm(len(bias), generator=generator)[:OUTLIER_CHANNELS].to(bias.device)
        bias[channels] = OUTLIER
        for blocks in family.blocks:
            for _, block in blocks.of(transformer):
                blocks.random_weights.undo_outliers(block, channels, OUTLIER)
                blocks.random_weights.sharpen_attention(block, QUERY_GAIN)


def needs_projections(pipe: DiffusionPipeline) -> bool:
    """True if sparse-linear attention needs a proj_l in this model. TurboT2AV's LTX-2 has none."""
    return family_of(pipe.transformer).blocks[0].sparse.needs_projection


def add_random_projections(pipe: DiffusionPipeline) -> None:
    """Give every self-attention a random proj_l, which training with sparse-linear attention adds."""
    generator = torch.Generator().manual_seed(0)
    attentions = (family_of(model).self_attentions(model) for model in transformers_of(pipe).values())
    for _, attn, _ in chain.from_iterable(attentions):
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

    Latents, such as [1, C, f, h, w], are in fp32: waves that drift across the frames, different in each channel, with a
    little noise. prompt_embeds [1, tokens, channels]: tokens that share a direction and have outlying channels, zeros
    as padding.
    """
    generator, given = torch.Generator().manual_seed(seed), _inputs_of(pipe)
    sizes = given.latents(height, width, num_frames)
    device = pipe.transformer.device
    latents = {name: _waves(*size, generator=generator)[None].to(device) for name, size in sizes.items()}
    prompt = torch.zeros(1, *given.prompt)
    tokens = torch.randn(PROMPT_TOKENS, given.prompt[1], generator=generator)
    prompt[0, :PROMPT_TOKENS] = tokens + 2 * torch.randn(given.prompt[1], generator=generator)
    prompt[0, :PROMPT_TOKENS, :OUTLIER_CHANNELS] *= 10
    return {**latents, "prompt_embeds": prompt.to(device, pipe.transformer.dtype), **given.more}


def _waves(channels: int, *axes: int, generator: torch.Generator) -> torch.Tensor:
    """Return waves along all axes, [channels, *axes]."""
    ones = (1,) * len(axes)
    places = torch.meshgrid(*(torch.linspace(0, 1, size) for size in axes), indexing="ij")
    cycles = 2 * torch.rand(len(axes), channels, generator=generator)
    phase = torch.rand(channels, *ones, generator=generator)
    waves = sum(c.view(-1, *ones) * place for c, place in zip(cycles, places, strict=True))
    noise = torch.randn(channels, *axes, generator=generator)
    return 1.4 * (2 * math.pi * (waves + phase)).sin() + 0.2 * noise
