"""use_rcm: make an ordinary ``pipe(...)`` call sample with RCMScheduler, and undo it."""

from __future__ import annotations

from collections.abc import Sequence

from diffusers import DiffusionPipeline

from ...scheduler import RCMScheduler
from .handle import FewStepHandle, boundary_timestep, check_experts, check_pipeline, train_timesteps


def use_rcm(
    pipe: DiffusionPipeline,
    sigma_max: float | None = None,
    *,
    stochastic: bool | None = None,
    round_timesteps_to_bf16: bool | None = None,
    sigmas: Sequence[float] | None = None,
    classifier_free_guidance: bool = False,
) -> FewStepHandle:
    """Let ``pipe(..., num_inference_steps=4)`` sample in 1 to 4 rCM steps (or at the given sigmas).

    Args:
        pipe: a WanPipeline, WanImageToVideoPipeline, WanVideoToVideoPipeline or WanVACEPipeline, or a modular Wan
            pipeline, whose transformer is rCM-distilled.
        sigma_max: the noise-to-signal ratio of the first time. The default is 80. Use 200 for image to video.
        stochastic: True (the default) for fresh noise in every step, False for the deterministic ODE.
        round_timesteps_to_bf16: True (the default) to give the network timesteps rounded to bf16, as in training.
        sigmas: times in place of the published ones, strictly decreasing in (0, 1], without the final 0.
            If the pipeline's scheduler is an RCMScheduler already (a saved one), None keeps its value of each of these.
        classifier_free_guidance: True if guidance_scale counts. Distilled models run without guidance, so by default a
            guidance_scale above 1 (the pipelines' own default is 5) is taken as 1, with one warning.

    Afterwards only the call's ``generator`` decides the noise: the first, then one draw per step. ``latents`` passed to
    the call are taken as unit noise and scaled like it. A video-to-video pipeline takes them as they are.

    Returns a handle with ``restore()``, which also works in a ``with`` statement. After an error nothing is changed.
    Raises TypeError for an unsupported pipeline, ValueError for one without a scheduler or for bad values, and
    RuntimeError if use_rcm is active on it.
    """
    check_pipeline(pipe, "use_rcm")
    saved = pipe.scheduler.config if isinstance(pipe.scheduler, RCMScheduler) else {}
    given = {
        "sigma_max": sigma_max,
        "stochastic": stochastic,
        "round_timesteps_to_bf16": round_timesteps_to_bf16,
        "sigmas": sigmas,
    }
    scheduler = RCMScheduler.from_config(
        saved,
        **{name: value for name, value in given.items() if value is not None},
        num_train_timesteps=train_timesteps(pipe),
        boundary_timestep=boundary_timestep(pipe),
    )
    check_experts(pipe, scheduler.timesteps[:1].tolist(), pipe.config.get("boundary_ratio"))
    return FewStepHandle(pipe, scheduler, classifier_free_guidance, "use_rcm")
