"""PyTorch's attention, or a function in its place: where it is faster, or where somebody asks for it."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

import turbo_rcm_patch as trp
from tests.tiny_wan import tiny_transformer_inputs, tiny_wan_transformer
from turbo_rcm_patch import kernels
from turbo_rcm_patch.kernels import dispatch
from turbo_rcm_patch.kernels.attention import attention as own
from turbo_rcm_patch.kernels.attention.sdpa import PYTORCHS
from turbo_rcm_patch.patching.steps import attention as layers
from turbo_rcm_patch.patching.steps import plan

ATTENTION = ("self_attention", "attention")


def step_on_a_gpu(monkeypatch, config, why_torch, **fields):
    """The step of self-attention on a GPU that is not of sm_90."""
    monkeypatch.setattr(dispatch, "why_not_device", lambda device: None)
    monkeypatch.setattr(dispatch, "is_sm90", lambda device: False)
    monkeypatch.setattr(own, "is_sm90", lambda device: False)
    monkeypatch.setattr(own, "why_torch", lambda *_: why_torch)
    gpu, attn = torch.device("cuda"), tiny_wan_transformer().blocks[0].attn1
    fields = {"derivative": None, "backend": plan.active_backend(), **fields}
    return layers.attention(attn, plan.Call(trp.Exact(**config), gpu, torch.bfloat16, **fields))


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
    monkeypatch.setattr(kernels, "attention_label", lambda pick, spec: pick.name)
    step = step_on_a_gpu(monkeypatch, config, "PyTorch's is faster", derivative=derivative)
    assert step.reason == reason
    assert step.kernel == ("PyTorch SDPA" if reason else "portable Triton")


def sageattn(q, k, v, tensor_layout="HND", **options):
    """Attention as SageAttention's: it takes PyTorch's options and ignores them. Negative, to tell it apart."""
    return -PYTORCHS(q, k, v)


REPLACED = "F.scaled_dot_product_attention was replaced"


@pytest.mark.parametrize(
    ("config", "kernel", "reason"),
    [
        ({}, "sageattn in place of PyTorch SDPA", REPLACED),
        ({"attention": "sdpa"}, "sageattn in place of PyTorch SDPA", "attention='sdpa'"),
        ({"implementation": "torch"}, "sageattn in place of PyTorch SDPA", "implementation='torch'"),
        ({"attention": "triton"}, "portable Triton", None),
        ({"implementation": "triton"}, "portable Triton", None),
    ],
)
def test_a_function_in_place_of_pytorchs_runs_where_auto_would_choose(monkeypatch, config, kernel, reason):
    step = step_on_a_gpu(monkeypatch, config, None, sdpa=sageattn)
    assert (step.kernel, step.reason) == (kernel, reason)


def test_the_model_and_its_summary_follow_a_replaced_attention_function(monkeypatch):
    model = tiny_wan_transformer()
    inputs = tiny_transformer_inputs(model)
    with torch.no_grad():
        before = model(**inputs)[0]
        with trp.patch(model, trp.Exact()) as patch:
            model(**inputs)  # the plans are made
            monkeypatch.setattr(F, "scaled_dot_product_attention", sageattn)
            attended = {(row.kernel, *row.reasons) for row in patch.rows() if row.step == "attention"}
            assert attended == {("sageattn in place of PyTorch SDPA", REPLACED)}
            replaced = model(**inputs)[0]
        monkeypatch.setattr(
            F, "scaled_dot_product_attention", lambda query, key, value, **_: sageattn(query, key, value)
        )
        torch.testing.assert_close(replaced, model(**inputs)[0], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(replaced, before, rtol=1e-2, atol=1e-2)


def test_ops_called_with_auto_take_a_replaced_attention_function(monkeypatch):
    q, k, v = torch.randn(3, 1, 7, 2, 16)
    expected = kernels.attention(q, k, v, attention="auto")
    sparse = partial(kernels.block_sparse_attention, q, k, v, mass=0.5, block_q=4, block_k=4)
    exact = sparse()
    monkeypatch.setattr(F, "scaled_dot_product_attention", sageattn)
    assert torch.equal(kernels.attention(q, k, v, attention="auto"), -expected)
    compiled = torch.compile(kernels.attention, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v, attention="auto"), -expected)
    assert torch.equal(sparse(), exact)  # a function that ignores masks cannot compute it
