"""The schedules that the authors of few-step checkpoints of Wan and LTX-2 publish, as data.

In rectified-flow time σ in [0, 1]: ``x_σ = (1 − σ)·x_0 + σ·ε``, and the network predicts the velocity ``v = ε − x_0``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real

SOLVERS = ("sde", "euler", "lcm")
STATE_DTYPES = ("float64", "float32", "bfloat16", "model")
RCM_STEPS = 4  # the number of published times; fewer steps take the first ones
INTERMEDIATE_ANGLES = (1.5, 1.4, 1.0)  # rCM's TrigFlow times after the first one, as published


@dataclass(frozen=True)
class Recipe:
    """The sampler settings of a distilled checkpoint. Raises ValueError for values outside these ranges.

    Attributes:
        name: a name for messages.
        solver: how a step goes from σ to the next time σ'.
            "euler": ``x + (σ' − σ)·v``, no noise after the first.
            "sde": predict x_0 and noise it anew, ``(1 − σ')·(x − σ·v) + σ'·ε``. ε in fp32, drawn in the last step too.
            "lcm": the same with x_0 and ε in the model's dtype, ε drawn frame by frame ([B, T, C, H, W]) and none for
            the last step.
        sigmas: the times σ of the steps, strictly decreasing in (0, 1], without the final 0.
        sigma_max: instead of sigmas, rCM's times from this noise-to-signal ratio down.
        timesteps: the timestep that the network gets in each step. None: 1000·σ in fp32.
        round_timesteps_to_bf16: round 1000·σ to bf16, as rCM does; the solver's σ stays exact.
        fewer_steps: True if a generation may have fewer steps, which take the first of the times. rCM's always may.
        state_dtype: the dtype of x between the steps. "model": the dtype of the network's output.
        boundary: with two experts, the high-noise one runs while σ >= boundary. None: the pipeline's own
            boundary_ratio.
        shift: the sigmas are 1, 1 − 1/steps, … warped by this shift (`shifted`), so that `in_steps` can make longer
            lists. None: they are not.
    """

    name: str
    solver: str
    sigmas: tuple[float, ...] | None = None
    sigma_max: float | None = None
    timesteps: tuple[float, ...] | None = None
    round_timesteps_to_bf16: bool = False
    fewer_steps: bool = False
    state_dtype: str = "float32"
    boundary: float | None = None
    shift: float | None = None

    def __post_init__(self):
        for field, accepted in (("solver", SOLVERS), ("state_dtype", STATE_DTYPES)):
            if getattr(self, field) not in accepted:
                raise ValueError(f"{field}={getattr(self, field)!r} is unknown; accepted are {', '.join(accepted)}.")
        if (self.sigmas is None) == (self.sigma_max is None):
            given = "neither sigmas nor sigma_max" if self.sigmas is None else "both sigmas and sigma_max"
            raise ValueError(f"recipe {self.name!r} has {given}; give sigmas, or for rCM's times sigma_max.")
        if self.sigma_max is not None and (self.solver == "lcm" or self.state_dtype != "float64" or self.timesteps):
            raise ValueError(
                f"recipe {self.name!r} has sigma_max, so its times are rCM's, with solver={self.solver!r}, "
                f"state_dtype={self.state_dtype!r} and timesteps={self.timesteps!r}; give solver 'sde' or 'euler', "
                "state_dtype 'float64' and no timesteps."
            )
        if self.boundary is not None and not (isinstance(self.boundary, Real) and 0 < self.boundary < 1):
            raise ValueError(f"boundary={self.boundary!r}; give a time between 0 and 1.")
        for field, largest in (("sigmas", 1.0), ("timesteps", math.inf)):
            if getattr(self, field) is not None:
                object.__setattr__(self, field, checked_times(getattr(self, field), field, largest))
        if self.sigmas and self.timesteps and len(self.sigmas) != len(self.timesteps):
            raise ValueError(
                f"{len(self.timesteps)} timesteps for {len(self.sigmas)} sigmas; give one timestep for each sigma."
            )
        if self.shift is not None and not are_evenly_spaced(self.sigmas or (), self.shift):
            raise ValueError(
                f"recipe {self.name!r} has sigmas that shift={self.shift} does not give; give "
                f"sigmas=evenly_spaced({self.steps}, {self.shift:g}), or leave shift out."
            )

    @property
    def steps(self) -> int:
        """The number of steps that the checkpoint was distilled to."""
        return RCM_STEPS if self.sigmas is None else len(self.sigmas)

    @property
    def accepted_steps(self) -> range:
        """The numbers of steps that a generation may have."""
        return range(1 if self.fewer_steps or self.sigmas is None else self.steps, self.steps + 1)

    @property
    def takes(self) -> str:
        """The numbers of steps that `in_steps` accepts, in words: "3", "1 to 4" or "4 or more"."""
        if self.shift is not None:
            return f"{self.steps} or more"
        first, last = self.accepted_steps[0], self.accepted_steps[-1]
        return str(last) if first == last else f"{first} to {last}"

    def in_steps(self, steps: int) -> Recipe:
        """Return the recipe for a number of steps: itself if it takes them, else a longer list of the same spacing.

        Raises ValueError if the recipe's authors publish no spacing, and for fewer steps than it takes.
        """
        steps = whole_number(steps, "steps")
        if steps in self.accepted_steps:
            return self
        if self.shift is not None and steps > self.steps:
            return dataclasses.replace(self, sigmas=evenly_spaced(steps, self.shift))
        others = "" if self.shift is not None else " For others, give a Recipe with sigmas of your own."
        raise ValueError(f"steps={steps}: {self.name} takes {self.takes} steps.{others}")


def whole_number(value: object, name: str) -> int:
    """Return an integer as Python's. Raises ValueError for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r}; give a whole number.") from None


def checked_times(values: Iterable[float], name: str, largest: float) -> tuple[float, ...]:
    """Return times as floats. Raises ValueError unless they are in (0, largest], finite, and decrease strictly."""
    try:
        times = tuple(map(float, values))
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch raises RuntimeError for rows of numbers
        times = ()
    if not times:
        raise ValueError(f"{name}={values!r}; give one or more numbers, highest first.")
    decreasing = all(after < before for before, after in itertools.pairwise(times))
    if not (decreasing and times[-1] > 0 and times[0] <= largest and math.isfinite(times[0])):
        limit = f"in (0, {largest:g}]" if math.isfinite(largest) else "above 0, finite and"
        raise ValueError(f"{name}={list(times)}; give numbers {limit} that decrease strictly, without the final 0.")
    return times


def shifted(sigmas: Sequence[float], shift: float) -> tuple[float, ...]:
    """Return ``shift·σ / (1 + (shift − 1)·σ)`` of each σ: the warp of flow matching schedules towards the noise."""
    return tuple(shift * sigma / (1 + (shift - 1) * sigma) for sigma in sigmas)


def evenly_spaced(steps: int, shift: float) -> tuple[float, ...]:
    """Return the σ of ``steps`` even steps from 1, warped by the shift: the times of shifted flow matching."""
    return shifted([1 - step / steps for step in range(steps)], shift)


def are_evenly_spaced(sigmas: Sequence[float], shift: float = 1.0) -> bool:
    """True for the σ of `evenly_spaced`."""
    pairs = zip(sigmas, evenly_spaced(len(sigmas), shift), strict=True)
    return len(sigmas) > 0 and all(abs(one - other) < 1e-6 for one, other in pairs)


# DMD's timesteps, and their σ: each is the nearest to the timestep in the table of σ = 8s/(1 + 7s), s in thousandths.
_DMD_TIMESTEPS = (1000.0, 757.0, 522.0)
_DMD_TABLE = shifted([s / 1000 for s in range(1000, 0, -1)], 8.0)
_DMD_SIGMAS = tuple(min(_DMD_TABLE, key=lambda sigma: abs(1000 * sigma - t)) for t in _DMD_TIMESTEPS)

_RCM = {"solver": "sde", "round_timesteps_to_bf16": True, "state_dtype": "float64"}
# rCM's times from σ = 1, and the timesteps that they become in the bf16 of TurboT2AV's authors.
_TURBOT2AV = {
    "sigmas": [math.sin(t) / (math.cos(t) + math.sin(t)) for t in (math.pi / 2, *INTERMEDIATE_ANGLES)],
    "timesteps": (1000.0, 928.0, 852.0, 608.0),
}
# The experts of Wan 2.2 change at 0.9; the authors' command for image to video takes the deterministic solver.
_RCM_I2V = {**_RCM, "solver": "euler", "sigma_max": 200.0, "boundary": 0.9}
_DMD = {"solver": "lcm", "sigmas": _DMD_SIGMAS, "timesteps": _DMD_TIMESTEPS, "state_dtype": "model"}
# Wan 2.2's boundaries, 0.875 and 0.9, both let these four times change experts after the second.
_EULER = {"solver": "euler", "sigmas": evenly_spaced(4, 5.0), "shift": 5.0, "boundary": 0.875}

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("rcm", **_RCM, sigma_max=80.0),
        Recipe("rcm-i2v", **_RCM_I2V),
        Recipe("turbowan", **_RCM, sigma_max=80.0),
        Recipe("turbowan-i2v", **_RCM_I2V),
        Recipe("fastwan", **_DMD),
        Recipe("lightx2v", **_EULER, state_dtype="bfloat16"),
        Recipe("lightx2v-flf2v", "euler", sigmas=evenly_spaced(4, 16.0), shift=16.0, state_dtype="bfloat16"),
        Recipe("lightx2v-nvfp4-i2v", "euler", sigmas=evenly_spaced(4, 7.0), shift=7.0, state_dtype="bfloat16"),
        Recipe("lightning", **_EULER),
        Recipe("causvid", **_DMD),
        # The authors publish no sampler for the LoRA. Other tools run it with these times.
        Recipe(
            "causvid-lora",
            "euler",
            sigmas=(1.0, 0.934, 0.862, 0.756, 0.603, 0.41, 0.25, 0.14, 0.074),
            fewer_steps=True,
        ),
        Recipe("turbot2av", "sde", **_TURBOT2AV, fewer_steps=True),
    )
}
SOUND_RECIPES = ("turbot2av",)  # for pipelines that make sound; the others are for those that do not
IMAGE_RECIPES = ("rcm-i2v", "turbowan-i2v", "lightx2v-flf2v", "lightx2v-nvfp4-i2v")  # for models that get an image


def find_recipe(recipe: str | Recipe) -> Recipe:
    """Return the recipe with this name, or the given Recipe itself.

    Raises ValueError for an unknown name, and TypeError for anything else.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(f"recipe={recipe!r}; give a Recipe, or the name of one: {', '.join(RECIPES)}.")
    if recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r} is unknown; accepted are {', '.join(RECIPES)}, or a Recipe of your own.")
    return RECIPES[recipe]


def recipes_for(*, sound: bool, image: bool) -> list[str]:
    """Return the names of the recipes for pipelines that make sound, or for the others.

    image: False for pipelines that take no image, without the recipes of image to video.
    """
    return [name for name in RECIPES if (name in SOUND_RECIPES) == sound and (image or name not in IMAGE_RECIPES)]


def recipe_names(*, sound: bool = False, image: bool = True) -> str:
    """Return the names of `recipes_for`, for messages."""
    return ", ".join(recipes_for(sound=sound, image=image))
