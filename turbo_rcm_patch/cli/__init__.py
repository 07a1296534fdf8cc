"""The command `turbo-rcm`: generate, compare, verify, evaluate, info, convert, demo, tune.

These files import neither torch nor diffusers, so that `--help` and most errors come at once:
arguments.py (options), checks.py (errors that show before a model is loaded), files.py (outputs, written whole or not
at all), errors.py, other_warnings.py and quiet_imports.py (keep other packages' warnings off stderr).
The others do: pipelines.py (loads the model), transformers.py (--transformer), sampling.py (its sampler and
guidance), commands.py, tuning.py (`tune`), video_writer.py, demo_page.py (the page of `demo`) and demo_videos.py (makes
its videos).
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence

from .arguments import parse_arguments
from .checks import check_arguments
from .errors import exit_code
from .other_warnings import without_other_warnings


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0; 1 when `verify` finds a block worse than allowed; 2 after a one-line error."""
    arguments = parse_arguments(argv)
    return exit_code(f"turbo-rcm {arguments.command}", lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    check_arguments(arguments)
    with contextlib.nullcontext() if arguments.verbose else without_other_warnings():
        from . import commands

        return commands.run(arguments)
