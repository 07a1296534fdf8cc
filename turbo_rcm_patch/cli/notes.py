"""Warnings and messages of a command. They are printed, or kept as notes for the page of `demo`."""

from __future__ import annotations

import argparse
import sys


def warn(arguments: argparse.Namespace, message: str) -> None:
    """Print a warning to stderr, or add it to ``arguments.notes``, which the page of `demo` has."""
    if hasattr(arguments, "notes"):
        arguments.notes.append(message)
    else:
        print(f"turbo-rcm {arguments.command}: warning: {message}", file=sys.stderr)


def tell(arguments: argparse.Namespace, message: str) -> None:
    """Print a message, or add it to ``arguments.notes``."""
    if hasattr(arguments, "notes"):
        arguments.notes.append(message)
    else:
        print(message, end="\n\n")
