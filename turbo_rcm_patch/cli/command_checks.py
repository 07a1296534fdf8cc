"""Checks of each command's options and outputs, before a model is loaded."""

from __future__ import annotations

import argparse
import importlib.util
import socket

from ..amounts import parse_amount
from ..config import Exact, Quantized
from .arguments import config_options, spelled
from .errors import CommandError
from .files import check_ffmpeg, check_output
from .generation_checks import check_at_least_one, check_config_options, check_device, check_generation, check_preset
from .model_checks import check_heads, check_lora, check_model, check_weights, heads_of


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise CommandError for anything wrong with the options, the model's folder or the outputs."""
    checks = {
        "generate": _check_generate,
        "compare": _check_compare,
        "verify": _check_verify,
        "evaluate": _check_evaluate,
        "info": _check_info,
        "convert": _check_convert,
        "demo": _check_demo,
    }
    check_device(arguments)
    if getattr(arguments, "vram", None) is not None:
        _check_vram(arguments)
    if arguments.command in checks:
        checks[arguments.command](arguments)
    check_output("--json", getattr(arguments, "json", None), (".json",))


def _check_vram(arguments: argparse.Namespace) -> None:
    try:
        parse_amount(arguments.vram)
    except ValueError as error:
        raise CommandError(f"--vram: {error}") from None
    if getattr(arguments, "offload", False):
        raise CommandError("--vram and --offload both say where the models are; leave one of them out.")
    if getattr(arguments, "no_patch", False):
        raise CommandError("--vram plans the memory of the patched pipeline; leave --vram or --no-patch out.")


def _check_generate(arguments: argparse.Namespace) -> None:
    check_generation(arguments)
    check_at_least_one("--fps", arguments.fps)
    check_output("-o", arguments.output, (".mp4",))
    check_ffmpeg()
    _check_gpus(arguments)
    given = [*config_options(arguments), *(["preset"] if arguments.preset != "exact" else [])]
    if arguments.no_patch and given:
        raise CommandError(f"{spelled(given[0])} is about the patch; leave it or --no-patch out.")
    if arguments.vae is not None and arguments.tiny_vae is not None:
        raise CommandError(f"--vae {arguments.vae} is about the pipeline's own VAE; leave it or --tiny-vae out.")
    if arguments.tiny_vae is not None:
        check_weights("--tiny-vae", arguments.tiny_vae)


def _check_gpus(arguments: argparse.Namespace) -> None:
    check_at_least_one("--gpus", arguments.gpus)
    if arguments.gpus == 1:
        return
    if arguments.device not in (None, "cuda"):
        raise CommandError(f"--gpus takes the first GPUs of the machine; leave --device {arguments.device} out.")
    for option in ("vram", "offload"):
        if getattr(arguments, option):
            raise CommandError(f"--gpus keeps the whole model on every GPU; leave --{option} out.")
    check_heads(arguments.gpus, heads_of(arguments.model))


def _check_compare(arguments: argparse.Namespace) -> None:
    check_generation(arguments)
    check_at_least_one("--repeats", arguments.repeats)
    check_output("--plot", arguments.plot, (".png", ".svg", ".pdf"))
    if arguments.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--plot needs matplotlib; install it with: pip install 'turbo_rcm_patch[plot]'")
    check_output("--video", arguments.video, (".mp4", ".png", ".gif", ".webp"))
    _check_different(arguments, "plot", "video")
    if arguments.video is not None and arguments.video.suffix.lower() == ".mp4":
        check_ffmpeg()


def _check_different(arguments: argparse.Namespace, *names: str) -> None:
    """Raise CommandError if two outputs are one file. names: their two options'."""
    first, second = paths = [getattr(arguments, name) for name in names]
    if None not in paths and first.resolve() == second.resolve():
        raise CommandError(f"{' and '.join(map(spelled, names))} are both {first}; give each a file of its own.")


def _check_verify(arguments: argparse.Namespace) -> None:
    if arguments.config is not None:
        _check_case(arguments)
    elif arguments.layers is not None:
        raise CommandError("--layers goes with --config; a model has the blocks that it has.")
    if arguments.keep_out is not None:
        if type(check_preset(arguments.preset)) is not Quantized:
            raise CommandError(
                f"--keep-out looks for what must leave 8 bits in --preset quantized, and not in {arguments.preset}."
            )
        check_output("--keep-out", arguments.keep_out, (".json",))
        _check_different(arguments, "json", "keep_out")
    check_generation(arguments)


def _check_case(arguments: argparse.Namespace) -> None:
    given = {"--model": arguments.model, "--image": arguments.image, "a prompt": arguments.prompt}
    for name, value in {**given, "--offload": arguments.offload or None, "--vram": arguments.vram}.items():
        if value is not None:
            raise CommandError(f"--config builds a model and its inputs; leave {name} out.")
    check_at_least_one("--layers", arguments.layers)


def _check_evaluate(arguments: argparse.Namespace) -> None:
    check_generation(arguments)
    check_at_least_one("-n", arguments.n)
    check_at_least_one("--batch-size", arguments.batch_size)


def _check_info(arguments: argparse.Namespace) -> None:
    for name in ("vram", "text_encoder", "preset", "height", "width", "frames"):
        if arguments.model is None and getattr(arguments, name) is not None:
            raise CommandError(f"{spelled(name)} is about the memory that a model takes; give --model too.")
    if arguments.preset is not None:
        check_preset(arguments.preset)


def _check_convert(arguments: argparse.Namespace) -> None:
    config = check_preset(arguments.preset)
    if arguments.format is not None and isinstance(config, Exact):
        raise CommandError(f"--format is about 8 bits, and --preset {arguments.preset} stores none; leave it out.")
    check_config_options(arguments, config)
    if not arguments.source.exists():
        raise CommandError(
            f"{arguments.source}: no such file or folder; give a diffusers folder, or a .pth or .safetensors file."
        )
    if not arguments.target.resolve().parent.is_dir():
        raise CommandError(f"{arguments.target}: the folder to write it in does not exist; create it first.")


def _check_demo(arguments: argparse.Namespace) -> None:
    if importlib.util.find_spec("gradio") is None:
        raise CommandError("the page needs gradio; install it with: pip install 'turbo_rcm_patch[demo]'")
    check_ffmpeg()
    if not 0 < arguments.port < 2**16:
        raise CommandError(f"--port {arguments.port}: give a number from 1 to 65535.")
    check_at_least_one("--max-pixels", arguments.max_pixels)
    for model in arguments.model or ():
        check_model(argparse.Namespace(**{**vars(arguments), "model": model, "image": None}))
    for file, scale in arguments.lora or ():
        check_lora("--lora", file, scale)
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
