"""The sizes of LTX-2's checkpoints, and tiny ones for tests."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2ImageToVideoPipeline,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

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
_from_text, _from_image = (
    partial(
        Case,
        LTX2VideoTransformer3DModel,
        pipeline_class,
        AutoencoderKLLTX2Video,
        scheduler=SCHEDULER,
        stand_ins={"connectors": NoConnectors},  # the real ones have 1.4e9 weights, and nothing of theirs is measured
    )
    for pipeline_class in (LTX2Pipeline, LTX2ImageToVideoPipeline)
)

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


# Gemma 3 with its vision tower, whose hidden states of all layers the connectors take.
GEMMA3_12B = Gemma3Config(
    text_config={
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "vocab_size": 262208,
    },
    vision_config={
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
    },
)
TEXT = {"text_encoder": (Gemma3ForConditionalGeneration, GEMMA3_12B)}


def _beside(audio_vae: Mapping[str, object], vocoder: Mapping[str, object]) -> dict[str, tuple]:
    return {
        "connectors": (LTX2TextConnectors, {"rope_type": "split"}),
        "audio_vae": (AutoencoderKLLTX2Audio, audio_vae),
        "vocoder": (LTX2Vocoder, vocoder),
    }


_real = {"vae": VAE, "encoders": TEXT, "others": _beside({}, {})}
_tiny = {"vae": TINY_VAE, "others": _beside(TINY_AUDIO_VAE, TINY_VOCODER)}
CASES = {
    "ltx2-19b": _from_text(LTX2_19B, 512, 768, 121, **_real),
    "ltx2-19b-image": _from_image(LTX2_19B, 512, 768, 121, **_real),
    "tiny-ltx2": _from_text(TINY, 64, 96, 5, **_tiny),
    "tiny-ltx2-image": _from_image(TINY, 64, 96, 5, **_tiny),
}
