"""The few-step samplers as schedulers of diffusers' pipelines: FewStepScheduler, and RCMScheduler at rCM's times.

solvers.py has their maths, recipes.py the settings of each checkpoint.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from numbers import Real
from typing import NamedTuple

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin, SchedulerOutput
from diffusers.utils.torch_utils import randn_tensor

from .recipes import RECIPES, Recipe, are_evenly_spaced, checked_times, whole_number
from .solvers import euler_step, lcm_step, model_timesteps, rcm_times, sde_step
from .wording import name_of_dtype

Generator = torch.Generator | list[torch.Generator]


class _NextGeneration(NamedTuple):
    """The generator of a generation whose times are chosen later. Copies of a scheduler share it."""

    generator: Generator | None

    def __deepcopy__(self, memo: dict[int, object]) -> _NextGeneration:
        return self


_generation = threading.local()  # scheduler: a weak reference to the one of this thread's generation


def running_scheduler() -> FewStepScheduler | None:
    """Return the scheduler of this thread's present generation, from ``bind_generator`` to its last step, or None."""
    reference = getattr(_generation, "scheduler", None)
    return None if reference is None else reference()


class FewStepScheduler(SchedulerMixin, ConfigMixin):
    """A few-step sampler as a diffusers scheduler for rectified-flow models such as Wan.

    ``use_distilled(pipe, ...)`` installs the one that a checkpoint needs.

    Args:
        sigmas: the times σ of the steps, strictly decreasing in (0, 1], without the final 0.
        timesteps: the timestep that the network gets in each step. None: num_train_timesteps · σ.
        solver: "sde", "euler" or "lcm" (`recipes.Recipe` has their formulas).
        state_dtype: the dtype of the samples.
        round_timesteps_to_bf16: True to give the network timesteps rounded to bf16.
        fewer_steps: True if a generation may have fewer steps, which take the first of the times.
        num_train_timesteps: the network's timestep at t = 1, a whole number.
        boundary_timestep: the timestep at which Wan 2.2 changes experts, 0 or more. Rounding moves no timestep across
            it.
        recipe: a name for messages.

    Arguments are keyword-only, because diffusers' configs lose positional ones. A pipeline passes no generator to
    ``step`` and never scales the first noise. The code that drives the pipeline calls ``bind_generator`` and
    ``scale_initial_noise`` after ``set_timesteps``. Raises ValueError for values outside these ranges.

    driver: the function that drives the pipeline, "use_rcm" or "use_distilled", or None. With a driver, ``step`` raises
    RuntimeError in a generation for which ``bind_generator`` was not called: another pipeline uses the scheduler.
    """

    order = 1
    driver: str | None = None
    _next: _NextGeneration | None = None

    @register_to_config
    def __init__(
        self,
        *,
        sigmas: Sequence[float],
        timesteps: Sequence[float] | None = None,
        solver: str = "euler",
        state_dtype: str = "float32",
        round_timesteps_to_bf16: bool = False,
        fewer_steps: bool = False,
        num_train_timesteps: int = 1000,
        boundary_timestep: float | None = None,
        recipe: str = "this sampler",
    ):
        _check_timesteps(num_train_timesteps, boundary_timestep)
        given = Recipe(recipe, solver, sigmas=sigmas, timesteps=timesteps, state_dtype=state_dtype)
        # JSON knows no arrays.
        self.register_to_config(
            sigmas=list(given.sigmas), timesteps=None if given.timesteps is None else list(given.timesteps)
        )
        self.solver, self.state_dtype = solver, state_dtype
        self.set_timesteps(len(given.sigmas))

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        sigmas: Sequence[float] | torch.Tensor | None = None,
        timesteps: Sequence[float] | torch.Tensor | None = None,
        mu: float | None = None,
    ):
        """Choose the next generation's times: ``timesteps`` [N], on the device, and ``sigmas`` [N + 1], on the CPU.

        By default these are the first num_inference_steps of the configured times (None: all). Times that you pass are
        strictly decreasing and without the final 0: sigmas in (0, 1], or timesteps in (0, num_train_timesteps]. Raises
        ValueError for other values.

        mu: LTX-2's pipelines pass it, and 1, 1 − 1/N, … as sigmas for a call without sigmas of its own. These choose N
        configured times then.
        """
        if mu is not None and sigmas is not None and are_evenly_spaced(sigmas):
            num_inference_steps, sigmas = len(sigmas), None
        if sigmas is not None and timesteps is not None:
            raise ValueError("both sigmas and timesteps were given; they say the same, so give one.")
        known, last = None, self.config.num_train_timesteps
        if timesteps is not None:
            given = checked_times(timesteps, "timesteps", last)
            if given[0] <= 1 < last:
                raise ValueError(f"timesteps={list(given)} look like times in (0, 1]; pass those as sigmas.")
            times = _with_end(given) / last
        elif sigmas is not None:
            times = _with_end(checked_times(sigmas, "sigmas", 1.0))
        else:
            times, known = self._configured_times(num_inference_steps)
        if num_inference_steps not in (None, len(times) - 1):
            raise ValueError(
                f"num_inference_steps={num_inference_steps}, but {len(times) - 1} sigmas or timesteps are set; pass "
                f"num_inference_steps={len(times) - 1}."
            )
        self._set_times(times, device, known)

    def _configured_times(self, num_inference_steps: int | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return N steps' times with the final 0, fp64 [N + 1], and their configured timesteps [N], or None."""
        longest = len(self.config.sigmas)
        steps = longest if num_inference_steps is None else whole_number(num_inference_steps, "num_inference_steps")
        if steps not in range(1 if self.config.fewer_steps else longest, longest + 1):
            takes = f"1 to {longest}" if self.config.fewer_steps else str(longest)
            raise ValueError(
                f"num_inference_steps={num_inference_steps}: {self.config.recipe} takes {takes} steps. Pass "
                f"num_inference_steps={longest}, guidance_scale=1.0.{self._more_steps()}"
            )
        known = self.config.timesteps
        known = None if known is None else torch.tensor(known[:steps], dtype=torch.float32, device="cpu")
        return _with_end(self.config.sigmas[:steps]), known

    def _more_steps(self) -> str:
        """Return a sentence on how to sample in more steps, or nothing for a recipe without a known spacing."""
        recipe = RECIPES.get(self.config.recipe)
        if recipe is None or recipe.shift is None:
            return ""
        more = [recipe.steps + 2, recipe.steps * 2]
        return f" For more, such as {more[0]} or {more[1]}, at the same spacing, call use_distilled with steps=."

    def _set_times(
        self, times: torch.Tensor, device: str | torch.device | None = None, timesteps: torch.Tensor | None = None
    ):
        self.sigmas = times
        if timesteps is None:
            timesteps = model_timesteps(
                times[:-1],
                self.config.num_train_timesteps,
                to_bf16=self.config.round_timesteps_to_bf16,
                boundary=self.config.boundary_timestep,
            )
        self.timesteps = timesteps.to(device)
        self.num_inference_steps = len(self.timesteps)
        self._step_index = self._begin_index = self._final_dtype = None
        # The last generator was another generation's. This one's is bound later, or was bound for these times.
        self.generator: Generator | None = None if self._next is None else self._next.generator
        self._is_bound, self._next = self._next is not None, None

    @property
    def init_noise_sigma(self) -> float:
        """The first time t_0: the network's first input is t_0 · ε."""
        return float(self.sigmas[0])

    @property
    def step_index(self) -> int | None:
        """The index of the next step, or None before the first."""
        return self._step_index

    @property
    def begin_index(self) -> int | None:
        """The index of the first step, or None if the pipeline did not set it."""
        return self._begin_index

    def set_begin_index(self, begin_index: int = 0):
        """Set the index of the generation's first step, so that ``step`` need not find it by its timestep."""
        self._begin_index = begin_index

    def bind_generator(self, generator: Generator | None, *, before_times: bool = False):
        """Begin a generation, whose steps draw from a generator.

        Args:
            generator: one, or one per sample. None: torch's global generator.
            before_times: True if set_timesteps is called afterwards, on this scheduler and on copies of it for more
                streams of the same generation. All of them draw from the one generator.
        """
        _generation.scheduler = weakref.ref(self)
        if before_times:
            self._next = _NextGeneration(generator)
        else:
            self.generator, self._is_bound = generator, True

    def scale_initial_noise(self, noise: torch.Tensor) -> torch.Tensor:
        """Return the initial state ``t_0 · noise``, of any shape. The last ``step`` returns noise's dtype.

        Raises TypeError unless the noise is floating-point.
        """
        _check_floating(noise=noise)
        self._final_dtype = noise.dtype
        state = noise.to(self._precision) * self.init_noise_sigma
        return state if self.state_dtype == "model" else state.to(getattr(torch, self.state_dtype))

    def scale_model_input(self, sample: torch.Tensor, timestep: float | torch.Tensor | None = None) -> torch.Tensor:
        """Return the sample unchanged: the network's input is the state itself."""
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

        timestep: one of ``timesteps``. It chooses the first step if no begin index is set.
        generator: draws this step's noise. None: the bound generator.

        Returns the next sample in the state's dtype. The last step's result has the first sample's dtype.

        Raises ValueError after the last step and for an unknown timestep, and TypeError unless both tensors are
        floating-point. Raises RuntimeError if this step draws noise, but no generator is given and ``bind_generator``
        was not called after ``set_timesteps``.
        """
        _check_floating(model_output=model_output, sample=sample)
        if self.driver is not None and not self._is_bound:
            shared = "" if self.driver == "use_rcm" else ", without a source, because it has the LoRA already"
            raise RuntimeError(
                f"this pipeline has the scheduler of another one, on which {self.driver} was called. Its own generator "
                "and guidance_scale would not count, and its first noise would not be scaled. Call "
                f"{self.driver} on this pipeline too{shared}."
            )
        if self._step_index is None:
            self._step_index = self._first_index(timestep)
        if self._final_dtype is None:
            self._final_dtype = sample.dtype
        if self._step_index >= self.num_inference_steps:
            raise ValueError(f"all {self.num_inference_steps} steps are taken; call set_timesteps to start again.")
        t, t_next = self.sigmas[self._step_index : self._step_index + 2].tolist()
        state_dtype = model_output.dtype if self.state_dtype == "model" else getattr(torch, self.state_dtype)
        is_last = self._step_index + 1 == self.num_inference_steps
        previous = self._solve(sample.to(state_dtype), model_output, t, t_next, is_last, generator).to(state_dtype)
        self._step_index += 1
        if is_last:
            _generation.scheduler = None
            previous = previous.to(self._final_dtype)
        return SchedulerOutput(prev_sample=previous) if return_dict else (previous,)

    @property
    def _precision(self) -> torch.dtype:
        """The dtype for scaling the first noise, and for computing in all solvers except "lcm"."""
        return torch.float64 if self.state_dtype == "float64" else torch.float32

    def _solve(self, x, velocity, t, t_next, is_last, generator) -> torch.Tensor:
        if self.solver == "lcm":
            noise = None if is_last else self._noise_by_frame(x, velocity.dtype, generator)
            return lcm_step(x, velocity, t, t_next, noise)
        in_precision = x.to(self._precision), velocity.to(self._precision), t, t_next
        if self.solver == "euler":
            return euler_step(*in_precision)
        # Draw noise in the last step too, where it is unused: the published sampler also advances the generator there.
        return sde_step(*in_precision, self._noise(x.shape, torch.float32, x.device, generator))

    def _noise_by_frame(self, x: torch.Tensor, dtype: torch.dtype, generator: Generator | None) -> torch.Tensor:
        """Return noise like x. For a video [B, C, T, H, W] it is drawn as [B, T, C, H, W]."""
        if x.dim() != 5:
            return self._noise(x.shape, dtype, x.device, generator)
        return self._noise(x.transpose(1, 2).shape, dtype, x.device, generator).transpose(1, 2)

    def _noise(self, shape, dtype: torch.dtype, device: torch.device, generator: Generator | None) -> torch.Tensor:
        if generator is None and not self._is_bound:
            raise RuntimeError(
                "this step draws noise, but no generator was given. In a pipeline, call use_rcm(pipe) or "
                "use_distilled(pipe) first. In a loop of your own, pass generator=, or call bind_generator after "
                "set_timesteps, with None for torch's global generator."
            )
        generator = self.generator if generator is None else generator
        if isinstance(generator, list) and len(generator) not in (1, shape[0]):
            raise ValueError(f"{len(generator)} generators for a batch of {shape[0]}; give one, or one per sample.")
        return randn_tensor(shape, generator=generator, device=device, dtype=dtype)

    def add_noise(self, original_samples: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """Return noised samples [B, ...] for video to video: ``(1 − t)·x_0 + t·noise``, in the samples' dtype.

        timesteps [B] (or one for all) are entries of ``timesteps``. t is their exact time, not the rounded one. Raises
        TypeError unless samples and noise are floating-point.
        """
        _check_floating(original_samples=original_samples, noise=noise)
        t = self.sigmas[[self._first_index(timestep) for timestep in timesteps.reshape(-1)]]
        t = t.to(original_samples).reshape(-1, *[1] * (original_samples.dim() - 1))
        return (1 - t) * original_samples + t * noise

    def scale_noise(self, sample: torch.Tensor, timestep: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """``add_noise`` with the argument order of diffusers' flow-matching schedulers."""
        return self.add_noise(sample, noise, timestep)

    def _first_index(self, timestep: float | torch.Tensor) -> int:
        """Return the begin index if one is set, else the index of the step with this timestep."""
        if self._begin_index is not None:
            return self._begin_index
        indices = (self.timesteps.cpu() == float(timestep)).nonzero().flatten().tolist()
        if len(indices) != 1:
            raise ValueError(
                f"timestep {float(timestep)} occurs {len(indices)} times in this schedule, not once: "
                f"{self.timesteps.tolist()}; pass an entry of scheduler.timesteps, or call set_begin_index."
            )
        return indices[0]

    def __len__(self) -> int:
        return self.config.num_train_timesteps


class RCMScheduler(FewStepScheduler):
    """The few-step sampler at rCM's times, with the state in fp64. ``use_rcm(pipe)`` installs it.

    Args:
        num_train_timesteps: the network's timestep at t = 1.
        sigma_max: the noise-to-signal ratio of the first time, σ_max/(1 + σ_max). 80 for text, 200 for image to video.
        stochastic: True for fresh noise in every step, as published for text to video. False for the deterministic ODE.
        round_timesteps_to_bf16: True to give the network timesteps rounded to bf16, as in training.
        sigmas: times in place of the published ones, any number, strictly decreasing in (0, 1], without the final 0.
        boundary_timestep: the timestep at which Wan 2.2 changes experts. Rounding moves no timestep across it.

    `FewStepScheduler` says what the code that drives the pipeline calls. Raises ValueError for values outside these
    ranges.
    """

    @register_to_config
    def __init__(
        self,
        *,
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
            self.register_to_config(sigmas=list(checked_times(sigmas, "sigmas", 1.0)))
        _check_timesteps(num_train_timesteps, boundary_timestep)
        self.solver, self.state_dtype = ("sde" if stochastic else "euler"), "float64"
        self.set_timesteps(1 if sigmas is None else len(self.config.sigmas))

    def _configured_times(self, num_inference_steps: int | None) -> tuple[torch.Tensor, None]:
        """Return the published times of 1 to 4 steps, or the configured sigmas, one per step."""
        if self.config.sigmas is not None:
            return _with_end(self.config.sigmas), None
        return rcm_times(whole_number(num_inference_steps, "num_inference_steps"), self.config.sigma_max), None


def scheduler_of(
    recipe: Recipe, num_train_timesteps: int = 1000, boundary_timestep: float | None = None
) -> FewStepScheduler:
    """Return the scheduler that samples as a recipe says, its timesteps set to the recipe's."""
    shared = {"num_train_timesteps": num_train_timesteps, "boundary_timestep": boundary_timestep}
    shared["round_timesteps_to_bf16"] = recipe.round_timesteps_to_bf16
    if recipe.sigma_max is not None:
        scheduler = RCMScheduler(sigma_max=recipe.sigma_max, stochastic=recipe.solver == "sde", **shared)
        scheduler.set_timesteps(recipe.steps)
        return scheduler
    own = ("sigmas", "timesteps", "solver", "state_dtype", "fewer_steps")
    return FewStepScheduler(**{name: getattr(recipe, name) for name in own}, **shared, recipe=recipe.name)


def _with_end(times: Sequence[float]) -> torch.Tensor:
    """Return times with the final 0, fp64 [N + 1] on the CPU, also if that is not PyTorch's default device."""
    return torch.tensor([*times, 0.0], dtype=torch.float64, device="cpu")


def _check_timesteps(num_train_timesteps: int, boundary_timestep: float | None) -> None:
    if not isinstance(num_train_timesteps, int) or num_train_timesteps < 1:
        raise ValueError(f"num_train_timesteps={num_train_timesteps!r}; give a whole number above 0, 1000 for Wan.")
    is_finite = isinstance(boundary_timestep, Real) and 0 <= boundary_timestep < math.inf
    if boundary_timestep is not None and not is_finite:
        raise ValueError(f"boundary_timestep={boundary_timestep!r}; give a finite timestep, 0 or more, or None.")


def _check_floating(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise TypeError(f"{name} is {name_of_dtype(tensor.dtype)}; give a floating-point tensor: {name}.float().")
