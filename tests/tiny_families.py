"""Tiny random transformers of every family that can be patched, and inputs for them."""

import torch
from diffusers import (
    AnyFlowFARTransformer3DModel,
    AnyFlowTransformer3DModel,
    ChronoEditTransformer3DModel,
    HeliosTransformer3DModel,
    LTX2VideoTransformer3DModel,
    SkyReelsV2Transformer3DModel,
    WanAnimate2Transformer3DModel,
    WanAnimateTransformer3DModel,
    WanVACETransformer3DModel,
)
from diffusers.models.transformers import transformer_wan_animate_2
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache
from torch.nn.attention import flex_attention

from tests.tiny_wan import (
    I2V_TEXT_TOKENS,
    IMAGE_DIM,
    TEXT_DIM,
    built_once,
    seeded,
    tiny_transformer_inputs,
    tiny_wan_transformer,
)

BATCH, FRAMES, HEIGHT, WIDTH = 2, 3, 4, 6  # of latents; 18 tokens
HEADS, HEAD_DIM, CHANNELS = 2, 64, 4
CHUNKS = (1, 1, 1)  # AnyFlow-FAR's frames in each chunk; the first has compressed frames, the others whole ones
SMALL = {
    "num_attention_heads": HEADS,
    "attention_head_dim": HEAD_DIM,
    "out_channels": CHANNELS,
    "text_dim": TEXT_DIM,
    "freq_dim": 64,
    "ffn_dim": 48,
    "rope_max_seq_len": 32,
}
FACE = {
    "motion_encoder_channel_sizes": {"4": 16, "8": 16, "16": 16},
    "motion_encoder_size": 16,
    "motion_style_dim": 8,
    "motion_dim": 4,
    "motion_encoder_dim": 16,
    "face_encoder_hidden_dim": 16,
    "face_encoder_num_heads": 2,
    "inject_face_latents_blocks": 1,
}
# Wan-Animate-2: the frames of a driving video, which a new video has one more than, and the features of an image.
DRIVING_FRAMES, CLIP_DIM = 2, 1280
AUDIO_TOKENS, AUDIO_HEAD_DIM, LTX2_CHANNELS = 5, 64, 32
LTX2 = {
    **{f"{stream}{end}_channels": LTX2_CHANNELS for stream in ("", "audio_") for end in ("in", "out")},
    "num_attention_heads": HEADS,
    "attention_head_dim": HEAD_DIM,
    "cross_attention_dim": HEADS * HEAD_DIM,
    "audio_num_attention_heads": HEADS,
    "audio_attention_head_dim": AUDIO_HEAD_DIM,
    "audio_cross_attention_dim": HEADS * AUDIO_HEAD_DIM,
    "caption_channels": TEXT_DIM,
}
# LTX-2.3 modulates prompts and their attention, has gates of heads, and no projections of prompts.
LTX2_3 = {
    **{f"{stream}{option}": True for stream in ("", "audio_") for option in ("gated_attn", "cross_attn_mod")},
    "perturbed_attn": True,
    "use_prompt_embeddings": False,
    "rope_type": "split",
}


def vace(layers=2, **options):
    return WanVACETransformer3DModel(
        **SMALL, in_channels=CHANNELS, num_layers=layers, vace_layers=[0, layers - 1], vace_in_channels=8, **options
    )


def skyreels(layers=2, **options):
    return SkyReelsV2Transformer3DModel(**SMALL, in_channels=CHANNELS, num_layers=layers, **options)


def animate(layers=2, **options):
    image = {"image_dim": IMAGE_DIM, "added_kv_proj_dim": HEADS * HEAD_DIM}
    latents = {"latent_channels": CHANNELS, "in_channels": 2 * CHANNELS + 4}
    return WanAnimateTransformer3DModel(**SMALL, **FACE, **image, **latents, num_layers=layers, **options)


def animate_2(layers=2, **options):
    small = {"dim": HEADS * HEAD_DIM, "num_heads": HEADS, "ffn_dim": 48, "freq_dim": 64, "text_dim": TEXT_DIM}
    channels = {"in_dim": 2 * CHANNELS, "out_dim": CHANNELS}
    return WanAnimate2Transformer3DModel(**{**small, **channels, "text_len": 8, "num_layers": layers, **options})


def _made_once(mask, *, _compile, **options):
    values = tuple(cell.cell_contents for cell in mask.__closure__)
    key = values + tuple(options.values())
    if key not in _masks:
        _masks[key] = flex_attention.create_block_mask(mask, **options)
    return _masks[key]


# diffusers compiles the mask for each model, and PyTorch traces FlexAttention, which takes a CPU many seconds.
flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
_masks = {}
transformer_wan_animate_2.create_block_mask = _made_once


def chronoedit(layers=2, **options):
    image = {"image_dim": IMAGE_DIM, "added_kv_proj_dim": HEADS * HEAD_DIM}
    return ChronoEditTransformer3DModel(**SMALL, **image, in_channels=CHANNELS, num_layers=layers, **options)


def anyflow(layers=2, **options):
    return AnyFlowTransformer3DModel(**SMALL, in_channels=CHANNELS, num_layers=layers, **options)


def anyflow_far(layers=2, **options):
    return AnyFlowFARTransformer3DModel(
        **SMALL, in_channels=CHANNELS, num_layers=layers, full_chunk_limit=2, chunk_partition=CHUNKS, **options
    )


def helios(layers=2, **options):
    config = {**SMALL, "in_channels": CHANNELS, "num_layers": layers, "rope_dim": (HEAD_DIM - 40, 20, 20), **options}
    del config["rope_max_seq_len"]
    return HeliosTransformer3DModel(**config)


def ltx2(layers=2, **options):
    return LTX2VideoTransformer3DModel(**{**LTX2, "num_layers": layers, **options})


# name: (what builds the model, its options)
FAMILIES = {
    "vace": (vace, {}),
    "skyreels": (skyreels, {}),
    "skyreels, causal": (skyreels, {"num_frame_per_block": 2}),
    "skyreels, diffusion forcing": (skyreels, {}),
    "animate": (animate, {}),
    "animate 2": (animate_2, {}),
    "animate 2, driving video": (animate_2, {"use_img_emb": False, "refer_stride": 2}),
    "chronoedit": (chronoedit, {}),
    "anyflow": (anyflow, {}),
    "anyflow, a timestep per frame": (anyflow, {"deltatime_type": "t-r", "image_dim": IMAGE_DIM}),
    "anyflow far": (anyflow_far, {}),
    "anyflow far, with a cache": (anyflow_far, {"deltatime_type": "t-r", "image_dim": IMAGE_DIM}),
    "helios": (helios, {}),
    "helios, one timestep": (helios, {"zero_history_timestep": False, "guidance_cross_attn": False}),
    "ltx2": (ltx2, {}),
    "ltx2, a timestep per token": (ltx2, {"rope_type": "split"}),
    "ltx2.3": (ltx2, LTX2_3),
}
# One name for each model. Those with a comma differ in options and calls alone.
EACH_MODEL = [name for name in FAMILIES if "," not in name]
# Families whose self-attention is called as a whole, because it has a mask or a cache, and those where it is dense.
WHOLE = ("skyreels, causal", "anyflow far", "anyflow far, with a cache")
DENSE = (*WHOLE, "animate 2", "animate 2, driving video")


@built_once
def tiny_family_transformer(name, dtype=torch.float32, *, seed=3, **options):
    """The transformer in eval mode; every parameter matters, and what diffusers keeps in fp32 stays so."""
    if name == "wan":
        return tiny_wan_transformer(dtype=dtype, **options)
    build, given = FAMILIES[name]
    model = seeded(seed, lambda: _with_random_vectors(build(**{**given, **options})))
    for path, parameter in model.named_parameters():
        if not any(kept in path.split(".") for kept in model._keep_in_fp32_modules or ()):
            parameter.data = parameter.data.to(dtype)
    return model


def first_of(outputs):
    """A model's first result in one tensor. Wan-Animate-2 gives a list of each sample's."""
    return torch.stack(outputs[0]) if isinstance(outputs[0], list) else outputs[0]


def tiny_family_inputs(name, model, *, seed=7):
    """Keyword arguments of a call of the transformer."""
    if name == "wan":
        return tiny_transformer_inputs(model)
    generator = torch.Generator().manual_seed(seed)
    if name.startswith("ltx2"):
        return _ltx2_inputs(name, model, generator)
    if name.startswith("animate 2"):
        return _animate_2_inputs(name, model, generator)
    frames = FRAMES + 1 if name == "skyreels, causal" else FRAMES  # two blocks of frames
    randn = lambda *shape: torch.randn(shape, generator=generator).to(model.dtype)  # noqa: E731
    inputs = {
        "hidden_states": randn(BATCH, model.config.in_channels, frames, HEIGHT, WIDTH),
        "timestep": 900.0 - 100.0 * torch.arange(BATCH),
        "encoder_hidden_states": randn(BATCH, 7, TEXT_DIM),
        "return_dict": False,
    }
    if name == "vace":
        inputs["control_hidden_states"] = randn(BATCH, 8, FRAMES, HEIGHT, WIDTH)
        inputs["control_hidden_states_scale"] = torch.tensor([0.7, 1.3], dtype=model.dtype)
    if name == "skyreels, diffusion forcing":
        inputs["timestep"] = torch.tensor([[0.0, 500.0, 900.0], [100.0, 100.0, 800.0]])
        inputs["enable_diffusion_forcing"] = True
    if name == "chronoedit":
        inputs["encoder_hidden_states"] = randn(BATCH, I2V_TEXT_TOKENS, TEXT_DIM)
        inputs["encoder_hidden_states_image"] = randn(BATCH, 5, IMAGE_DIM)
    if name.startswith("anyflow"):
        inputs["hidden_states"] = inputs["hidden_states"].transpose(1, 2)  # frames before channels
        inputs["timestep"] = inputs["timestep"][:, None].repeat(1, FRAMES)
        inputs["r_timestep"] = inputs["timestep"] - 100.0
    if name in ("anyflow, a timestep per frame", "anyflow far"):
        inputs["timestep"] = torch.tensor([[0.0, 500.0, 900.0], [100.0, 100.0, 800.0]])
    if name in ("anyflow, a timestep per frame", "anyflow far, with a cache"):
        inputs["encoder_hidden_states_image"] = randn(BATCH, 5, IMAGE_DIM)
    if name.startswith("anyflow far"):
        inputs["chunk_partition"] = list(CHUNKS)
    if name == "anyflow far, with a cache":  # the third chunk, after two in the cache
        inputs |= {key: inputs[key][:, -1:] for key in ("hidden_states", "timestep", "r_timestep")}
        inputs["kv_cache"] = [_cache(randn) for _ in model.blocks]
        inputs["kv_cache_flag"] = {"num_cached_chunks": 2, "is_cache_step": False}
    if name == "animate":
        inputs["encoder_hidden_states"] = randn(BATCH, I2V_TEXT_TOKENS, TEXT_DIM)
        inputs["encoder_hidden_states_image"] = randn(BATCH, 5, IMAGE_DIM)
        inputs["pose_hidden_states"] = randn(BATCH, CHANNELS, FRAMES - 1, HEIGHT, WIDTH)
        inputs["face_pixel_values"] = randn(BATCH, 3, 4 * (FRAMES - 2) + 1, 16, 16)
    if name.startswith("helios"):
        inputs |= _helios_history(randn)
    return inputs


def _animate_2_inputs(name, model, generator):
    frames = DRIVING_FRAMES if name.endswith("driving video") else DRIVING_FRAMES + 1
    randn = lambda *shape: torch.randn(shape, generator=generator).to(model.dtype)  # noqa: E731
    grid = torch.tensor([[DRIVING_FRAMES, HEIGHT // 2, WIDTH // 2]] * BATCH)
    inputs = {
        "hidden_states": list(randn(BATCH, CHANNELS, frames, HEIGHT, WIDTH)),
        "condition_latents": list(randn(BATCH, CHANNELS, frames, HEIGHT, WIDTH)),
        "timestep": 900.0 - 100.0 * torch.arange(BATCH),
        "encoder_hidden_states": list(randn(BATCH, 7, TEXT_DIM)),
        "seq_len": frames * HEIGHT * WIDTH // 4,
        "kv_cache": WanAnimate2KVCache(len(model.blocks)),
        "return_dict": False,
    }
    if model.config.use_img_emb:
        inputs["encoder_hidden_states_image"] = randn(BATCH, 5, CLIP_DIM)
    if name.endswith("driving video"):
        return inputs | {"kv_cache_mode": "extract", "offset_grid_sizes": grid}
    for layer in inputs["kv_cache"].layer_caches:
        layer.store(*randn(2, BATCH, grid[0].prod(), HEADS, HEAD_DIM))
    pixels = {"origin_len": 4 * (DRIVING_FRAMES - 1), "origin_area": [8 * HEIGHT, 8 * WIDTH]}
    return inputs | {"kv_cache_mode": "cached", "reference_grid_sizes": grid, **pixels}


def _helios_history(randn):
    """Earlier frames: as large as the new ones, reduced twofold, and reduced fourfold."""
    counts = {"long": 4, "mid": 2, "short": 2}
    *history, new = torch.arange(sum(counts.values()) + FRAMES)[None].split([*counts.values(), FRAMES], 1)
    inputs = {"indices_hidden_states": new}
    for (name, count), indices in zip(counts.items(), history, strict=True):
        inputs[f"indices_latents_history_{name}"] = indices
        inputs[f"latents_history_{name}"] = randn(BATCH, CHANNELS, count, HEIGHT, WIDTH)
    return inputs


def _ltx2_inputs(name, model, generator):
    config, tokens = model.config, FRAMES * HEIGHT * WIDTH // 4
    randn = lambda *shape: torch.randn(shape, generator=generator).to(model.dtype)  # noqa: E731
    widths = (HEADS * HEAD_DIM, HEADS * AUDIO_HEAD_DIM)
    text_dim, audio_text_dim = (TEXT_DIM, TEXT_DIM) if config.use_prompt_embeddings else widths
    timestep = 900.0 - 100.0 * torch.arange(BATCH)
    inputs = {
        "hidden_states": randn(BATCH, tokens, LTX2_CHANNELS),
        "audio_hidden_states": randn(BATCH, AUDIO_TOKENS, LTX2_CHANNELS),
        "encoder_hidden_states": randn(BATCH, 7, text_dim),
        "audio_encoder_hidden_states": randn(BATCH, 7, audio_text_dim),
        "timestep": timestep,
        "audio_timestep": timestep,
        "sigma": timestep,
        "num_frames": FRAMES,
        "height": HEIGHT // 2,
        "width": WIDTH // 2,
        "audio_num_frames": AUDIO_TOKENS,
        "return_dict": False,
    }
    if name == "ltx2, a timestep per token":  # from an image, which is the first frame
        inputs["timestep"] = timestep[:, None] * (torch.arange(tokens) >= tokens // FRAMES)
    return inputs


def _cache(randn):
    """The keys and values of earlier frames, compressed and whole, in AnyFlow-FAR's cache of a block."""
    tokens = {"compressed_cache": (HEIGHT // 4) * (WIDTH // 4), "full_cache": (HEIGHT // 2) * (WIDTH // 2)}  # a frame's
    return {key: randn(2, BATCH, HEADS, FRAMES * count, HEAD_DIM) for key, count in tokens.items()}


# The ends of names: also of LTX-2's prompts, of its attentions between streams, and of LTX-2.5's keyframes.
TABLES = ("scale_shift_table", "modulation", "keyframes_abs_pos_embedding")


def _with_random_vectors(model):
    """Norm weights start at 1, biases may start at 0 and gates are small: leaving one out must change the output."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
        elif name.endswith(TABLES):
            torch.nn.init.normal_(parameter, std=0.5)
    return model
