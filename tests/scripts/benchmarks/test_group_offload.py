"""scripts/benchmarks/group_offload.py: the order of its variants, and the state of the model in each."""

from unittest import mock

import pytest
import torch

from scripts.benchmarks import group_offload as benchmark
from scripts.benchmarks.gpu_session import ROOT
from tests.tiny_wan import tiny_wan_transformer

CPU = torch.device("cpu")


def test_the_resident_step_is_timed_before_an_offloaded_one_and_after_it(monkeypatch):
    """A machine that slows down does not make offloading look slower."""
    model, states = tiny_wan_transformer(), []
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    linear, offloads, emptied = model.blocks[0].ffn.net[2], [], []
    monkeypatch.setattr(benchmark, "offload", lambda model, device: offloads.append(type(linear).__name__))
    monkeypatch.setattr(benchmark, "stop_streaming", lambda model: offloads.clear())
    monkeypatch.setattr(benchmark, "empty_cache", lambda: emptied.append(len(states)))

    def measure(model, inputs, repeats):
        states.append((type(linear).__name__, *offloads))
        seconds = [100.0 + len(states)] * repeats
        sizes = dict.fromkeys(("bytes_between_steps", "block_bytes", "other_bytes"), 0)
        return {"step_seconds": seconds, "peak_bytes": len(states), **sizes, "finite": True}

    monkeypatch.setattr(benchmark, "measure", measure)
    rows = list(benchmark.measure_all(model, (), 3, CPU))
    resident, after, before_it = (("QuantizedLinear", *when) for when in ((), ("QuantizedLinear",), ("Linear",)))
    assert states == [resident, after, resident, before_it]
    assert emptied == [3]
    assert [row["step_seconds"] for row in rows] == [102, 102, 104]
    assert [row["peak_bytes"] for row in rows] == [3, 2, 4]
    assert list(benchmark.faults_of(rows)) == []
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def test_blocks_stream_as_the_page_on_tiers_says():
    model = mock.Mock()
    benchmark.offload(model, CPU)
    (options,) = (call.kwargs for call in model.enable_group_offload.mock_calls)
    assert (options["offload_type"], options["use_stream"], options["record_stream"]) == ("block_level", True, True)


def test_the_process_begins_anew_with_the_variables_that_the_page_on_tiers_names(monkeypatch):
    began = []

    def execve(program, arguments, environment):
        began.append({name: environment[name] for name in benchmark.REUSED})
        raise SystemExit

    monkeypatch.setattr(benchmark.os, "execve", execve)
    monkeypatch.setattr(benchmark.torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit):
        benchmark.main(["--reuse-host-memory"])
    assert began == [benchmark.REUSED]
    exported = " ".join(f"{name}={value}" for name, value in benchmark.REUSED.items())
    assert f"export {exported}\n" in (ROOT / "docs/tiers.md").read_text()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"peak_bytes": 4 * 2**30}, "the peak is 4.00 GiB, above 3.5 GiB"),
        ({"step_seconds": 1.2}, "a step takes 1.20 times the resident one, above 1.1"),
        ({"bytes_between_steps": 2 * 2**30}, "more than two blocks' weights stay on the GPU"),
        ({"finite": False}, "the result is not finite"),
    ],
)
def test_a_step_that_misses_a_limit_is_named(changes, fault):
    good = {"step_seconds": 1.0, "peak_bytes": 2**30, "finite": True}
    good |= {"bytes_between_steps": 0, "block_bytes": 0, "other_bytes": 0}
    resident, offloaded = ({**good, "weights": place} for place in (benchmark.RESIDENT, benchmark.AFTER))
    found = list(benchmark.faults_of([resident, {**offloaded, **changes}]))
    assert len(found) == (fault is not None)
    assert all(sentence.startswith(f"{benchmark.AFTER}: {fault}") for sentence in found)
