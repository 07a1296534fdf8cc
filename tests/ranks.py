"""Processes of one torch.distributed world ("ranks"), for tests of sharding and context parallelism."""

import multiprocessing

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

RANKS = 2
IMPORTS = ["turbo_rcm_patch.patching.apply", "tests.tiny_wan"]  # what takes most of a new process's time


def in_cpu_ranks(check, folder):
    """Return check(rank) of each rank, run without GPUs. One process imports the modules, then forks all ranks."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTS)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CUDA_VISIBLE_DEVICES", "")
        return _in_ranks(check, folder, "cpu:gloo", "forkserver")


def in_gpu_ranks(check, folder):
    """Return check(rank) of each rank, which may use the GPU of its number."""
    return _in_ranks(check, folder, "nccl", "spawn")


def _in_ranks(check, folder, backend, start_method):
    torch.multiprocessing.start_processes(_run_rank, (check, folder, backend), RANKS, start_method=start_method)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def _run_rank(rank, check, folder, backend):
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.save(check(rank), folder / f"{rank}.pt")
    dist.destroy_process_group()


def shard(model, mesh, **options):
    """Apply fully_shard (FSDP2) to each block and to the whole, as users do."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
