"""The states of the few-step sampler at which a student learns a teacher's velocity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from diffusers import WanPipeline, WanTransformer3DModel

from turbo_rcm_patch.latents import latent_size
from turbo_rcm_patch.solvers import model_timesteps, rcm_times, sde_step

STEPS = 4  # of the sampler


def latent_shape(pipe: WanPipeline, call: Mapping[str, object]) -> tuple[int, ...]:
    """Return the shape [C, f, h, w] of a call's latents."""
    size = (call[name] for name in ("height", "width", "num_frames"))
    return pipe.transformer.config.in_channels, *latent_size(pipe.vae.config, *size)


def trajectory(
    student: WanTransformer3DModel,
    teacher: WanTransformer3DModel,
    asked: torch.Tensor,
    taught: torch.Tensor,
    shape: tuple[int, ...],
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the student's velocity and the teacher's at each state of the student's own sampler, from noise.

    asked, taught: the student's prompts and the teacher's. shape: [C, f, h, w].
    """
    times = rcm_times(STEPS)
    sample = times[0].item() * torch.randn(len(asked), *shape, device=asked.device)
    for step, timestep in enumerate(model_timesteps(times[:-1]).to(asked.device)):
        timestep = timestep.expand(len(sample))
        with torch.no_grad():
            expected = teacher(sample, timestep, taught, return_dict=False)[0]
        velocity = student(sample, timestep, asked, return_dict=False)[0]
        yield velocity, expected
        t, t_next = times[step].item(), times[step + 1].item()
        sample = sde_step(sample, velocity.detach(), t, t_next, torch.randn_like(sample))
