"""A stand-in for CUDA graphs on the CPU, and pairs of models to compare with and without it.

Like a graph, a tape computes on the addresses that were recorded, and knows nothing else. A replay that should not have
happened gives the old result. Memory of a graph that is not running is NaN.
"""

import dataclasses
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import turbo_rcm_patch as trp
from tests.tiny_wan import moved, tiny_transformer_inputs, tiny_wan_transformer
from turbo_rcm_patch.patching.cuda_graphs import copy_of
from turbo_rcm_patch.patching.families import family

AUTO = trp.Exact(cuda_graph="auto")
VARIANTS = {
    "t2v": ({}, {}),
    "i2v": ({"image_dim": 4, "added_kv_proj_dim": "inner", "in_channels": 36}, {}),
    "ti2v": ({}, {"per_token": True}),
}


TAPES = weakref.WeakSet()


class Tape(TorchDispatchMode):
    """A recorded call on the CPU: its ops and the memory that they read and write."""

    def __init__(self, function, inputs):
        super().__init__()
        self._steps, self._memory = [], []
        self._inputs = [None if tensor is None else tensor.clone() for tensor in inputs]
        with self:
            self._output = function(*self._inputs)
        TAPES.add(self)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        # A detached tensor stays at its address when the original's ``.data`` is set.
        args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs or {}))
        read = {address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        output = op(*args, **kwargs)
        own = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and address(t) not in read]
        self._steps.append((op, args, kwargs, own, read))
        self._memory += own
        return output

    def replay(self, inputs):
        for tape in TAPES:  # all of them share a pool
            tape.forget()
        for static, tensor in zip(self._inputs, inputs, strict=True):
            if static is not None:
                static.copy_(tensor)
        for op, args, kwargs, own, read in self._steps:
            leaves = [leaf for leaf in tree_leaves(op(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
            new = [leaf for leaf in leaves if address(leaf) not in read]
            for memory, result in zip(own, new, strict=True):
                memory.copy_(result)
        return copy_of(self._output)

    def drop(self):
        """Give the memory up: another replay raises."""
        self._steps = None

    def forget(self):
        for memory in self._memory:
            if memory.is_floating_point():
                memory.fill_(torch.nan)


def address(tensor):
    return tensor.untyped_storage().data_ptr()


class TapeRecorder:
    """The recorder that Graphs takes on the CPU."""

    device_type, reserved_bytes = "cpu", 3 * 2**20

    def __init__(self, device):
        pass

    def record(self, function, inputs):
        return Tape(function, inputs)

    def release(self):
        pass


def make_models(options=None, config=AUTO, **more):
    """A model of one block twice, the first patched with graphs."""
    options = {"layers": 1, **(options or {}), **more}
    return patched_pair([tiny_wan_transformer(**options) for _ in range(2)], config)


def patched_pair(pair, config):
    """Patch a model with graphs and the other without."""
    trp.patch(pair[0], config)
    trp.patch(pair[1], dataclasses.replace(config, cuda_graph="off"))
    return pair


def inputs_for(model, per_token=False, **options):
    inputs = tiny_transformer_inputs(model, **options)
    if per_token:
        batch, _, frames, height, width = inputs["hidden_states"].shape
        tokens = frames * height * width // 4
        inputs["timestep"] = torch.linspace(0, 999, batch * tokens).reshape(batch, tokens)
    return inputs


def cuda_inputs(model, **options):
    return moved(inputs_for(model, **options), "cuda")


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs)[0]


def assert_same(pair, inputs):
    """Compare all outputs, such as video and sound. Returns the first model's."""
    with torch.no_grad():
        theirs, ours = (model(**inputs) for model in reversed(pair))
    for x, y in zip(ours, theirs, strict=True):
        assert not y.isnan().any()
        assert torch.equal(x, y)
    return ours


def warm(pair, inputs):
    """Until the call is replayed."""
    for _ in range(3):
        assert_same(pair, inputs)
    assert replays(pair[0]) > 0


def graphs_of(model):
    return getattr(model, family.GRAPH)._graphs


def replays(model):
    return graphs_of(model).replays


def note(model):
    return getattr(model, family.GRAPH).note()


def assert_replayed(pair, inputs):
    before = replays(pair[0])
    assert_same(pair, inputs)
    assert replays(pair[0]) == before + 1


def assert_eager(pair, inputs, reason):
    before = replays(pair[0])
    assert_same(pair, inputs)
    assert replays(pair[0]) == before
    assert reason in graphs_of(pair[0]).eager
    assert reason in note(pair[0])
