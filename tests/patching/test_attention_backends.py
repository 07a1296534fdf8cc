"""PyTorch's attention on GPUs where it is faster, or where a configuration asks for it."""

import pytest
import torch

import turbo_rcm_patch as trp
from tests.tiny_wan import tiny_wan_transformer
from turbo_rcm_patch import kernels
from turbo_rcm_patch.kernels import dispatch
from turbo_rcm_patch.kernels.attention import attention as own
from turbo_rcm_patch.patching.steps import attention as layers
from turbo_rcm_patch.patching.steps import plan

ATTENTION = ("self_attention", "attention")


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
