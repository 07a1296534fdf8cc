"""Imports of other packages whose warnings a command keeps off stderr."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Import other packages without their warnings."""
    with warnings.catch_warnings(), _nothing_logged_but_errors():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _nothing_logged_but_errors() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
