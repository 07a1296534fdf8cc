"""The errors that end a command with one line and exit code 2."""


class CommandError(Exception):
    """What was wrong and what to do about it, in one line."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))
