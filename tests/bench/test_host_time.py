"""scripts/benchmark_host_time.py, and what the page of results says of it."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("benchmark_host_time", ROOT / "scripts/benchmark_host_time.py")
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)
sys.path.insert(0, str(ROOT / "scripts"))

from result_tables.ops import host_time  # noqa: E402


def test_the_time_is_of_one_call(monkeypatch):
    calls = []
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: 0.5 * len(calls))
    assert benchmark.mean_time(lambda: calls.append(1), 4) == 500.0
    assert len(calls) == 4


def test_each_variant_is_what_it_is_called():
    outputs = []

    def timed(call):
        outputs.append(call())
        return float(len(outputs))

    milliseconds = benchmark.measure("tiny", None, torch.device("cpu"), timed)
    assert milliseconds == {"unpatched": 1.0, "exact": 2.0, "quantized": 3.0}
    unpatched, exact, quantized = (output.float() for output in outputs)
    assert 0 < (exact - unpatched).norm() < (quantized - unpatched).norm() < 0.1 * unpatched.norm()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["--config", "tiny"])
    assert "no CUDA GPU" in capsys.readouterr().err


def test_the_page_marks_what_is_over_a_millisecond():
    run = {"settings": {"config": "tiny"}, "milliseconds": {"unpatched": 2.0, "exact": 0.96, "quantized": 1.24}}
    assert "unpatched 2.00 ms, exact 0.96 ms, quantized **1.24 ms**" in host_time(run)


@pytest.mark.gpu
def test_every_variant_is_timed(tmp_path, capsys):
    path = tmp_path / "host-time.json"
    assert benchmark.main(["--config", "tiny", "--json", str(path)]) == 0
    milliseconds = json.loads(path.read_text())["milliseconds"]
    assert list(milliseconds) == ["unpatched", "exact", "quantized"]
    assert all(0 < value < 100 for value in milliseconds.values())
    assert "ms a block" in capsys.readouterr().out
