"""Wan pipelines at their real sizes with random weights: what a benchmark runs without downloading anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from diffusers import AutoencoderKLWan, ModelMixin, WanPipeline, WanTransformer3DModel

from ..scheduler import RCMScheduler

TEXT_TOKENS = 512


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
