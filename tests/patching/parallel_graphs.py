"""The code of each rank of a context-parallel model with graphs. A rank is a process of its own on the CPU.

A tape stands for a CUDA graph. Replayed, it exchanges tokens with the other rank again.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_leaves, tree_map_only

import turbo_rcm_patch as trp
from tests.patching.tape import AUTO, Tape, TapeRecorder, graphs_of, inputs_for, note, replays, run
from tests.tiny_wan import tiny_wan_transformer
from turbo_rcm_patch.patching import cuda_graphs as graphs
from turbo_rcm_patch.patching.families.wan import graph as wan_graph

STEPS = 4
REPLAYED = []  # the numbers of the recordings, in turn
# f: a first frame has a timestep of its own, so that rank 0 has two runs, and rank 1 one. o: one run on each rank.
# m: too many runs on rank 1. share: between the limits of one GPU and of two.
WITH_RUNS = {
    "other timesteps": {"calls": "ffff"},
    "two kinds in turn": {"calls": "fofofofoof"},
    "too many runs on one": {"calls": "mmmfffmfm"},
    "large": {"calls": "ffffoomm", "share": 0.4},
    "large, if asked for": {"calls": "mm", "share": 0.4, "config": trp.Exact(cuda_graph="on")},
    "too large": {"calls": "ff", "share": 0.2},
    "a hook on one": {"calls": "fff", "hooked": True},
    "large, with a hook on one": {"calls": "ff", "share": 0.4, "hooked": True},
}


class ParallelTape(Tape):
    """A tape on which every collective is waited for where it starts, as on the GPU's stream."""

    def replay(self, inputs):
        REPLAYED.append(self.number)
        return super().replay(inputs)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.name() == "_c10d_functional::_wrap_tensor_autograd":
            return args[0]
        args, kwargs = tree_map_only(AsyncCollectiveTensor, AsyncCollectiveTensor.trigger_wait, (args, kwargs or {}))
        return super().__torch_dispatch__(waiting(op) if "c10d" in op.namespace else op, types, args, kwargs)


def waiting(op):
    def run_and_wait(*args, **kwargs):
        output = op(*args, **kwargs)
        for result in tree_leaves(output):
            if isinstance(result, torch.Tensor):
                torch.ops._c10d_functional.wait_tensor(result)
            else:
                dist.distributed_c10d.Work.unbox(result).wait()
        return output

    return run_and_wait


class ParallelTapeRecorder(TapeRecorder):
    broken = False
    numbers = itertools.count()

    def record(self, function, inputs):
        number = next(self.numbers)
        tape = ParallelTape(function, inputs)  # which also runs the function, unlike a CUDA graph
        tape.number = number
        if self.broken:
            raise RuntimeError("out of memory")
        return tape


def run_graphs(rank, parallelize):
    """The outputs and notes of models with graphs, by scenario. parallelize: (model) -> None."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "CudaRecorder", ParallelTapeRecorder)
        results = {name: scenario(rank, parallelize) for name, scenario in SCENARIOS.items()}
    return results


def run_graphs_with_runs(rank, parallelize):
    """The results of models with timesteps per token, by scenario, and the numbers of the recordings replayed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "CudaRecorder", ParallelTapeRecorder)
        REPLAYED.clear()
        results = {name: steps_with_runs(rank, parallelize, **options) for name, options in WITH_RUNS.items()}
    return results, list(REPLAYED)


@torch.no_grad()
def steps_with_runs(rank, parallelize, calls, config=AUTO, share=None, hooked=False):
    """Return the outputs, which calls were replayed, and the note.

    share: of a block's FLOPs of which one GPU makes a graph at most. hooked: a hook of rank 1 sees the time embedding.
    """
    model = parallel_model(parallelize, config)
    outputs, replayed = [], ""
    if hooked and rank == 1:
        model.condition_embedder.time_embedder.register_forward_hook(lambda *_: None)
    with pytest.MonkeyPatch.context() as patch:
        if share is not None:
            flops = wan_graph.flops_per_block(model, inputs_for(model, batch=1)["hidden_states"], AUTO)
            patch.setattr(wan_graph, "MOST_FLOPS_PER_BLOCK", share * flops)
        for step, call in enumerate(calls):
            before = replays(model)
            outputs.append(model(**inputs_with_runs(model, step, call))[0])
            replayed += "-" if replays(model) == before else call
    return outputs, replayed, note(model)


def inputs_with_runs(model, step, call):
    """Inputs of a step with timesteps per token. Each rank has nine of the eighteen."""
    inputs, timestep = inputs_for(model, seed=step, batch=1), torch.full((1, 18), 900.0 - step)
    if call == "f":
        timestep[:, :6] = 0.0  # the first frame
    elif call == "m":
        timestep[:, 9:] -= torch.arange(9.0)  # many runs, on rank 1
    return {**inputs, "timestep": timestep}


def kept_after_the_end(parallelize):
    """The number of graphs before and after a process group of no use to the model is destroyed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "CudaRecorder", ParallelTapeRecorder)
        model = parallel_model(parallelize)
        steps(model, 2)
        before = graphs_of(model).kept
        group = dist.new_group()
        dist.barrier(group)  # until the other rank has connected to this one
        dist.destroy_process_group(group)
    return before, graphs_of(model).kept


def steps(model, count=STEPS):
    outputs = []
    for step in range(count):
        outputs.append(run(model, step_inputs(model, step)))
    return outputs


def step_inputs(model, step):
    return inputs_for(model, seed=step)


def parallel_model(parallelize, config=AUTO, when="before"):
    model = tiny_wan_transformer()
    if when == "after":
        parallelize(model)
    trp.patch(model, config)
    if when == "before":
        parallelize(model)
    return model


def all_record(rank, parallelize, **options):
    model = parallel_model(parallelize, **options)
    return steps(model), note(model), replays(model)


def one_has_a_hook(rank, parallelize):
    """The hook of rank 1 comes when both replay, and goes later."""
    model = parallel_model(parallelize)
    outputs = steps(model)
    handle = model.blocks[1].register_forward_hook(lambda *_: None) if rank == 1 else None
    before = replays(model)
    outputs += steps(model)
    with_hook = replays(model) - before
    said = note(model)
    if handle is not None:
        handle.remove()
    outputs += steps(model)
    return outputs, said, (with_hook, replays(model) - before)


def one_fails(rank, parallelize):
    model = parallel_model(parallelize)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParallelTapeRecorder, "broken", rank == 1)
        outputs = steps(model)
    return outputs + steps(model), note(model), replays(model)


def one_failed_alone(rank, parallelize):
    """Rank 1 failed before the model became parallel."""
    model = parallel_model(lambda model: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParallelTapeRecorder, "broken", rank == 1)
        steps(model, 2)
    before = replays(model)
    parallelize(model)
    return steps(model), note(model), replays(model) - before


def one_moved_its_weights(rank, parallelize):
    model = parallel_model(parallelize)
    outputs = steps(model)
    if rank == 0:
        model.proj_out.weight.data = model.proj_out.weight.data.clone()
    return outputs + steps(model), note(model), replays(model)


SCENARIOS = {
    "all record": all_record,
    "patched after": lambda *args: all_record(*args, when="after"),
    "quantized": lambda *args: all_record(*args, config=trp.Quantized(cuda_graph="on")),
    "one has a hook": one_has_a_hook,
    "one fails": one_fails,
    "one failed alone": one_failed_alone,
    "one moved its weights": one_moved_its_weights,
}
