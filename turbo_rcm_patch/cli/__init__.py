"""The command `turbo-rcm`: generate, compare, verify, evaluate, info, convert, demo, tune.

These files import neither torch nor diffusers, so that `--help` and most errors come at once:

    arguments.py       the options
    command_checks.py, generation_checks.py, model_checks.py    errors that show before a model is loaded
    sizes.py           the sizes that a model takes
    files.py           outputs, written whole or not at all
    errors.py          one-line errors and exit codes
    other_warnings.py, quiet_imports.py    keep other packages' warnings off stderr

The others import them:

    commands.py        the commands; info.py has `info`, tuning.py `tune`
    pipelines.py       loads the model; transformers.py has --transformer
    model_memory.py    the GPU memory that `info` shows
    sampling.py        the sampler and the guidance; notes.py has warnings
    side_by_side.py    the videos of `compare`
    gpus.py            a process for each GPU
    demo_page.py       the page of `demo`; demo_videos.py makes its videos, demo_answer.py shows what they took
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .arguments import parse_arguments
from .command_checks import check_arguments
from .errors import exit_code
from .other_warnings import without_other_warnings
from .quiet_imports import quiet_imports


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return 0, 1 if `verify` finds a block worse than allowed, or 2 after a one-line error."""
    arguments = parse_arguments(argv)
    return exit_code(f"turbo-rcm {arguments.command}", lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command != "info" and getattr(arguments, "vram", None) is not None:
        # Before torch is imported, which reads this.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    check_arguments(arguments)
    if arguments.command == "evaluate":  # the imports alone can take 10 seconds
        print("turbo-rcm evaluate: loading PyTorch, diffusers and the model", file=sys.stderr, flush=True)
    if getattr(arguments, "gpus", 1) > 1:
        with quiet_imports(arguments.verbose):  # torch logs which processes it ends
            from .gpus import on_gpus

            return on_gpus(arguments)
    with without_other_warnings(arguments.verbose):
        from . import commands

        return commands.run(arguments)
