"""`generate --gpus N`: one video on several GPUs, with a process for each.

The processes import this file first. It imports torch, but nothing that warns when it is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from tqdm import tqdm

from ..wording import counted
from .errors import CommandError, user_errors
from .other_warnings import without_other_warnings

START_METHOD = "spawn"  # CUDA does not run in forks
# Seconds that a failed process waits before it ends. The others fail when it ends, because its connections close, and
# wait as long. So the first failure is seen first.
BEFORE_THE_END = 1


def on_gpus(arguments: argparse.Namespace) -> int:
    """Run `generate` in a process for each of --gpus, of which the first writes the video. Return 0.

    The first process that fails ends all. Raises CommandError for its error if a user can fix that, or if it was
    killed, and ProcessRaisedException with its traceback for any other.
    """
    found = torch.cuda.device_count()
    if arguments.gpus > found:
        what_to_do = f"give {found} or fewer" if found > 1 else "leave --gpus out"
        raise CommandError(f"--gpus {arguments.gpus}: PyTorch finds {counted(found, 'GPU')} here; {what_to_do}.")
    with tempfile.TemporaryDirectory() as folder:
        given = arguments, f"file://{folder}/rendezvous"
        world = mp.start_processes(_one_process, given, arguments.gpus, join=False, start_method=START_METHOD)
        try:
            while not world.join():
                pass
        except ProcessRaisedException as error:
            *_, last = str(error).rstrip().splitlines()
            _, is_users, message = last.partition(f"{CommandError.__name__}: ")
            if is_users:
                raise CommandError(message) from None
            raise
        except ProcessExitedException as error:
            how = (
                f"was killed by {error.signal_name}" if error.signal_name else f"ended with exit code {error.exit_code}"
            )
            raise CommandError(
                f"the process of GPU {error.error_index} {how}; check the host's memory, which each process needs."
            ) from None
        finally:
            for process in world.processes:  # those that an interrupt did not end
                process.kill()
    return 0


def _one_process(rank: int, arguments: argparse.Namespace, rendezvous: str) -> None:
    """Run one of several processes, on the GPU of its rank."""
    arguments.is_first = rank == 0
    tqdm.set_lock(threading.RLock())  # its own has a semaphore: Python warns of a leak if this process is killed
    try:
        with _shown_by_first(rank), without_other_warnings(arguments.verbose), user_errors():
            from .commands import generate

            with _joined(rank, arguments, rendezvous):
                generate(arguments)
    except Exception:
        time.sleep(BEFORE_THE_END)
        raise


@contextlib.contextmanager
def _shown_by_first(rank: int) -> Iterator[None]:
    """Show what the first process prints, but not what the others do, which is the same."""
    with open(os.devnull, "w") as nowhere:
        out, err = (sys.stdout, sys.stderr) if rank == 0 else (nowhere, nowhere)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield


@contextlib.contextmanager
def _joined(rank: int, arguments: argparse.Namespace, rendezvous: str) -> Iterator[None]:
    """Join the process group of all processes, and leave it after success. After an error the process ends anyway."""
    if torch.cuda.is_available():
        arguments.device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    dist.init_process_group(init_method=rendezvous, rank=rank, world_size=arguments.gpus)
    yield
    dist.destroy_process_group()
