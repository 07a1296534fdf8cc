"""Tiny random VAEs of Wan 2.1, TI2V-5B and Qwen-Image, whose every parameter matters, and latents for them."""

import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan

from tests.tiny_wan import built_once, seeded

Z_DIM, HEIGHT, WIDTH = 16, 3, 4
SMALL = {"base_dim": 3, "z_dim": Z_DIM, "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
RESIDUAL = {"in_channels": 12, "out_channels": 12, "is_residual": True, "patch_size": 2, "scale_factor_spatial": 16}
KINDS = {
    "wan 2.1": {**SMALL, "dim_mult": [1] * 4},
    "residual": {**SMALL, **RESIDUAL, "dim_mult": [1] * 4},
    # With the real models' numbers of channels in relation: shortcuts, and duplicated channels that come out uneven.
    "wan 2.1, growing": {**SMALL, "base_dim": 4, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2},
    "residual, growing": {**SMALL, **RESIDUAL, "base_dim": 4, "decoder_base_dim": 6, "dim_mult": [1, 2, 4, 4]},
    "qwen image": {**SMALL, "base_dim": 4, "dim_mult": [1, 2, 4, 4]},
}


@built_once
def tiny_vae(kind="wan 2.1", dtype=torch.float32, *, seed=5, **options):
    cls = AutoencoderKLQwenImage if kind == "qwen image" else AutoencoderKLWan
    return seeded(seed, lambda: _with_random_vectors(cls(**{**KINDS[kind], **options}))).to(dtype)


def tiny_latents(frames=3, batch=2, height=HEIGHT, width=WIDTH, dtype=torch.float32, *, seed=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, Z_DIM, frames, height, width, generator=generator).to(dtype)


def decode(vae, z=None):
    """The frames of latents, or of tiny ones, without gradients."""
    with torch.no_grad():
        return vae.decode(tiny_latents() if z is None else z, return_dict=False)[0]


def _with_random_vectors(vae):
    """Gains start at 1 and biases near 0: leaving one out must change the output. Some of that is to be clamped."""
    for name, parameter in vae.named_parameters():
        if name.endswith(("bias", "gamma")):
            parameter.data += 0.2 * torch.randn_like(parameter)
    vae.decoder.conv_out.weight.data *= 4
    return vae
