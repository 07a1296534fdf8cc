"""The sparse-linear attention module: its initial values, its arguments to the op, and its state_dict."""

import copy

import pytest
import torch

from turbo_rcm_patch import kernels
from turbo_rcm_patch.modules import SparseLinearAttention


def test_it_starts_as_the_softmax_alone():
    q, k, v = torch.randn(3, 2, 70, 2, 16)
    out = SparseLinearAttention(16, topk=1.0)(q, k, v)
    torch.testing.assert_close(out, kernels.attention(q, k, v, implementation="torch"))


@torch.no_grad()
@pytest.mark.parametrize("quantized", [False, True])
def test_it_is_the_op_with_its_options(quantized):
    q, k, v = torch.randn(3, 2, 200, 2, 64)
    module = SparseLinearAttention(64, 0.5, block_q=64, block_k=32, quantized=quantized)
    weight, bias = torch.randn(64, 64), torch.randn(64)
    module.load_state_dict({"proj_l.weight": weight, "proj_l.bias": bias})
    options = {"topk": 0.5, "block_q": 64, "block_k": 32, "quantized": quantized}
    expected = kernels.sparse_linear_attention(q, k, v, weight, bias, **options)
    torch.testing.assert_close(module(q, k, v), expected)
    assert torch.equal(copy.deepcopy(module)(q, k, v), module(q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_proj_l_may_stay_in_fp32(dtype):
    q, k, v = torch.randn(3, 1, 70, 1, 16).to(dtype)
    module = SparseLinearAttention(16)
    torch.nn.init.normal_(module.proj_l.weight)
    out = module(q, k, v)
    assert out.dtype == dtype
    torch.testing.assert_close(module.to(dtype)(q, k, v), out)


def test_it_trains():
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 70, 1, 16))
    module = SparseLinearAttention(16)
    module(q, k, v).square().sum().backward()
    for x in (q, k, v, *module.parameters()):
        assert x.grad.any()


def test_kept_blocks():
    cpu = torch.device("cpu")
    assert SparseLinearAttention(64).kept_blocks(32760, cpu) == (51, False)
    assert SparseLinearAttention(64, 0.15, block_q=64, block_k=128).kept_blocks(32760, cpu) == (38, False)
    assert SparseLinearAttention(64).kept_blocks(600, cpu) == (1, False)
    assert SparseLinearAttention(64).kept_blocks(500, cpu) == (1, True)


def test_repr_names_its_options():
    assert "topk=0.1, blocks=as published" in repr(SparseLinearAttention(64))
    assert "blocks=64x128, quantized=True" in repr(SparseLinearAttention(64, block_q=64, block_k=128, quantized=True))


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("head_dim=0", {"head_dim": 0}),
        ("topk=2", {"topk": 2}),
        ("block_q and block_k together", {"block_q": 64}),
        ("implementation='fast'", {"implementation": "fast"}),
    ],
)
def test_errors_name_what_was_given(message, arguments):
    with pytest.raises(ValueError, match=message):
        SparseLinearAttention(**{"head_dim": 64} | arguments)
