"""Ranks that hang or fail: the test fails with an error that says where each of them was."""

import time

import pytest
import torch.distributed as dist

from tests.ranks import RANKS, in_cpu_ranks

SECONDS = 3


def one_never_comes(rank):
    if rank == 1:
        time.sleep(20 * SECONDS)
    dist.barrier()


def one_fails(rank):
    dist.barrier()  # else the other one may not have come so far
    if rank == 1:
        time.sleep(1)
        raise ValueError("no memory")
    time.sleep(20 * SECONDS)  # gloo's waits would end with errors of their own


def test_ranks_that_hang_end_and_say_where(tmp_path):
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match="terminated with exit code 1") as failure:
        in_cpu_ranks(one_never_comes, tmp_path, SECONDS)
    assert time.monotonic() - start < 10 * SECONDS
    message = str(failure.value)
    assert "Timeout (0:00:03)" in message
    for rank in range(RANKS):
        _, _, place = message.partition(f"rank {rank}: ")
        assert " in one_never_comes" in place.partition("rank ")[0]


def test_an_error_says_where_the_other_rank_waited(tmp_path):
    with pytest.raises(pytest.fail.Exception, match="ValueError: no memory") as failure:
        in_cpu_ranks(one_fails, tmp_path)
    _, _, place = str(failure.value).partition("rank 0: ")
    assert " in one_fails" in place.partition("rank ")[0]
