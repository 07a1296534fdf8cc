"""The sizes of Wan's checkpoints, and tiny ones for tests."""

from __future__ import annotations

from functools import partial

from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from transformers import CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

from ..family import Case
from .image_free import ImageFreePipeline

_from_text, _from_image = (
    partial(Case, WanTransformer3DModel, pipeline, AutoencoderKLWan) for pipeline in (WanPipeline, ImageFreePipeline)
)

# UMT5-XXL, which encodes the prompts of every checkpoint, and CLIP ViT-H, which encodes the images of Wan 2.1.
UMT5_XXL = UMT5Config(
    vocab_size=256384,
    d_model=4096,
    d_kv=64,
    d_ff=10240,
    num_layers=24,
    num_heads=64,
    feed_forward_proj="gated-gelu",
    tie_word_embeddings=False,
)
CLIP_VIT_H = CLIPVisionConfig(
    hidden_size=1280,
    intermediate_size=5120,
    num_hidden_layers=32,
    num_attention_heads=16,
    image_size=224,
    patch_size=14,
)
TEXT = {"text_encoder": (UMT5EncoderModel, UMT5_XXL)}
TEXT_AND_IMAGE = {**TEXT, "image_encoder": (CLIPVisionModel, CLIP_VIT_H)}

SIZE_14B = {"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824}
TI2V_5B = {"num_attention_heads": 24, "num_layers": 30, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48}
TI2V_5B_VAE = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "in_channels": 12,
    "out_channels": 12,
    "is_residual": True,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "latents_mean": [0.0] * 48,  # neutral, because the weights are random here
    "latents_std": [1.0] * 48,
}
TINY = {"num_attention_heads": 2, "attention_head_dim": 64, "num_layers": 2, "ffn_dim": 256, "text_dim": 32}
# With fewer than 8 channels the norms amplify rounding so much that errors are meaningless.
TINY_VAE = {"base_dim": 8, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}

# The sizes of Wan-AI's diffusers checkpoints; what is left out has diffusers' default. The latter half is for tests.
CASES = {
    "wan2.1-1.3b": _from_text(
        {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}, 480, 832, 81, encoders=TEXT
    ),
    "wan2.1-14b": _from_text(SIZE_14B, 720, 1280, 81, encoders=TEXT),
    "wan2.1-i2v-14b": _from_image(
        {**SIZE_14B, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
        720,
        1280,
        81,
        encoders=TEXT_AND_IMAGE,
    ),
    "wan2.2-a14b": _from_text(SIZE_14B, 720, 1280, 81, encoders=TEXT, experts=2, boundary=0.875),
    "wan2.2-i2v-a14b": _from_image(
        {**SIZE_14B, "in_channels": 36}, 720, 1280, 81, encoders=TEXT, experts=2, boundary=0.9
    ),
    "wan2.2-5b": _from_text(TI2V_5B, 704, 1280, 121, vae=TI2V_5B_VAE, expand_timesteps=True, encoders=TEXT),
    "wan2.2-5b-image": _from_image(TI2V_5B, 704, 1280, 121, vae=TI2V_5B_VAE, expand_timesteps=True, encoders=TEXT),
    "tiny": _from_text(TINY, 32, 48, 5, vae=TINY_VAE),
    "tiny-experts": _from_text(TINY, 32, 48, 5, vae=TINY_VAE, experts=2, boundary=0.875),
    "tiny-tokens": _from_text(TINY, 32, 48, 5, vae=TINY_VAE, expand_timesteps=True),
    "tiny-image-tokens": _from_image(TINY, 32, 48, 5, vae=TINY_VAE, expand_timesteps=True),
    "tiny-image": _from_image(
        {**TINY, "in_channels": 36, "image_dim": 8, "added_kv_proj_dim": 128}, 32, 48, 5, vae=TINY_VAE
    ),
}
