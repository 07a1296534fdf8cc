"""Checks of a command's options that need neither torch nor a loaded model."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..amounts import parse_amount
from ..config import Exact, PatchConfig, Quantized, options_of, presets_with, resolve_config
from ..recipes import RCM_STEPS, RECIPES, recipe_names, recipes_for
from ..wording import counted, with_article
from .arguments import spelled
from .errors import CommandError, in_the_shell
from .files import check_ffmpeg, check_output
from .quiet_imports import quiet_imports
from .sizes import SizeRules, size_rules

OWN_SAMPLER = "none"  # the value of --recipe that keeps the pipeline's scheduler
GUIDANCE = ("guidance", "guidance_2", "negative_prompt")
LORAS = ("lora", "lora_2")
OF_WAN = ("vae", "tiny_vae", "text_encoder", "sigma_max")  # options of Wan's VAE, encoder and sampler
TRANSFORMERS = ("transformer", "transformer_2")
CONFIG_OPTIONS = ("topk", "mass", "min_tokens", "keep", "vae")  # of the patch, beside --preset
_HUB_PATH = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(/.+)?")  # an id, perhaps with a file or folder in it
WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")  # checkpoints.lazy.SUFFIXES, whose module imports torch
EMBEDDED = Path(__file__).parent.parent / "embedded/weights"  # embedded.WEIGHTS, whose module imports torch


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise CommandError for anything wrong with the options, the model's folder or the outputs."""
    _check_device(arguments)
    if getattr(arguments, "vram", None) is not None:
        _check_vram(arguments)
    if arguments.command == "info":
        _check_planned(arguments)
    if arguments.command == "verify":
        _check_config(arguments)
        _check_keep_out(arguments)
    if arguments.command == "demo":
        _check_page(arguments)
    if arguments.command not in ("info", "convert", "demo", "tune"):
        check_generation(arguments)
    if arguments.command == "generate":
        if arguments.fps is not None:
            check_at_least_one("--fps", arguments.fps)
        check_output("-o", arguments.output, (".mp4",))
        check_ffmpeg()
        _check_gpus(arguments)
        _check_unpatched(arguments)
        _check_vae(arguments)
    if arguments.command == "compare":
        _check_comparison(arguments)
    if arguments.command == "evaluate":
        check_at_least_one("-n", arguments.n)
        if arguments.batch_size is not None:
            check_at_least_one("--batch-size", arguments.batch_size)
    if arguments.command == "convert":
        _check_conversion(arguments)
    if arguments.command not in ("generate", "convert", "demo", "tune"):
        check_output("--json", arguments.json, (".json",))


def _check_vram(arguments: argparse.Namespace) -> None:
    try:
        parse_amount(arguments.vram)
    except ValueError as error:
        raise CommandError(f"--vram: {error}") from None
    if arguments.command == "info":
        return
    if arguments.offload:
        raise CommandError("--vram and --offload both say where the models are; leave one of them out.")
    if getattr(arguments, "no_patch", False):
        raise CommandError("--vram plans the memory of the patched pipeline; leave --vram or --no-patch out.")


def _check_planned(arguments: argparse.Namespace) -> None:
    """Check the options of `info` that are about --model."""
    given = {name: getattr(arguments, name) for name in ("vram", "text_encoder", "preset", "height", "width", "frames")}
    first = next((name for name, value in given.items() if value is not None), None)
    if arguments.model is None and first is not None:
        raise CommandError(f"{spelled(first)} is about the memory that a model takes; give --model too.")
    if arguments.preset is not None:
        _check_preset_name(arguments.preset)


def _check_gpus(arguments: argparse.Namespace) -> None:
    check_at_least_one("--gpus", arguments.gpus)
    if arguments.gpus == 1:
        return
    if arguments.device not in (None, "cuda"):
        raise CommandError(f"--gpus takes the first GPUs of the machine; leave --device {arguments.device} out.")
    for option in ("vram", "offload"):
        if getattr(arguments, option):
            raise CommandError(f"--gpus keeps the whole model on every GPU; leave --{option} out.")
    folder = EMBEDDED if arguments.model is None else Path(arguments.model).expanduser()
    check_heads(arguments.gpus, _read_json(folder / "transformer/config.json").get("num_attention_heads"))


def _check_unpatched(arguments: argparse.Namespace) -> None:
    given = list(config_options(arguments)) + (["preset"] if arguments.preset != "exact" else [])
    if arguments.no_patch and given:
        raise CommandError(f"{spelled(given[0])} is about the patch; leave it or --no-patch out.")


def _check_vae(arguments: argparse.Namespace) -> None:
    if arguments.vae is not None and arguments.tiny_vae is not None:
        raise CommandError(f"--vae {arguments.vae} is about the pipeline's own VAE; leave it or --tiny-vae out.")
    if arguments.tiny_vae is not None:
        _check_weights("--tiny-vae", arguments.tiny_vae)


def check_heads(gpus: int, heads: int | None) -> None:
    """Raise CommandError if a model's attention heads do not divide by --gpus. heads: None if not known yet."""
    if heads is not None and heads % gpus:
        divisors = [str(count) for count in range(2, min(heads, 16) + 1) if heads % count == 0]
        raise CommandError(f"--gpus {gpus}: the model has {heads} attention heads; give one of {', '.join(divisors)}.")


def step_counts(arguments: argparse.Namespace) -> tuple[int, ...]:
    """Return all numbers of steps that the command runs."""
    return arguments.steps if isinstance(arguments.steps, tuple) else (arguments.steps,)


def is_distilled(arguments: argparse.Namespace) -> bool:
    """True if a LoRA or a recipe is given."""
    return bool(given_loras(arguments)) or getattr(arguments, "recipe", None) not in (None, OWN_SAMPLER)


def given_loras(arguments: argparse.Namespace) -> dict[str, tuple[str, float]]:
    """Return the files and strengths of --lora and --lora-2, by the option's name in the arguments."""
    values = {option: getattr(arguments, option, None) for option in LORAS}
    return {option: value for option, value in values.items() if value is not None}


def check_pipeline_class(class_name: object, arguments: argparse.Namespace) -> None:
    """Raise CommandError unless the command runs --model's class, and an image is given exactly where it is needed."""
    with quiet_imports(arguments.verbose):
        from ..patching.families import PIPELINES  # imports torch, which no help text needs

    model, has_image = arguments.model, arguments.image is not None
    starts = {
        pipeline.pipeline_class.__name__: pipeline.starts_from for pipeline in PIPELINES if not pipeline.is_modular
    }
    accepted = [name for name, start in starts.items() if start in ("text", "image")]
    if class_name not in accepted:
        raise CommandError(f"--model {model} is {with_article(class_name)}; supported are {' and '.join(accepted)}.")
    has_sound = any(one.has_sound for one in PIPELINES if one.pipeline_class.__name__ == class_name)
    if has_sound and arguments.command in ("evaluate", "demo"):
        raise CommandError(f"--model {model} is {with_article(class_name)}; {arguments.command} takes Wan models.")
    given = [option for option in OF_WAN if has_sound and getattr(arguments, option, None) is not None]
    if given:
        option = spelled(given[0])
        raise CommandError(f"--model {model} is {with_article(class_name)}; {option} is for Wan models, leave it out.")
    if has_sound and getattr(arguments, "gpus", 1) > 1:
        raise CommandError(f"--model {model} is {with_article(class_name)}; --gpus takes Wan models.")
    from_image = starts[class_name] == "image"
    recipe, taken = getattr(arguments, "recipe", None), {"sound": has_sound, "image": from_image}
    if recipe in RECIPES and recipe not in recipes_for(**taken):
        raise CommandError(
            f"--recipe {recipe} is not for {with_article(class_name)}, which --model {model} is; accepted are "
            f"{recipe_names(**taken)}."
        )
    if from_image and arguments.command in ("evaluate", "demo"):
        command = arguments.command
        raise CommandError(f"--model {model} makes videos from an image; {command} takes text-to-video models.")
    if from_image and not has_image:
        raise CommandError(f"--model {model} makes videos from an image; give one with --image.")
    if from_image and has_sound and importlib.util.find_spec("av") is None:
        raise CommandError(
            f"--model {model} compresses the image first, which needs PyAV; install it with: pip install av"
        )
    if has_image and not from_image:
        raise CommandError(f"--model {model} is a text-to-video model; leave --image out.")


def check_second_transformer(index: Mapping[str, object], arguments: argparse.Namespace) -> None:
    """Raise CommandError for an option of the second transformer if the index of --model's pipeline lists none."""
    _, second = index.get(TRANSFORMERS[1]) or (None, None)
    for name in ("lora_2", "guidance_2"):
        if second is None and getattr(arguments, name, None) is not None:
            raise CommandError(f"--model {arguments.model} has no second transformer; leave {spelled(name)} out.")


def check_generation(arguments: argparse.Namespace) -> None:
    """Raise CommandError for anything wrong with the options of a generation."""
    _check_device(arguments)
    _check_distilled(arguments)
    _check_steps(arguments)
    _check_sigma_max(arguments)
    _check_guidance(arguments)
    _check_transformers(arguments)
    _check_options(arguments, _check_preset_name(arguments.preset))
    if not 0 <= arguments.seed < 2**63:
        raise CommandError(f"--seed {arguments.seed} is out of range; give a number from 0 to 2**63 - 1.")
    if arguments.image is not None and not arguments.image.is_file():
        raise CommandError(f"--image {arguments.image}: no such file.")
    _check_model(arguments).check(arguments.height, arguments.width, arguments.frames)
    if arguments.image is not None:
        _check_image(arguments.image)


def _check_image(path: Path) -> None:
    from PIL import Image  # which no help text needs

    try:
        with Image.open(path):
            pass
    except (OSError, Image.DecompressionBombError) as error:
        raise CommandError(f"--image {path}: {error}; give a PNG or JPEG file.") from error


def _check_device(arguments: argparse.Namespace) -> None:
    if arguments.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", arguments.device):
        accepted = "cuda or cuda:N" if arguments.command == "tune" else "cpu, cuda or cuda:N"
        raise CommandError(f"--device {arguments.device} is unknown; give {accepted}.")


def _check_steps(arguments: argparse.Namespace) -> None:
    is_rcm = not is_distilled(arguments) and (arguments.model is None or arguments.sigma_max is not None)
    for steps in step_counts(arguments):
        if steps is not None and is_rcm and steps not in range(1, RCM_STEPS + 1):
            raise CommandError(f"--steps {steps}: the sampler takes 1 to {RCM_STEPS} steps.")
        if steps is not None:
            check_at_least_one("--steps", steps)


def _check_sigma_max(arguments: argparse.Namespace) -> None:
    if arguments.sigma_max is None:
        return
    with quiet_imports(arguments.verbose):
        from ..solvers import rcm_times  # imports torch, which no help text needs
    for steps in step_counts(arguments):
        try:
            rcm_times(RCM_STEPS if steps is None else steps, arguments.sigma_max)
        except ValueError as error:
            raise CommandError(in_the_shell(error)) from None


def _check_guidance(arguments: argparse.Namespace) -> None:
    for name in GUIDANCE:
        value, option = getattr(arguments, name), spelled(name)
        if value is not None and arguments.model is None:
            raise CommandError(f"{option} goes with --model; without it there is no guidance.")
        if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
            raise CommandError(f"{option} {value}: give a number, 0 or more; up to 1 there is no guidance.")
    for name in ("guidance_2", "negative_prompt"):
        if getattr(arguments, name) is not None and arguments.guidance is not None and arguments.guidance <= 1:
            raise CommandError(
                f"{spelled(name)} has an effect only with --guidance above 1, and it is {arguments.guidance:g}; leave "
                "it out."
            )


def _check_transformers(arguments: argparse.Namespace) -> None:
    for name in TRANSFORMERS:
        path, option = getattr(arguments, name, None), spelled(name)
        if path is not None and arguments.model is None:
            raise CommandError(f"{option} goes with --model, the pipeline that has the rest.")
        if path is not None and not path.exists():
            raise CommandError(f"{option} {path}: no such file or folder.")


def _check_options(arguments: argparse.Namespace, config: PatchConfig) -> None:
    """Raise CommandError for an option that --preset's configuration does not have, or for a wrong value."""
    for option, value in config_options(arguments).items():
        if option not in options_of(type(config)):
            raise CommandError(
                f"{spelled(option)} is an option of --preset {' and '.join(presets_with(option))}, not of "
                f"{arguments.preset}; leave it out, or choose another preset."
            )
        try:
            replace(config, **{option: value})
        except ValueError as error:
            raise CommandError(f"{spelled(option)}: {error}") from None


def config_options(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the options of the configuration that are given, by name.

    Raises CommandError for a file of --keep beside other names.
    """
    values = {option: getattr(arguments, option, None) for option in CONFIG_OPTIONS}
    given = {option: value for option, value in values.items() if value is not None}
    if any(name.endswith(".json") for name in given.get("keep", ())):
        if len(given["keep"]) > 1:
            raise CommandError(f"--keep takes one file alone, or names; given are {' and '.join(given['keep'])}.")
        (given["keep"],) = given["keep"]
    return given


def _check_keep_out(arguments: argparse.Namespace) -> None:
    if arguments.keep_out is None:
        return
    if type(_check_preset_name(arguments.preset)) is not Quantized:
        raise CommandError(
            f"--keep-out looks for what must leave 8 bits in --preset quantized, and not in {arguments.preset}."
        )
    check_output("--keep-out", arguments.keep_out, (".json",))
    _check_different("--json", arguments.json, "--keep-out", arguments.keep_out)


def _check_different(option: str, path: Path | None, other: str, other_path: Path) -> None:
    """Raise CommandError if two outputs are one file."""
    if path is not None and path.resolve() == other_path.resolve():
        raise CommandError(f"{option} and {other} are both {path}; give each a file of its own.")


def _check_preset_name(preset: str) -> PatchConfig:
    try:
        return resolve_config(preset)
    except ValueError as error:
        raise CommandError(f"--preset: {error}") from None


def _check_distilled(arguments: argparse.Namespace) -> None:
    loras, recipe = given_loras(arguments), getattr(arguments, "recipe", None)
    if not loras and recipe is None:
        return
    if arguments.model is None:
        raise CommandError("--lora and --recipe go with --model; the embedded model is sampled as rCM.")
    if arguments.sigma_max is not None:
        raise CommandError("--sigma-max is for rCM without --recipe or --lora, whose recipe says it; leave it out.")
    if recipe == OWN_SAMPLER and loras:
        raise CommandError("--recipe none keeps the pipeline's scheduler, and --lora is for few steps; leave one out.")
    if recipe in RECIPES and arguments.steps is not None:
        try:
            RECIPES[recipe].in_steps(arguments.steps)
        except ValueError:
            takes = RECIPES[recipe].takes
            raise CommandError(f"--steps {arguments.steps}: {recipe} takes {takes} steps.") from None
    for option, (file, scale) in loras.items():
        _check_lora(spelled(option), file, scale)


def _check_lora(option: str, file: str, scale: float) -> None:
    if not math.isfinite(scale):
        raise CommandError(f"{option} {file}:{scale}: give a finite strength.")
    path = Path(file).expanduser()
    if path.is_file():
        _check_weights(option, path)
    if not path.exists() and (_is_local(path) or not _HUB_PATH.fullmatch(file)):
        raise CommandError(f"{option} {file}: no such file or folder; give one, or the id of a hub repository.")


def _is_local(path: Path) -> bool:
    """True for a missing file of weights that is not meant on the hub, where it has an owner and a repository."""
    here = path.is_absolute() or len(path.parts) <= 2 or (len(path.parts) > 3 and path.parent.is_dir())
    return here and path.suffix in WEIGHTS


def _check_weights(option: str, path: Path) -> None:
    """Raise CommandError unless a file of tensors can be read, as far as its header tells."""
    with quiet_imports():
        from ..checkpoints.lazy import open_tensors  # imports torch, which no help text needs

    try:
        with open_tensors(path):
            pass
    except ValueError as error:
        raise CommandError(f"{option}: {error}") from None


def _check_comparison(arguments: argparse.Namespace) -> None:
    check_at_least_one("--repeats", arguments.repeats)
    check_output("--plot", arguments.plot, (".png", ".svg", ".pdf"))
    if arguments.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--plot needs matplotlib; install it with: pip install 'turbo_rcm_patch[plot]'")
    check_output("--video", arguments.video, (".mp4", ".png", ".gif", ".webp"))
    if arguments.video is not None:
        _check_different("--plot", arguments.plot, "--video", arguments.video)
    if arguments.video is not None and arguments.video.suffix.lower() == ".mp4":
        check_ffmpeg()


def _check_conversion(arguments: argparse.Namespace) -> None:
    config = _check_preset_name(arguments.preset)
    if arguments.format is not None and isinstance(config, Exact):
        raise CommandError(f"--format is about 8 bits, and --preset {arguments.preset} stores none; leave it out.")
    _check_options(arguments, config)
    if not arguments.source.exists():
        raise CommandError(
            f"{arguments.source}: no such file or folder; give a diffusers folder, or a .pth or .safetensors file."
        )
    if not arguments.target.resolve().parent.is_dir():
        raise CommandError(f"{arguments.target}: the folder to write it in does not exist; create it first.")


def _check_page(arguments: argparse.Namespace) -> None:
    if importlib.util.find_spec("gradio") is None:
        raise CommandError("the page needs gradio; install it with: pip install 'turbo_rcm_patch[demo]'")
    check_ffmpeg()
    if not 0 < arguments.port < 2**16:
        raise CommandError(f"--port {arguments.port}: give a number from 1 to 65535.")
    if arguments.max_pixels is not None:
        check_at_least_one("--max-pixels", arguments.max_pixels)
    for model in arguments.model or ():
        _check_model(argparse.Namespace(**{**vars(arguments), "model": model, "image": None}))
    for file, scale in arguments.lora or ():
        _check_lora("--lora", file, scale)
    if arguments.lora and not arguments.model:
        raise CommandError("--lora goes with --model; the embedded model takes none.")
    _check_address(arguments.host, arguments.port)


def _check_address(host: str, port: int) -> None:
    """Raise CommandError if no server can listen there. Gradio would blame the port for every reason."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server does that was just ended
            listener.bind(address)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CommandError(f"--host {host} --port {port}: {reason}; choose another address or port.") from error


def _check_config(arguments: argparse.Namespace) -> None:
    if arguments.config is None:
        if arguments.layers is not None:
            raise CommandError("--layers goes with --config; a model has the blocks that it has.")
        return
    given = {"--model": arguments.model, "--image": arguments.image, "a prompt": arguments.prompt}
    for name, value in {**given, "--offload": arguments.offload or None, "--vram": arguments.vram}.items():
        if value is not None:
            raise CommandError(f"--config builds a model and its inputs; leave {name} out.")
    if arguments.layers is not None:
        check_at_least_one("--layers", arguments.layers)
        _check_layers(arguments)


def _check_layers(arguments: argparse.Namespace) -> None:
    with quiet_imports(arguments.verbose):
        from ..patching.families import CASES  # imports torch, which no help text needs
    case = CASES.get(arguments.config)  # of an unknown name pipelines.py says what is accepted
    most = arguments.layers if case is None else case.transformer["num_layers"]
    if arguments.layers > most:
        raise CommandError(
            f"--layers {arguments.layers}: {arguments.config} has {counted(most, 'block')}; give at most {most}."
        )


def check_at_least_one(option: str, value: int) -> None:
    """Raise CommandError for a count below 1."""
    if value < 1:
        raise CommandError(f"{option} {value}: give 1 or more.")


def _check_model(arguments: argparse.Namespace) -> SizeRules:
    """Check --model as far as its folder tells, and return the size rules known so far."""
    model = arguments.model
    if model is None:
        if arguments.image is not None:
            raise CommandError("the embedded model makes videos from text; leave --image out, or give a --model.")
        if getattr(arguments, "config", None) is not None:
            return SizeRules()  # pipelines.py checks what belongs to the config
        return _size_rules_in(EMBEDDED)
    folder = Path(model).expanduser()
    if not folder.exists():
        if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model):
            return SizeRules()  # a hub id; pipelines.py checks what it finds there
        raise CommandError(f"--model {model}: no such folder; give the folder of a diffusers pipeline or a hub id.")
    if folder.is_file():
        raise CommandError(
            f"--model {model} is a file; diffusers takes a single file as a transformer: give it as --transformer, and "
            "its pipeline's folder or hub id as --model."
        )
    if (
        any((folder / part / "config.json").is_file() for part in ("", *TRANSFORMERS))
        and not (folder / "model_index.json").is_file()
    ):
        raise CommandError(
            f"--model {model} holds a transformer alone: give it as --transformer, and its pipeline's folder or hub id "
            "as --model."
        )
    if not (folder / "model_index.json").is_file():
        raise CommandError(
            f"--model {model} has no model_index.json; give a folder that a diffusers pipeline was saved to."
        )
    index = _read_json(folder / "model_index.json")
    check_pipeline_class(index.get("_class_name"), arguments)
    check_second_transformer(index, arguments)
    return _size_rules_in(folder)


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
