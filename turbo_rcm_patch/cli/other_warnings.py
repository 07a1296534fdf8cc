"""Other packages' warnings, which a command keeps off stderr unless it is given --verbose."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator

from .quiet_imports import quiet_imports

OWN = "turbo_rcm_patch"


@contextlib.contextmanager
def without_other_warnings(verbose: bool = False) -> Iterator[None]:
    """Hide Python warnings, other packages' log below errors, and, if stderr is no terminal, progress bars of loading.

    This package's own log stays, and with verbose=True everything does. The libraries are imported here, because
    importing them logs, and sets the levels of their loggers.
    """
    if verbose:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with quiet_imports():
            from ..embedded import without_progress_bars
            from . import commands  # noqa: F401
        bars_of_loading = contextlib.nullcontext() if sys.stderr.isatty() else without_progress_bars()
        with _only_errors_of_others(), bars_of_loading:
            yield


@contextlib.contextmanager
def _only_errors_of_others() -> Iterator[None]:
    """Raise the levels of all loggers except our own. Loggers made later, and those without a level, inherit them."""
    loggers = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    others = [logger for logger in loggers if logger.level and logger.name.partition(".")[0] != OWN]
    own = logging.getLogger(OWN)
    before = {logger: logger.level for logger in [logging.root, *others, own]}
    own.setLevel(own.getEffectiveLevel())
    for logger in [logging.root, *others]:
        logger.setLevel(max(logger.level, logging.ERROR))
    try:
        yield
    finally:
        for logger, level in before.items():
            logger.setLevel(level)
