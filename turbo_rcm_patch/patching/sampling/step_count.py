"""Find the present step of a generation from its scheduler's count."""

from __future__ import annotations

import logging
import weakref

from diffusers import DiffusionPipeline

from ...scheduler import running_scheduler

logger = logging.getLogger(__name__)

NOT_COUNTED = "a scheduler that counts no steps"


class Steps:
    """The steps of a pipeline, whichever scheduler it has at the time. Nothing waits for the GPU.

    Other pipelines with its transformers, such as copies, are counted too while they sample in few steps. Without a
    pipeline nothing else is counted, and all steps are exact.
    """

    def __init__(self, pipe: DiffusionPipeline | None = None):
        self._pipe = (lambda: None) if pipe is None else weakref.ref(pipe)
        self._begins, self._before = False, 0  # steps that the scheduler counts and the generation does not make
        self._warned = False

    def why_exact(self, first: int, last: int) -> str | None:
        """Return the reason why the present step runs exactly, as one of the first or last, or None.

        If no scheduler counts the steps, every step runs exactly, with one warning.
        """
        scheduler = self._scheduler()
        if not _counts(scheduler):
            self._warn(first, last)
            return NOT_COUNTED
        made, pipe = self._made(scheduler.step_index), self._pipe()
        count = len(scheduler.timesteps) - self._before
        if made == 0 and pipe is not None and pipe.scheduler is scheduler:
            # A generation may begin at a later step, as from a video. Before its first step only the pipeline knows it.
            count = getattr(pipe, "num_timesteps", count)
        return f"exact_steps={(first, last)}" if made < first or made >= count - last else None

    def _scheduler(self) -> object:
        """Return the scheduler of the present generation: the running few-step one, or else the pipeline's own."""
        own = getattr(self._pipe(), "scheduler", None)
        running = running_scheduler() if own is None or hasattr(own, "bind_generator") else None
        return own if running is None else running

    def _warn(self, first: int, last: int) -> None:
        if not self._warned:
            logger.warning(
                "exact_steps=%s: no scheduler counts the steps of this generation, so attention runs exactly in all of "
                "them. Patch the pipeline that you call, not another one with the same transformer.",
                (first, last),
            )
        self._warned = True

    def _made(self, counted: int | None) -> int:
        """Return the number of finished steps. counted: the scheduler's step index, or None before the first step."""
        if counted is None:
            self._begins, self._before = True, 0
            return 0
        if self._begins:
            self._begins, self._before = False, counted - 1
        return counted - self._before

    def __deepcopy__(self, memo: dict[int, object]) -> Steps:
        """Count the steps of the pipeline's copy if it is being copied, else no pipeline's."""
        return Steps(memo.get(id(self._pipe())))

    def __reduce__(self) -> tuple:
        """Pickle without the pipeline."""
        return Steps, ()


def _counts(scheduler: object) -> bool:
    """True if a scheduler counts steps and is in a generation: it has timesteps, and not all of them are done."""
    timesteps = getattr(scheduler, "timesteps", None)
    if timesteps is None or not hasattr(scheduler, "step_index"):
        return False
    is_set = getattr(scheduler, "num_inference_steps", len(timesteps)) is not None
    return is_set and (scheduler.step_index or 0) < len(timesteps)


def why_not_countable(pipe: object) -> str | None:
    """Return why a pipeline's scheduler cannot count its steps, or None if it can."""
    by_frame = any(cls.__name__.startswith("SkyReelsV2DiffusionForcing") for cls in type(pipe).__mro__)
    return f"{type(pipe).__name__}, whose frames are each in a step of their own" if by_frame else None
