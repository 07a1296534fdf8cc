"""The stages of a generation, and the bytes that each computes with beside the weights.

The figures are those of the patched model. Attention itself and the kernels' workspaces add little. Commands that run
diffusers' own code too add `unpatched_stages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from ..config import FUSION_GROUPS, VAE_8BIT, PatchConfig
from ..keep_list import is_of_attention, keeps_weights
from ..kernels.dispatch import MINIMUM_CAPABILITY, SM90
from ..kernels.quantized import FP8_CAPABILITY
from ..latents import latent_size
from ..patching.families import family_of
from ..patching.families.family import Sizes
from ..patching.families.vae import is_vae, vae_state, why_left_alone
from ..patching.families.vae.chunks import (
    decoding_bytes,
    encoding_bytes,
    unpatched_decoding_bytes,
    unpatched_encoding_bytes,
)
from ..patching.text_encoder import has_graphs, runs_lean
from ..patching.weights.quantize_linears import quantized_linears
from ..plain import is_lora_layer
from ..tiers import EXACT, QUANTIZED
from ..wording import with_article
from . import sound

TEXT_TOKENS, IMAGE_TOKENS = 512, 257  # of a prompt, and of an image of 224x224 pixels in patches of 14 with its class
BESIDE_BLOCKS = 100 * 10**6  # bytes of latents, prompts and workspaces in a step: H200 runs had 80 to 120 MB
BESIDE_TOKEN = 2200  # the same for each token of a large video (calculated): most of it is the sampler's latents
FP32_BYTES = 4
# The memory of a VAE's run over that with our kernels, counted at 480p and 720p: of a decode, TI2V-5B's, and an encode.
PYTORCHS_CONVOLUTIONS = 1.06, 1.15, 1.06
PYTORCHS_NORMS_TOO = 1.2, 1.25, 1.55


class Video(NamedTuple):
    """The size of a video in pixels and frames."""

    height: int
    width: int
    frames: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}, {self.frames} frames"


class Patched(NamedTuple):
    """A pipeline's models by their names in it, and the configuration that they are or will be patched with.

    The models may be on the meta device. own_timesteps: True if each token has its own timestep. beside: yields the
    stages that a command runs beside the patched pipeline's. None: there are none. both_ways: True if the pipeline also
    runs on the weights as they are before the patch. samples: computed at once in a step, for a pipeline with sound.
    capability: the GPU's compute capability, or (0, 0) for a GPU without Triton kernels of ours. None: that of an H200.
    from_video: True for a pipeline from video to video, whose given video has the size of the one that it makes.
    """

    models: Mapping[str, nn.Module]
    config: PatchConfig
    own_timesteps: bool = False
    beside: Callable[[Patched, Video], Iterator[Stage]] | None = None
    both_ways: bool = False
    samples: int = 1
    capability: tuple[int, int] | None = None
    from_video: bool = False


class Stage(NamedTuple):
    """A stage of a generation.

    name: for people.
    runs: the models that it runs.
    computing: bytes beside their weights.
    in_tiles: the same if the VAE works in tiles. None: the stage runs no VAE, or the VAE has no tiles at this size.
    within: the bytes that are free -> the same if the decoder takes fewer frames at a time. None: not a decode.
    after_blocks: bytes after the last block, when no block is on the GPU.
    """

    name: str
    runs: tuple[str, ...]
    computing: int
    in_tiles: int | None = None
    within: Callable[[int], int] | None = None
    after_blocks: int = 0


def stages_of(patched: Patched, video: Video) -> Iterator[Stage]:
    """Yield the stages in which a pipeline makes a video, and those beside them.

    A transformer without a VAE has latents of the size of Wan 2.1's.
    """
    yield from (_stages_with_sound if sound.has_sound(patched.models) else _stages_without_sound)(patched, video)
    if patched.beside is not None:
        yield from patched.beside(patched, video)


def _stages_without_sound(patched: Patched, video: Video) -> Iterator[Stage]:
    models = patched.models
    vae = models.get("vae")
    if (encoder := models.get("text_encoder")) is not None:
        yield Stage("text encoding", ("text_encoder",), encoder_bytes(encoder, TEXT_TOKENS))
    if (encoder := models.get("image_encoder")) is not None:
        yield Stage("image encoding", ("image_encoder",), encoder_bytes(encoder, IMAGE_TOKENS))
    _, given = given_bytes(patched, video)
    is_ours = vae is not None and _is_patched(vae, patched.config)
    if vae is not None:
        ours = partial(_encoding_bytes, patched=patched)
        yield from _encoding("VAE encoding", patched, video, ours if is_ours else unpatched_encoding_bytes)
    for name, model in models.items():
        if family_of(model) is not None:
            in_blocks, after_blocks = denoising_bytes(name, patched, video)
            step = in_blocks + max(BESIDE_BLOCKS, BESIDE_TOKEN * tokens_of(name, patched, video)) + given
            yield Stage("denoising", (name,), step, after_blocks=after_blocks + given)
    if is_ours:
        size_of = partial(_decoding_bytes, patched=patched)
        sizes = _whole_and_in_tiles(size_of, vae, video, given)
        yield Stage("decoding", ("vae",), *sizes, within=lambda free: size_of(vae, *video, free=free) + given)
    elif vae is not None:
        yield Stage("decoding", ("vae",), *_whole_and_in_tiles(unpatched_decoding_bytes, vae, video, given))
    if patched.from_video and patched.own_timesteps and vae is not None:
        yield Stage("joining", (), joining_bytes(vae, video))


def _stages_with_sound(patched: Patched, video: Video) -> Iterator[Stage]:
    """Yield the stages of a pipeline that makes sound too. It encodes one frame, if it starts from an image."""
    models, vae, samples = patched.models, patched.models["vae"], patched.samples
    kept, prompt = sound.kept_prompts_bytes(models, samples), sound.prompt_bytes(models)
    decoding = _whole_and_in_tiles(sound.video_decoding_bytes, vae, video, kept)
    if (encoder := models.get("text_encoder")) is not None:
        # Beside a prompt's hidden states: those of the prompt that was encoded before it, and its own keys and values.
        beside = (samples - 1) * prompt + sound.cache_bytes(encoder)
        in_layers = beside + prompt + encoder_bytes(encoder, sound.TEXT_TOKENS)
        after_layers = beside + sound.IN_ENCODER * prompt + sound.logits_bytes(encoder)
        yield Stage("text encoding", ("text_encoder",), in_layers, after_blocks=after_layers)
    if "connectors" in models:
        yield Stage("connectors", ("connectors",), sound.IN_CONNECTORS * samples * prompt)
    if patched.own_timesteps:
        given = video._replace(frames=1)
        whole, in_tiles = _whole_and_in_tiles(sound.video_encoding_bytes, vae, given, kept)
        in_tiles = None if decoding[1] is None else in_tiles  # for both, or for none
        yield Stage("VAE encoding", ("vae",), whole, in_tiles)
    in_blocks, after_blocks = denoising_bytes("transformer", patched, video)
    step = samples * in_blocks + kept + BESIDE_BLOCKS
    yield Stage("denoising", ("transformer",), step, after_blocks=samples * after_blocks + kept)
    yield Stage("decoding", ("vae",), *decoding)
    frames = 3 * video.frames * video.height * video.width * FP32_BYTES  # as postprocessed, perhaps on the GPU
    for name, model, size in sound.sound_steps(models, video.frames):
        yield Stage(name, (model,), size + frames + kept)


def _whole_and_in_tiles(
    size_of: Callable[..., int | None], vae: nn.Module, video: Video, more: int
) -> tuple[int, int | None]:
    """Return the bytes of a VAE's run, without and with tiles. more: bytes beside it. None: it has no tiles."""
    sizes = (size_of(vae, *video, in_tiles=tiles) for tiles in (False, True))
    return tuple(None if size is None else size + more for size in sizes)


def graphs_bytes(models: Mapping[str, nn.Module]) -> int:
    """Return the bytes that the text encoder's CUDA graphs keep: those that it computes with."""
    encoder = models.get("text_encoder")
    return encoder_bytes(encoder, TEXT_TOKENS) if encoder is not None and has_graphs(encoder) else 0


def unpatched_stages(patched: Patched, video: Video) -> Iterator[Stage]:
    """Yield the stages that take other memory in diffusers' own code."""
    vae = patched.models.get("vae")
    kept = sound.kept_prompts_bytes(patched.models, patched.samples) if sound.has_sound(patched.models) else 0
    _, given = given_bytes(patched, video)
    for name, model in patched.models.items():
        if family_of(model) is not None:
            step = tokens_of(name, patched, video) * _unpatched_bytes_per_token(model, patched)
            yield Stage("denoising, unpatched", (name,), patched.samples * step + kept + given)
    if vae is not None and is_vae(vae):  # others are not patched
        yield from _encoding("VAE encoding, unpatched", patched, video, unpatched_encoding_bytes)
        sizes = _whole_and_in_tiles(unpatched_decoding_bytes, vae, video, given)
        yield Stage("decoding, unpatched", ("vae",), *sizes)


def _is_patched(vae: nn.Module, config: PatchConfig) -> bool:
    """True if a VAE is or will be patched."""
    return bool(config.vae) and (vae_state(vae) is not None or why_left_alone(vae) is None)


def _encoding(name: str, patched: Patched, video: Video, size_of: Callable[..., int]) -> Iterator[Stage]:
    """Yield the stage in which the VAE encodes an image or a video, if the pipeline has one."""
    models = patched.models
    if patched.from_video or any(reads_image(model) for model in models.values()):
        encoded = video._replace(frames=1) if patched.own_timesteps and not patched.from_video else video
        more, _ = given_bytes(patched, video)
        yield Stage(name, ("vae",), *_whole_and_in_tiles(size_of, models["vae"], encoded, more))


def why_unknown(transformer: nn.Module) -> str | None:
    """Return the transformer's class and why its tensors cannot be counted, or None if they can.

    AnyFlow-FAR caches keys and values of all its layers. SkyReels-V2's mask has a value for each pair of tokens.
    """
    family, config = family_of(transformer), getattr(transformer, "config", {})
    name = with_article(type(transformer).__name__)
    if (config.get("num_frame_per_block") or 1) > 1:
        return f"{name} with num_frame_per_block > 1, whose mask takes memory that is not counted"
    is_known = family is not None and "full_chunk_limit" not in config
    if is_known and all(needed in config for needed in family.blocks[0].sizes.needed):
        return None
    return f"{name}, whose memory is not known"


def reads_image(model: nn.Module) -> bool:
    """True for a transformer whose latents come with those of an image, or of a video that controls it."""
    config, family = getattr(model, "config", None), family_of(model)
    if family is None:
        return False
    return config.in_channels != config.out_channels or family.blocks[0].sizes.given_bytes is not None


def given_bytes(patched: Patched, video: Video) -> tuple[int, int]:
    """Return the bytes of given videos on the GPU, while the VAE encodes them and after that.

    The encoding itself counts two videos in the VAE's dtype. In a pipeline from video to video the first is in fp32,
    and stays.
    """
    models = patched.models
    if patched.from_video and "vae" in models:
        values = 3 * video.height * video.width * video.frames
        return values * (FP32_BYTES - models["vae"].dtype.itemsize), values * FP32_BYTES
    for model in models.values():
        family = family_of(model)
        if family is not None and (given := family.blocks[0].sizes.given_bytes) is not None:
            wide = family.compute_dtype(model).itemsize
            return given(model.config, *video, wide, models["vae"].dtype.itemsize if "vae" in models else wide)
    return 0, 0


def joining_bytes(vae: nn.Module, video: Video) -> int:
    """Return the bytes with which SkyReels' pipeline puts the video that it made behind the given one, in fp32.

    Alive are the given video, the decoded one in the VAE's dtype and in fp32, and both together.
    """
    return 3 * video.height * video.width * video.frames * (vae.dtype.itemsize + 4 * FP32_BYTES)


def denoising_bytes(name: str, patched: Patched, video: Video) -> tuple[int, int]:
    """Return the bytes of the largest sets of tensors that are alive together in a step: in the blocks, and after them.

    name: the transformer's.
    """
    transformer = patched.models[name]
    sizes, tokens = family_of(transformer).blocks[0].sizes, tokens_of(name, patched, video)
    wide = family_of(transformer).compute_dtype(transformer).itemsize
    in_blocks = _block_bytes(transformer, sizes, wide, patched)
    after_blocks = sizes.bytes_after_blocks(transformer.config, wide)
    if patched.own_timesteps:
        table = transformer.scale_shift_table.itemsize
        in_blocks, after_blocks = sizes.bytes_with_timesteps(transformer.config, wide, table, in_blocks)
    if set(patched.config.fuse) != set(FUSION_GROUPS):
        in_blocks = max(in_blocks, _unpatched_bytes_per_token(transformer, patched))
    if not _has_kernels(patched):  # the torch reference of RoPE has a tensor in fp32 more than diffusers
        more = FP32_BYTES * _width(transformer.config)
        in_blocks = max(in_blocks, _unpatched_bytes_per_token(transformer, patched) + more)
    return tokens * in_blocks, tokens * after_blocks


def _block_bytes(transformer: nn.Module, sizes: Sizes, wide: int, patched: Patched) -> int:
    """Return the bytes per token of the largest set of a block's tensors that are alive together.

    wide: bytes of a value in the transformer's dtype.
    """
    config, capability, model = patched.config, patched.capability, transformer.config
    own, exact = (sizes.bytes_per_token(model, wide, tier) for tier in (config.tier, EXACT))
    if config.tier == EXACT:
        if config.linears != "torch" and capability in (None, SM90):
            return own
        return own + wide * _width(model)  # the result of PyTorch's linear, to which the skip is added
    if not config.in_8_bits("linears"):
        return max(own, exact)
    if config.keep or not config.in_8_bits("attention"):
        in_8_bits = sizes.bytes_per_token(model, wide, QUANTIZED)
        own = max(own, in_8_bits + _bytes_of_attention_kept(transformer, wide, config) * _width(model))
    first, second = _kept_in_feed_forwards(transformer, config)
    has_fp8 = capability is None or capability >= FP8_CAPABILITY
    if not has_fp8 or first - second:  # a GELU's result is then quantised in a pass of its own
        return max(own, exact + sizes.feed_forward(model))
    return max(own, exact) if second else own


def _bytes_of_attention_kept(transformer: nn.Module, wide: int, config: PatchConfig) -> int:
    """Return the bytes per channel that q, k and v take more if some of them, or the attention, are not in 8 bits.

    wide: bytes of a value in the transformer's dtype.
    """
    lora = lora_itemsize(transformer) if config.keep else 0
    if lora:  # of projections that differ, PEFT's own code runs, with three tensors in the LoRA's dtype
        return wide + 3 * lora - 3
    attends_in_8_bits = config.in_8_bits("attention") and not any(is_of_attention(name) for name in config.keep)
    return wide - 2 if attends_in_8_bits else 2 * wide - 3  # two tensors take the place of three in 8 bits


def _kept_in_feed_forwards(transformer: nn.Module, config: PatchConfig) -> tuple[set[str], set[str]]:
    """Return the feed-forwards whose first linear stays in the model's dtype, and those whose second one does."""
    linears = "net.0.proj", "net.2"  # diffusers' names
    paths = [path for path, _ in transformer.named_modules() if path.endswith(linears)]
    kept = [path for path in paths if keeps_weights(path, config.keep)]
    return tuple({path.removesuffix(linear) for path in kept if path.endswith(linear)} for linear in linears)


def _width(config: Mapping[str, object]) -> int:
    """Return the channels of a transformer's hidden states."""
    return config["num_attention_heads"] * config["attention_head_dim"]


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return a device's `Patched.capability`."""
    if device.type != "cuda":
        return None
    return (0, 0) if torch.version.hip is not None else torch.cuda.get_device_capability(device)


def why_not_counted(patched: Patched) -> str | None:
    """Return the reason why the memory of a step is not known, or None if it is."""
    config = patched.config
    if config.tier == EXACT or _has_kernels(patched):
        return None
    is_chosen = config.implementation == "torch"
    where = "with implementation='torch'" if is_chosen else "on this GPU, for which it has no kernels"
    return (
        f"the preset {config.tier.name!r} {where}: it runs as PyTorch's operations, which take several times the "
        "memory; give the preset 'exact'."
    )


def _has_kernels(patched: Patched) -> bool:
    """True if kernels of ours run: not in the torch reference, nor on AMD's GPUs and those before sm_80."""
    is_known = patched.capability is None or patched.capability >= MINIMUM_CAPABILITY
    return is_known and patched.config.implementation != "torch"


def _over_our_kernels(vae: nn.Module, patched: Patched) -> tuple[float, float]:
    """Return a VAE's memory of a decode and of an encode, each over that with our kernels.

    Our convolutions do not take fp32. Our norms do.
    """
    over = (1.0, 1.0, 1.0)
    if not _has_kernels(patched):
        over = PYTORCHS_NORMS_TOO
    elif patched.capability not in (None, SM90) or vae.dtype == torch.float32:
        over = PYTORCHS_CONVOLUTIONS
    decoding, residual, encoding = over
    return residual if getattr(vae.config, "is_residual", False) else decoding, encoding


def _encoding_bytes(vae: nn.Module, *size: int, patched: Patched, in_tiles: bool) -> int:
    """Return the bytes that the patched VAE encodes a video of this size with."""
    _, times = _over_our_kernels(vae, patched)
    return round(times * encoding_bytes(vae, *size, in_tiles=in_tiles, latents=patched.config.vae_chunk))


def _decoding_bytes(
    vae: nn.Module, *size: int, patched: Patched, in_tiles: bool = False, free: int | None = None
) -> int:
    """Return the bytes that the patched VAE decodes with. in_tiles, free: as of `decoding_bytes`."""
    config, (times, _) = patched.config, _over_our_kernels(vae, patched)
    options = {"in_8_bits": config.vae == VAE_8BIT, "latents": config.vae_chunk}
    size_of = partial(decoding_bytes, vae, *size, in_tiles=in_tiles, **options)
    return round(times * size_of(free=None if free is None else round(free / times)))


def _unpatched_bytes_per_token(transformer: nn.Module, patched: Patched) -> int:
    """Return the bytes per token of the largest set of tensors that are alive together in diffusers' own code."""
    family = family_of(transformer)
    wide, lora = family.compute_dtype(transformer).itemsize, lora_itemsize(transformer)
    sizes = family.blocks[0].sizes
    return sizes.unpatched_bytes_per_token(transformer.config, wide, lora, patched.own_timesteps)


def tokens_of(name: str, patched: Patched, video: Video) -> int:
    """Return the tokens of a video in a transformer, with those of the images that its family counts."""
    transformer, vae = patched.models[name], patched.models.get("vae")
    sizes = family_of(transformer).blocks[0].sizes
    frames, *edges = latent_size({} if vae is None else vae.config, *video)
    return sizes.tokens(transformer.config, (frames + sizes.given_images, *edges))


def lora_itemsize(model: nn.Module) -> int:
    """Return the bytes of a value in a model's LoRAs, or 0 without one."""
    layers = filter(is_lora_layer, model.modules())
    return max((first.weight.itemsize for layer in layers for first in layer.lora_A.values()), default=0)


def encoder_bytes(encoder: nn.Module, tokens: int) -> int:
    """Return the bytes of the largest set of tensors that are alive together in a layer of a transformers encoder."""
    config = getattr(encoder.config, "text_config", encoder.config)
    wide = getattr(config, "d_ff", None) or getattr(config, "intermediate_size", 4 * config.hidden_size)
    itemsize = next(encoder.parameters()).itemsize
    scores = config.num_attention_heads * tokens**2
    if runs_lean(encoder):  # the bias of positions, with the mask added, or the feed-forward
        stored = (linear.weight.numel() for linear in quantized_linears(encoder))
        attention = 6 * tokens * config.hidden_size + 2 * scores
        feed_forward = tokens * (2 * config.hidden_size + 4 * wide)
        # A weight is in the model's dtype while its linear runs.
        return (max(stored, default=0) + max(attention, feed_forward)) * itemsize
    # The attention's scores, with the bias of positions, in the model's dtype and in fp32 for the softmax.
    return tokens * (6 * config.hidden_size + 3 * wide) * itemsize + scores * (3 * itemsize + 2 * FP32_BYTES)
