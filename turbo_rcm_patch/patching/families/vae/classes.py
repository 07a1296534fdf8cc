"""The classes of the VAEs that can be patched, by what they are.

AutoencoderKLQwenImage is Wan 2.1's VAE under other names, for images and without patches. Its `tiled_decode` does not
clamp.
"""

from __future__ import annotations

from diffusers.models.autoencoders import autoencoder_kl_qwenimage as qwen
from diffusers.models.autoencoders import autoencoder_kl_wan as wan
from torch import nn

VAE = (wan.AutoencoderKLWan, qwen.AutoencoderKLQwenImage)
OF_IMAGES = (qwen.AutoencoderKLQwenImage,)
DECODER = (wan.WanDecoder3d, qwen.QwenImageDecoder3d)
UP_BLOCK = (wan.WanUpBlock, qwen.QwenImageUpBlock)
RESIDUAL_UP_BLOCK = (wan.WanResidualUpBlock,)
ENCODER = (wan.WanEncoder3d, qwen.QwenImageEncoder3d)
RESIDUAL_DOWN_BLOCK = (wan.WanResidualDownBlock,)
MID_BLOCK = (wan.WanMidBlock, qwen.QwenImageMidBlock)
RESIDUAL_BLOCK = (wan.WanResidualBlock, qwen.QwenImageResidualBlock)
ATTENTION = (wan.WanAttentionBlock, qwen.QwenImageAttentionBlock)
RESAMPLE = (wan.WanResample, qwen.QwenImageResample)
UPSAMPLE = (wan.WanUpsample, qwen.QwenImageUpsample)
SHORTCUT, AVERAGE = (wan.DupUp3D,), (wan.AvgDown3D,)
CAUSAL = (wan.WanCausalConv3d, qwen.QwenImageCausalConv3d)
NORM = (wan.WanRMS_norm, qwen.QwenImageRMS_norm)


def resnets_for_8_bits(decoder: nn.Module) -> list[nn.Module]:
    """Return the resnets whose convolutions ``vae="8bit"`` is for: those of all up blocks but the first."""
    return [resnet for block in list(decoder.up_blocks)[1:] for resnet in block.resnets]


def patch_size_of(vae: nn.Module) -> int:
    """Return the pixels along height and width that the network takes, or makes, as channels of one."""
    return vae.config.get("patch_size") or 1


def clamps_tiles(vae: nn.Module) -> bool:
    """True if `tiled_decode` clamps its sample to [-1, 1]."""
    return type(vae) is wan.AutoencoderKLWan
