"""Graphs: failed recordings, memory that is given back, and memory that is kept between steps."""

import contextlib
import copy
import gc
import pickle
import weakref

import pytest
import torch

import turbo_rcm_patch as trp
from tests.patching.tape import (
    AUTO,
    TAPES,
    TapeRecorder,
    assert_same,
    graphs_of,
    inputs_for,
    make_models,
    note,
    replays,
    run,
    warm,
)
from tests.tiny_wan import moved, tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch.patching import cuda_graphs as graphs
from turbo_rcm_patch.patching.cuda_graphs import CudaRecorder
from turbo_rcm_patch.patching.families import family


def test_a_failed_recording_is_said_once_and_never_tried_again(tape, monkeypatch, caplog):
    pair = make_models()
    inputs, other = inputs_for(pair[0]), inputs_for(pair[0], width=8)
    warm(pair, other)
    tries = []

    def failing(self, function, inputs):
        tries.append(1)
        try:
            raise RuntimeError("an op waits for the GPU\nand more")
        except RuntimeError:
            raise RuntimeError("capture ended")  # noqa: B904

    monkeypatch.setattr(TapeRecorder, "record", failing)
    for _ in range(4):
        assert_same(pair, inputs)
    assert_same(pair, other)
    assert len(tries) == 1
    assert len(caplog.records) == 1
    assert "none now: recording failed (RuntimeError: an op waits for the GPU); " in note(pair[0])
    assert "recording failed (RuntimeError: an op waits for the GPU) (4)" in note(pair[0])
    assert graphs_of(pair[0]).kept == 0
    monkeypatch.undo()
    monkeypatch.setattr(graphs, "CudaRecorder", TapeRecorder)
    trp.restore(pair[0])
    trp.patch(pair[0], AUTO)
    warm(pair, inputs)


def test_the_functions_own_error_reaches_the_caller(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    assert_same(pair, inputs)
    wrong = {**inputs, "encoder_hidden_states": inputs["encoder_hidden_states"][..., :5]}
    for _ in range(3):
        with pytest.raises(RuntimeError, match="shapes"):
            run(pair[0], wrong)
    warm(pair, inputs)


def test_a_failed_recording_keeps_nothing_alive(tape):
    recorded, held = graphs.Graphs(), []

    def function(x):
        memory = torch.empty(3)
        held.append(weakref.ref(memory))
        if len(held) == 2:
            raise RuntimeError("an op waits for the GPU")
        return 2 * x

    for _ in range(2):
        recorded.run("key", function, [torch.ones(3)])
    assert [memory() for memory in held] == [None] * 3


def test_no_garbage_is_collected_while_a_call_is_recorded(tape):
    """It may hold a dropped model's graph, whose end breaks a capture."""
    recorded, collects = graphs.Graphs(), []

    def function(x):
        collects.append(gc.isenabled())
        if len(collects) == 4:
            raise RuntimeError("an op waits for the GPU")
        return 2 * x

    for key in ("first", "first", "second", "second"):
        recorded.run(key, function, [torch.ones(3)])
        assert gc.isenabled()
    assert collects == [True, False, True, False, True]


@pytest.mark.parametrize("recorded", [1, 2])
def test_a_pool_is_given_back_with_the_last_of_its_recordings(tape, monkeypatch, recorded):
    released, kept = [], graphs.Graphs()
    monkeypatch.setattr(TapeRecorder, "release", lambda self: released.append(self))
    call = lambda key: kept.run(key, lambda x: 2 * x, [torch.ones(3)])  # noqa: E731
    for key in range(recorded):
        call(key), call(key)
    pool = kept._recorder
    for key in range(recorded, graphs.KINDS_KEPT + recorded - 1):
        call(key)
    assert (kept.kept, released) == (1, [])
    call(-1)
    assert (kept.kept, released, kept.reserved_bytes) == (0, [pool], 0)
    call(-1)
    assert kept._recorder is not pool
    assert torch.equal(call(-1), torch.full((3,), 2.0))
    kept.clear()
    assert len(released) == 2


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda graphs: pickle.loads(pickle.dumps(graphs))])
def test_copied_and_pickled_graphs_are_empty(tape, duplicate):
    kept = graphs.Graphs()
    for _ in range(3):
        kept.run("key", lambda x: 2 * x, [torch.ones(3)])
    other = duplicate(kept)
    assert (other.kept, other.replays, kept.kept, kept.replays) == (0, 0, 1, 2)
    assert torch.equal(other.run("key", lambda x: 3 * x, [torch.ones(3)]), torch.full((3,), 3.0))


def test_a_summary_where_the_allocator_does_not_tell_its_memory(tape, monkeypatch):
    pair = make_models()
    warm(pair, inputs_for(pair[0]))

    def unavailable():
        raise RuntimeError("cudaMallocAsync does not yet support snapshot")

    with monkeypatch.context() as context:
        for name in ("graph_pool_handle", "Event"):
            context.setattr(torch.cuda, name, lambda: None)
        context.setattr(torch.cuda, "Stream", lambda device: None)
        context.setattr(torch.cuda, "memory_snapshot", unavailable)
        graphs_of(pair[0])._recorder = CudaRecorder(torch.device("cuda"))
        assert ": 1 kept; 2 calls replayed;" in note(pair[0])


def test_a_move_to_another_device_frees_the_graphs_at_the_next_forward(tape, monkeypatch):
    pair = make_models()
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    pair[0].to("meta")
    on_meta = moved(inputs, "meta")
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # it knows no "meta"
    with contextlib.suppress(RuntimeError, NotImplementedError):  # tensors without contents have no checksum
        run(pair[0], on_meta)
    assert len(TAPES) == 0
    assert "none now: meta tensors" in note(pair[0])


def test_a_restore_that_cannot_free_its_graphs_leaves_no_patch(tape, monkeypatch):
    pipe = tiny_wan_pipeline("wan22")
    patch = trp.patch(pipe, AUTO)

    def failing(self):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(graphs.Graphs, "clear", failing)
    with pytest.raises(RuntimeError, match="CUDA error"):
        patch.restore()
    assert not patch.active
    for model in (pipe.transformer, pipe.transformer_2):
        assert not any("turbo_rcm_patch" in name for module in model.modules() for name in module.__dict__)


def test_restore_frees_the_graphs_and_patching_again_starts_anew(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    assert len(TAPES) == 1
    held = getattr(pair[0], family.GRAPH)  # as a hook that kept a patched forward would
    trp.restore(pair[0])
    gc.collect()
    assert len(TAPES) == 0
    assert not held._graphs.kept
    assert "forward" not in pair[0].__dict__
    assert not any("turbo_rcm_patch" in name for name in pair[0].__dict__)
    plain = run(tiny_wan_transformer(layers=1), inputs)
    assert torch.equal(run(pair[0], inputs), plain)
    trp.patch(pair[0], AUTO)
    assert replays(pair[0]) == 0
    warm(pair, inputs)
