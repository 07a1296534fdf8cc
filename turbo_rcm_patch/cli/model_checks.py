"""Checks of the files and folders that hold a model, a transformer, a LoRA or a VAE, before any of them is loaded."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

from ..recipes import RECIPES, recipe_names, recipes_for
from ..wording import counted, with_article
from .arguments import spelled
from .errors import CommandError
from .quiet_imports import quiet_imports
from .sizes import SizeRules, size_rules

OF_WAN = ("vae", "tiny_vae", "text_encoder", "sigma_max")  # options of Wan's VAE, encoder and sampler
# The modules that have these three too import torch.
TRANSFORMERS = ("transformer", "transformer_2")  # checkpoints.files.COMPONENTS
WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")  # checkpoints.lazy.SUFFIXES
EMBEDDED = Path(__file__).parent.parent / "embedded/weights"  # embedded.WEIGHTS
_HUB_ID = r"[\w-][\w.-]*/[\w-][\w.-]*"


def check_model(arguments: argparse.Namespace) -> SizeRules:
    """Check --model as far as its folder tells, and return the size rules known so far."""
    model = arguments.model
    if model is None:
        if arguments.image is not None:
            raise CommandError("the embedded model makes videos from text; leave --image out, or give a --model.")
        if getattr(arguments, "config", None) is not None:
            return _check_case(arguments)
        return _size_rules_in(EMBEDDED)
    folder = Path(model).expanduser()
    if not folder.exists():
        if re.fullmatch(_HUB_ID, model):
            return SizeRules()  # pipelines.py checks what it finds on the hub
        raise CommandError(f"--model {model}: no such folder; give the folder of a diffusers pipeline or a hub id.")
    instead = "give it as --transformer, and its pipeline's folder or hub id as --model."
    if folder.is_file():
        raise CommandError(f"--model {model} is a file; diffusers takes a single file as a transformer: {instead}")
    if not (folder / "model_index.json").is_file():
        if any((folder / part / "config.json").is_file() for part in ("", *TRANSFORMERS)):
            raise CommandError(f"--model {model} holds a transformer alone: {instead}")
        raise CommandError(
            f"--model {model} has no model_index.json; give a folder that a diffusers pipeline was saved to."
        )
    index = _read_json(folder / "model_index.json")
    check_pipeline_class(index.get("_class_name"), arguments)
    check_second_transformer(index, arguments)
    return _size_rules_in(folder)


def _check_case(arguments: argparse.Namespace) -> SizeRules:
    """Check --config and the options that its model cannot take, and return its size rules."""
    config = arguments.config
    with quiet_imports(arguments.verbose):
        from ..patching.families import CASES, PIPELINES, SIZES  # imports torch, which no help text needs

    if config not in CASES:
        raise CommandError(f"--config {config} is unknown; accepted are {SIZES}.")
    case = CASES[config]
    if arguments.layers is not None and arguments.layers > (most := case.transformer["num_layers"]):
        raise CommandError(f"--layers {arguments.layers}: {config} has {counted(most, 'block')}; give at most {most}.")
    if any(pipeline.has_sound for pipeline in PIPELINES if pipeline.pipeline_class is case.pipeline_class):
        _check_runs_with_sound(f"--config {config} is {with_article(case.pipeline_class.__name__)}", arguments)
    return size_rules(case.vae, case.transformer)


def check_pipeline_class(class_name: object, arguments: argparse.Namespace) -> None:
    """Raise CommandError unless the command runs --model's class, and an image is given exactly where it is needed."""
    with quiet_imports(arguments.verbose):
        from ..patching.families import PIPELINES  # imports torch, which no help text needs

    by_name = {p.pipeline_class.__name__: p for p in PIPELINES if not p.is_modular and p.starts_from != "video"}
    pipeline, model, a_class = by_name.get(str(class_name)), arguments.model, with_article(class_name)
    if pipeline is None:
        raise CommandError(f"--model {model} is {a_class}; supported are {' and '.join(by_name)}.")
    if pipeline.has_sound:
        _check_runs_with_sound(f"--model {model} is {a_class}", arguments)
    recipe = getattr(arguments, "recipe", None)
    taken = {"sound": pipeline.has_sound, "image": pipeline.starts_from == "image"}
    if recipe in RECIPES and recipe not in recipes_for(**taken):
        names = recipe_names(**taken)
        raise CommandError(f"--recipe {recipe} is not for {a_class}, which --model {model} is; accepted are {names}.")
    _check_image_fits(arguments, **taken)


def _check_runs_with_sound(model_is: str, arguments: argparse.Namespace) -> None:
    if arguments.command in ("evaluate", "demo"):
        raise CommandError(f"{model_is}; {arguments.command} takes Wan models.")
    for option in OF_WAN:
        if getattr(arguments, option, None) is not None:
            raise CommandError(f"{model_is}; {spelled(option)} is for Wan models, leave it out.")
    if getattr(arguments, "gpus", 1) > 1:
        raise CommandError(f"{model_is}; --gpus takes Wan models.")


def _check_image_fits(arguments: argparse.Namespace, *, sound: bool, image: bool) -> None:
    """Check --image beside the model. sound: True if it makes sound. image: True if it starts from an image."""
    model, command = arguments.model, arguments.command
    if not image:
        if arguments.image is not None:
            raise CommandError(f"--model {model} is a text-to-video model; leave --image out.")
        return
    if command in ("evaluate", "demo"):
        raise CommandError(f"--model {model} makes videos from an image; {command} takes text-to-video models.")
    if arguments.image is None:
        raise CommandError(f"--model {model} makes videos from an image; give one with --image.")
    if sound and importlib.util.find_spec("av") is None:
        raise CommandError(
            f"--model {model} compresses the image first, which needs PyAV; install it with: pip install av"
        )


def check_second_transformer(index: Mapping[str, object], arguments: argparse.Namespace) -> None:
    """Raise CommandError for an option of the second transformer if the index of --model's pipeline lists none."""
    _, second = index.get(TRANSFORMERS[1]) or (None, None)
    for name in ("lora_2", "guidance_2"):
        if second is None and getattr(arguments, name, None) is not None:
            raise CommandError(f"--model {arguments.model} has no second transformer; leave {spelled(name)} out.")


def check_heads(gpus: int, heads: int | None) -> None:
    """Raise CommandError if a model's attention heads do not divide by --gpus. heads: None if not known yet."""
    if heads is not None and heads % gpus:
        divisors = [str(count) for count in range(2, min(heads, 16) + 1) if heads % count == 0]
        raise CommandError(f"--gpus {gpus}: the model has {heads} attention heads; give one of {', '.join(divisors)}.")


def heads_of(model: str | None) -> int | None:
    """Return the attention heads of --model, or None if its folder does not tell."""
    folder = EMBEDDED if model is None else Path(model).expanduser()
    return _read_json(folder / "transformer/config.json").get("num_attention_heads")


def _size_rules_in(folder: Path) -> SizeRules:
    return size_rules(_read_json(folder / "vae/config.json"), _read_json(folder / "transformer/config.json"))


def _read_json(path: Path) -> dict:
    """Return the object in a JSON file, or an empty one without a file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot read {path}: {error}; download the model again.") from error
    if not isinstance(content, dict):
        raise CommandError(f"{path} holds no JSON object; download the model again.")
    return content


def check_transformers(arguments: argparse.Namespace) -> None:
    """Raise CommandError for a --transformer or --transformer-2 without --model, or that is not there."""
    for name in TRANSFORMERS:
        path, option = getattr(arguments, name, None), spelled(name)
        if path is not None and arguments.model is None:
            raise CommandError(f"{option} goes with --model, the pipeline that has the rest.")
        if path is not None and not path.exists():
            raise CommandError(f"{option} {path}: no such file or folder.")


def check_lora(option: str, file: str, scale: float) -> None:
    """Raise CommandError for a strength that is not finite, and for a file that is not there or cannot be read."""
    if not math.isfinite(scale):
        raise CommandError(f"{option} {file}:{scale}: give a finite strength.")
    path = Path(file).expanduser()
    if path.is_file():
        check_weights(option, path)
    # A file on the hub has an owner and a repository before its name.
    is_here = path.is_absolute() or len(path.parts) <= 2 or (len(path.parts) > 3 and path.parent.is_dir())
    is_local = (is_here and path.suffix in WEIGHTS) or not re.fullmatch(f"{_HUB_ID}(/.+)?", file)
    if is_local and not path.exists():
        raise CommandError(f"{option} {file}: no such file or folder; give one, or the id of a hub repository.")


def check_weights(option: str, path: Path) -> None:
    """Raise CommandError unless a file of tensors can be read, as far as its header tells."""
    with quiet_imports():
        from ..checkpoints.lazy import open_tensors  # imports torch, which no help text needs

    try:
        with open_tensors(path):
            pass
    except ValueError as error:
        raise CommandError(f"{option}: {error}") from None
