"""Find a pipeline's present step from its scheduler's count."""

from __future__ import annotations

import weakref

from diffusers import DiffusionPipeline

NOT_COUNTED = "a scheduler that counts no steps"


class Steps:
    """The steps of a pipeline, whichever scheduler it has at the time. Nothing waits for the GPU."""

    def __init__(self, pipe: DiffusionPipeline):
        self._pipe = weakref.ref(pipe)
        self._begins, self._before = False, 0  # steps that the scheduler counts and the generation does not make

    def why_exact(self, first: int, last: int) -> str | None:
        """Return the reason why the present step runs exactly, as one of the first or last, or None.

        If the scheduler does not count steps, every step runs exactly.
        """
        pipe = self._pipe()
        scheduler = getattr(pipe, "scheduler", None)
        timesteps = getattr(scheduler, "timesteps", None)
        if timesteps is None or not hasattr(scheduler, "step_index"):
            return NOT_COUNTED
        made = self._made(scheduler.step_index)
        # A generation may begin at a later step, as from a video: it then has fewer steps than the scheduler.
        count = getattr(pipe, "num_timesteps", len(timesteps))
        return f"exact_steps={(first, last)}" if made < first or made >= count - last else None

    def _made(self, counted: int | None) -> int:
        """Return the number of finished steps. counted: the scheduler's step index, or None before the first step."""
        if counted is None:
            self._begins = True
            return 0
        if self._begins:
            self._begins, self._before = False, counted - 1
        return counted - self._before

    def __reduce__(self) -> tuple:
        """Copy or pickle without the pipeline, because a copied pipeline is another one. All steps are exact then."""
        return _nobodys_steps, ()


def why_not_countable(pipe: object) -> str | None:
    """Return why a pipeline's scheduler cannot count its steps, or None if it can."""
    by_frame = any(cls.__name__.startswith("SkyReelsV2DiffusionForcing") for cls in type(pipe).__mro__)
    return f"{type(pipe).__name__}, whose frames are each in a step of their own" if by_frame else None


def _nobodys_steps() -> Steps:
    steps = Steps.__new__(Steps)
    steps._pipe = lambda: None
    return steps
