"""Processes of one torch.distributed world ("ranks"), for tests of sharding and context parallelism.

A new process takes ten seconds to import everything. So tests/conftest.py forks a process when all tests are imported,
which then forks the ranks. It does so before any test runs: autograd does not run in forks of a process that used it.
With a GPU a server of new processes starts them instead, because CUDA does not run in forks.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import signal

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import tests.tiny_wan
import turbo_rcm_patch.patching.apply
from turbo_rcm_patch.patching.families import family_of

RANKS = 2
_forked = []  # the connection to the process that forks the ranks, if there is one
# The imports that take most of a new process's time.
IMPORTS = [module.__name__ for module in (torch._dynamo, tests.tiny_wan, turbo_rcm_patch.patching.apply)]


def start_on_cpu(function, *arguments):
    """Run function(rank, *arguments) in a process for each rank, without GPUs."""
    if not _forked:
        multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTS)
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("CUDA_VISIBLE_DEVICES", "")
            torch.multiprocessing.start_processes(function, arguments, RANKS, start_method="forkserver")
    else:
        (connection,) = _forked
        connection.send((function, arguments))
        error = connection.recv()
        if error is not None:
            pytest.fail(error)


def in_cpu_ranks(check, folder, seconds=300):
    """Return check(rank) of each rank, run without GPUs. Fail if a rank fails, or takes more than so many seconds."""
    with _places_in_errors(folder):
        start_on_cpu(_run_rank, check, folder, "cpu:gloo", seconds)
    return _results(folder)


def in_gpu_ranks(check, folder, seconds=300):
    """Do what `in_cpu_ranks` does, with the GPU of its number for each rank."""
    with _places_in_errors(folder):
        arguments = check, folder, "nccl", seconds
        torch.multiprocessing.start_processes(_run_rank, arguments, RANKS, start_method="spawn")
    return _results(folder)


@contextlib.contextmanager
def _places_in_errors(folder):
    """Add to an error of the ranks where the other ranks were: those that took too long, or waited for a failed one."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        places = [f"rank {path.stem}: {path.read_text()}" for path in sorted(folder.glob("*.place"))]
        pytest.fail("\n".join([str(error), *places]))


def _results(folder):
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def use_one_thread():
    """Let the ranks share the cores. PyTorch can refuse this in a fork, so that it is not asked without need."""
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)


def _run_rank(rank, check, folder, backend, seconds):
    place = os.open(folder / f"{rank}.place", os.O_CREAT | os.O_WRONLY)  # open until the process ends
    faulthandler.dump_traceback_later(seconds, exit=True, file=place)
    faulthandler.register(signal.SIGTERM, file=place, chain=True)  # sent to the others when one fails
    use_one_thread()
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.save(check(rank), folder / f"{rank}.pt")
    dist.barrier()  # gloo fails on a rank that still connects while this one leaves
    dist.destroy_process_group()


def fork_before_tests():
    """Fork the process that forks the ranks. It ends with this one."""
    if torch.cuda.is_available():
        return
    ours, theirs = multiprocessing.Pipe()
    if os.fork():
        theirs.close()
        _forked.append(ours)
        return
    ours.close()
    with contextlib.suppress(EOFError):
        while True:
            _fork_ranks(theirs)
    os._exit(0)


def _fork_ranks(connection):
    function, arguments = connection.recv()
    try:
        torch.multiprocessing.start_processes(function, arguments, RANKS, start_method="fork")
    except Exception as error:
        connection.send(str(error))
    else:
        connection.send(None)


def shard(model, mesh, **options):
    """Apply fully_shard (FSDP2) to each block and to the whole, as users do."""
    for _, block in family_of(model).every_block(model):
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
