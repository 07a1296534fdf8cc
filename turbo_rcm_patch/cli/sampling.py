"""The sampler and the guidance of a command's pipeline, from the options or from its model."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import logging
from collections.abc import Iterator

from diffusers import DiffusionPipeline

from ..patching import use_distilled, use_rcm
from ..patching.families import pipeline_of
from ..patching.sampling import distilled_handle
from ..patching.sampling.use_distilled import NotRecognised
from ..recipes import RCM_STEPS, recipe_names
from ..scheduler import FewStepScheduler
from .arguments import LORAS, OWN_SAMPLER, step_counts
from .errors import CommandError, in_the_shell
from .generation_checks import check_has_effect
from .notes import tell


def install_sampler(pipe: DiffusionPipeline, arguments: argparse.Namespace) -> None:
    """Install the few-step sampler that the options ask for, or that the model is known to be distilled for.

    All other models keep the pipeline's own scheduler.
    """
    guided = arguments.guidance is not None
    try:
        if arguments.sigma_max is not None:  # an option of rCM's scheduler
            use_rcm(pipe, sigma_max=arguments.sigma_max, classifier_free_guidance=guided)
        else:
            _use_distilled(pipe, arguments, guided)
        for steps in step_counts(arguments):
            pipe.scheduler.set_timesteps(default_steps(pipe) if steps is None else steps)
    except (ValueError, TypeError, ImportError) as error:
        raise CommandError(in_the_shell(error)) from error


def default_steps(pipe: DiffusionPipeline) -> int:
    """Return the number of steps that the model was distilled to, or a call's own default."""
    if not isinstance(pipe.scheduler, FewStepScheduler):
        return default_of(pipe, "num_inference_steps")
    sigmas = pipe.scheduler.config.get("sigmas")
    return len(sigmas) if sigmas else RCM_STEPS


def guidance(pipe: DiffusionPipeline, arguments: argparse.Namespace) -> dict[str, object]:
    """Return the call's arguments about guidance. Few-step models have it distilled into them: 1 is their default.

    Raises CommandError for an option that the call would ignore.
    """
    scale = arguments.guidance
    if scale is None:
        scale = 1.0 if isinstance(pipe.scheduler, FewStepScheduler) else default_of(pipe, "guidance_scale")
    check_has_effect(arguments, scale)
    call = {"guidance_scale_2": arguments.guidance_2, "negative_prompt": arguments.negative_prompt}
    return {"guidance_scale": scale, **{name: value for name, value in call.items() if value is not None}}


def default_of(pipe: DiffusionPipeline, name: str) -> object:
    """Return the default of an argument of the pipeline's call."""
    return inspect.signature(type(pipe).__call__).parameters[name].default


def _use_distilled(pipe: DiffusionPipeline, arguments: argparse.Namespace, guided: bool) -> None:
    recipe = getattr(arguments, "recipe", None)
    if recipe == OWN_SAMPLER:
        if not isinstance(pipe.scheduler, FewStepScheduler):
            tell(arguments, _own_sampler(pipe, arguments.model) + ".")
            return
        recipe = None  # a saved few-step sampler is the pipeline's own
    loras = [getattr(arguments, name, None) or (None, 1.0) for name in LORAS]
    source, scale = loras[0]  # perhaps a folder with a file for each expert
    if loras[1][0] is not None:
        source, scale = zip(*loras, strict=True)
    longest = max((steps for steps in step_counts(arguments) if steps is not None), default=None)
    try:
        options = {"steps": longest, "classifier_free_guidance": guided}
        with _untold_twice():
            handle = use_distilled(pipe, source, recipe, scale, **options)
        if arguments.model is not None:  # the tiny model has one sampler
            tell(arguments, str(handle))
    except NotRecognised:
        stated = pipeline_of(pipe)
        text = f"{_own_sampler(pipe, arguments.model)}: its name and files name no few-step distillation."
        if hasattr(arguments, "recipe"):
            taken = {"sound": stated.has_sound, "image": stated.starts_from != "text"}
            text += f" If it is distilled, give --recipe: {recipe_names(**taken)}."
        elif not stated.has_sound:
            text += " If it is distilled, give --sigma-max, for rCM."
        tell(arguments, text)


@contextlib.contextmanager
def _untold_twice() -> Iterator[None]:
    """Keep `use_distilled` from logging its text, which the command prints."""
    before = distilled_handle.logger.level
    distilled_handle.logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        distilled_handle.logger.setLevel(before)


def _own_sampler(pipe: DiffusionPipeline, model: str) -> str:
    return (
        f"--model {model} is sampled by its own {type(pipe.scheduler).__name__}, by default in {default_steps(pipe)} "
        f"steps with guidance {default_of(pipe, 'guidance_scale'):g}"
    )
