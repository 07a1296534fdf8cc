"""scripts/benchmarks/host_time.py, and its part of the results page."""

import json
from types import SimpleNamespace

import pytest
import torch

from scripts.benchmarks import host_time as benchmark
from scripts.tools.pages.ops import host_time


def test_the_time_is_of_one_call(monkeypatch):
    calls = []
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: 0.5 * len(calls))
    assert benchmark.mean_time(lambda: calls.append(1), 4) == 500.0
    assert len(calls) == 4


@pytest.mark.parametrize("woke", range(4))
def test_the_gpu_sleeps_longer_where_it_woke_too_early(monkeypatch, woke):
    """Such a call may have waited for it: its time is not taken."""
    slept = []
    event = SimpleNamespace(record=lambda: None, query=lambda: len(slept) <= woke)
    cuda = SimpleNamespace(synchronize=lambda: None, _sleep=slept.append, Event=lambda: event)
    monkeypatch.setattr(benchmark.torch, "cuda", cuda)
    monkeypatch.setattr(benchmark, "mean_time", lambda call, calls: float(len(slept)))
    if woke == len(benchmark.SLEEPS):
        with pytest.raises(RuntimeError, match="the GPU woke"):
            benchmark._behind_a_sleep(lambda: None)
        return
    assert benchmark._behind_a_sleep(lambda: None) == woke + 1
    assert slept == sorted(set(slept))


TIERS = ("exact", "quantized", "sparse")
NAMES = ["unpatched", *(f"{tier}{graph}" for tier in TIERS for graph in ("", ", CUDA graph"))]


def test_each_variant_is_what_it_is_called():
    outputs = []

    def timed(call):
        outputs.append(call())
        return 10.0 * len(outputs)

    milliseconds = benchmark.measure("tiny", None, torch.device("cpu"), timed, rounds=2)
    blocks = benchmark.CASES["tiny"].transformer["num_layers"]
    # There and back: a machine that slows down slows all variants alike.
    assert milliseconds == {name: pytest.approx(75.0 / blocks if "graph" in name else 75.0) for name in NAMES}
    unpatched, exact, quantized = (outputs[i].float() for i in (0, 1, 3))
    assert 0 < (exact - unpatched).norm() < (quantized - unpatched).norm() < 0.1 * unpatched.norm()
    exact, quantized = (outputs[i][0].float() for i in (2, 4))
    assert 0 < (quantized - exact).norm() < 0.1 * exact.norm()
    assert (outputs[5].float() - unpatched).norm() > 1e-2 * unpatched.norm()


def test_a_block_of_ltx2():
    calls = benchmark.measure(
        "tiny-ltx2", None, torch.device("cpu"), lambda call: float(len(call())), rounds=1, layers=1
    )
    assert calls == dict.fromkeys(NAMES, 2.0)  # video and sound


def test_as_on_one_of_several_gpus(monkeypatch):
    """The collectives do nothing, so that only the calls are timed."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)  # diffusers divides by it
    with benchmark.others(2):
        calls = benchmark.measure(
            "tiny", None, torch.device("cpu"), lambda call: float(len(call()) > 0), rounds=1, ulysses=2
        )
    assert list(calls) == NAMES
    assert not torch.distributed.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["--config", "tiny"])
    assert "no CUDA GPU" in capsys.readouterr().err


def test_the_page_marks_what_is_over_a_millisecond():
    run = {"settings": {"config": "wan2.1-1.3b"}, "milliseconds": {"unpatched": 2.0, "exact": 0.96, "quantized": 1.24}}
    assert "unpatched 2.00 ms, exact 0.96 ms, quantized 1.24 ms ✗ (1 ms is wanted at most)" in host_time(run)
    run["settings"]["ulysses"] = 4
    assert "a block of wan2.1-1.3b on one of 4 GPUs that share the tokens" in host_time(run)
    run["settings"]["config"] = "ltx2-19b"  # for which nothing was wanted
    assert host_time(run).endswith("quantized 1.24 ms.\n")


@pytest.mark.gpu
def test_every_variant_is_timed(tmp_path, capsys):
    path = tmp_path / "host-time.json"
    assert benchmark.main(["--config", "tiny", "--json", str(path)]) == 0
    milliseconds = json.loads(path.read_text())["milliseconds"]
    assert list(milliseconds) == NAMES
    assert milliseconds["exact, CUDA graph"] < milliseconds["exact"]
    assert all(0 < value < 100 for value in milliseconds.values())
    assert "ms a block" in capsys.readouterr().out
