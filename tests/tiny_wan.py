"""Tiny random Wan pipelines, built offline and deterministically: the models that the tests run.

The variants:

    "t2v"          Wan 2.1
    "i2v"          Wan 2.1 I2V, with added image K/V and a CLIP
    "v2v"          Wan 2.1 video to video
    "wan22"        two transformers and a boundary
    "wan22_i2v"    these, from an image without a CLIP
    "ti2v"         TI2V-5B text to video, with per-token timesteps
    "ti2v_i2v"     TI2V-5B from an image
"""

import copy
import functools
from collections import OrderedDict

import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    WanVideoToVideoPipeline,
)
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    PreTrainedTokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

from turbo_rcm_patch.patching import use_rcm

HEIGHT, WIDTH, FRAMES = 32, 48, 5  # latents [16, 2, 4, 6]: 12 tokens
TEXT_DIM, IMAGE_DIM, Z_DIM = 32, 4, 16
I2V_TEXT_TOKENS = 512  # WanAttention with added K/V takes the last 512 context tokens as the text

# Pipelines pad a prompt to so many tokens, in which tiny models spend most of their time. On the CPU they pad it to 32
# where a call does not say how far.
PIPELINE_TEXT_TOKENS = WanPipeline.__call__.__wrapped__.__defaults__[-1]
if not torch.cuda.is_available():
    for call in (WanPipeline.__call__.__wrapped__, WanVideoToVideoPipeline.__call__.__wrapped__):
        call.__defaults__ = (*call.__defaults__[:-1], 32)


def built_once(build):
    """Build a model once for the same arguments, and return copies of it, which take a third of the time."""
    known = {}

    @functools.wraps(build)
    def copied(*args, **kwargs):
        key = repr((args, sorted(kwargs.items()), torch.get_default_device()))
        if key not in known:
            known[key] = build(*args, **kwargs)
        return _copy(known[key], {})

    return copied


def _copy(module, copies):
    """Return a copy of a module that shares no tensor, child, hook or processor with it."""
    if id(module) in copies:
        return copies[id(module)]
    copies[id(module)] = result = object.__new__(type(module))
    for name, value in vars(module).items():
        if type(value) in (dict, set, list, OrderedDict):
            value = value.copy()
        result.__dict__[name] = copy.copy(value) if name == "processor" else value
    for group in (result._parameters, result._buffers):
        for name, tensor in group.items():
            if tensor is not None:
                group[name] = copies[id(tensor)] = (
                    copies[id(tensor)] if id(tensor) in copies else _copy_of_tensor(tensor)
                )
    for name, child in result._modules.items():
        result._modules[name] = None if child is None else _copy(child, copies)
    return result


def _copy_of_tensor(tensor):
    data = tensor.detach().clone()
    return nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


def tiny_wan_pipeline(variant="t2v", dtype=torch.float32, *, seed=0, **transformer_overrides):
    """A pipeline of the given variant on the CPU. transformer_overrides go to ``tiny_wan_transformer``."""
    components = {
        "tokenizer": _tokenizer(),
        "text_encoder": _text_encoder(seed).to(dtype),
        "vae": _vae(seed + 1),
        "scheduler": UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    }

    def transformer(**overrides):
        return tiny_wan_transformer(dtype=dtype, **{"seed": seed + 2, **overrides, **transformer_overrides})

    if variant == "t2v":
        return _quiet(WanPipeline(transformer=transformer(), **components))
    if variant == "v2v":
        return _quiet(WanVideoToVideoPipeline(transformer=transformer(), **components))
    if variant == "ti2v":
        return _quiet(WanPipeline(transformer=transformer(), expand_timesteps=True, **components))
    if variant == "ti2v_i2v":
        return _quiet(WanImageToVideoPipeline(transformer=transformer(), expand_timesteps=True, **components))
    if variant == "wan22":
        low_noise = transformer(seed=seed + 3)
        return _quiet(
            WanPipeline(transformer=transformer(), transformer_2=low_noise, boundary_ratio=0.875, **components)
        )
    if variant == "wan22_i2v":
        channels = 2 * Z_DIM + 4
        high, low = transformer(in_channels=channels), transformer(in_channels=channels, seed=seed + 3)
        pipe = WanImageToVideoPipeline(transformer=high, transformer_2=low, boundary_ratio=0.9, **components)
        return _quiet(pipe)
    if variant == "i2v":
        # input channels: latents, 4 mask channels, encoded image
        model = transformer(in_channels=2 * Z_DIM + 4, image_dim=IMAGE_DIM, added_kv_proj_dim="inner")
        return _quiet(
            WanImageToVideoPipeline(
                transformer=model,
                image_encoder=_clip(seed + 4).to(dtype),
                image_processor=CLIPImageProcessor(crop_size=32, size=32),
                **components,
            )
        )
    raise ValueError(f"unknown variant {variant!r}")


def rcm_pipeline(variant="t2v", dtype=torch.float32, **transformer_overrides):
    """A pipeline of the given variant that samples as rCM does."""
    pipe = tiny_wan_pipeline(variant, dtype, **transformer_overrides)
    use_rcm(pipe)
    return pipe


def tiny_call(variant="t2v", **overrides):
    """Keyword arguments of a fast ``pipe(...)`` call for a variant; returns latents unless output_type is given."""
    call = {
        "prompt": "a red fox jumps over the snow",
        "height": HEIGHT,
        "width": WIDTH,
        "num_inference_steps": 2,
        "max_sequence_length": 16,
        "output_type": "latent",
    }
    if variant == "v2v":
        call["video"] = [_image(i) for i in range(FRAMES)]
        call["strength"] = 1.0
    else:
        call["num_frames"] = FRAMES
    if variant in ("i2v", "ti2v_i2v", "wan22_i2v"):
        call["image"] = _image(0)
    if variant == "i2v":
        call["max_sequence_length"] = I2V_TEXT_TOKENS
    return {**call, **overrides}


def frames_of(pipe, variant="t2v", *, seed=3, **overrides):
    """Return the latents or frames of a fast call, from noise of a seed."""
    return pipe(**tiny_call(variant, generator=torch.Generator().manual_seed(seed), **overrides)).frames


@built_once
def tiny_wan_transformer(heads=2, head_dim=64, layers=2, *, dtype=torch.float32, seed=2, **overrides):
    """A WanTransformer3DModel in eval mode whose every parameter matters: norms and biases are random too.

    overrides go to the model's config; added_kv_proj_dim="inner" stands for heads * head_dim, as in Wan 2.1 I2V. Like
    ``from_pretrained(dtype=...)``, a low-precision model keeps its time embedder, modulation and norm2 in fp32.
    """
    config = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": heads,
        "attention_head_dim": head_dim,
        "in_channels": Z_DIM,
        "out_channels": Z_DIM,
        "text_dim": TEXT_DIM,
        "freq_dim": 256,
        "ffn_dim": 48,
        "num_layers": layers,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 32,
        **overrides,
    }
    if config.get("added_kv_proj_dim") == "inner":
        config["added_kv_proj_dim"] = heads * head_dim
    model = seeded(seed, lambda: _with_random_vectors(WanTransformer3DModel(**config)))
    keep = WanTransformer3DModel._keep_in_fp32_modules
    for name, parameter in model.named_parameters():
        if not any(kept in name.split(".") for kept in keep):
            parameter.data = parameter.data.to(dtype)
    return model


def tiny_transformer_inputs(model, batch=2, frames=3, height=4, width=6, text_tokens=7, image_tokens=5, *, seed=7):
    """Keyword arguments of ``model(...)`` for latents [batch, C, frames, height, width]; one timestep per sample."""
    config, dtype = model.config, model.dtype
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    inputs = {
        "hidden_states": randn(batch, config.in_channels, frames, height, width),
        "timestep": 900.0 - 100.0 * torch.arange(batch),
        "encoder_hidden_states": randn(batch, text_tokens, config.text_dim),
        "return_dict": False,
    }
    if config.added_kv_proj_dim is not None:
        inputs["encoder_hidden_states"] = randn(batch, I2V_TEXT_TOKENS, config.text_dim)
        inputs["encoder_hidden_states_image"] = randn(batch, image_tokens, config.image_dim)
    return inputs


def moved(inputs, device):
    """Return keyword arguments with their tensors on a device."""
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def output_of(model, device="cpu", **overrides):
    """Return the model's result for `tiny_transformer_inputs`, some of them overridden, on a device."""
    with torch.no_grad():
        return model(**moved({**tiny_transformer_inputs(model), **overrides}, device))[0]


def _with_random_vectors(model):
    """Norm weights start at 1, biases may start at 0 and gates are small: leaving one out must change the output."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    for block in model.blocks:
        torch.nn.init.normal_(block.scale_shift_table, std=0.5)
    return model


def seeded(seed, build):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().eval()


def _quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


@built_once
def _vae(seed):
    config = {"base_dim": 3, "z_dim": Z_DIM, "dim_mult": [1] * 4, "num_res_blocks": 1}
    return seeded(seed, lambda: AutoencoderKLWan(**config, temperal_downsample=[False, True, True]))


@built_once
def _text_encoder(seed):
    config = UMT5Config(vocab_size=256, d_model=TEXT_DIM, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    return seeded(seed, lambda: UMT5EncoderModel(config))


@built_once
def _clip(seed):
    config = CLIPVisionConfig(
        hidden_size=IMAGE_DIM,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=32,
        patch_size=16,
    )
    return seeded(seed, lambda: CLIPVisionModel(config))


def _tokenizer():
    letters = [(letter, -4.0) for letter in "▁abcdefghijklmnopqrstuvwxyz0123456789.,'-"]
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    tokenizer = Tokenizer(models.Unigram(special + letters, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=I2V_TEXT_TOKENS,
    )


def _image(index):
    """A smooth gradient; index shifts its colour."""
    image = Image.linear_gradient("L").resize((WIDTH, HEIGHT))
    return Image.merge("RGB", [image, image.rotate(180), image.point(lambda value: (value + 40 * index) % 256)])
