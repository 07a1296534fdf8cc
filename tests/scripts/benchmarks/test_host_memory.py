"""The benchmark of the host's memory: it converts and loads, and its peak has what was held for a moment."""

import gc
import time

import torch

from scripts.benchmarks import host_memory, memory_cap


def test_a_pipeline_of_two_experts_is_converted_and_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_cap, "POOL", 1 << 12)
    options = host_memory.parse_options(["--config", "tiny-experts", "--device", "cpu"])
    host_memory.convert(options, tmp_path)
    options.load = str(tmp_path / "converted")
    figures = host_memory.load(options)
    assert 0 < figures["weights"] < 10**7
    assert 0 <= figures["peak"] < 10**9
    assert figures["pinned"] == 0


def test_the_peak_has_what_is_freed_again():
    most = 0.9 * 4 * (1 << 26)
    gc.collect()  # else what other tests left may be freed meanwhile
    with host_memory.watched() as peak:
        before, late = host_memory.own_memory(), time.monotonic() + 20
        held = torch.ones(1 << 26)
        while peak[0] - before <= most and time.monotonic() < late:  # a busy machine lets the watching thread wait
            time.sleep(0.01)
        del held
    assert peak[0] - before > most
