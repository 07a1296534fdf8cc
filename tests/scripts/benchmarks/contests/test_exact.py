"""The contests of the exact tier and of convolutions, at small sizes: every contender computes the same."""

import functools

import pytest
import torch

from scripts.benchmarks.contests import conv, exact
from tests.bench.contests import eager, errors_beside_another_row
from turbo_rcm_patch.bench import ops_conv, ops_exact
from turbo_rcm_patch.bench.ops import COMPILED, COPY, OpCase, OpKey, measure_copy_bandwidth, measure_errors, run_case
from turbo_rcm_patch.bench.ops_conv import EAGER
from turbo_rcm_patch.bench.ops_exact import FOLDED

CPU = torch.device("cpu")
CONV_SIZES = {  # T, H, W, C, N, kt, kh, upsample, interleave
    "3×3×3": (3, 5, 7, 16, 12, 3, 3, 1, 1),
    "upsampled": (2, 4, 5, 16, 12, 1, 3, 2, 1),
    "interleaved": (3, 4, 5, 16, 12, 3, 1, 1, 2),
    "1×1×1": (2, 4, 5, 16, 12, 1, 1, 1, 1),
}
SMALL = {
    "self-attention": functools.partial(ops_exact.attention, 2, 70, 70, 16),
    "cross-attention": functools.partial(ops_exact.attention, 2, 70, 9, 16),
    "linear_skip": functools.partial(ops_exact.linear_skip, 70, 24, 40),
    "linear_gelu": functools.partial(ops_exact.linear_gelu, 70, 40, 24),
    "linear_qkv": functools.partial(ops_exact.linear_qkv, 70, 24, 40),
    "layer_norm_modulate": functools.partial(exact.layer_norm_modulate, 70, 48),
    "rms_norm_rope": functools.partial(ops_exact.rms_norm_rope, 70, 2, 16),
    **{name: functools.partial(ops_conv.conv_skip, *sizes) for name, sizes in CONV_SIZES.items()},
}


@pytest.mark.parametrize("name", SMALL)
def test_all_contenders_are_right_to_bf16(name):
    """All contenders round to bf16 twice on the way, each time by at most half a unit in the last place."""
    contest = SMALL[name](CPU, eager)
    errors = measure_errors(contest)
    assert set(errors) == {*contest.ours, *contest.rivals}
    assert all(0 < error < torch.finfo(torch.bfloat16).eps for error in errors.values())
    assert min(errors_beside_another_row(contest)) > 0.1


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


def test_the_flops_of_convolutions_are_those_of_the_multiplications():
    T, H, W, C, N, kt, kh, _, interleave = CONV_SIZES["interleaved"]
    contest = SMALL["interleaved"](CPU, eager)
    assert contest.flops == 2 * (T * H * W) * (interleave * N) * (kt * kh * kh * C)
    assert SMALL["upsampled"](CPU, eager).flops == 2 * (2 * 8 * 10) * 12 * 9 * 16


def test_convolutions_are_of_a_measured_op():
    assert {case.name.split()[0] for case in conv.CASES} == {"conv_skip"}
    assert all(set(case.targets) == {EAGER, COMPILED} for case in conv.CASES)


@pytest.mark.gpu
def test_on_a_gpu_with_graphs_and_compiled_rivals():
    device = torch.device("cuda")
    bandwidth = measure_copy_bandwidth(device, nbytes=1 << 26)
    assert 1e10 < bandwidth < 1e14
    for build in SMALL.values():
        result = run_case(OpCase(OpKey("small"), build, {}), device, copy_bandwidth=bandwidth, rounds=3)
        assert result.best is not None, result
