"""The contests of ops, at small sizes: every contender computes the same, and what does not is never timed."""

import functools
from dataclasses import replace

import pytest
import torch

from turbo_rcm_patch.bench import ops
from turbo_rcm_patch.bench.ops import COMPILED, COPY, FOLDED, OpCase, error_limit, measure_errors, run_case
from turbo_rcm_patch.bench.report import ops_table
from turbo_rcm_patch.tiers import EXACT, ErrorLimits, Tier

CPU = torch.device("cpu")
SMALL = {
    "self-attention": functools.partial(ops.attention, 2, 70, 70, 16),
    "cross-attention": functools.partial(ops.attention, 2, 70, 9, 16),
    "linear_skip": functools.partial(ops.linear_skip, 70, 24, 40),
    "linear_gelu": functools.partial(ops.linear_gelu, 70, 40, 24),
    "linear_qkv": functools.partial(ops.linear_qkv, 70, 24, 40),
    "layer_norm_modulate": functools.partial(ops.layer_norm_modulate, 70, 48),
    "rms_norm_rope": functools.partial(ops.rms_norm_rope, 70, 2, 16),
}


def eager(function):
    return function


def run(build, copy=False, tier=EXACT):
    case = OpCase("small", build, {COMPILED: 1e9, COPY: 0.0} if copy else {COMPILED: 1e9}, tier)
    return run_case(case, CPU, copy_bandwidth=1e9, rounds=3, compile_rivals=False)


@pytest.mark.parametrize("name", SMALL)
def test_all_contenders_are_right_to_bf16(name):
    contest = SMALL[name](CPU, eager)
    errors = measure_errors(contest)
    assert set(errors) == {*contest.ours, *contest.rivals}
    # Two roundings to bf16 on the way, each of at most half a unit in the last place.
    assert all(0 < error < torch.finfo(torch.bfloat16).eps for error in errors.values())


@pytest.mark.parametrize("name", SMALL)
def test_the_oracle_tells_the_rows_apart(name):
    contest = SMALL[name](CPU, eager)
    shifted = replace(contest, oracle=lambda rows: contest.oracle((rows + 1) % contest.tokens))
    assert min(measure_errors(shifted).values()) > 0.1


def test_a_folded_gate_differs_by_the_bias_alone():
    contest = SMALL["linear_skip"](CPU, eager)
    difference = contest.rivals[COMPILED]().float() - contest.partial[FOLDED]().float()
    assert difference.std(dim=1).max() < 0.1  # the same in every row, but for roundings
    assert difference.mean(dim=1).abs().max() > 0.5


def test_what_is_less_accurate_than_its_rivals_is_not_timed():
    right = SMALL["linear_gelu"](CPU, eager)
    (name,) = right.ours

    def wrong(device, compiled):
        result = right.ours[name]()
        return replace(
            right, ours={"wrong": lambda: result * 1.02, "nan": lambda: result * float("nan"), name: right.ours[name]}
        )

    result = run(wrong)
    assert result.best == name
    for loser in ("wrong", "nan"):
        assert result.timings[loser].milliseconds is None
        assert "is above the" in result.timings[loser].refused
    assert result.timings[name].milliseconds > 0
    assert f"{result.speedups[COMPILED]:.3f} of {COMPILED} (below 1e+09)" in ops_table([result])
    assert "is above the" in ops_table([result])

    nothing_right = run(lambda *_: replace(wrong(*_), ours={"wrong": wrong(*_).ours["wrong"]}))
    assert nothing_right.best is None
    assert nothing_right.speedups == {}


def test_the_limit_is_the_best_rivals_error():
    contest = SMALL["linear_gelu"](CPU, eager)
    two = replace(contest, rivals={"a": contest.rivals[COMPILED], "b": contest.rivals[COMPILED]})
    assert error_limit(two, {"a": 0.4, "b": 0.2}, ErrorLimits(3.0, 0.0)) == pytest.approx(0.6)


def test_contenders_do_not_always_follow_the_same_one():
    """There and back: each is measured after its one neighbour, then after the other."""
    order = []
    contenders = {name: functools.partial(order.append, name) for name in "abc"}
    times = ops.take_turns(contenders, CPU, rounds=3)
    assert "".join(order[-9:]) == "abccbaabc"
    assert {name: len(taken) for name, taken in times.items()} == dict.fromkeys("abc", 3)


def test_speed_ups_and_rates_are_of_the_medians():
    result = run(SMALL["layer_norm_modulate"], copy=True)
    ours = result.timings["layer_norm_modulate"]
    assert ours.is_ours
    assert not result.timings[COMPILED].is_ours
    low, high = ours.quartiles
    assert low <= ours.milliseconds <= high
    assert result.speedups[COMPILED] == pytest.approx(result.timings[COMPILED].milliseconds / ours.milliseconds)
    moved = 2 * 70 * 48 * 2
    assert result.terabytes_per_second == pytest.approx(moved / ours.milliseconds / 1e9)
    assert result.speedups[COPY] == pytest.approx(moved / 1e9 / (ours.milliseconds / 1e3))
    assert result.teraflops is None


def test_names_of_cases_are_unique_and_their_targets_are_of_contenders():
    assert len({case.name for case in ops.CASES}) == len(ops.CASES)
    for case in ops.CASES:
        small = {"attention": "self-attention"}.get(case.build.func.__name__, case.build.func.__name__)
        contest = SMALL[small](CPU, eager)
        assert set(case.targets) <= {*contest.rivals, *contest.partial, COPY}
        assert COPY not in case.targets or contest.bytes_moved


@pytest.mark.gpu
def test_on_a_gpu_with_graphs_and_compiled_rivals():
    device = torch.device("cuda")
    bandwidth = ops.measure_copy_bandwidth(device, nbytes=1 << 26)
    assert 1e10 < bandwidth < 1e14
    for build in SMALL.values():
        result = run_case(OpCase("small", build, {}), device, copy_bandwidth=bandwidth, rounds=3)
        assert result.best is not None, ops_table([result])


def test_a_tier_with_wider_limits_is_timed():
    """As an 8-bit op would be, whose error is far above that of its rivals in bf16."""
    right = SMALL["linear_gelu"](CPU, eager)
    (name,) = right.ours
    rough = replace(right, ours={"rough": lambda: right.ours[name]() * 1.05})
    assert run(lambda *_: rough).best is None
    wide = Tier("wide", "A tier that errs more.", ErrorLimits(factor=100.0, fp32=1e-1))
    assert run(lambda *_: rough, tier=wide).best == "rough"
