"""The maths of the few-step samplers: their times, and one step of each solver, as pure functions.

In rectified-flow time t in [0, 1]: ``x_t = (1 − t)·x_0 + t·ε`` and the network predicts the velocity ``v = ε − x_0``.
Sources: Score-Regularized Continuous-Time Consistency Models (rCM, Zheng et al. 2025) and TurboDiffusion.
"""

from __future__ import annotations

import math
from numbers import Real

import torch

from .recipes import INTERMEDIATE_ANGLES, RCM_STEPS


def rcm_times(num_steps: int, sigma_max: float = 80.0) -> torch.Tensor:
    """Return rectified-flow times of 1 to 4 steps, fp64 [num_steps + 1], from σ_max/(1 + σ_max) down to 0.

    TrigFlow angles atan(σ_max), 1.5, 1.4, 1.0 (fewer steps take a prefix), then 0, through sin/(cos + sin). Raises
    ValueError for another number of steps and for a sigma_max at or below the next time's.
    """
    if num_steps not in range(1, RCM_STEPS + 1):
        raise ValueError(
            f"num_inference_steps={num_steps}: the rCM sampler takes 1 to {RCM_STEPS} steps. Pass "
            f"num_inference_steps={RCM_STEPS}, guidance_scale=1.0, or choose your own times with sigmas or timesteps."
        )
    smallest = math.tan(INTERMEDIATE_ANGLES[0]) if num_steps > 1 else 0.0
    if not (isinstance(sigma_max, Real) and smallest < sigma_max < math.inf):
        raise ValueError(
            f"sigma_max={sigma_max!r}: with {num_steps} step{'s' * (num_steps > 1)} it must be a finite number above "
            f"{smallest:.4g}; 80 is usual for text to video, 200 for image to video."
        )
    angles = [math.atan(sigma_max), *INTERMEDIATE_ANGLES[: num_steps - 1], 0.0]
    angles = torch.tensor(angles, dtype=torch.float64, device="cpu")
    return angles.sin() / (angles.cos() + angles.sin())


def model_timesteps(
    times: torch.Tensor, num_train_timesteps: int = 1000, *, to_bf16: bool = True, boundary: float | None = None
) -> torch.Tensor:
    """Return the network's timesteps, fp32 [N]: num_train_timesteps · times. to_bf16 rounds them to bf16.

    boundary: the timestep at which Wan 2.2 changes experts; the first one takes timesteps >= boundary. A value that
    rounding would move across it takes the nearest bf16 number on its own side instead.
    """
    timesteps = times.float() * num_train_timesteps
    if not to_bf16:
        return timesteps
    rounded = timesteps.bfloat16()
    if boundary is None:
        return rounded.float()
    toward_exact = torch.where(rounded.float() < timesteps, math.inf, -math.inf).bfloat16()
    crossed = (rounded.float() >= boundary) != (timesteps >= boundary)
    return torch.where(crossed, torch.nextafter(rounded, toward_exact), rounded).float()


def euler_step(sample: torch.Tensor, velocity: torch.Tensor, t: float, t_next: float) -> torch.Tensor:
    """Take one step of the ODE from time t to t_next: ``x − (t − t_next)·v``, in the dtype of both."""
    return sample - (t - t_next) * velocity


def sde_step(
    sample: torch.Tensor, velocity: torch.Tensor, t: float, t_next: float, noise: torch.Tensor
) -> torch.Tensor:
    """Predict x_0, then noise it anew: ``(1 − t_next)·(x − t·v) + t_next·ε``, in the dtype of x and v."""
    return (1 - t_next) * (sample - t * velocity) + t_next * noise


def lcm_step(
    sample: torch.Tensor, velocity: torch.Tensor, t: float, t_next: float, noise: torch.Tensor | None
) -> torch.Tensor:
    """Take a step like ``sde_step``, but with x_0 computed in fp64. x_0 and the result have the velocity's dtype.

    noise: in the velocity's dtype, or None for the last step, which returns x_0.
    """
    dtype = velocity.dtype
    x0 = (sample.double() - t * velocity.double()).to(dtype)
    if noise is None:
        return x0
    at_least_fp32 = torch.promote_types(dtype, torch.float32)
    return ((1 - t_next) * x0.to(at_least_fp32) + t_next * noise.to(at_least_fp32)).to(dtype)
