"""Which of a generation's steps a pipeline is in, as its scheduler counts them."""

from __future__ import annotations

import weakref

from diffusers import DiffusionPipeline


class Steps:
    """The steps of a pipeline, whichever scheduler it has at the time. Nothing waits for the GPU."""

    def __init__(self, pipe: DiffusionPipeline):
        self._pipe = weakref.ref(pipe)

    def why_exact(self, first: int, last: int) -> str | None:
        """Why the step under way is one of the first or last that run exactly, in a few words; None when it is not.

        Where nobody counts the steps every one does.
        """
        scheduler = getattr(self._pipe(), "scheduler", None)
        timesteps = getattr(scheduler, "timesteps", None)
        if timesteps is None or not hasattr(scheduler, "step_index"):
            return "a scheduler that counts no steps"
        index = scheduler.step_index or 0  # None before the first step
        within = index < first or index >= len(timesteps) - last
        return f"exact_steps={(first, last)}" if within else None

    def __reduce__(self) -> tuple:
        """Copied and pickled without the pipeline, whose copy is another one: all steps are exact then."""
        return _nobodys_steps, ()


def _nobodys_steps() -> Steps:
    steps = Steps.__new__(Steps)
    steps._pipe = lambda: None
    return steps
