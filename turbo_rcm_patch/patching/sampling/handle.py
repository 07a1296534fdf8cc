"""A handle that makes an ordinary ``pipe(...)`` call sample in few steps, and undoes it.

Such a pipeline gives its scheduler's ``step`` no generator, never scales the first noise and uses guidance by default.
The handle corrects all three where the pipeline prepares its latents: it wraps that method on the instance.
"""

from __future__ import annotations

import inspect
import logging

from diffusers import DiffusionPipeline

from ...scheduler import FewStepScheduler
from ..families import PIPELINES, pipeline_of

logger = logging.getLogger(__name__)


def check_pipeline(pipe: object, caller: str) -> None:
    """Raise TypeError, ValueError or RuntimeError unless ``caller`` can install a few-step sampler on it."""
    if pipeline_of(pipe) is None:
        supported = ", ".join(pipeline.pipeline_class.__name__ for pipeline in PIPELINES)
        raise TypeError(f"{caller} does not know {type(pipe).__name__}; supported are {supported}.")
    if pipe.scheduler is None:
        raise ValueError(f"this {type(pipe).__name__} has no scheduler; load the pipeline with one.")
    active = getattr(pipe.prepare_latents, "__self__", None)
    if isinstance(active, FewStepHandle):
        raise RuntimeError(f"{active.caller} is active on this pipeline; call restore() on its handle first.")


def boundary_timestep(pipe: DiffusionPipeline) -> float | None:
    """Return the timestep where a pipeline changes from its high-noise to its low-noise transformer, or None."""
    ratio = pipe.config.get("boundary_ratio")
    return None if ratio is None else ratio * train_timesteps(pipe)


def train_timesteps(pipe: DiffusionPipeline) -> int:
    """Return the network's timestep at t = 1."""
    return pipe.scheduler.config.get("num_train_timesteps", 1000)


class FewStepHandle:
    """The changes of ``caller`` to a pipeline, its scheduler and its prepare_latents. ``restore()`` undoes both."""

    def __init__(
        self, pipe: DiffusionPipeline, scheduler: FewStepScheduler, classifier_free_guidance: bool, caller: str
    ):
        self.pipe, self.scheduler, self.caller = pipe, scheduler, caller
        self._classifier_free_guidance, self._warned = classifier_free_guidance, False
        self._original_scheduler = pipe.scheduler
        self._original_prepare_latents = pipe.prepare_latents
        self._was_on_instance = "prepare_latents" in vars(pipe)
        pipe.prepare_latents = self._prepare_latents
        pipe.scheduler = scheduler
        self._active = True

    def restore(self):
        """Put the original scheduler object and prepare_latents back.

        Raises RuntimeError when called twice, and when either was replaced since; nothing changes then.
        """
        self._check_restorable()
        self.pipe.scheduler = self._original_scheduler
        if self._was_on_instance:
            self.pipe.prepare_latents = self._original_prepare_latents
        else:
            del self.pipe.prepare_latents
        self._active = False

    def _check_restorable(self):
        if not self._active:
            raise RuntimeError(f"this {self.caller} is restored already.")
        for name, ours in (("scheduler", self.scheduler), ("prepare_latents", self._prepare_latents)):
            if vars(self.pipe).get(name) != ours:
                raise RuntimeError(f"pipe.{name} was replaced after {self.caller}; undo that first, then restore.")

    def __enter__(self) -> FewStepHandle:
        return self

    def __exit__(self, *exception):
        if self._active:
            self.restore()

    def _prepare_latents(self, *args, **kwargs):
        """Run the pipeline's prepare_latents, which alone knows the call's generator and makes the first noise."""
        if self.pipe.scheduler is not self.scheduler:
            raise RuntimeError(f"pipe.scheduler was replaced after {self.caller}; put it back and restore() first.")
        call = inspect.signature(self._original_prepare_latents).bind(*args, **kwargs)
        self.scheduler.bind_generator(call.arguments.get("generator"))
        if self.pipe.guidance_scale > 1 and not self._classifier_free_guidance:
            self._turn_guidance_off()
        prepared = self._original_prepare_latents(*args, **kwargs)
        if pipeline_of(self.pipe).adds_noise:
            return prepared  # scheduler.add_noise has scaled the noise
        if isinstance(prepared, tuple):  # image to video: latents, then conditions
            return (self.scheduler.scale_initial_noise(prepared[0]), *prepared[1:])
        return self.scheduler.scale_initial_noise(prepared)

    def _turn_guidance_off(self):
        self.pipe._guidance_scale = 1.0
        if not self._warned:
            logger.warning(
                "few-step models sample without guidance: guidance_scale is taken as 1. Pass guidance_scale=1.0 to "
                "also save the encoding of the negative prompt, or classifier_free_guidance=True to %s.",
                self.caller,
            )
        self._warned = True
