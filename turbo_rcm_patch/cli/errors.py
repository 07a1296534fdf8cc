"""The errors that end a command with one line and exit code 2."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator

OUT_OF_MEMORY = (
    "out of memory; try fewer --frames, a smaller --height and --width, --offload or --vram on one GPU, or for "
    "evaluate a smaller --batch-size."
)

_ADVICE = {  # in Python, and the same in the shell
    "give source=(high, low)": "give --lora HIGH --lora-2 LOW",
    "recipe= says how": "--recipe says how",
    "as recipe=, one of": "as --recipe, one of",
    ", or a Recipe of your own": "",
    "use_rcm is for Wan": "--sigma-max is for Wan",
    "call use_distilled with recipe='turbot2av'": "give --recipe turbot2av",
    "load it as a diffusers pipeline and call use_distilled without source": "give it as --transformer",
    "load it with from_pretrained, then call use_distilled without source": "give it as --model",
    "load it with use_distilled or with pipe.load_lora_weights": "give it as --lora, beside the whole model",
    "load them with trp.load_turbodiffusion, or take another preset": "give them as --transformer, or another --preset",
    "give another preset, such as 'quantized'": "give another --preset, such as quantized",
    "give the preset 'sparse'": "give --preset sparse",
}


class CommandError(Exception):
    """One line that says what was wrong and what to do about it."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


def in_the_shell(error: Exception | str) -> str:
    """Return an error's message with options in place of what Python's functions take."""
    message = re.sub(r"^recipe='([\w-]+)'", r"--recipe \1", str(error))
    message = re.sub(r"^steps=", "--steps ", message)
    message = re.sub(r"^sigma_max=", "--sigma-max ", message)
    for advice, option in _ADVICE.items():
        message = message.replace(advice, option)
    return message


def why_not_loaded(error: Exception) -> str:
    """Return why diffusers did not load a model, in one line. Without network diffusers blames the repository."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    causes, cause = [], error
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    of_network = (LocalEntryNotFoundError, ConnectionError, TimeoutError, socket.gaierror)
    if any(isinstance(cause, of_network) for cause in causes):
        return "the hub cannot be reached, and this machine has no copy; check the network, or give a folder."
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return f"{line.rstrip('. ')}; check the name, the network and the files."


def exit_code(name: str, run: Callable[[], int]) -> int:
    """Return what ``run()`` returns, or 2 after a CommandError, which is printed after the program's name."""
    try:
        code = run()
        if sys.stdout is not None:  # None: closed from the start
            sys.stdout.flush()
        return code
    except CommandError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has left, as in `turbo-rcm info | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python writes an error at the end
        return 1


@contextlib.contextmanager
def user_errors(out_of_memory: str = OUT_OF_MEMORY) -> Iterator[None]:
    """Turn errors that a user can fix, such as too little memory, into a CommandError."""
    import torch  # here, so that `--help` and most errors come at once

    from ..patching import PatchError

    try:
        yield
    except PatchError as error:
        raise CommandError(in_the_shell(error)) from error
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise CommandError(out_of_memory) from error
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise CommandError(out_of_memory) from error
