"""CUDA graphs under context parallelism: which steps are recorded, and when graphs go. See test_context_parallel.py."""

import functools
import os

import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.models._modeling_parallel import ParallelConfig

import turbo_rcm_patch as trp
from tests.patching.tape import TapeRecorder
from turbo_rcm_patch.patching import cuda_graphs
from turbo_rcm_patch.patching.cuda_graphs import Graphs
from turbo_rcm_patch.patching.families import CASES
from turbo_rcm_patch.patching.families.wan.graph import GRAPHED
from turbo_rcm_patch.patching.steps.context_parallel import _forget_at_exit as forget_at_exit
from turbo_rcm_patch.patching.steps.context_parallel import forget_graphs, prepare_graphs


def test_graphs_are_gone_before_their_process_group_ends(monkeypatch):
    """Else NCCL waits for them."""
    seen = []
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")  # as the user set it
    monkeypatch.setattr(dist, "destroy_process_group", lambda group=None: seen.append(group))
    graphs = [Graphs(), Graphs()]
    for one in graphs:
        monkeypatch.setattr(one, "clear", lambda: seen.append("cleared"))
        prepare_graphs(one)
    dist.destroy_process_group(group="group")
    assert os.environ["NCCL_GRAPH_REGISTER"] == "1"
    assert seen == ["cleared", "cleared", "group"]


def test_graphs_are_gone_before_the_process_ends(monkeypatch):
    """After an error nobody destroys the process group. NCCL would then wait for the graphs when the process ends."""
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    monkeypatch.setattr(cuda_graphs, "CudaRecorder", TapeRecorder)
    parallel, others = Graphs(), Graphs()
    for graphs in (parallel, others):
        for _ in range(2):
            graphs.run("key", torch.neg, [torch.ones(2)])
        monkeypatch.setattr(graphs, "_release_pool", lambda: pytest.fail("this waits for the GPU"))
    prepare_graphs(parallel)
    assert (parallel.kept, others.kept) == (1, 1)
    (held,) = parallel._recordings.values()  # as by the traceback of an error in a replay
    forget_at_exit()
    assert (parallel.kept, others.kept) == (0, 1)
    with pytest.raises(TypeError, match="NoneType"):
        held.replay([torch.ones(2)])


def test_torch_gets_its_function_back_with_the_last_graphs(monkeypatch):
    seen = []
    monkeypatch.setattr(dist, "destroy_process_group", original := lambda: seen.append("destroyed"))
    graphs = [Graphs(), Graphs()]
    for one in graphs:
        monkeypatch.setattr(one, "clear", lambda: seen.append("cleared"))
        prepare_graphs(one)
    ours = dist.destroy_process_group
    forget_graphs(Graphs())  # of a model that is not parallel
    forget_graphs(graphs[0])
    assert dist.destroy_process_group is ours
    monkeypatch.setattr(dist, "destroy_process_group", functools.wraps(ours)(lambda: ours()))
    forget_graphs(graphs[1])
    dist.destroy_process_group()  # someone else's function stays, and calls ours
    assert seen == ["destroyed"]
    monkeypatch.setattr(dist, "destroy_process_group", ours)
    prepare_graphs(graphs[0])
    forget_graphs(graphs[0])
    assert dist.destroy_process_group is original


def test_a_recording_that_failed_elsewhere_gives_its_memory_back(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "CudaRecorder", TapeRecorder)
    monkeypatch.setattr(TapeRecorder, "release", lambda self: released.append(self))
    graphs, released = Graphs(), []
    for _ in range(2):
        graphs.run("key", torch.neg, [torch.ones(2)], lambda progress: 0 if progress == 1 and graphs.kept else progress)
    assert graphs.failure == "recording failed on another GPU"
    assert len(released) == 1


def test_a_gpu_without_memory_for_a_recorder_still_tells_the_others(monkeypatch):
    """Else they wait for its answer after the recording."""

    class Recorder(TapeRecorder):
        def __init__(self, device):
            raise RuntimeError("out of memory")

    monkeypatch.setattr(cuda_graphs, "CudaRecorder", Recorder)
    graphs, told = Graphs(), []
    for _ in range(2):
        output = graphs.run("key", torch.neg, [torch.ones(2)], lambda progress: told.append(progress) or progress)
        assert torch.equal(output, -torch.ones(2))
    assert told == [cuda_graphs.UNSEEN, cuda_graphs.SEEN, 0]
    assert graphs.failure == "recording failed (RuntimeError: out of memory)"


def test_nccl_registers_no_buffers_while_it_records(monkeypatch):
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "")  # restored afterwards
    monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    prepare_graphs(Graphs())
    assert os.environ["NCCL_GRAPH_REGISTER"] == "0"


@pytest.mark.parametrize(
    ("frames", "ranks", "config", "is_recorded"),
    [
        (21, 1, trp.Exact(), False),  # 81 frames at 832×480
        (21, 2, trp.Exact(), False),
        (21, 2, trp.Quantized(), True),
        (21, 4, trp.Exact(), True),
        (41, 2, trp.Exact(), False),  # 161 frames
        (41, 2, trp.Sparse(), True),
    ],
)
def test_steps_that_are_recorded_at_the_size_of_wan_1_3b(frames, ranks, config, is_recorded):
    latents = torch.empty(1, 16, frames, 60, 104, device="meta")
    assert GRAPHED.is_large(parallel_case("wan2.1-1.3b", ranks), (latents, torch.empty(1)), config) != is_recorded


@pytest.mark.parametrize(
    ("ranks", "config", "is_recorded"),
    [
        (1, trp.Sparse(), False),
        (2, trp.Quantized(), False),
        (4, trp.Exact(), False),
        (4, trp.Quantized(), True),
        (2, trp.Sparse(), True),
    ],
)
def test_steps_that_are_recorded_at_the_size_of_ti2v_5b(ranks, config, is_recorded):
    latents = torch.empty(1, 48, 31, 44, 80, device="meta")  # 121 frames at 1280×704
    timestep = torch.empty(1, 31 * 22 * 40 // ranks, device="meta")
    assert GRAPHED.is_large(parallel_case("wan2.2-5b", ranks), (latents, timestep), config) != is_recorded


def parallel_case(name, ranks):
    """One block of a case's transformer without values, on so many GPUs."""
    case = CASES[name]
    with torch.device("meta"):
        model = case.transformer_class(**{**case.transformer, "num_layers": 1})
    if ranks > 1:
        degrees = ContextParallelConfig(ulysses_degree=ranks)
        model._parallel_config = ParallelConfig(context_parallel_config=degrees)
    return model
