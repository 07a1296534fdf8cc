"""use_rcm: make an ordinary ``pipe(...)`` call sample with RCMScheduler, and undo it.

A Wan pipeline gives its scheduler's ``step`` no generator, never scales the first noise and uses guidance by default.
All three are put right where the pipeline prepares its latents: that method is wrapped on the instance.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence

from diffusers import DiffusionPipeline, WanImageToVideoPipeline, WanPipeline, WanVideoToVideoPipeline

from ..scheduler import RCMScheduler

logger = logging.getLogger(__name__)

SUPPORTED_PIPELINES = (WanPipeline, WanImageToVideoPipeline, WanVideoToVideoPipeline)


def use_rcm(
    pipe: DiffusionPipeline,
    sigma_max: float | None = None,
    *,
    stochastic: bool | None = None,
    round_timesteps_to_bf16: bool | None = None,
    sigmas: Sequence[float] | None = None,
    classifier_free_guidance: bool = False,
) -> RCMHandle:
    """Let ``pipe(..., num_inference_steps=4)`` sample in 1 to 4 rCM steps (or at the given sigmas).

    pipe: a WanPipeline, WanImageToVideoPipeline or WanVideoToVideoPipeline whose transformer is rCM-distilled.
    sigma_max, stochastic, round_timesteps_to_bf16, sigmas: of RCMScheduler. None keeps the value of a pipeline whose
    scheduler is an RCMScheduler already (one that was saved), else takes RCMScheduler's default: 80, True, True, the
    published times. Use sigma_max=200 for image to video.
    classifier_free_guidance: whether guidance_scale counts. Distilled models run without guidance, so by default a
    guidance_scale above 1 (the pipelines' own default is 5) is taken as 1, with one warning.

    The call's ``generator`` then alone decides the noise: the first, then one draw per step. ``latents`` passed to the
    call are taken as unit noise and scaled like it; those passed to a video-to-video pipeline are taken as they are.

    Returns a handle with ``restore()``, also usable in a ``with`` statement. Raises TypeError for an unsupported
    pipeline, ValueError for one without a scheduler or for bad values, RuntimeError when use_rcm is active on it;
    the pipeline is then unchanged.
    """
    _check(pipe)
    scheduler = _scheduler_for(
        pipe, sigma_max=sigma_max, stochastic=stochastic, round_timesteps_to_bf16=round_timesteps_to_bf16, sigmas=sigmas
    )
    return RCMHandle(pipe, scheduler, classifier_free_guidance)


class RCMHandle:
    """What ``use_rcm`` changed on a pipeline: its scheduler and its prepare_latents. ``restore()`` undoes both."""

    def __init__(self, pipe: DiffusionPipeline, scheduler: RCMScheduler, classifier_free_guidance: bool):
        self.pipe, self.scheduler = pipe, scheduler
        self._classifier_free_guidance, self._warned = classifier_free_guidance, False
        self._original_scheduler = pipe.scheduler
        self._original_prepare_latents = pipe.prepare_latents
        self._was_on_instance = "prepare_latents" in vars(pipe)
        pipe.prepare_latents = self._prepare_latents
        pipe.scheduler = scheduler
        self._active = True

    def restore(self):
        """Put the original scheduler object and prepare_latents back.

        Raises RuntimeError when called twice, and when either was replaced after use_rcm; nothing changes then.
        """
        if not self._active:
            raise RuntimeError("this use_rcm is restored already.")
        for name, ours in (("scheduler", self.scheduler), ("prepare_latents", self._prepare_latents)):
            if vars(self.pipe).get(name) != ours:
                raise RuntimeError(f"pipe.{name} was replaced after use_rcm; undo that first, then restore.")
        self.pipe.scheduler = self._original_scheduler
        if self._was_on_instance:
            self.pipe.prepare_latents = self._original_prepare_latents
        else:
            del self.pipe.prepare_latents
        self._active = False

    def __enter__(self) -> RCMHandle:
        return self

    def __exit__(self, *exception):
        if self._active:
            self.restore()

    def _prepare_latents(self, *args, **kwargs):
        """The pipeline's prepare_latents: the one place that knows the call's generator and makes the first noise."""
        if self.pipe.scheduler is not self.scheduler:
            raise RuntimeError("pipe.scheduler was replaced after use_rcm; put it back and restore() first.")
        call = inspect.signature(self._original_prepare_latents).bind(*args, **kwargs)
        self.scheduler.bind_generator(call.arguments.get("generator"))
        if self.pipe.guidance_scale > 1 and not self._classifier_free_guidance:
            self._turn_guidance_off()
        prepared = self._original_prepare_latents(*args, **kwargs)
        if isinstance(self.pipe, WanVideoToVideoPipeline):
            return prepared  # scheduler.add_noise has scaled the noise
        if isinstance(prepared, tuple):  # image to video: latents, then conditions
            return (self.scheduler.scale_initial_noise(prepared[0]), *prepared[1:])
        return self.scheduler.scale_initial_noise(prepared)

    def _turn_guidance_off(self):
        self.pipe._guidance_scale = 1.0
        if not self._warned:
            logger.warning(
                "rCM samples without guidance: guidance_scale is taken as 1. Pass guidance_scale=1.0 to also save the "
                "encoding of the negative prompt, or use_rcm(..., classifier_free_guidance=True) to have guidance."
            )
        self._warned = True


def _check(pipe):
    if not isinstance(pipe, SUPPORTED_PIPELINES):
        supported = ", ".join(pipeline.__name__ for pipeline in SUPPORTED_PIPELINES)
        raise TypeError(f"use_rcm does not know {type(pipe).__name__}; supported are {supported}.")
    if pipe.scheduler is None:
        raise ValueError(f"this {type(pipe).__name__} has no scheduler; load the pipeline with one.")
    if isinstance(getattr(pipe.prepare_latents, "__self__", None), RCMHandle):
        raise RuntimeError("use_rcm is active on this pipeline; call restore() on its handle first.")


def _scheduler_for(pipe, **options) -> RCMScheduler:
    current = pipe.scheduler.config
    num_train_timesteps = current.get("num_train_timesteps", 1000)
    boundary_ratio = pipe.config.get("boundary_ratio")
    chosen = {name: value for name, value in options.items() if value is not None}
    return RCMScheduler.from_config(
        current if isinstance(pipe.scheduler, RCMScheduler) else {},
        **chosen,
        num_train_timesteps=num_train_timesteps,
        boundary_timestep=None if boundary_ratio is None else boundary_ratio * num_train_timesteps,
    )
