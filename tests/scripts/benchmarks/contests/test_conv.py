"""The contest of convolutions, at small sizes: all contenders agree, and a wrong one is never timed."""

import functools

import pytest
import torch

from scripts.benchmarks.contests import conv
from tests.bench.contests import check_in_bf16, check_that_the_oracle_tells_the_rows_apart, eager
from turbo_rcm_patch.bench import ops_conv
from turbo_rcm_patch.bench.ops import COMPILED, OpCase, OpKey, run_case
from turbo_rcm_patch.bench.ops_conv import EAGER

CPU = torch.device("cpu")
SIZES = {  # T, H, W, C, N, kt, kh, upsample, interleave
    "3×3×3": (3, 5, 7, 16, 12, 3, 3, 1, 1),
    "upsampled": (2, 4, 5, 16, 12, 1, 3, 2, 1),
    "interleaved": (3, 4, 5, 16, 12, 3, 1, 1, 2),
    "1×1×1": (2, 4, 5, 16, 12, 1, 1, 1, 1),
}
SMALL = {name: functools.partial(ops_conv.conv_skip, *sizes) for name, sizes in SIZES.items()}


@pytest.mark.parametrize("name", SMALL)
def test_all_contenders_are_right_to_bf16(name):
    check_in_bf16(SMALL[name](CPU, eager))


@pytest.mark.parametrize("name", SMALL)
def test_the_oracle_tells_the_rows_apart(name):
    check_that_the_oracle_tells_the_rows_apart(SMALL[name](CPU, eager))


def test_the_flops_are_those_of_the_multiplications():
    T, H, W, C, N, kt, kh, _, interleave = SIZES["interleaved"]
    contest = SMALL["interleaved"](CPU, eager)
    assert contest.flops == 2 * (T * H * W) * (interleave * N) * (kt * kh * kh * C)
    assert SMALL["upsampled"](CPU, eager).flops == 2 * (2 * 8 * 10) * 12 * 9 * 16


def test_cases_are_of_a_measured_op():
    assert {case.name.split()[0] for case in conv.CASES} == {"conv_skip"}
    assert all(set(case.targets) == {EAGER, COMPILED} for case in conv.CASES)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SMALL)
def test_on_a_gpu_with_graphs_and_compiled_rivals(name):
    result = run_case(OpCase(OpKey("small"), SMALL[name], {}), torch.device("cuda"), copy_bandwidth=1e12, rounds=3)
    assert result.best is not None, result
