"""The sizes of LTX-2's checkpoints, and tiny ones for tests."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2Vocoder

from ..family import Case
from .connector_free import NoConnectors

SCHEDULER = partial(
    FlowMatchEulerDiscreteScheduler,
    use_dynamic_shifting=True,
    base_shift=0.95,
    max_shift=2.05,
    base_image_seq_len=1024,
    max_image_seq_len=4096,
)  # LTX-2's own has a shift_terminal too, with which a single step has no time
_from_text = partial(Case, LTX2VideoTransformer3DModel, LTX2Pipeline, AutoencoderKLLTX2Video, scheduler=SCHEDULER)

# LTX-2 19B, in full where other code reads the configs; what is left out has diffusers' default, which is LTX-2.0's.
LTX2_19B = {
    "in_channels": 128,
    "out_channels": 128,
    "patch_size": 1,
    "patch_size_t": 1,
    "num_attention_heads": 32,
    "attention_head_dim": 128,
    "audio_num_attention_heads": 32,
    "audio_attention_head_dim": 64,
    "num_layers": 48,
    "caption_channels": 3840,
    "rope_type": "split",
}
VAE = {
    "latent_channels": 128,
    "decoder_causal": False,
    "spatial_compression_ratio": 32,
    "temporal_compression_ratio": 8,
}
TINY = {
    **LTX2_19B,
    "in_channels": 4,
    "out_channels": 4,
    "audio_in_channels": 4,
    "audio_out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 64,
    "cross_attention_dim": 128,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 32,
    "audio_cross_attention_dim": 64,
    "num_layers": 2,
    "caption_channels": 32,
}
TINY_VAE = {
    "latent_channels": 4,
    "block_out_channels": (8,),
    "decoder_block_out_channels": (8,),
    "layers_per_block": (1,),
    "decoder_layers_per_block": (1, 1),
    "spatio_temporal_scaling": (True,),
    "decoder_spatio_temporal_scaling": (True,),
    "decoder_inject_noise": (False, False),
    "downsample_type": ("spatial",),
    "upsample_type": ("spatial",),
    "upsample_residual": (False,),
    "upsample_factor": (1,),
    "decoder_causal": False,
    "patch_size": 8,
    "spatial_compression_ratio": 16,
    "temporal_compression_ratio": 1,
}
TINY_VOCODER = {
    "in_channels": 16,
    "hidden_channels": 32,
    "upsample_kernel_sizes": [4, 4],
    "upsample_factors": [2, 2],
    "resnet_kernel_sizes": [3],
    "resnet_dilations": [[1, 3, 5]],
}
TINY_AUDIO_VAE = {"base_channels": 4, "ch_mult": (1,), "num_res_blocks": 1, "latent_channels": 2, "mel_bins": 8}


def _beside(audio_vae: Mapping[str, object], vocoder: Mapping[str, object]) -> dict[str, tuple]:
    return {
        "connectors": (NoConnectors, {}),
        "audio_vae": (AutoencoderKLLTX2Audio, audio_vae),
        "vocoder": (LTX2Vocoder, vocoder),
    }


CASES = {
    "ltx2-19b": _from_text(LTX2_19B, 512, 768, 121, vae=VAE, others=_beside({}, {})),
    "tiny-ltx2": _from_text(TINY, 64, 96, 5, vae=TINY_VAE, others=_beside(TINY_AUDIO_VAE, TINY_VOCODER)),
}
