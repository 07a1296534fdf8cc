"""The newest releases that the tests run with. Newer ones are not refused: `patch` warns of them once, `info` too."""

from __future__ import annotations

import functools
import importlib
import logging
import re

logger = logging.getLogger(__name__)

NEWEST_TESTED = {"torch": "2.15", "triton": "3.9", "diffusers": "0.42", "transformers": "5"}


def untested() -> list[str]:
    """Return the installed packages that are newer than the tests' newest, each with both versions."""
    found = []
    for name, newest in NEWEST_TESTED.items():
        installed = importlib.import_module(name).__version__
        tested = _numbers(newest)
        if _numbers(installed)[: len(tested)] > tested:
            found.append(f"{name} {installed} (the tests run with {newest} at most)")
    return found


def untested_note() -> str | None:
    """Return a sentence on packages that are newer than tested, or None."""
    found = untested()
    if not found:
        return None
    return f"Not tested with {', '.join(found)}. Check the results once, with turbo-rcm verify."


@functools.cache
def warn_of_untested() -> None:
    """Log `untested_note`, once in a process."""
    note = untested_note()
    if note is not None:
        logger.warning(note)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))
