"""Traffic: the check before a measurement, tables, the script."""

import contextlib
import json
import sys
from dataclasses import replace

import pytest
import torch

from scripts.benchmarks import profile_hbm as script
from scripts.benchmarks.dram import KernelTraffic, MeasurementError
from scripts.benchmarks.traffic import (
    AttentionCase,
    Check,
    ImplementationTraffic,
    TrafficReport,
    WanBlockCase,
    check_and_profile,
    join,
)
from turbo_rcm_patch.bench.environment import describe_environment

CPU = torch.device("cpu")
SMALL = AttentionCase(batch=2, seq=48, dim=128, heads=2)
WAN = WanBlockCase("tiny")


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


def report():
    implementations = join(CHECKS, [[GEMM, SKIP, GEMM, TINY], [GEMM]])
    settings = {"case": "attention module", "tokens": 20, "dim": 10}
    return TrafficReport(settings, describe_environment(CPU), implementations)


def test_ranges_go_to_the_implementations_that_were_profiled():
    assert [(one.name, len(one.kernels), one.refused) for one in report().implementations] == [
        ("a", 4, None),
        ("b", 0, "wrong"),
        ("c", 1, None),
    ]


def test_the_dictionary_has_every_kernel_and_the_totals():
    plain = json.loads(json.dumps(report().to_dict()))
    assert plain["pass_bytes"] == 400
    first, refused, _ = plain["implementations"]
    assert (first["read"], first["written"], first["passes"]) == (1301, 500, 1801 / 400)
    assert first["kernels"][0] == {"name": GEMM.name, "read": 600, "written": 200, "seconds": 2e-3}
    assert refused["refused"] == "wrong"
    assert "passes" not in refused


# --- the script


def test_without_a_gpu_the_script_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no counters are read: PyTorch finds no CUDA GPU"):
        script.main([])


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
    monkeypatch.setattr(script, "describe_environment", lambda device: describe_environment(CPU))
    assert script.main(["--wan-block", "1.3b"]) == 1  # one was refused
    printed = capsys.readouterr().out
    assert "| triton_fused |" in printed
    assert "b is refused: wrong" in printed
    assert "triton_fused moves 0.0 passes, within the 60 asked for" in printed


def test_a_profiler_that_fails_is_an_error(monkeypatch):
    def measure(command):
        raise MeasurementError("ERR_NVGPUCTRPERM")

    monkeypatch.setattr(script.dram, "why_not", lambda: None)
    monkeypatch.setattr(script.dram, "measure", measure)
    with pytest.raises(SystemExit, match=r"no counters are read: ERR_NVGPUCTRPERM\."):
        script.main(["--wan-block", "tiny"])


@pytest.mark.parametrize(("passes", "verdict"), [(60, "within the 60"), (60.1, "OVER the 60")])
def test_the_verdict_is_on_the_patched_block(passes, verdict):
    made = report()
    last = ImplementationTraffic("triton_fused", (replace(GEMM, read=int(passes * 400), written=0),), 1e-3)
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
