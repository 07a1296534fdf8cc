"""The contests of the exact tier, at small sizes: every contender computes the same."""

import functools

import pytest
import torch

from scripts.benchmarks.contests import exact
from tests.bench.contests import check_in_bf16, check_that_the_oracle_tells_the_rows_apart, eager
from turbo_rcm_patch.bench import ops_exact
from turbo_rcm_patch.bench.ops import COMPILED, COPY, OpCase, OpKey, measure_copy_bandwidth, run_case
from turbo_rcm_patch.bench.ops_exact import FOLDED

CPU = torch.device("cpu")
SMALL = {
    "self-attention": functools.partial(ops_exact.attention, 2, 70, 70, 16),
    "cross-attention": functools.partial(ops_exact.attention, 2, 70, 9, 16),
    "linear_skip": functools.partial(ops_exact.linear_skip, 70, 24, 40),
    "linear_gelu": functools.partial(ops_exact.linear_gelu, 70, 40, 24),
    "linear_qkv": functools.partial(ops_exact.linear_qkv, 70, 24, 40),
    "layer_norm_modulate": functools.partial(exact.layer_norm_modulate, 70, 48),
    "rms_norm_rope": functools.partial(ops_exact.rms_norm_rope, 70, 2, 16),
}


@pytest.mark.parametrize("name", SMALL)
def test_all_contenders_are_right_to_bf16(name):
    check_in_bf16(SMALL[name](CPU, eager))


@pytest.mark.parametrize("name", SMALL)
def test_the_oracle_tells_the_rows_apart(name):
    check_that_the_oracle_tells_the_rows_apart(SMALL[name](CPU, eager))


def test_a_folded_gate_differs_by_the_bias_alone():
    contest = SMALL["linear_skip"](CPU, eager)
    difference = contest.rivals[COMPILED]().float() - contest.partial[FOLDED]().float()
    assert difference.std(dim=1).max() < 0.1  # the same in every row, except for roundings
    assert difference.mean(dim=1).abs().max() > 0.5


def test_targets_are_of_contenders():
    for case in exact.CASES:
        small = {"attention": "self-attention"}.get(case.build.func.__name__, case.build.func.__name__)
        contest = SMALL[small](CPU, eager)
        assert set(case.targets) <= {*contest.rivals, *contest.partial, COPY}
        assert COPY not in case.targets or contest.bytes_moved


@pytest.mark.gpu
def test_on_a_gpu_with_graphs_and_compiled_rivals():
    device = torch.device("cuda")
    bandwidth = measure_copy_bandwidth(device, nbytes=1 << 26)
    assert 1e10 < bandwidth < 1e14
    for build in SMALL.values():
        result = run_case(OpCase(OpKey("small"), build, {}), device, copy_bandwidth=bandwidth, rounds=3)
        assert result.best is not None, result
