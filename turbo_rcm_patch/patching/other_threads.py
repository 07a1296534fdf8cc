"""Keep other threads from calling a model while the patch changes it, so that every call runs as it began."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType

from torch import nn

from .errors import PatchError

_changing = threading.RLock()  # held by the thread that patches or restores
GATE = "_compiled_call_impl"  # nn.Module calls it in place of everything else, hooks included
CALLS = {"_wrapped_call_impl", "__call__"}  # the methods that run when a module or a pipeline is called


@contextmanager
def no_other_calls(verb: str, models: Mapping[str, nn.Module]) -> Iterator[None]:
    """A context in which no other thread runs a call of these models. A call that begins meanwhile waits for its end.

    Raises PatchError if another thread is in a call of a model, of a part of it, or of a pipeline that has it.
    verb: what cannot be done then.
    """
    with _changing:
        before = [(model, vars(model)[GATE]) for model in models.values() if GATE in vars(model)]
        try:
            for model in models.values():
                vars(model)[GATE] = partial(_wait_and_call, model)
            called = next(_calls_under_way(models), None)
            if called is not None:
                raise PatchError(
                    f"cannot {verb}: another thread is in a call of {called}; {verb} when that call has ended."
                )
            yield
        finally:
            for model in models.values():
                del vars(model)[GATE]
            for model, own in before:
                vars(model)[GATE] = own


def _wait_and_call(model: nn.Module, *args: object, **kwargs: object) -> object:
    with _changing:
        pass
    return model(*args, **kwargs)


def _calls_under_way(models: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield what other threads call, for each call of these models, of parts of them or of pipelines that have them."""
    names = {id(part): name for name, model in models.items() for part in model.modules()}
    for thread, frame in sys._current_frames().items():
        while frame is not None and thread != threading.get_ident():
            called = _called_in(frame)
            if id(called) in names:
                yield names[id(called)]
            elif called is not None and not isinstance(called, nn.Module) and _has_any(called, models):
                yield f"a {type(called).__name__}"
            frame = frame.f_back


def _called_in(frame: FrameType) -> object | None:
    """Return the object whose call runs in a frame, or None for a frame of anything else."""
    code = frame.f_code
    if code.co_name not in CALLS or code.co_argcount == 0:
        return None
    return frame.f_locals.get(code.co_varnames[0])


def _has_any(pipeline: object, models: Mapping[str, nn.Module]) -> bool:
    """True if one of the models, or its compiled wrapper, is an attribute of a pipeline."""
    parts = list(getattr(pipeline, "__dict__", {}).values())
    return any(getattr(part, "_orig_mod", part) is model for part in parts for model in models.values())
