"""Sparse attention gives e4m3 to the next linear: what is launched on GPUs that are not there, and the summary."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import turbo_rcm_patch as trp
from scripts.tools import compile_without_gpu
from tests.tiny_families import tiny_family_inputs, tiny_family_transformer
from tests.tiny_wan import moved
from turbo_rcm_patch.kernels import FP8
from turbo_rcm_patch.kernels.dispatch import meta_is_gpu
from turbo_rcm_patch.patching.weights import quantize_linears

ATTENTION = ("attention_8bit_kernel", "_sparse_attention_8bit_kernel", "sparse_linear_attention_8bit_kernel")
APART = "quantised in a pass of its own"
CONFIGS = {"block_sparse": trp.BlockSparse(min_tokens=0), "sparse": trp.Sparse()}
IN_BF16 = {torch.bfloat16}, {APART}


def launched(monkeypatch, name, tier, capability, change=None):
    """Patch a tiny model for a GPU and run it there. Return the dtypes of its 8-bit self-attentions' results, and the
    reasons of the projections after them. change: called with each patched self-attention."""
    monkeypatch.setattr(quantize_linears, "capability_of", lambda device: capability)
    model = tiny_family_transformer(name, dtype=torch.bfloat16)
    if name == "wan" and tier == "sparse":
        for block in model.blocks:
            block.attn1.proj_l = nn.Linear(64, 64, dtype=torch.bfloat16)
    patch = trp.patch(model, CONFIGS[tier])
    blocks = model.transformer_blocks if name.startswith("ltx2") else model.blocks
    for block in blocks if change is not None else ():
        change(block.attn1)
    inputs = moved(tiny_family_inputs(name, model), "meta")
    model.to("meta")
    with torch.no_grad(), meta_is_gpu(capability, compile_without_gpu.MULTIPROCESSORS):
        launches = compile_without_gpu.record_launches(lambda: model(**inputs), capability)
        rows = patch.rows()
    given = [dict(zip(launch.kernel.arg_names, launch.arguments, strict=False)) for launch in launches]
    attentions = [x for x, launch in zip(given, launches, strict=True) if launch.kernel.fn.__name__ in ATTENTION]
    results = {getattr(x["out"], "base", x["out"]).dtype for x in attentions}
    assert all((x["out_scale"] is None) == (results != {FP8}) for x in attentions)
    own = [row for row in rows if row.sub_layer in ("self_attention", "video") and row.step == "projection + skip"]
    return results, {reason for row in own for reason in row.reasons}


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 0)])
@pytest.mark.parametrize("name", ["wan", "ltx2"])
@pytest.mark.parametrize("tier", CONFIGS)
def test_the_projection_takes_what_attention_gives(tier, name, capability, monkeypatch):
    assert launched(monkeypatch, name, tier, capability) == ({FP8}, set())


@pytest.mark.parametrize("tier", CONFIGS)
def test_a_gpu_without_fp8_quantises_apart(tier, monkeypatch):
    assert launched(monkeypatch, "wan", tier, (8, 0)) == IN_BF16


def test_factors_of_heads_come_between(monkeypatch):
    results, _ = launched(monkeypatch, "ltx2.3", "block_sparse", (9, 0))
    assert results == {torch.bfloat16}


def test_a_call_of_proj_l_comes_between(monkeypatch):
    def hooked(attn):
        attn.proj_l.register_forward_hook(lambda *_: None)

    assert launched(monkeypatch, "wan", "sparse", (9, 0), hooked) == IN_BF16


@pytest.mark.parametrize("tier", CONFIGS)
def test_an_all_to_all_comes_between(tier, monkeypatch):
    mesh = SimpleNamespace(get_group=lambda: None)
    degrees = SimpleNamespace(ring_degree=1, ulysses_degree=2, ulysses_anything=False, _ulysses_mesh=mesh)

    def on_two_gpus(attn):
        attn.processor._parallel_config = SimpleNamespace(context_parallel_config=degrees)

    in_8_bits_where_it_arrives = {torch.bfloat16}, set()
    assert launched(monkeypatch, "wan", tier, (9, 0), on_two_gpus) == in_8_bits_where_it_arrives
