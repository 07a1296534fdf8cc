"""Memory of a forward: a block frees tensors early, and a patched model peaks no higher than an unpatched one."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import turbo_rcm_patch as trp
from tests.tiny_wan import moved, tiny_transformer_inputs, tiny_wan_transformer
from turbo_rcm_patch.kernels import MAX_RUNS
from turbo_rcm_patch.kernels.dispatch import interpreting
from turbo_rcm_patch.patching.steps import layers

I2V = {"image_dim": 4, "added_kv_proj_dim": "inner", "in_channels": 36}
FREED = ("_layer_norm", "_qkv", "_head_norm")  # steps whose results nobody needs at the sub-layer's end


class Results:
    """References to what steps returned, and which steps' results were alive when another step was called."""

    def __init__(self, monkeypatch):
        self._monkeypatch, self._kept, self.alive = monkeypatch, [], []

    def keep(self, name):
        op = getattr(layers, name)

        def wrapped(*args, **options):
            result = op(*args, **options)
            self._kept += [(name, _storage(tensor)) for tensor in tree_leaves(result)]
            return result

        self._monkeypatch.setattr(layers, name, wrapped)

    def look_at(self, name):
        op = getattr(layers, name)

        def wrapped(*args, **options):
            gc.collect(1)  # the interpreter leaves cycles
            self.alive.append([kept for kept, storage in self._kept if not storage.expired()])
            self._kept.clear()
            return op(*args, **options)

        self._monkeypatch.setattr(layers, name, wrapped)


def _storage(tensor):
    return StorageWeakRef(tensor.untyped_storage())


@pytest.mark.skipif(not interpreting(), reason="needs Triton's CPU interpreter")
@pytest.mark.parametrize("options", [{}, I2V], ids=["t2v", "i2v"])
def test_a_sub_layer_frees_what_it_needs_no_more_before_its_result_is_allocated(options, monkeypatch):
    model = tiny_wan_transformer(layers=1, **options)
    trp.patch(model, trp.Exact(implementation="triton"))
    results = Results(monkeypatch)
    for name in FREED:
        results.keep(name)
    results.look_at("_linear_skip")
    with torch.no_grad():
        model(**tiny_transformer_inputs(model))
    assert results.alive == [[], [], []]


class Largest(TorchDispatchMode):
    """Bytes of the largest fp32 tensor that an op made."""

    bytes = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.dtype == torch.float32]
        self.bytes = max([self.bytes, *(tensor.untyped_storage().nbytes() for tensor in made)])
        return result


@pytest.mark.parametrize("runs", [2, MAX_RUNS + 1])
def test_only_many_runs_of_timesteps_make_a_block_compute_modulation_for_every_token(runs):
    model = tiny_wan_transformer(layers=1, dtype=torch.bfloat16)
    inputs = tiny_transformer_inputs(model, batch=1, frames=2, height=16, width=16)
    inputs["timestep"] = per_token(128, runs)
    trp.patch(model, trp.Exact(implementation="torch"))
    (block,), largest = model.blocks, Largest()
    forward = block.forward

    def watched(*args):
        with largest:
            return forward(*args)

    block.forward = watched
    with torch.no_grad():
        model(**inputs)
    rows = 128 * 6 * 128 * 4  # [tokens, 6, channels] in fp32
    assert largest.bytes >= rows if runs > MAX_RUNS else 0 < largest.bytes < rows


def per_token(tokens, runs):
    """Timesteps [1, tokens] in so many runs."""
    return 900.0 - (torch.arange(tokens) * runs // tokens)[None].float()


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["t2v", "i2v", "ti2v"])
def test_a_patched_forward_peaks_no_higher(variant):
    options = I2V if variant == "i2v" else {}
    model = tiny_wan_transformer(heads=8, head_dim=128, dtype=torch.bfloat16, ffn_dim=4096, **options).cuda()
    inputs = tiny_transformer_inputs(model, batch=1, frames=8, height=64, width=64, image_tokens=257)
    if variant == "ti2v":
        inputs["timestep"] = per_token(8192, 2)
    inputs = moved(inputs, "cuda")
    unpatched = peak_memory(model, inputs)
    with trp.patch(model, trp.Exact(cuda_graph="off")):
        assert peak_memory(model, inputs) <= unpatched


def peak_memory(model, inputs):
    """Bytes that a forward allocates at most, without what its first call allocates for good."""
    with torch.no_grad():
        model(**inputs)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(**inputs)
    return torch.cuda.max_memory_allocated() - before
