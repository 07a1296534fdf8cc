"""Ops are checked, then timed: an op that is less accurate than its rivals is not timed."""

import functools
from dataclasses import replace

import pytest
import torch

from scripts.benchmarks.contests import exact
from tests.bench.contests import eager
from turbo_rcm_patch.bench import ops, ops_exact
from turbo_rcm_patch.bench.ops import COMPILED, COPY, OpCase, OpKey, error_limit, run_case
from turbo_rcm_patch.tiers import EXACT, ErrorLimits, Tier

CPU = torch.device("cpu")
SMALL = {
    "linear_gelu": functools.partial(ops_exact.linear_gelu, 70, 40, 24),
    "layer_norm_modulate": functools.partial(exact.layer_norm_modulate, 70, 48),
}


def run(build, copy=False, tier=EXACT):
    targets = {COMPILED: 1e9, COPY: 0.0} if copy else {COMPILED: 1e9}
    case = OpCase(OpKey("small"), build, targets, tier, most=1.5, least=860)
    return run_case(case, CPU, copy_bandwidth=1e9, rounds=3, compile_rivals=False)


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
    assert result.speedups[COPY] == pytest.approx(moved / 1e9 / (ours.milliseconds / 1e3))
    assert result.teraflops is None
    assert (result.most, result.least, result.targets) == (1.5, 860, {COMPILED: 1e9, COPY: 0.0})


def test_a_tier_with_wider_limits_is_timed():
    """An 8-bit op is such a case: its error is far above that of its rivals in bf16."""
    right = SMALL["linear_gelu"](CPU, eager)
    (name,) = right.ours
    rough = replace(right, ours={"rough": lambda: right.ours[name]() * 1.05})
    assert run(lambda *_: rough).best is None
    wide = Tier("wide", "A tier that errs more.", ErrorLimits(factor=100.0, fp32=1e-1))
    assert run(lambda *_: rough, tier=wide).best == "rough"
