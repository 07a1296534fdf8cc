"""The few-step rCM sampler: its maths as pure functions, and RCMScheduler, which offers it to diffusers' pipelines.

Score-Regularized Continuous-Time Consistency Models (Zheng et al. 2025) and TurboDiffusion, in rectified-flow time
t in [0, 1]: ``x_t = (1 − t)·x_0 + t·ε`` and the network predicts the velocity ``v = ε − x_0``. The state is fp64, noise
is fp32.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin, SchedulerOutput
from diffusers.utils.torch_utils import randn_tensor

Generator = torch.Generator | list[torch.Generator]

INTERMEDIATE_ANGLES = (1.5, 1.4, 1.0)  # TrigFlow times after the first one, as published
MAX_STEPS = 1 + len(INTERMEDIATE_ANGLES)


def rcm_times(num_steps: int, sigma_max: float = 80.0) -> torch.Tensor:
    """Rectified-flow times of 1 to 4 steps, fp64 [num_steps + 1], from σ_max/(1 + σ_max) down to 0.

    TrigFlow angles atan(σ_max), 1.5, 1.4, 1.0 (fewer steps take a prefix), then 0, through sin/(cos + sin). Raises
    ValueError for another number of steps and for a sigma_max at or below the next time's.
    """
    if num_steps not in range(1, MAX_STEPS + 1):
        raise ValueError(
            f"num_inference_steps={num_steps}: the rCM sampler takes 1 to {MAX_STEPS} steps. Pass "
            f"num_inference_steps={MAX_STEPS}, guidance_scale=1.0, or choose your own times with sigmas or timesteps."
        )
    smallest = math.tan(INTERMEDIATE_ANGLES[0]) if num_steps > 1 else 0.0
    if not smallest < sigma_max < math.inf:
        raise ValueError(
            f"sigma_max={sigma_max}: with {num_steps} steps it must be finite and above {smallest:.4g}; 80 is usual "
            "for text to video, 200 for image to video."
        )
    angles = torch.tensor([math.atan(sigma_max), *INTERMEDIATE_ANGLES[: num_steps - 1], 0.0], dtype=torch.float64)
    return angles.sin() / (angles.cos() + angles.sin())


def model_timesteps(
    times: torch.Tensor, num_train_timesteps: int = 1000, *, to_bf16: bool = True, boundary: float | None = None
) -> torch.Tensor:
    """The timesteps that the network is given, fp32 [N]: num_train_timesteps · times, rounded to bf16 with to_bf16.

    boundary: where one expert hands over to the other, in timesteps (Wan 2.2: the first takes timesteps >= boundary).
    A value that rounding would move across it takes the nearest bf16 number on its own side instead.
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


def rcm_step(
    sample: torch.Tensor, velocity: torch.Tensor, t: float, t_next: float, noise: torch.Tensor | None
) -> torch.Tensor:
    """One step from time t to t_next, for fp64 sample and velocity; with noise (fp32) the SDE, without it the ODE.

    SDE: predict x_0, then noise it anew: ``(1 − t_next)·(x − t·v) + t_next·ε``. ODE: ``x − (t − t_next)·v``.
    """
    if noise is None:
        return sample - (t - t_next) * velocity
    return (1 - t_next) * (sample - t * velocity) + t_next * noise


class RCMScheduler(SchedulerMixin, ConfigMixin):
    """The rCM sampler as a diffusers scheduler for rectified-flow models such as Wan. ``use_rcm(pipe)`` installs it.

    num_train_timesteps: the network's timestep at t = 1.
    sigma_max: the noise-to-signal ratio of the first time, σ_max/(1 + σ_max). 80 for text, 200 for image to video.
    stochastic: fresh noise in every step (as published for text to video), or the deterministic ODE.
    round_timesteps_to_bf16: give the network bf16-rounded timesteps, as distilled models were trained.
    sigmas: own times instead of the published ones, strictly decreasing in (0, 1], without the final 0; any number.
    boundary_timestep: where Wan 2.2 changes experts; rounding moves no timestep across it.

    A pipeline passes no generator to ``step`` and never scales the first noise; ``bind_generator`` and
    ``scale_initial_noise`` are for whoever drives it. Raises ValueError for values outside these ranges.
    """

    order = 1

    @register_to_config
    def __init__(
        self,
        num_train_timesteps: int = 1000,
        sigma_max: float | None = 80.0,
        stochastic: bool = True,
        round_timesteps_to_bf16: bool = True,
        sigmas: list[float] | None = None,
        boundary_timestep: float | None = None,
    ):
        if sigma_max is None:  # how other schedulers' configs say "not set"
            self.register_to_config(sigma_max=80.0)
        if sigmas is not None:
            self.register_to_config(sigmas=[float(sigma) for sigma in sigmas])  # JSON knows no arrays
        self.generator: Generator | None = None
        self._set_times(rcm_times(1, self.config.sigma_max) if sigmas is None else _user_times(sigmas, "sigmas"))

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        sigmas: Sequence[float] | torch.Tensor | None = None,
        timesteps: Sequence[float] | torch.Tensor | None = None,
    ):
        """Choose the next generation's times: ``timesteps`` [N], on the device, and ``sigmas`` [N + 1], on the CPU.

        By default the published times for num_inference_steps = 1 to 4, or the configured sigmas (then
        num_inference_steps is their number). Own times are strictly decreasing and without the final 0: sigmas in
        (0, 1], or timesteps in (0, num_train_timesteps]. Raises ValueError for anything else.
        """
        if sigmas is not None and timesteps is not None:
            raise ValueError("both sigmas and timesteps were given; they say the same, so give one.")
        if timesteps is not None:
            times = _user_times(timesteps, "timesteps", self.config.num_train_timesteps)
        elif sigmas is not None or self.config.sigmas is not None:
            times = _user_times(self.config.sigmas if sigmas is None else sigmas, "sigmas")
        else:
            times = rcm_times(_as_int(num_inference_steps), self.config.sigma_max)
        if num_inference_steps not in (None, len(times) - 1):
            raise ValueError(
                f"num_inference_steps={num_inference_steps}, but {len(times) - 1} sigmas or timesteps are set; pass "
                f"num_inference_steps={len(times) - 1}."
            )
        self._set_times(times, device)
        self.generator = None  # that of the last call; the pipeline binds this call's afterwards

    def _set_times(self, times: torch.Tensor, device: str | torch.device | None = None):
        self.sigmas = times
        self.timesteps = model_timesteps(
            times[:-1],
            self.config.num_train_timesteps,
            to_bf16=self.config.round_timesteps_to_bf16,
            boundary=self.config.boundary_timestep,
        ).to(device)
        self.num_inference_steps = len(self.timesteps)
        self._step_index = self._begin_index = self._final_dtype = None

    @property
    def init_noise_sigma(self) -> float:
        """The first time t_0: the network's first input is t_0 · ε."""
        return float(self.sigmas[0])

    @property
    def step_index(self) -> int | None:
        """Index of the next step; None before the first."""
        return self._step_index

    @property
    def begin_index(self) -> int | None:
        """Index of the first step, where the pipeline set it."""
        return self._begin_index

    def set_begin_index(self, begin_index: int = 0):
        """Say at which step the generation begins, so that ``step`` need not look it up by its timestep."""
        self._begin_index = begin_index

    def bind_generator(self, generator: Generator | None):
        """Draw the noise of coming steps from this generator, or from one per sample; None is torch's global one."""
        self.generator = generator

    def scale_initial_noise(self, noise: torch.Tensor) -> torch.Tensor:
        """The initial state ``t_0 · noise`` in fp64, of any shape. The last ``step`` returns to noise's dtype."""
        self._final_dtype = noise.dtype
        return noise.double() * self.init_noise_sigma

    def scale_model_input(self, sample: torch.Tensor, timestep: float | torch.Tensor | None = None) -> torch.Tensor:
        """The sample itself: the network takes the state as it is."""
        return sample

    def step(
        self,
        model_output: torch.Tensor,
        timestep: float | torch.Tensor,
        sample: torch.Tensor,
        generator: Generator | None = None,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[torch.Tensor]:
        """Take the next step from sample with the velocity model_output, both [B, ...].

        timestep: one of ``timesteps``; it chooses the step when this is the first one and no begin index is set.
        generator: of this step's noise; by default the bound one. Returns the next sample in fp64, and after the last
        step in the dtype of the first sample. Raises ValueError after the last step and for an unknown timestep.
        """
        if self._step_index is None:
            self._step_index = self._first_index(timestep)
        if self._final_dtype is None:
            self._final_dtype = sample.dtype
        if self._step_index >= self.num_inference_steps:
            raise ValueError(f"all {self.num_inference_steps} steps are taken; call set_timesteps to start again.")
        t, t_next = self.sigmas[self._step_index : self._step_index + 2].tolist()
        noise = self._noise_like(sample, generator) if self.config.stochastic else None
        previous = rcm_step(sample.double(), model_output.double(), t, t_next, noise)
        self._step_index += 1
        if self._step_index == self.num_inference_steps:
            previous = previous.to(self._final_dtype)
        return SchedulerOutput(prev_sample=previous) if return_dict else (previous,)

    def _noise_like(self, sample: torch.Tensor, generator: Generator | None) -> torch.Tensor:
        """fp32 noise. Also drawn for the last step, where it counts for nothing: published samplers advance the
        generator there too."""
        generator = self.generator if generator is None else generator
        if isinstance(generator, list) and len(generator) not in (1, len(sample)):
            raise ValueError(f"{len(generator)} generators for a batch of {len(sample)}; give one, or one per sample.")
        return randn_tensor(sample.shape, generator=generator, device=sample.device, dtype=torch.float32)

    def add_noise(self, original_samples: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """Noised samples [B, ...] for video to video: ``(1 − t)·x_0 + t·noise``, in the samples' dtype.

        timesteps [B] (or one for all) are entries of ``timesteps``; their exact times count, not the rounded ones.
        """
        t = self.sigmas[[self._first_index(timestep) for timestep in timesteps.reshape(-1)]]
        t = t.to(original_samples).reshape(-1, *[1] * (original_samples.dim() - 1))
        return (1 - t) * original_samples + t * noise

    def scale_noise(self, sample: torch.Tensor, timestep: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """``add_noise`` with the argument order of diffusers' flow-matching schedulers."""
        return self.add_noise(sample, noise, timestep)

    def _first_index(self, timestep: float | torch.Tensor) -> int:
        """The step that a timestep belongs to; the begin index, where one is set."""
        if self._begin_index is not None:
            return self._begin_index
        indices = (self.timesteps.cpu() == float(timestep)).nonzero().flatten().tolist()
        if len(indices) != 1:
            raise ValueError(
                f"timestep {float(timestep)} is {'not one' if not indices else 'more than one'} of this schedule's, "
                f"{self.timesteps.tolist()}; pass an entry of scheduler.timesteps, or call set_begin_index."
            )
        return indices[0]

    def __len__(self) -> int:
        return self.config.num_train_timesteps


def _user_times(values: Sequence[float] | torch.Tensor, name: str, scale: float = 1.0) -> torch.Tensor:
    """User times divided by scale, with the final 0: fp64 [N + 1]."""
    values = torch.as_tensor(values, dtype=torch.float64, device="cpu")
    if values.dim() != 1 or len(values) == 0:
        raise ValueError(f"{name} has shape {list(values.shape)}; give one or more numbers, highest first.")
    decreasing = bool((values.diff() < 0).all())
    if not (decreasing and values[-1] > 0 and values[0] <= scale):
        raise ValueError(
            f"{name}={values.tolist()}; they must decrease strictly within (0, {scale:g}], without the final 0."
        )
    if scale > 1 and values[0] <= 1:
        raise ValueError(f"{name}={values.tolist()} look like times in (0, 1]; pass those as sigmas.")
    return torch.cat([values / scale, values.new_zeros(1)])


def _as_int(num_inference_steps) -> int:
    try:
        return operator.index(num_inference_steps)
    except TypeError:
        raise ValueError(f"num_inference_steps={num_inference_steps!r}; give a whole number.") from None
