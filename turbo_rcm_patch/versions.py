"""The newest releases that the tests run with, and the pairs of torch and Triton that ran on a GPU.

Others are not refused: `patch` warns of newer releases once, and `info` warns of both.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re

logger = logging.getLogger(__name__)

NEWEST_TESTED = {"torch": "2.15", "triton": "3.9", "diffusers": "0.42", "transformers": "5"}

# Pairs of torch and Triton with which the GPU tests passed. The figures in results/ are of the first.
RAN_ON_A_GPU = (("2.11", "3.6"), ("2.14", "3.8"))


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


def unknown_pair_note() -> str | None:
    """Return a sentence on the installed pair of torch and Triton if it did not run on a GPU yet, or None."""
    installed = [importlib.import_module(name).__version__ for name in ("torch", "triton")]
    pair = tuple(".".join(map(str, _numbers(version)[:2])) for version in installed)
    if pair in RAN_ON_A_GPU:
        return None
    known = " and ".join(f"torch {torch} with Triton {triton}" for torch, triton in RAN_ON_A_GPU)
    return (
        f"On a GPU nobody ran torch {installed[0]} with Triton {installed[1]} yet, only {known}. Check the results "
        "once, with turbo-rcm verify."
    )


@functools.cache
def warn_of_untested() -> None:
    """Log `untested_note`, once in a process."""
    note = untested_note()
    if note is not None:
        logger.warning(note)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))
