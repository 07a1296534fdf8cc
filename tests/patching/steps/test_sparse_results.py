"""Sparse attention gives e4m3 to the next linear: what is launched on GPUs that are not there, and the summary."""

import pytest
import torch

import turbo_rcm_patch as trp
from scripts.tools import compile_without_gpu
from tests.tiny_families import tiny_family_inputs, tiny_family_transformer
from tests.tiny_wan import moved
from turbo_rcm_patch.kernels import FP8
from turbo_rcm_patch.kernels.dispatch import meta_is_gpu
from turbo_rcm_patch.patching.weights import convert

ATTENTION = ("attention_8bit_kernel", "_sparse_attention_8bit_kernel", "sparse_linear_attention_8bit_kernel")
APART = "quantised in a pass of its own"
CONFIGS = {"block_sparse": trp.BlockSparse(min_tokens=0)}


def launched(monkeypatch, name, config, capability, change=None, **options):
    """Patch a tiny model for a GPU and run it there. Return the dtypes of its 8-bit self-attentions' results, and the
    reasons of the projections after them."""
    monkeypatch.setattr(convert, "capability_of", lambda device: capability)
    model = tiny_family_transformer(name, dtype=torch.bfloat16, **options)
    inputs = moved(tiny_family_inputs(name, model), "meta")
    patch = trp.patch(model, config)
    if change is not None:
        change(model)
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
    assert launched(monkeypatch, name, CONFIGS[tier], capability) == ({FP8}, set())


@pytest.mark.parametrize("tier", CONFIGS)
def test_a_gpu_without_fp8_quantises_apart(tier, monkeypatch):
    assert launched(monkeypatch, "wan", CONFIGS[tier], (8, 0)) == ({torch.bfloat16}, {APART})
