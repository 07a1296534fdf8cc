"""scripts/benchmarks/group_offload.py: the order of its variants, and the state of the model in each."""

import torch

from scripts.benchmarks import group_offload as benchmark
from tests.tiny_wan import tiny_wan_transformer

CPU = torch.device("cpu")


def test_every_variant_has_a_turn_there_and_one_back(monkeypatch):
    """A machine that slows down slows all variants alike."""
    model, states = tiny_wan_transformer(), []
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    offloads = []
    monkeypatch.setattr(benchmark, "offload", lambda model, device, record_stream: offloads.append(record_stream))
    monkeypatch.setattr(benchmark, "stop_streaming", lambda model: offloads.clear())

    def measure(model, inputs, repeats):
        states.append((model.blocks[0].ffn.net[2].__class__.__name__, *offloads))
        seconds = [float(len(states))] * repeats
        sizes = dict.fromkeys(("bytes_between_steps", "block_bytes", "other_bytes"), 0)
        return {"step_seconds": seconds, "peak_bytes": len(states), **sizes, "finite": True}

    monkeypatch.setattr(benchmark, "measure", measure)
    rows = list(benchmark.measure_all(model, (), 3, CPU))
    assert states == states[::-1]
    assert states[:5] == [
        ("Linear",),
        ("QuantizedLinear",),
        ("QuantizedLinear", False),
        ("QuantizedLinear", False),
        ("Linear", False),
    ]
    assert states[5:8] == [(kind, True) for kind, _ in states[2:5]]
    assert [row["step_seconds"] for row in rows] == [8.5] * 8
    assert [row["peak_bytes"] for row in rows] == list(range(16, 8, -1))
    assert list(benchmark.faults_of(rows)) == []
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
