"""Traffic: counted from shapes against counts by hand, the check before a measurement, tables, the script."""

import contextlib
import json
import os
import runpy
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scripts.benchmarks import profile_hbm as script
from scripts.benchmarks.dram import KernelTraffic, MeasurementError
from scripts.benchmarks.report import _short_name, plot_traffic, traffic_table, traffic_totals_table
from scripts.benchmarks.traffic import (
    COUNTERS,
    SHAPES,
    AttentionCase,
    Check,
    ImplementationTraffic,
    TrafficReport,
    WanBlockCase,
    check_and_profile,
    count,
    join,
)
from scripts.benchmarks.traffic_from_shapes import count_call
from turbo_rcm_patch.bench.environment import describe_environment

CPU = torch.device("cpu")
SMALL = AttentionCase(batch=2, seq=48, dim=128, heads=2)
WAN = WanBlockCase("tiny")


# --- counted from shapes


class Expression(nn.Module):
    def __init__(self, expression):
        super().__init__()
        self.forward = expression


def counted(expression, *args, compiled=False):
    """(name, bytes read, bytes written) of every kernel."""
    return [(k.name, k.read, k.written) for k in count_call(Expression(expression), args, {}, compiled)]


def half(*shape):
    return torch.empty(shape, dtype=torch.bfloat16)


def test_every_op_reads_its_inputs_and_writes_its_outputs():
    x, weight, bias = half(3, 16, 64), half(32, 64), half(32)
    assert counted(lambda *tensors: F.linear(*tensors), x, weight, bias) == [
        ("linear", x.nbytes + weight.nbytes + bias.nbytes, 2 * 3 * 16 * 32)
    ]
    n = x.numel()
    chain = [("to", 2 * n, 4 * n), ("mul", 4 * n, 4 * n), ("add", 6 * n, 4 * n), ("to", 4 * n, 2 * n)]
    assert counted(lambda x, y: (x.float() * 2 + y).to(x.dtype), x, half(3, 16, 64)) == chain


def test_views_and_what_does_nothing_move_no_bytes():
    def view(x):
        x = x.to(x.dtype).contiguous()
        return x.transpose(1, 2).unflatten(1, (2, -1)), torch.empty_like(x)

    assert counted(view, half(3, 16, 64)) == []


@pytest.mark.parametrize(
    ("view", "read"),
    [
        (lambda x: x[:, :32], 4 * 32 * 2),  # a part of every row
        (lambda x: x[:, ::2], 4 * 64 * 2),  # every second element: all sectors
        (lambda x: x[:, ::32], 4 * 2 * 32),  # one sector for each element
        (lambda x: x[:1].expand(4, -1), 64 * 2),  # the same row four times
        (lambda x: x.T, 4 * 64 * 2),
    ],
)
def test_strided_reads_cost_whole_sectors_and_repeated_ones_nothing(view, read):
    ((_, counted_read, _),) = counted(lambda x: view(x) + 1, half(4, 64))
    assert counted_read == read


def test_writes_in_place_are_counted_on_what_they_write():
    def interleave(x):
        out = torch.empty_like(x)
        out[:, 0::2] = x[:, :32].float()
        return out

    x = half(4, 64)
    assert counted(interleave, x) == [("to", x.nbytes // 2, x.nbytes), ("copy_", x.nbytes, x.nbytes)]


def test_compiled_chains_are_one_kernel():
    x, y = half(3, 16, 64), half(3, 16, 64)
    expression = lambda x, y: (x.float() * 2 + y).to(x.dtype)  # noqa: E731
    assert counted(expression, x, y, compiled=True) == [("merged: to, mul, add", 2 * x.nbytes, x.nbytes)]


def test_what_several_ops_of_a_compiled_chain_read_is_read_once():
    x = half(64, 128)
    assert counted(lambda x: F.relu(x) + x * x, x, compiled=True) == [("merged: relu, mul, add", x.nbytes, x.nbytes)]


def test_a_compiled_chain_writes_what_is_read_after_a_matmul_and_puts_off_what_is_not_needed_before():
    def block(x, weight):
        h = F.relu(x + 1)
        return F.linear(h, weight).float() * 2 + h.float() + x.float()

    x, weight = half(64, 128), half(128, 128)
    size = x.nbytes
    assert counted(block, x, weight, compiled=True) == [
        ("merged: add, relu", size, size),
        ("linear", size + weight.nbytes, size),
        ("merged: to, mul, add", 3 * size, 2 * size),
    ]


def test_two_results_of_one_compiled_chain_are_both_written():
    def both(x):
        y = x + 1
        return y, y * 2

    x = half(64, 128)
    (kernel,) = counted(both, x, compiled=True)
    assert kernel[1:] == (x.nbytes, 2 * x.nbytes)


def passes(traffic, case):
    return TrafficReport(case.settings, SHAPES, None, ()).passes(traffic)


def test_attention_modules_move_the_passes_counted_by_hand():
    expected = {"two_pass": 13, "torch_fused": 33, "two_pass_compiled": 13, "torch_fused_compiled": 13}
    expected["triton_fused"] = 11
    # 8 bits are half a pass; v is in fp16 here. Three times the rows of 64 channels have scales of 4 bytes.
    expected["triton_quantized"] = (1 + 0.5) + (0.5 + 3) + (3 + 2) + (2 + 1) + (1 + 0.5) + (0.5 + 1 + 1) + 6 / 32
    case = AttentionCase(batch=64, seq=512, dim=64, heads=1)  # weights and coefficients weigh next to nothing
    implementations = count(case, CPU)
    assert tuple(one.name for one in implementations) == case.implementations
    for one in implementations:
        assert passes(one, case) == pytest.approx(expected[one.name], rel=0.01)


def test_a_patched_block_of_the_1_3b_model_calls_each_fused_op_once_for_each_place():
    case = WanBlockCase("wan2.1-1.3b")
    assert (case.settings["tokens"], case.settings["dim"]) == (32760, 1536)
    call = case.outline("triton_fused", CPU)
    patched = count_call(call.module, call.args, call.kwargs, False)
    names = Counter(kernel.name for kernel in patched)
    fused = {"layer_norm_modulate": 3, "rms_norm_rope": 4, "attention": 2, "linear_skip": 3, "linear_gelu": 1}
    # Q, K and V twice: on the CPU PyTorch's linears compute them, because linear_qkv has a kernel for sm_90 only.
    fused["linear"] = 6
    assert {name: names[name] for name in fused} == fused
    assert not any("dropout" in kernel.name for kernel in patched)
    assert all(kernel.seconds is None for kernel in patched)
    # By its shapes it keeps to the passes asked for.
    # q, k, v, two outputs, q again, the feed-forward's hidden layer written and read, norms, attention, residuals
    unavoidable = 3 * 2 + 4 + 4 + 2 * 2 + 3 * 2 + 3 * 2 + 2 * 8960 / 1536
    moved = passes(ImplementationTraffic("", patched), case)
    assert unavoidable < moved < script.PASS_LIMITS["1.3b"] < 1.3 * moved


@pytest.mark.parametrize("case", [SMALL, WAN])
def test_an_outline_has_the_shapes_of_what_is_run(case):
    def shapes(call):
        return [tuple(a.shape) for a in torch.utils._pytree.tree_leaves(call.args)]

    name = case.implementations[0]
    built = case.build(name, CPU)
    assert shapes(case.outline(name, CPU)) == shapes(built)
    assert built.args[0].shape[0] * built.args[0].shape[1] == case.settings["tokens"]
    assert built.args[0].shape[2] == case.settings["dim"]


# --- the check before a measurement


class Without(WanBlockCase):
    """The tiny block without the compiled implementation, which takes long; optionally one that is wrong."""

    implementations = ("eager", "torch_fused", "triton_fused")
    factor, damaged = 1.0, "torch_fused"

    def build(self, implementation, device):
        call = super().build(implementation, device)
        if implementation == self.damaged:
            with torch.no_grad():
                call.module.ffn.net[2].weight.mul_(self.factor)
        return call


def profiles():
    """A context manager to profile with, and how often it was entered."""
    entered = []

    @contextlib.contextmanager
    def profile():
        entered.append(True)
        yield

    return profile, entered


def test_all_implementations_are_right_and_profiled():
    profile, entered = profiles()
    checks = check_and_profile(Without("tiny"), CPU, profile)
    assert [check.implementation for check in checks] == list(Without.implementations)
    assert all(check.refused is None and 1e-4 < check.error < 1e-2 for check in checks)
    assert len(entered) == 3


@pytest.mark.parametrize("factor", [1.05, float("nan")])
def test_what_is_less_accurate_than_the_first_is_not_profiled(factor, monkeypatch):
    monkeypatch.setattr(Without, "factor", factor)
    profile, entered = profiles()
    checks = check_and_profile(Without("tiny"), CPU, profile)
    assert [check.refused is None for check in checks] == [True, False, True]
    assert "is above the" in checks[1].refused
    assert len(entered) == 2


def test_nothing_is_profiled_where_the_first_is_nan(monkeypatch):
    monkeypatch.setattr(Without, "factor", float("nan"))
    monkeypatch.setattr(Without, "damaged", "eager")
    profile, entered = profiles()
    assert all(check.refused for check in check_and_profile(Without("tiny"), CPU, profile))
    assert not entered


@pytest.mark.gpu
@pytest.mark.parametrize("case", [SMALL, WAN])
def test_every_implementation_is_right_on_a_gpu(case):
    checks = check_and_profile(case, torch.device("cuda"), contextlib.nullcontext)
    assert [check.refused for check in checks] == [None] * len(case.implementations)


# --- reports


GEMM, SKIP = KernelTraffic("void gemm<128>(T1)", 600, 200, 2e-3), KernelTraffic("ns::skip(T1)", 100, 100, 5e-4)
TINY = KernelTraffic("fill", 1, 0, 1e-6)
CHECKS = [Check("a", 1e-3), Check("b", 9.0, "wrong"), Check("c", 2e-3)]


def report(source=COUNTERS):
    implementations = join(CHECKS, [[GEMM, SKIP, GEMM, TINY], [GEMM]])
    settings = {"case": "attention module", "tokens": 20, "dim": 10}
    return TrafficReport(settings, source, describe_environment(CPU), implementations)


def test_ranges_go_to_the_implementations_that_were_profiled():
    assert [(one.name, len(one.kernels), one.refused) for one in report().implementations] == [
        ("a", 4, None),
        ("b", 0, "wrong"),
        ("c", 1, None),
    ]


def test_tables_sum_launches_and_name_what_was_refused():
    lines = [line.split() for line in traffic_table(report()).splitlines()]
    assert lines[1] == ["gemm", "2", "0.0", "0.0", "4.00", "4.000"]
    assert lines[2:5] == [
        ["skip", "1", "0.0", "0.0", "0.50", "0.500"],
        ["others", "1", "0.0", "0.0", "0.00", "0.001"],
        ["total", "4", "0.0", "0.0", "4.50", "4.501"],
    ]
    assert lines[6][0] == "c"
    totals = [line.split() for line in traffic_totals_table(report()).splitlines()]
    assert totals[1] == ["a", "4", "0.0", "0.0", "4.50", "1.00", "1.0e-03"]
    assert totals[2] == ["c", "1", "0.0", "0.0", "2.00", "2.25", "2.0e-03"]
    assert totals[3] == ["b", "refused:", "wrong"]


def test_the_dictionary_has_every_kernel_and_the_totals():
    plain = json.loads(json.dumps(report().to_dict()))
    assert (plain["source"], plain["pass_bytes"]) == ("counters", 400)
    first, refused, _ = plain["implementations"]
    assert (first["read"], first["written"], first["passes"]) == (1301, 500, 1801 / 400)
    assert first["kernels"][0] == {"name": GEMM.name, "read": 600, "written": 200, "seconds": 2e-3}
    assert refused["refused"] == "wrong"
    assert "passes" not in refused


def test_a_plot_is_drawn(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    plot_traffic(report(), tmp_path / "bars.png")
    assert image.open(tmp_path / "bars.png").width > 500


MUL = "at::native::BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float>>"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "void at::native::<unnamed>::vectorized_layer_norm_kernel<float, float>(int, T2)",
            "vectorized_layer_norm_kernel",
        ),
        ("void (anonymous namespace)::softmax<8>(float *)", "softmax"),
        (
            f"void at::native::vectorized_elementwise_kernel<4, {MUL}, T3>(int)",
            "vectorized_elementwise_kernel MulFunctor",
        ),
        ("void at::native::elementwise_kernel<128, 2>(int)", "elementwise_kernel"),
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT", "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT"),
        ("merged: to, mul, add", "merged: to, mul, add"),
        ("k" * 99, "k" * 59 + "…"),
    ],
)
def test_names_are_shortened(name, short):
    assert _short_name(name) == short


# --- the script


def test_without_a_gpu_the_kernels_can_be_traced(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    runpy.run_path(script.__file__)
    assert os.environ["TRITON_INTERPRET"] == "1"


def test_without_a_gpu_the_script_counts_and_says_so(tmp_path, monkeypatch, capsys):
    out = tmp_path / "traffic.json"
    monkeypatch.setattr(AttentionCase, "implementations", ("two_pass", "triton_fused"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main(["--batch", "1", "--seq", "16", "--dim", "128", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "no counters are read: PyTorch finds no CUDA GPU." in printed
    assert "Counted from shapes, not measured" in printed
    written = json.loads(out.read_text())
    assert (written["source"], written["settings"]["heads"]) == ("shapes", 2)
    assert [one["name"] for one in written["implementations"]] == list(AttentionCase.implementations)
    assert "linear_skip" in [kernel["name"] for kernel in written["implementations"][-1]["kernels"]]


def test_with_a_profiler_the_script_runs_itself_under_it(tmp_path, monkeypatch, capsys):
    def measure(command):
        assert command[:2] == [sys.executable, script.__file__]
        assert command[2:4] == ["--wan-block", "1.3b"]
        assert command[-2] == "--profiled"
        assert script.main(command[2:]) == 0
        return [[replace(GEMM, read=59 * 32760 * 1536 * 2)], [GEMM]]

    checks = [*CHECKS[:2], Check("triton_fused", 1e-3)]
    monkeypatch.setattr(script.dram, "why_not", lambda: None)
    monkeypatch.setattr(script.dram, "measure", measure)
    monkeypatch.setattr(script, "check_and_profile", lambda case, device: checks)
    assert script.main(["--wan-block", "1.3b"]) == 1  # one was refused
    printed = capsys.readouterr().out
    assert "59.0" in printed
    assert "triton_fused moves 0.0 passes, within the 60 asked for" in printed
    assert "shapes" not in printed


def test_a_profiler_that_fails_leaves_the_count(monkeypatch, capsys):
    def measure(command):
        raise MeasurementError("ERR_NVGPUCTRPERM")

    monkeypatch.setattr(script.dram, "why_not", lambda: None)
    monkeypatch.setattr(script.dram, "measure", measure)
    monkeypatch.setattr(script, "count", lambda case, device: join(CHECKS[:1], [[GEMM]]))
    assert script.main(["--wan-block", "tiny"]) == 0
    assert "no counters are read: ERR_NVGPUCTRPERM." in capsys.readouterr().out


@pytest.mark.parametrize(("passes", "verdict"), [(60, "within the 60"), (60.1, "OVER the 60")])
def test_the_verdict_is_on_the_patched_block(passes, verdict):
    made = report()
    last = ImplementationTraffic("triton_fused", (replace(GEMM, read=int(passes * 400), written=0),))
    assert verdict in script._verdict(replace(made, implementations=(*made.implementations, last)), 60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--wan-block", "14b", "--dim", "512"], "has sizes of its own"),
        (["--dim", "100", "--heads", "3"], "--dim 100 must be a positive multiple of --heads 3"),
        (["--batch", "0"], "must be"),
        (["--json", "out.txt"], "ending in .json"),
    ],
)
def test_bad_options_end_with_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        script.main(arguments)
    assert message in capsys.readouterr().err
