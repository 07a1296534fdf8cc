"""The pipeline that a command runs on, with the sampler of its model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import diffusers
import torch
from diffusers import ContextParallelConfig, DiffusionPipeline
from diffusers.utils import load_image

from .. import embedded
from ..bench.cases import (
    add_random_projections,
    add_structure,
    build_pipeline,
    needs_projections,
    structured_inputs,
)
from ..config import PRESETS, BlockSparse, PatchConfig, Sparse
from ..latents import latent_size
from ..patching import PatchError, patch_text_encoder, use_tiny_vae
from ..patching.apply import transformers_of
from ..patching.families import CASES, family_of, pipeline_of
from ..patching.weights.load import load_converted
from ..patching.weights.turbodiffusion import load_projections, load_turbodiffusion
from ..recipes import RCM_STEPS
from ..scheduler import FewStepScheduler
from ..shapes import grammar
from ..wording import counted
from .arguments import config_options
from .errors import CommandError, why_not_loaded
from .files import Sound
from .model_checks import check_heads, check_pipeline_class, check_second_transformer
from .notes import warn
from .sampling import default_of, default_steps, guidance, install_sampler
from .sizes import size_rules
from .transformers import check_own_transformers, converted_folder, files_of_ours, given_transformers

DEFAULT_PROMPT = "A red fox leaps through fresh snow, slow motion"  # with --model
LONGEST_NAMED = 100  # characters of a prompt in a warning


def choose_device(arguments: argparse.Namespace) -> torch.device:
    """Return --device, by default the GPU if there is one. Raises CommandError for a GPU that is not there."""
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CommandError(f"--device {device}: PyTorch finds no CUDA GPU; use --device cpu, or check the driver.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise CommandError(
            f"--device {device}: this machine has {counted(torch.cuda.device_count(), 'GPU')}, counted from cuda:0."
        )
    if device.type == "cpu" and getattr(arguments, "offload", False):
        raise CommandError("--offload moves models between CPU and GPU, and this runs on the CPU; leave it out.")
    if device.type == "cpu" and getattr(arguments, "vram", None) is not None and arguments.command != "info":
        raise CommandError("--vram is the memory of a GPU, and this runs on the CPU; leave it out.")
    return device


def choose_dtype(arguments: argparse.Namespace, device: torch.device) -> torch.dtype:
    """Return --dtype, by default bf16 on a GPU and fp32 on the CPU."""
    return getattr(torch, arguments.dtype or ("bfloat16" if device.type == "cuda" else "float32"))


def choose_config(arguments: argparse.Namespace) -> PatchConfig:
    """Return --preset's configuration with --topk, --mass, --min-tokens, --keep and --vae.

    The embedded model has its own blocks.
    """
    config = replace(PRESETS[arguments.preset], **config_options(arguments))
    is_embedded = arguments.model is None and getattr(arguments, "config", None) is None
    is_sparse_attention = isinstance(config, (Sparse, BlockSparse))
    return replace(config, blocks=embedded.SLA_BLOCKS) if is_embedded and is_sparse_attention else config


def is_sparse(arguments: argparse.Namespace) -> bool:
    """True if --preset is the sparse tier, whose weights have proj_l."""
    return isinstance(PRESETS[arguments.preset], Sparse)


def load_pipeline(arguments: argparse.Namespace) -> tuple[DiffusionPipeline, dict[str, object]]:
    """Return the pipeline with its sampler, and the arguments of its call except the generator."""
    pipe, call = load_sampler(arguments)
    prompt = _choose_prompt(arguments)
    warn_of_size(arguments, call["height"], call["width"], call["num_frames"])
    warn_of_prompts(arguments, [prompt])
    call = {"prompt": prompt, **call, "num_inference_steps": arguments.steps}
    if arguments.image is not None:
        call["image"] = load_image(str(arguments.image))
    if arguments.command == "generate":
        call |= _frame_rate(pipe, arguments)
    return pipe, call


def _frame_rate(pipe: DiffusionPipeline, arguments: argparse.Namespace) -> dict[str, float]:
    """Set ``arguments.fps`` if it is not given. Return the frame rate as a call of a pipeline with sound takes it."""
    arguments.fps = frames_per_second(pipe) if arguments.fps is None else arguments.fps
    return {"frame_rate": float(arguments.fps)} if pipeline_of(pipe).has_sound else {}


def frames_per_second(pipe: DiffusionPipeline) -> int:
    """Return the frame rate that a pipeline's model was made for."""
    return pipeline_of(pipe).frame_rate(pipe)


def sound_of(pipe: DiffusionPipeline, sound: torch.Tensor | None) -> Sound | None:
    """Return the first sample's sound, or None for a pipeline that makes none."""
    return None if sound is None else Sound(sound[0].float().cpu().numpy(), pipe.vocoder.config.output_sampling_rate)


def load_sampler(arguments: argparse.Namespace) -> tuple[DiffusionPipeline, dict[str, object]]:
    """Return the pipeline with its sampler, and the arguments of its call that do not depend on a prompt.

    Sets ``arguments.steps`` if it is not given, and ``arguments.patched`` to the patch of a --transformer in 8 bits.
    """
    device = choose_device(arguments)
    dtype = choose_dtype(arguments, device)
    sparse = is_sparse(arguments)
    if arguments.model is None:
        pipe = embedded.load_embedded_pipeline(dtype, sla=sparse)
    else:
        pipe = _load_model(arguments, dtype)
        if getattr(arguments, "patched", None) is None:
            check_own_transformers(pipe, arguments)
            if sparse:
                load_projections(pipe)
    given = arguments.height, arguments.width, arguments.frames
    size_rules(pipe.vae.config, (pipe.transformer or pipe.transformer_2).config).check(*given)
    of_shapes = arguments.model is None or arguments.command == "evaluate"
    size = (embedded.HEIGHT, embedded.WIDTH, embedded.FRAMES) if of_shapes else _default_size(pipe)
    height, width, frames = (default if value is None else value for value, default in zip(given, size, strict=True))
    guided = _install(pipe, arguments)
    pipe.set_progress_bar_config(disable=None)  # none where stderr is a file
    if getattr(arguments, "text_encoder", None) is not None:
        patch_text_encoder(pipe, in_8_bits=True, restorable=False)
    if getattr(arguments, "tiny_vae", None) is not None:
        try:
            use_tiny_vae(pipe, arguments.tiny_vae)
        except (ValueError, PatchError) as error:
            raise CommandError(f"--tiny-vae: {error}") from None
    if arguments.offload:
        pipe.enable_model_cpu_offload(device=device)
    elif getattr(arguments, "vram", None) is None:  # else `fit` moves the models
        pipe.to(device)
    return pipe, {"height": height, "width": width, "num_frames": frames, **guided}


def _install(pipe: DiffusionPipeline, arguments: argparse.Namespace) -> dict[str, object]:
    """Install the sampler. Return the call's arguments about guidance, and set ``arguments.steps`` if not given."""
    install_sampler(pipe, arguments)
    if arguments.steps is None:
        arguments.steps = default_steps(pipe)
    return guidance(pipe, arguments)


def split_among(pipe: DiffusionPipeline, call: dict[str, object], gpus: int) -> None:
    """Split the tokens of a pipeline's transformers among processes. Raises CommandError if these do not divide them.

    call: the arguments of the pipeline's call.
    """
    latent = latent_size(pipe.vae.config, call["height"], call["width"], call["num_frames"])
    for model in transformers_of(pipe).values():
        check_heads(gpus, model.config.num_attention_heads)  # those of a hub id are not known earlier
        if (tokens := family_of(model).blocks[0].sizes.tokens(model.config, latent)) % gpus:
            raise CommandError(
                f"--gpus {gpus}: a video of this size has {tokens} tokens, which do not divide by {gpus}; give another "
                "--height, --width or --frames."
            )
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=gpus))


def build_case(arguments: argparse.Namespace) -> tuple[DiffusionPipeline, dict[str, object]]:
    """Return the pipeline of --config with random but structured weights, and its call with structured inputs."""
    case = CASES[arguments.config]
    device = choose_device(arguments)
    pipe = build_pipeline(case, choose_dtype(arguments, device), device, layers=arguments.layers)
    add_structure(pipe)
    if is_sparse(arguments) and needs_projections(pipe):
        add_random_projections(pipe)
    guided = _install_on_case(pipe, arguments)
    pipe.set_progress_bar_config(disable=None)
    size = {
        "height": arguments.height or case.height,
        "width": arguments.width or case.width,
        "num_frames": arguments.frames or case.frames,
    }
    inputs = structured_inputs(pipe, **size, seed=arguments.seed)
    return pipe, {**inputs, **size, **guided, "num_inference_steps": arguments.steps}


def _install_on_case(pipe: DiffusionPipeline, arguments: argparse.Namespace) -> dict[str, object]:
    """Do the same as `_install` for the pipeline of --config, whose random weights need no guidance."""
    if isinstance(pipe.scheduler, FewStepScheduler):
        return _install(pipe, arguments)
    arguments.steps = arguments.steps or RCM_STEPS
    return {}


def _choose_prompt(arguments: argparse.Namespace) -> str:
    """Return the given prompt, or one that suits the model."""
    if arguments.prompt is not None:
        return arguments.prompt
    return grammar.EXAMPLES[0] if arguments.model is None else DEFAULT_PROMPT


def warn_of_prompts(arguments: argparse.Namespace, prompts: Sequence[str]) -> None:
    """Warn if the embedded model gets other prompts than it has learned."""
    outside = [prompt for prompt in prompts if grammar.parse_caption(prompt) is None]
    if arguments.model is None and outside:
        warn(arguments, _outside_grammar(outside))


def warn_of_size(arguments: argparse.Namespace, height: int, width: int, frames: int) -> None:
    """Warn if the embedded model gets another size than it has learned."""
    if arguments.model is None and (height, width, frames) != (embedded.HEIGHT, embedded.WIDTH, embedded.FRAMES):
        warn(
            arguments,
            f"the embedded model has learned videos of {embedded.HEIGHT}x{embedded.WIDTH} pixels and {embedded.FRAMES} "
            f"frames only; at {height}x{width} and {counted(frames, 'frame')} shapes and motion get worse the further "
            "that is.",
        )


def _outside_grammar(prompts: Sequence[str]) -> str:
    more = f" and {len(prompts) - 1} more" if len(prompts) > 1 else ""
    named = prompts[0] if len(prompts[0]) <= LONGEST_NAMED else f"{prompts[0][:LONGEST_NAMED]}…"
    examples = "".join(f"\n  {example}" for example in grammar.EXAMPLES)
    size, colour, shape, direction, speed, background = map(
        "|".join,
        (grammar.SIZES, grammar.COLOURS, grammar.SHAPES, grammar.DIRECTIONS, grammar.SPEEDS, grammar.BACKGROUNDS),
    )
    return (
        "the embedded model has learned captions of moving shapes only, unlike "
        f"{named!r}{more}; such a video may show anything. Try:{examples}\nAn object is: "
        f"a [{size}] {colour} {shape} moves {direction} [{speed}]. Two of different colours are joined by 'while'; "
        f"', on {background}' may end the caption."
    )


def _load_model(arguments: argparse.Namespace, dtype: torch.dtype) -> DiffusionPipeline:
    folder = Path(arguments.model)
    source = folder if folder.exists() else arguments.model
    try:
        components = DiffusionPipeline.load_config(source)  # before any weights
        class_name = components.get("_class_name")
        check_pipeline_class(class_name, arguments)
        check_second_transformer(components, arguments)
        converted = converted_folder(arguments)
        of_ours = files_of_ours(arguments, components)
        models = given_transformers(arguments, components, dtype, of_ours)
        # DiffusionPipeline itself would ignore the transformers, which are optional components.
        pipeline_class = getattr(diffusers, class_name) if models else DiffusionPipeline
        pipe = pipeline_class.from_pretrained(source, **models, dtype=dtype)
        if converted is not None:
            arguments.patched = load_converted(converted, pipe, choose_config(arguments))
        elif of_ours:
            arguments.patched = load_turbodiffusion(of_ours, pipe, choose_config(arguments))
        return pipe
    except (CommandError, PatchError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # hub, safetensors, diffusers and transformers raise many kinds
        raise CommandError(f"cannot load --model {arguments.model}: {why_not_loaded(error)}") from error


def _default_size(pipe: DiffusionPipeline) -> tuple[int, int, int]:
    """Return the height, width and frames that a call of the pipeline has by default."""
    height, width, frames = (default_of(pipe, name) for name in ("height", "width", "num_frames"))
    return height, width, frames or pipeline_of(pipe).frames
