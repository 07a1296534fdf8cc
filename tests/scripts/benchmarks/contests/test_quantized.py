"""The contests of the quantized tier's ops, at small sizes: ours is within the tier's limits and as right as rivals."""

import functools
import importlib.util
from dataclasses import replace

import pytest
import torch

from scripts.benchmarks.contests import quantized
from scripts.benchmarks.contests.quantized import FLASH_ATTENTION
from tests.bench.contests import eager, errors_beside_another_row
from turbo_rcm_patch.bench import ops, ops_quantized
from turbo_rcm_patch.bench.ops import Draws, OpCase, OpKey, error_limit, measure_errors, run_case
from turbo_rcm_patch.bench.ops_quantized import OURS_EXACT, SCALED_MM
from turbo_rcm_patch.tiers import QUANTIZED

CPU = torch.device("cpu")
# Sizes that _scaled_mm takes: multiples of 16.
SMALL = {
    "attention_8bit": functools.partial(quantized.attention_8bit, 2, 70, 64),
    "structured_attention_8bit": functools.partial(quantized.structured_attention_8bit, 2, 150, 64),
    "attention_skip_8bit": functools.partial(quantized.attention_skip_8bit, 2, 70, 64),
    "norms_8bit": functools.partial(quantized.norms_8bit, 2, 70, 64),
    "norms_attention_8bit": functools.partial(ops_quantized.norms_attention_8bit, 2, 70, 64),
    "linear_skip_8bit": functools.partial(ops_quantized.linear_skip_8bit, 70, 48, 64),
    "fed_linear_skip_8bit": functools.partial(ops_quantized.fed_linear_skip_8bit, 70, 48, 64),
    "linear_gelu_8bit": functools.partial(ops_quantized.linear_gelu_8bit, 70, 64, 48),
    "linear_qkv_8bit": functools.partial(ops_quantized.linear_qkv_8bit, 70, 48, 64),
    "linear_qkv_int8": functools.partial(quantized.linear_qkv_int8, 70, 48, 64),
    "linear_int8": functools.partial(quantized.linear_int8, 70, 48, 64),
    "linear_gelu_int8": functools.partial(quantized.linear_gelu_int8, 70, 64, 48),
}


def takes_scales_of_rows():
    """True if the rival's function runs on this CPU. That of torch 2.11 takes one scale for a matrix alone."""
    values, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(values, values.T, scale_a=scale, scale_b=scale.T, out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def beside_scaled_mm(names):
    """Mark the contests in which _scaled_mm is a rival."""
    skips = pytest.mark.skipif(not takes_scales_of_rows(), reason="this torch has no _scaled_mm by rows on a CPU")
    return [
        pytest.param(name, marks=skips) if name.removeprefix("fed_").startswith("linear") else name for name in names
    ]


@pytest.mark.parametrize("name", beside_scaled_mm(SMALL))
def test_all_contenders_are_within_the_tiers_limit(name):
    contest = SMALL[name](CPU, eager)
    errors = measure_errors(contest)
    assert set(errors) == {*contest.ours, *contest.rivals}
    limit = error_limit(contest, errors, QUANTIZED.limits)
    assert all(0 < error <= limit for error in errors.values()), errors
    # Ours computes in 8 bits: it errs more than one rounding to bf16 does.
    assert all(errors[ours] > torch.finfo(torch.bfloat16).eps / 2 for ours in contest.ours)
    assert min(errors_beside_another_row(contest)) > 0.1


@pytest.mark.parametrize("name", beside_scaled_mm(name for name in SMALL if "int8" in name))
def test_int8_errs_less_than_the_rivals_e4m3(name):
    errors = measure_errors(contest := SMALL[name](CPU, eager))
    (ours,) = contest.ours
    assert errors[ours] < 0.9 * errors[SCALED_MM]


@pytest.mark.parametrize("name", beside_scaled_mm(name for name in SMALL if "linear" in name and "int8" not in name))
def test_ours_errs_as_the_rival_of_the_same_format_does(name):
    contest = SMALL[name](CPU, eager)
    errors = measure_errors(contest)
    (ours,) = contest.ours
    # Both round the same operands in the same way, and a GELU's result once more; the rival rounds to bf16 in between.
    assert errors[ours] == pytest.approx(errors[SCALED_MM], rel=QUANTIZED.limits.factor - 1)


def test_the_residual_does_not_hide_that_attention_is_left_out(monkeypatch):
    contest = quantized.attention_skip_8bit(1, 2048, 64, CPU, eager)
    assert measure_errors(contest)["attention"] <= ops_quantized.ATTENTION_ERROR

    def without_attention(qkv, *, residual=None, c_skip=1, c_out=1):
        return torch.zeros(qkv.q.shape) if residual is None else c_skip * residual

    monkeypatch.setattr(ops_quantized.kernels, "attention_8bit", without_attention)
    assert measure_errors(contest)["attention"] > 5 * ops_quantized.ATTENTION_ERROR


# Between the case's limit and the tier's limit for an op.
@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("attention_8bit", 1.03),
        ("structured_attention_8bit", 1.03),
        ("attention_skip_8bit", 1.035),
        ("norms_attention_8bit", 1.03),
    ],
)
def test_attention_that_errs_more_than_is_asked_of_it_is_not_timed(name, factor):
    right = SMALL[name](CPU, eager)
    (ours,) = right.ours
    wrong = replace(right, ours={ours: lambda: right.ours[ours]() * factor})
    error = measure_errors(wrong)[ours]
    assert error < QUANTIZED.limits.part
    case = OpCase(OpKey("small"), lambda *_: wrong, {}, QUANTIZED)
    result = run_case(case, CPU, copy_bandwidth=1e9, rounds=2, compile_rivals=False)
    assert result.timings[ours].refused == f"its error {error:.2e} is above the {right.limit({}):.2e} allowed"


def test_on_structured_values_attention_may_err_half_as_much_as_flash_attention_does():
    contest = SMALL["structured_attention_8bit"](CPU, eager)
    assert error_limit(contest, {FLASH_ATTENTION: 4e-2, "attention": 1e-2}, QUANTIZED.limits) == 2e-2
    assert error_limit(contest, {"attention": 1e-2}, QUANTIZED.limits) == pytest.approx(2.55e-2)


def test_what_comes_before_the_attention_has_a_case_of_its_own_beside_the_exact_tiers():
    contest = SMALL["norms_8bit"](CPU, eager)
    q, k = contest.partial[OURS_EXACT]()
    (ours,) = contest.ours.values()
    rows = torch.arange(contest.tokens)
    expected = contest.oracle(rows).split(64, dim=-1)
    centred = k.double() - k.double().mean(1, keepdim=True)
    for ours_has, exact_has, oracle_has in zip(ours().dequantize_qk(), (q, centred), expected, strict=False):
        assert ops.relative_l2(exact_has, oracle_has) < 4e-3  # bf16
        assert 4e-3 < ops.relative_l2(ours_has, oracle_has) < 2e-2  # int8
    assert ops.relative_l2(ours().dequantize_v(), expected[2]) < 4e-2  # e4m3


def test_targets_are_of_contenders():
    for case in quantized.CASES:
        assert case.tier is QUANTIZED
        contest = SMALL[case.build.func.__name__](CPU, eager)
        # FlashAttention-3 is a rival where FlashInfer is installed.
        assert set(case.targets) <= {*contest.rivals, FLASH_ATTENTION}


def test_flash_attention_takes_part_where_it_is_installed():
    contest = SMALL["attention_8bit"](torch.device("cpu"), eager)
    assert (FLASH_ATTENTION in contest.rivals) == (importlib.util.find_spec("flashinfer") is not None)


def test_structured_values_are_like_a_models():
    heads, tokens, head_dim = 3, 4000, 64
    q, k, v = (x.double() for x in quantized.structured_qkv(Draws(CPU), heads, tokens, head_dim))
    # 4000 tokens with ρ = 0.95 count as 4000 · 0.05 / 1.95 = 103 independent ones: a standard error of 0.1 each.
    plain_k, plain_v = k[0, :, :, 4:], v[0, :, :, 2:]
    for x in (q[0], plain_k, plain_v):
        centred = x - x.mean(0)
        correlation = (centred[1:] * centred[:-1]).sum() / centred.square().sum()
        assert correlation == pytest.approx(0.95, abs=0.02)
        assert centred.std() == pytest.approx(1.0, abs=0.1)
    assert plain_k.mean(0).std() == pytest.approx(3.0, rel=0.15)
    within = lambda x: (x - x.mean(0)).std()  # noqa: E731
    assert within(k[0, :, :, :4]) / within(plain_k) == pytest.approx(5.0, rel=0.1)
    assert within(v[0, :, :, :2]) / within(plain_v) == pytest.approx(8.0, rel=0.1)
    assert v.mean().abs() < 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("name", SMALL)
def test_on_a_gpu_with_graphs_and_compiled_rivals(name):
    result = run_case(
        OpCase(OpKey(name), SMALL[name], {}, QUANTIZED), torch.device("cuda"), copy_bandwidth=1e12, rounds=3
    )
    assert result.best is not None, result
