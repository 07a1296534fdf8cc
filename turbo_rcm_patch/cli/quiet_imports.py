"""Imports of other packages whose warnings a command keeps off stderr."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_imports(verbose: bool = False) -> Iterator[None]:
    """Import other packages without their warnings, or with verbose=True with them."""
    if verbose:
        yield
        return
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
