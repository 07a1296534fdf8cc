"""Pipelines at their real sizes with random weights, which need no download."""

from __future__ import annotations

import functools
import math

import torch
from diffusers import AutoencoderKLWan, DiffusionPipeline, ModelMixin, WanImageToVideoPipeline
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image

from ..patching.families import FAMILIES, family_of
from ..patching.families.family import Case
from ..patching.steps.sparse_linear import PROJ_L
from ..scheduler import RCMScheduler

TEXT_TOKENS, IMAGE_TOKENS = 512, 257
PROMPT_TOKENS = 77  # tokens of a structured prompt; the rest is padding
OUTLIER_CHANNELS, OUTLIER = 4, 10.0  # hidden channels far above the others, whose values are about 1
QUERY_GAIN = 6.0  # a factor on attention scores; at 1 random weights attend to all keys about equally

CASES = {name: case for family in FAMILIES for name, case in family.cases.items()}


class ImageFreePipeline(WanImageToVideoPipeline):
    """Image to video without encoders: the image is random features [1, 257, image_dim] and random latents.

    Encoding an image as a video takes more memory than a denoising step, and CLIP is not needed for one.
    """

    def encode_image(self, image: object, device: torch.device | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(1, IMAGE_TOKENS, self.transformer.config.image_dim, generator=generator).to(device)

    def prepare_latents(
        self,
        image: torch.Tensor,
        batch_size: int,
        num_channels_latents: int = 16,
        height: int = 480,
        width: int = 832,
        num_frames: int = 81,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        generator: torch.Generator | None = None,
        latents: torch.Tensor | None = None,
        last_image: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return latents, condition and, with timesteps per token, a mask: 0 in the first frame, as in diffusers."""
        shape = (
            (num_frames - 1) // self.vae_scale_factor_temporal + 1,
            height // self.vae_scale_factor_spatial,
            width // self.vae_scale_factor_spatial,
        )
        draw = functools.partial(randn_tensor, generator=generator, device=device, dtype=dtype)
        latents = draw((batch_size, num_channels_latents, *shape)) if latents is None else latents
        first_frame = torch.zeros(1, 1, *shape, dtype=dtype, device=device)
        first_frame[:, :, 0] = 1
        if self.config.expand_timesteps:
            return latents, draw((batch_size, num_channels_latents, 1, *shape[1:])), 1 - first_frame
        condition = draw((batch_size, num_channels_latents, *shape))
        masks = first_frame.expand(batch_size, self.vae_scale_factor_temporal, *shape)
        return latents, torch.cat([masks, condition], dim=1)


def build_pipeline(
    case: Case, dtype: torch.dtype, device: torch.device, *, layers: int | None = None, seed: int = 0
) -> DiffusionPipeline:
    """Return the case's pipeline without encoders, drawn on the device from the seed; layers: fewer blocks, if given.

    Modules that Wan keeps in fp32 stay so. The global random state is left alone.
    """
    config = dict(case.transformer) if layers is None else {**case.transformer, "num_layers": layers}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        transformer = _with_strong_gates(case.transformer_class(**config))
        vae = AutoencoderKLWan(**case.vae)
    from_text = next(one for one in family_of(transformer).pipelines if one.starts_from == "text")
    pipeline_class = ImageFreePipeline if case.from_image else from_text.pipeline_class
    return pipeline_class(
        tokenizer=None,
        text_encoder=None,
        vae=_cast_as_loaded(vae.eval(), dtype),
        transformer=_cast_as_loaded(transformer.eval(), dtype),
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
    return {"image": Image.new("RGB", (64, 64))} if isinstance(pipe, ImageFreePipeline) else {}


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
        for _, block in family.every_block(transformer):
            block.scale_shift_table[0, 1::3, channels] = 1 / OUTLIER - 1  # the scales undo them, as training would
            block.norm2.weight[channels] = 1 / OUTLIER
            for name, parameter in block.named_parameters():
                if name.endswith("norm_q.weight"):
                    parameter.mul_(QUERY_GAIN)


def add_random_projections(pipe: DiffusionPipeline, seed: int = 0) -> None:
    """Give every self-attention a random proj_l, which training with sparse-linear attention adds."""
    transformer = pipe.transformer
    generator = torch.Generator().manual_seed(seed)
    for _, attn, _ in family_of(transformer).self_attentions(transformer):
        like = attn.to_out[0].weight
        size = transformer.config.attention_head_dim
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


def _with_strong_gates(model: ModelMixin) -> ModelMixin:
    """Draw the modulation tables N(0, 0.5²): random blocks then change their input about as much as they keep of it.

    diffusers draws them N(0, 1/dim), and a block's output is then little more than its input; an error inside a block
    would hardly show.
    """
    for _, block in family_of(model).every_block(model):
        torch.nn.init.normal_(block.scale_shift_table, std=0.5)
    return model


def _cast_as_loaded(model: ModelMixin, dtype: torch.dtype) -> ModelMixin:
    """Cast in place as diffusers' ``from_pretrained(dtype=...)`` does: modules that it keeps in fp32 stay fp32."""
    kept = model._keep_in_fp32_modules or ()
    for name, parameter in model.named_parameters():
        if not any(part in kept for part in name.split(".")):
            parameter.data = parameter.data.to(dtype)
    return model
