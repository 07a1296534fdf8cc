"""Attention backends that a user chooses in diffusers, and PyTorch's attention on GPUs where it is faster."""

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry, attention_backend

import turbo_rcm_patch as trp
from tests.patching.pairs import assert_same_output, families, make_pair, row
from tests.tiny_wan import tiny_wan_transformer
from turbo_rcm_patch import kernels
from turbo_rcm_patch.kernels import dispatch
from turbo_rcm_patch.kernels.attention import attention as own
from turbo_rcm_patch.patching.steps import attention as layers
from turbo_rcm_patch.patching.steps import plan

ATTENTION = ("self_attention", "attention")


@families
def test_attention_backends(monkeypatch, name):
    # set_attention_backend also changes a global default, which reset_attention_backend leaves changed.
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", _AttentionBackendRegistry._active_backend)
    patched, plain, patch = make_pair(name)
    patched.set_attention_backend("_native_math")
    assert_same_output(name, patched, plain)
    assert row(patch, *ATTENTION).reasons == {"attention backend _native_math": len(patched.blocks)}
    patched.reset_attention_backend()
    with attention_backend("native"):
        assert row(patch, *ATTENTION).reasons == {"cpu tensors": len(patched.blocks)}
        assert_same_output(name, patched, plain)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "PyTorch's is faster"),
        ({"attention": "triton"}, None),
        ({"implementation": "triton"}, None),
        ({"attention": "sdpa"}, "attention='sdpa'"),
    ],
)
@pytest.mark.parametrize("derivative", [None, "backward"])
def test_sdpa_where_it_is_faster_or_asked_for(monkeypatch, config, reason, derivative):
    monkeypatch.setattr(dispatch, "why_not_device", lambda device: None)
    monkeypatch.setattr(dispatch, "is_sm90", lambda device: False)
    monkeypatch.setattr(own, "is_sm90", lambda device: False)
    monkeypatch.setattr(own, "why_torch", lambda *_: "PyTorch's is faster")
    monkeypatch.setattr(kernels, "attention_label", lambda pick, spec: pick.name)
    gpu, attn = torch.device("cuda"), tiny_wan_transformer().blocks[0].attn1
    call = plan.Call(trp.Exact(**config), gpu, torch.bfloat16, derivative, plan.active_backend())
    step = layers.attention(attn, call)
    assert step.reason == reason
    assert step.kernel == ("PyTorch SDPA" if reason else "portable Triton")
