"""The attention modules against each other, at small sizes: right ones are timed, wrong ones never."""

import functools
import json
import math
from dataclasses import replace

import pytest
import torch

from scripts.benchmarks import compare_implementations as script
from scripts.benchmarks import implementations
from scripts.benchmarks.implementations import (
    FORWARD,
    FORWARD_BACKWARD,
    IMPLEMENTATIONS,
    LEFT_OUT,
    MODES,
    NAIVE_SOFTMAX,
    OK,
    REFUSED,
    TORCH_FUSED,
    TRITON_FUSED,
    TRITON_QUANTIZED,
    TWO_PASS,
    Implementation,
    benchmark_all_implementations,
    draw_problem,
    error_limit,
    errors_of,
    oracle,
)
from turbo_rcm_patch.kernels.dispatch import interpreting
from turbo_rcm_patch.modules import TwoPassRCMAttention
from turbo_rcm_patch.tiers import QUANTIZED

CPU = torch.device("cpu")
SIZE = (2, 24, 32, 2)
COMPILED = [name for name, implementation in IMPLEMENTATIONS.items() if implementation.compiled]
# On the CPU without torch.compile, with heads of other than 64 and 128 channels.
ABSENT = {*COMPILED, TRITON_QUANTIZED} if interpreting() else {*COMPILED, TRITON_FUSED, TRITON_QUANTIZED}


def run(size=SIZE, dtypes=("float32",), **options):
    return benchmark_all_implementations(
        *size, dtypes=dtypes, device=CPU, repeats=2, **{"compile_rivals": False, **options}
    )


def by_name(results, mode=FORWARD_BACKWARD):
    return {row.implementation: row for row in results.rows if row.mode == mode}


class Wrong(TwoPassRCMAttention):
    """An implementation that a test can damage."""

    def forward(self, x, timestep, residual=None):
        return self.damage(super().forward(x, timestep, residual))


def keep(monkeypatch, *names, **others):
    """Run only these implementations and others."""
    kept = {name: IMPLEMENTATIONS[name] for name in (TWO_PASS, *names)}
    monkeypatch.setattr(implementations, "IMPLEMENTATIONS", {**kept, **others})


def with_damage(monkeypatch, damage, name=TORCH_FUSED):
    """Replace an implementation by a damaged module, and leave Triton out."""
    damaged = type("Damaged", (Wrong,), {"damage": staticmethod(damage)})
    keep(monkeypatch, NAIVE_SOFTMAX, **{name: Implementation(damaged)})


def test_all_are_right_and_timed():
    results = run()
    assert [(row.mode, row.implementation) for row in results.rows] == [(m, n) for m in MODES for n in IMPLEMENTATIONS]
    for mode in MODES:
        rows = by_name(results, mode)
        assert {name for name, row in rows.items() if row.status == LEFT_OUT} == ABSENT
        for name in set(rows) - ABSENT:
            row = rows[name]
            assert row.status == OK, row.note
            assert (row.B, row.N, row.C, row.num_heads) == SIZE
            assert row.latency > 0
            assert row.spread >= 0
            assert row.speedup == rows[TWO_PASS].latency / row.latency
            assert 0 < row.output_error < 1e-5
            gradient_errors = (row.input_gradient_error, row.weight_gradient_error)
            assert gradient_errors == (None, None) if mode == FORWARD else max(gradient_errors) < 1e-5
            assert row.peak_memory is None


@pytest.mark.skipif(not interpreting(), reason="needs the kernels")
def test_8_bits_are_timed_where_they_are_run_and_within_their_limit(monkeypatch):
    keep(monkeypatch, TRITON_QUANTIZED)
    results = run((1, 19, 128, 2))
    row = by_name(results, FORWARD)[TRITON_QUANTIZED]
    assert row.status == OK, row.note
    assert 1e-3 < row.output_error <= QUANTIZED.limits.part
    backward = by_name(results)[TRITON_QUANTIZED]
    assert (backward.status, backward.note, backward.latency) == (LEFT_OUT, implementations.NO_BACKWARD, None)
    assert by_name(run(modes=[FORWARD]), FORWARD)[TRITON_QUANTIZED].note == "it does not run in 8 bits: head_dim 16"


def test_the_oracle_is_the_module_in_fp64():
    problem = draw_problem(*SIZE, torch.float64, CPU)
    step = implementations._step(implementations._build(TWO_PASS, problem), problem, FORWARD_BACKWARD)
    expected = oracle(problem)
    assert all(0 < error < 1e-6 for error in errors_of(step(), expected).values())  # the coefficients are fp32
    shapes = [tensor.shape for tensor in (problem.x, problem.x, *problem.weights.values())]
    assert [tensor.shape for tensor in expected] == shapes


def test_the_attention_counts():
    problem = draw_problem(3, 400, 64, 2, torch.float32, CPU)
    q, k, _ = torch.nn.functional.linear(problem.x, problem.weights["qkv.weight"]).unflatten(-1, (3, 2, 32)).unbind(2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 32**-0.5
    assert scores.std().item() == pytest.approx(implementations.SCORE_SCALE, rel=0.1)
    scaled = replace(problem, weights={**problem.weights, "qkv.weight": problem.weights["qkv.weight"] * 1.01})
    assert errors_of(oracle(scaled)[:1], oracle(problem))["output_error"] > 0.01


@pytest.mark.parametrize("damage", [lambda y: y * 1.001, lambda y: torch.cat([y[:1], y[1:] * float("nan")])])
def test_what_is_wrong_is_not_timed(monkeypatch, damage):
    with_damage(monkeypatch, damage)
    timed = []
    take_turns = implementations.take_turns
    monkeypatch.setattr(
        implementations, "take_turns", lambda steps, *rest: timed.extend(steps) or take_turns(steps, *rest)
    )
    results = run()
    assert timed == 2 * [TWO_PASS, NAIVE_SOFTMAX]
    for mode in MODES:
        rows = by_name(results, mode)
        assert rows[TORCH_FUSED].status == REFUSED
        assert "its output error" in rows[TORCH_FUSED].note
        assert (rows[TORCH_FUSED].latency, rows[TORCH_FUSED].speedup) == (None, None)
        assert rows[TWO_PASS].status == OK


def test_a_wrong_gradient_alone_is_refused_where_there_is_a_backward(monkeypatch):
    with_damage(monkeypatch, lambda y: y.detach() + 1.001 * (y - y.detach()))
    results = run()
    assert by_name(results, FORWARD)[TORCH_FUSED].status == OK
    row = by_name(results)[TORCH_FUSED]
    assert row.status == REFUSED
    assert "its input gradient error" in row.note
    assert "its weight gradient error" in row.note
    assert "output error" not in row.note


def test_two_pass_may_be_refused_too(monkeypatch):
    with_damage(monkeypatch, lambda y: y * 1.1, TWO_PASS)
    rows = by_name(run())
    assert rows[TWO_PASS].status == REFUSED
    assert rows[NAIVE_SOFTMAX].status == OK
    assert rows[NAIVE_SOFTMAX].speedup is None


def test_limits():
    assert error_limit(TRITON_FUSED, 0.01) == pytest.approx(0.0105)
    assert error_limit(NAIVE_SOFTMAX, 0.01) == pytest.approx(0.03)
    assert error_limit(TRITON_FUSED, 1e-7) == 1e-5
    assert error_limit(TRITON_QUANTIZED, 1e-7) == pytest.approx(QUANTIZED.limits.part, rel=0.01)
    assert error_limit(TRITON_FUSED, 0.5) == 0.05
    assert math.isnan(error_limit(TRITON_FUSED, float("nan")))


def test_naive_softmax_is_left_out_where_its_scores_do_not_fit(monkeypatch):
    keep(monkeypatch, NAIVE_SOFTMAX)
    B, N, _, heads = SIZE
    needed = 4 * B * heads * N * N * 4
    monkeypatch.setattr(implementations, "_free_memory", lambda device: needed - 1)
    row = by_name(run(modes=[FORWARD]), FORWARD)[NAIVE_SOFTMAX]
    assert (row.status, row.latency) == (LEFT_OUT, None)
    assert "score matrices" in row.note
    monkeypatch.setattr(implementations, "_free_memory", lambda device: needed)
    assert by_name(run(modes=[FORWARD]), FORWARD)[NAIVE_SOFTMAX].status == OK


def test_the_compiled_ones_are_one_graph_each_at_every_size(monkeypatch):
    keep(monkeypatch, *COMPILED)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    with torch._dynamo.config.patch(recompile_limit=4):  # 2 implementations in 2 modes, at one size and dtype
        for tokens in (8, 12):
            results = run((1, tokens, 16, 1), compile_rivals=True)
            assert {row.status for row in results.rows if row.implementation in COMPILED} == {OK}


def test_fp32_is_exact_meanwhile_for_all(monkeypatch):
    seen = set()
    with_damage(monkeypatch, lambda y: seen.add(torch.get_float32_matmul_precision()) or y)
    torch.set_float32_matmul_precision("high")
    try:
        run(modes=[FORWARD_BACKWARD])  # nothing is traced
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == {"highest"}


def test_the_script_writes_table_and_json(tmp_path, monkeypatch, capsys):
    keep(monkeypatch, *COMPILED, NAIVE_SOFTMAX)
    out = tmp_path / "out.json"
    arguments = ["--sizes", "1x16x64", "2x8x64", "--dtypes", "float32", "--repeats", "2", "--no-compile"]
    assert script.main([*arguments, "--device", "cpu", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "| 1×16×64, float32, forward+backward |" in printed
    assert "| 2×8×64, float32, forward |" in printed
    assert "two_pass_compiled left out (float32 forward): torch.compile is switched off" in printed
    report = json.loads(out.read_text())
    assert report["environment"]["torch"] == torch.__version__
    assert len(report["rows"]) == 2 * len(MODES) * len(implementations.IMPLEMENTATIONS)


def test_the_script_fails_where_one_is_wrong(monkeypatch, capsys):
    with_damage(monkeypatch, lambda y: y * 1.001)
    arguments = ["--sizes", "1x16x64", "--dtypes", "float32", "--repeats", "2", "--no-compile", "--device", "cpu"]
    assert script.main(arguments) == 1
    assert "torch_fused refused (float32 forward): its output error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "4x512"], "'4x512' is no BxNxC"),
        (["--sizes", "4x512x100"], "C a multiple of 64"),
        (["--device", "cpu"], "choose small ones with --sizes"),
        (["--sizes", "1x8x64", "--repeats", "1"], "quartiles need at least 2"),
        (["--sizes", "1x8x64", "--device", "cpu", "--json", "out.csv"], "ending in .json"),
    ],
)
def test_the_script_names_what_is_wrong_with_its_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit):
        script.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_with_graphs_and_compiled_rivals():
    results = benchmark_all_implementations(2, 256, 256, 4, device="cuda", repeats=3)
    run_rows = [row for row in results.rows if (row.mode, row.implementation) != (FORWARD_BACKWARD, TRITON_QUANTIZED)]
    assert {row.status for row in run_rows} == {OK}, run_rows
    assert all(row.latency > 0 and row.peak_memory > 0 for row in run_rows)
