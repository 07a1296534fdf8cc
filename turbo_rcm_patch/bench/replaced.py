"""Attributes of an object that have another value for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from diffusers import DiffusionPipeline


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """A context in which the owner's attribute has this value, in place of its own or of its class's."""
    is_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def progress_bar(pipe: DiffusionPipeline, **options: object) -> contextlib.AbstractContextManager[None]:
    """A context in which the pipeline's progress bar has these options beside its own."""
    return replaced(pipe, "_progress_bar_config", {**getattr(pipe, "_progress_bar_config", {}), **options})
