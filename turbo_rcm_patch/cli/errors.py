"""The errors that end a command with one line and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable


class CommandError(Exception):
    """What was wrong and what to do about it, in one line."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


def exit_code(name: str, run: Callable[[], int]) -> int:
    """What ``run()`` returns; 2 after a CommandError, which is printed after the program's name."""
    try:
        return run()
    except CommandError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
