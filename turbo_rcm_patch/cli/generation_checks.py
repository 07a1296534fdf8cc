"""Checks of the options of a generation: the preset and its options, the sampler, the guidance and the image."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import replace

from ..config import PatchConfig, options_of, presets_with, resolve_config
from ..recipes import RCM_STEPS, RECIPES
from .arguments import LORAS, OWN_SAMPLER, config_options, spelled, step_counts
from .errors import CommandError, in_the_shell
from .model_checks import check_lora, check_model, check_transformers
from .quiet_imports import quiet_imports


def check_generation(arguments: argparse.Namespace) -> None:
    """Raise CommandError for anything wrong with the options of a generation."""
    check_device(arguments)
    _check_distilled(arguments)
    _check_steps(arguments)
    _check_guidance(arguments)
    check_transformers(arguments)
    check_config_options(arguments, check_preset(arguments.preset))
    if not 0 <= arguments.seed < 2**63:
        raise CommandError(f"--seed {arguments.seed} is out of range; give a number from 0 to 2**63 - 1.")
    if arguments.image is not None and not arguments.image.is_file():
        raise CommandError(f"--image {arguments.image}: no such file.")
    check_model(arguments).check(arguments.height, arguments.width, arguments.frames)
    if arguments.image is not None:
        _check_image(arguments)


def check_device(arguments: argparse.Namespace) -> None:
    """Raise CommandError for a --device that no command takes."""
    if arguments.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", arguments.device):
        accepted = "cuda or cuda:N" if arguments.command == "tune" else "cpu, cuda or cuda:N"
        raise CommandError(f"--device {arguments.device} is unknown; give {accepted}.")


def _check_distilled(arguments: argparse.Namespace) -> None:
    recipe = getattr(arguments, "recipe", None)
    loras = {name: lora for name in LORAS if (lora := getattr(arguments, name, None)) is not None}
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
            raise CommandError(f"--steps {arguments.steps}: {recipe} takes {RECIPES[recipe].takes} steps.") from None
    for name, (file, scale) in loras.items():
        check_lora(spelled(name), file, scale)


def _check_steps(arguments: argparse.Namespace) -> None:
    """Check --steps and --sigma-max, of which rCM's times are made."""
    is_rcm = arguments.model is None or arguments.sigma_max is not None
    for steps in step_counts(arguments):
        if is_rcm and steps is not None and steps not in range(1, RCM_STEPS + 1):
            raise CommandError(f"--steps {steps}: the sampler takes 1 to {RCM_STEPS} steps.")
        check_at_least_one("--steps", steps)
    if arguments.sigma_max is None:
        return
    with quiet_imports(arguments.verbose):
        from ..solvers import rcm_times  # imports torch, which no help text needs
    for steps in step_counts(arguments):
        try:
            rcm_times(RCM_STEPS if steps is None else steps, arguments.sigma_max)
        except ValueError as error:
            raise CommandError(in_the_shell(error)) from None


def check_at_least_one(option: str, value: int | None) -> None:
    """Raise CommandError for a count below 1. None: the option is not given."""
    if value is not None and value < 1:
        raise CommandError(f"{option} {value}: give 1 or more.")


def _check_guidance(arguments: argparse.Namespace) -> None:
    for name in ("guidance", "guidance_2", "negative_prompt"):
        value, option = getattr(arguments, name), spelled(name)
        if value is not None and arguments.model is None:
            raise CommandError(f"{option} goes with --model; without it there is no guidance.")
        if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
            raise CommandError(f"{option} {value}: give a number, 0 or more; up to 1 there is no guidance.")
    if arguments.guidance is not None:
        check_has_effect(arguments, arguments.guidance)


def check_has_effect(arguments: argparse.Namespace, scale: float) -> None:
    """Raise CommandError for --guidance-2 or --negative-prompt if this guidance scale leaves them without effect."""
    for name in ("guidance_2", "negative_prompt"):
        if getattr(arguments, name) is not None and scale <= 1:
            raise CommandError(
                f"{spelled(name)} has an effect only with --guidance above 1, and it is {scale:g}; leave it out."
            )


def check_preset(preset: str) -> PatchConfig:
    """Return the configuration of --preset. Raises CommandError for an unknown name."""
    try:
        return resolve_config(preset)
    except ValueError as error:
        raise CommandError(f"--preset: {error}") from None


def check_config_options(arguments: argparse.Namespace, config: PatchConfig) -> None:
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


def _check_image(arguments: argparse.Namespace) -> None:
    from PIL import Image  # which no help text needs

    try:
        with Image.open(arguments.image) as image:
            image.load()  # opening reads the header alone
    except (OSError, Image.DecompressionBombError) as error:
        raise CommandError(f"--image {arguments.image}: {error}; give a PNG or JPEG file.") from error
