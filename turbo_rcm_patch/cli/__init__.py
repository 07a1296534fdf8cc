"""The command `turbo-rcm`: generate, compare, verify, evaluate, info, convert, demo, tune.

arguments.py: options. checks.py: what can be found wrong before a model is loaded. files.py: outputs, written whole or
not at all. other_warnings.py: keeps other packages' warnings off stderr. pipelines.py: the model. commands.py: the
commands. page.py, studio.py: the page of `demo`, and what it does. tuning.py: `tune`. Only the last five import torch
and diffusers, so that `--help` and most errors come at once.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence

from .arguments import parse_arguments
from .checks import check_arguments
from .errors import exit_code
from .other_warnings import without_chatter


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0; 1 when `verify` finds a block worse than allowed; 2 after a one-line error."""
    arguments = parse_arguments(argv)
    return exit_code(f"turbo-rcm {arguments.command}", lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    check_arguments(arguments)
    with contextlib.nullcontext() if arguments.verbose else without_chatter():
        from . import commands

        return commands.run(arguments)
