"""Wan pipelines at their real sizes with random weights: what runs there without downloading anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from diffusers import AutoencoderKLWan, ModelMixin, WanPipeline, WanTransformer3DModel

from ..scheduler import RCMScheduler

TEXT_TOKENS = 512
PROMPT_TOKENS = 77  # of a structured prompt; the rest is padding
OUTLIER_CHANNELS, OUTLIER = 4, 10.0  # hidden channels far above the others, whose values are about 1
QUERY_GAIN = 6.0  # of the attention scores; at 1 random weights attend to all keys about equally


@dataclass(frozen=True)
class Case:
    """Configs of a transformer and a VAE, whether timesteps are per token, and the usual size of a video."""

    transformer: Mapping[str, object]
    height: int
    width: int
    frames: int
    vae: Mapping[str, object] = field(default_factory=dict)
    expand_timesteps: bool = False


# The sizes of Wan-AI's diffusers checkpoints; what is left out has diffusers' default. The latent statistics of the
# TI2V-5B VAE are left neutral: its weights are random here.
CASES = {
    "wan2.1-1.3b": Case({"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}, 480, 832, 81),
    "wan2.1-14b": Case({"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824}, 720, 1280, 81),
    "wan2.2-5b": Case(
        {"num_attention_heads": 24, "num_layers": 30, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48},
        704,
        1280,
        121,
        vae={
            "base_dim": 160,
            "decoder_base_dim": 256,
            "z_dim": 48,
            "in_channels": 12,
            "out_channels": 12,
            "is_residual": True,
            "patch_size": 2,
            "scale_factor_spatial": 16,
            "latents_mean": [0.0] * 48,
            "latents_std": [1.0] * 48,
        },
        expand_timesteps=True,
    ),
    "tiny": Case(
        {"num_attention_heads": 2, "attention_head_dim": 64, "num_layers": 2, "ffn_dim": 256, "text_dim": 32},
        32,
        48,
        5,
        vae={"base_dim": 3, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
    ),
}


def build_pipeline(
    case: Case, dtype: torch.dtype, device: torch.device, *, layers: int | None = None, seed: int = 0
) -> WanPipeline:
    """The case's WanPipeline without a text encoder, drawn on the device from the seed; layers: fewer blocks, if given.

    Modules that Wan keeps in fp32 stay so. The global random state is left alone.
    """
    config = dict(case.transformer) if layers is None else {**case.transformer, "num_layers": layers}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        transformer = _with_strong_gates(WanTransformer3DModel(**config))
        vae = AutoencoderKLWan(**case.vae)
    return WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=_cast_as_loaded(vae.eval(), dtype),
        transformer=_cast_as_loaded(transformer.eval(), dtype),
        scheduler=RCMScheduler(),
        expand_timesteps=case.expand_timesteps,
    )


def random_prompt(pipe: WanPipeline, seed: int = 0) -> torch.Tensor:
    """Random embeddings [1, 512, text_dim] in place of an encoded prompt."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(1, TEXT_TOKENS, pipe.transformer.config.text_dim, generator=generator)
    return embeddings.to(pipe.transformer.device, pipe.transformer.dtype)


def add_structure(pipe: WanPipeline, seed: int = 0) -> None:
    """Give random weights, in place, two habits of trained ones: a few hidden channels far above all others, and
    attention that picks out a few keys. On Gaussian activations and near-uniform attention many errors average out.
    """
    transformer = pipe.transformer
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        bias = transformer.patch_embedding.bias
        channels = torch.randperm(len(bias), generator=generator)[:OUTLIER_CHANNELS].to(bias.device)
        bias[channels] = OUTLIER
        for block in transformer.blocks:
            block.scale_shift_table[0, 1::3, channels] = 1 / OUTLIER - 1  # as training would: the scales undo them
            block.norm2.weight[channels] = 1 / OUTLIER
            for attn in (block.attn1, block.attn2):
                attn.norm_q.weight.mul_(QUERY_GAIN)


def structured_inputs(
    pipe: WanPipeline, *, height: int, width: int, num_frames: int, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Arguments of the pipeline's call that are like a video's and a prompt's, rather than white noise.

    latents [1, C, f, h, w] in fp32: waves that drift across the frames, in every channel its own, under a little noise.
    prompt_embeds [1, 512, text_dim]: tokens that share a direction and have outlying channels, zeros as padding.
    """
    generator = torch.Generator().manual_seed(seed)
    config = pipe.transformer.config
    shape = (
        (num_frames - 1) // pipe.vae_scale_factor_temporal + 1,
        height // pipe.vae_scale_factor_spatial,
        width // pipe.vae_scale_factor_spatial,
    )
    frame, row, column = torch.meshgrid(*(torch.linspace(0, 1, size) for size in shape), indexing="ij")
    cycles = 2 * torch.rand(3, config.in_channels, generator=generator)
    phase = torch.rand(config.in_channels, 1, 1, 1, generator=generator)
    waves = sum(c.view(-1, 1, 1, 1) * axis for c, axis in zip(cycles, (frame, row, column), strict=True))
    noise = torch.randn(config.in_channels, *shape, generator=generator)
    latents = 1.4 * (2 * math.pi * (waves + phase)).sin() + 0.2 * noise

    prompt = torch.zeros(1, TEXT_TOKENS, config.text_dim)
    tokens = torch.randn(PROMPT_TOKENS, config.text_dim, generator=generator)
    prompt[0, :PROMPT_TOKENS] = tokens + 2 * torch.randn(config.text_dim, generator=generator)
    prompt[0, :PROMPT_TOKENS, :OUTLIER_CHANNELS] *= 10
    device = pipe.transformer.device
    return {"latents": latents[None].to(device), "prompt_embeds": prompt.to(device, pipe.transformer.dtype)}


def _with_strong_gates(model: WanTransformer3DModel) -> WanTransformer3DModel:
    """Draw the modulation tables N(0, 0.5²): random blocks then change their input about as much as they keep of it.

    diffusers draws them N(0, 1/dim), and a block's output is then little more than its input; an error inside a block
    would hardly show.
    """
    for block in model.blocks:
        torch.nn.init.normal_(block.scale_shift_table, std=0.5)
    return model


def _cast_as_loaded(model: ModelMixin, dtype: torch.dtype) -> ModelMixin:
    """Cast in place as diffusers' ``from_pretrained(dtype=...)`` does: what its models keep in fp32 stays fp32."""
    kept = model._keep_in_fp32_modules or ()
    for name, parameter in model.named_parameters():
        if not any(part in kept for part in name.split(".")):
            parameter.data = parameter.data.to(dtype)
    return model
