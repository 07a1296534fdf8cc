"""Tiny random LTX-2 pipelines, built offline. They take embeddings of prompts, as they have no text encoder."""

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2ConditionPipeline,
    LTX2ImageToVideoPipeline,
    LTX2Pipeline,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from PIL import Image

from tests.tiny_families import AUDIO_HEAD_DIM, HEAD_DIM, HEADS, tiny_family_transformer
from tests.tiny_wan import TEXT_DIM, built_once, seeded, tiny_wan_pipeline

LTX2_PIPELINES = {"text": LTX2Pipeline, "image": LTX2ImageToVideoPipeline, "condition": LTX2ConditionPipeline}
HEIGHT, WIDTH, FRAMES = 64, 96, 5  # 72 tokens
CHANNELS, PROMPT_TOKENS, REGISTERS, ENCODER_LAYERS = 4, 8, 8, 3


def tiny_ltx2_pipeline(kind="text", dtype=torch.float32, family="ltx2"):
    """A pipeline on the CPU. The family is "ltx2" or "ltx2.3"."""
    latents = {f"{stream}{end}_channels": CHANNELS for stream in ("", "audio_") for end in ("in", "out")}
    pipe = LTX2_PIPELINES[kind](
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_vae().to(dtype),
        audio_vae=_audio_vae().to(dtype),
        text_encoder=None,
        tokenizer=None,
        connectors=_connectors(family).to(dtype),
        transformer=tiny_family_transformer(family, dtype, **latents),
        vocoder=_vocoder().to(dtype),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def tiny_ltx2_pipeline_for_prompts(kind="text"):
    """The same with an encoder for prompts. UMT5 stands for Gemma: both give all layers' hidden states."""
    pipe = tiny_ltx2_pipeline(kind)
    encoded = tiny_wan_pipeline()
    pipe.register_modules(text_encoder=encoded.text_encoder, tokenizer=encoded.tokenizer)
    return pipe


def tiny_ltx2_call(kind="text", dtype=torch.float32, device="cpu", **overrides):
    """Keyword arguments of a fast ``pipe(...)`` call with guidance. It returns latents of the video and the sound."""
    generator = torch.Generator().manual_seed(4)
    prompts = torch.randn(2, 1, PROMPT_TOKENS, TEXT_DIM * ENCODER_LAYERS, generator=generator).to(device, dtype)
    mask = (torch.arange(PROMPT_TOKENS, device=device) >= 3).long()[None]  # padded on the left
    call = {
        "prompt_embeds": prompts[0],
        "prompt_attention_mask": mask,
        "negative_prompt_embeds": prompts[1],
        "negative_prompt_attention_mask": mask.roll(-1, 1) | mask,
        "height": HEIGHT,
        "width": WIDTH,
        "num_frames": FRAMES,
        "frame_rate": 25.0,
        "num_inference_steps": 2,
        "guidance_scale": 2.0,
        "stg_scale": 0.0,
        "modality_scale": 2.0,
        "generator": torch.Generator().manual_seed(5),
        "output_type": "latent",
        "return_dict": False,
    }
    picture = Image.linear_gradient("L").resize((WIDTH, HEIGHT)).convert("RGB")
    if kind == "image":
        call |= {"image": picture, "image_crf": 0}  # not compressed, which needs PyAV
    elif kind == "condition":
        call["conditions"] = LTX2VideoCondition(frames=picture, index=0, strength=0.8, crf=0)
    return {**call, **overrides}


@built_once
def _vae():
    config = {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": CHANNELS,
        "block_out_channels": (8,),
        "decoder_block_out_channels": (8,),
        "layers_per_block": (1,),
        "decoder_layers_per_block": (1, 1),
        "spatio_temporal_scaling": (True,),
        "decoder_spatio_temporal_scaling": (True,),
        "decoder_inject_noise": (False, False),
        "downsample_type": ("spatial",),
        "upsample_residual": (False,),
        "upsample_factor": (1,),
        "timestep_conditioning": False,
        "patch_size": 8,
        "patch_size_t": 1,
        "encoder_causal": True,
        "decoder_causal": False,
    }
    return seeded(1, lambda: AutoencoderKLLTX2Video(**config))


@built_once
def _audio_vae():
    config = {
        "base_channels": 4,
        "output_channels": 2,
        "ch_mult": (1,),
        "num_res_blocks": 1,
        "attn_resolutions": None,
        "in_channels": 2,
        "resolution": 32,
        "latent_channels": 2,
        "norm_type": "pixel",
        "causality_axis": "height",
        "mid_block_add_attention": False,
        "sample_rate": 16000,
        "mel_hop_length": 160,
        "is_causal": True,
        "mel_bins": 8,
    }
    return seeded(2, lambda: AutoencoderKLLTX2Audio(**config))


@built_once
def _connectors(family):
    """Those of LTX-2.3 have gates, and give each stream embeddings of its own width, as its blocks project none."""
    config = {"caption_channels": TEXT_DIM, "text_proj_in_factor": ENCODER_LAYERS, "connector_rope_base_seq_len": 32}
    newer = family == "ltx2.3"
    config |= {"per_modality_projections": newer, "proj_bias": newer, "rope_type": "split" if newer else "interleaved"}
    for stream, head_dim in (("video", HEAD_DIM), ("audio", AUDIO_HEAD_DIM)):
        width = HEADS * head_dim if newer else TEXT_DIM
        config |= {
            f"{stream}_hidden_dim": width,
            f"{stream}_gated_attn": newer,
            f"{stream}_connector_num_attention_heads": 2,
            f"{stream}_connector_attention_head_dim": width // 2,
            f"{stream}_connector_num_layers": 1,
            f"{stream}_connector_num_learnable_registers": REGISTERS,
        }
    return seeded(3, lambda: LTX2TextConnectors(**config))


@built_once
def _vocoder():
    config = {
        "in_channels": 16,
        "hidden_channels": 32,
        "out_channels": 2,
        "upsample_kernel_sizes": [4, 4],
        "upsample_factors": [2, 2],
        "resnet_kernel_sizes": [3],
        "resnet_dilations": [[1, 3, 5]],
        "output_sampling_rate": 16000,
    }
    return seeded(4, lambda: LTX2Vocoder(**config))
