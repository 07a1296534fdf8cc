"""The part that the handles of all patches share.

A handle restores at the end of a ``with``. It checks first that it can.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from .errors import PatchError
from .journal import Journal
from .weights.quantize_linears import quantized_linears, why_not_restorable

logger = logging.getLogger(__name__)
_Handle = TypeVar("_Handle", bound="Handle")


class Handle:
    """A handle with `active` and `restore`. It is a context manager that restores on exit, unless that was done."""

    def __enter__(self: _Handle) -> _Handle:
        return self

    def __exit__(self, exception_type: type | None, *_: object) -> None:
        if not self.active:
            return
        try:
            self.restore()
        except RuntimeError as error:
            if exception_type is None:
                raise
            logger.warning("%s", error)  # the exception that is being raised matters more


def check_restorable(
    models: dict[str, torch.nn.Module],
    journals: list[Journal],
    why_offloaded: Callable[[torch.nn.Module], str | None],
) -> None:
    """Raise PatchError if one of these models cannot be restored.

    why_offloaded: why the weights of a model with 8-bit weights cannot be replaced where they are, or None.
    """
    for (name, model), journal in zip(models.items(), journals, strict=True):
        if journal.owner is not model:
            raise PatchError(f"cannot restore: {name} is a shallow copy of a patched model; restore that model.")
    for name, model in models.items():
        reason = why_not_restorable(model) or (why_offloaded(model) if quantized_linears(model) else None)
        if reason is not None:
            raise PatchError(f"cannot restore {name}: {reason}")
    captured = [entry for journal in journals for entry in journal.captured()]
    if captured:
        kinds = sorted({type(module).__name__ for module, _ in captured})
        raise PatchError(
            f"cannot restore: on {len(captured)} modules ({', '.join(kinds)}) the patched forward was replaced after "
            "the patch; take the replacement off first."
        )
