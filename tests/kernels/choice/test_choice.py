"""The kernels' names against the kernels that are really launched, and by what PyTorch's are preferred."""

import sys

import pytest
import torch

from turbo_rcm_patch import kernels
from turbo_rcm_patch.kernels import dispatch, reference
from turbo_rcm_patch.kernels.attention import attention_portable, attention_sm90
from turbo_rcm_patch.kernels.choice import choice
from turbo_rcm_patch.kernels.conv import conv_sm90
from turbo_rcm_patch.kernels.linear import gemm_portable as gemm
from turbo_rcm_patch.kernels.linear import gemm_sm90

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
GLUON_KERNELS = ("gemm_kernel", "gemm_of_three_kernel", "attention_kernel", "conv_kernel")


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that ops launch, on a CPU that counts as a GPU of sm_90 with four multiprocessors."""
    names = []
    portable_conv = sys.modules["turbo_rcm_patch.kernels.conv.conv_skip"]
    for module in (gemm, gemm_sm90, attention_portable, attention_sm90, portable_conv, conv_sm90):
        monkeypatch.setattr(module, "launch_kernel", lambda kernel, *_, **__: names.append(kernel.__name__))
    for module in (dispatch, choice):
        monkeypatch.setattr(module, "is_sm90", lambda device: True)
    monkeypatch.setattr(dispatch, "is_rounded_wrongly", lambda *_: False)
    return names


def kind_of(names):
    assert len(names) == 1
    return choice.GLUON if names[0] in GLUON_KERNELS else choice.PORTABLE


BF16, FP32 = torch.bfloat16, torch.float32
GEMMS = {
    "large": (BF16, 1, 600, 256, 64, (1, 1, 256), choice.GLUON),
    "two samples": (BF16, 2, 300, 256, 64, (2, 1, 256), choice.GLUON),
    "one sample's coefficients": (BF16, 2, 50, 384, 64, (1, 1, 384), choice.PORTABLE + " (fewer tiles"),
    "few tiles": (BF16, 1, 100, 64, 64, (1, 1, 64), choice.PORTABLE + " (fewer tiles than multiprocessors)"),
    "fp32": (FP32, 1, 600, 256, 64, (1, 1, 256), choice.PORTABLE + " (float32 tensors)"),
    "odd columns": (BF16, 1, 600, 252, 64, (1, 1, 252), choice.PORTABLE + " (rows or addresses"),
    "odd depth": (BF16, 1, 600, 256, 60, (1, 1, 256), choice.PORTABLE + " (rows or addresses"),
    "per token": (BF16, 1, 600, 256, 64, (1, 600, 256), choice.PORTABLE + " (c_out per token)"),
}


@pytest.mark.parametrize("case", GEMMS)
def test_a_gemms_name_is_that_of_the_kernel_launched(launched, case):
    dtype, batch, tokens, N, K, gate_shape, expected = GEMMS[case]
    a, weight, residual = torch.zeros(batch, tokens, K), torch.zeros(N, K), torch.zeros(batch, tokens, N)
    a, weight, residual = (x.to(dtype) for x in (a, weight, residual))
    kernels.linear_skip(a, weight, None, residual, c_out=torch.zeros(gate_shape), implementation="triton")
    options = {"samples": batch if gate_shape[0] > 1 else 1, "per_token": gate_shape[1] > 1}
    name = kernels.gemm_kernel(a.device, dtype, batch * tokens, N, K, **options)
    assert name.startswith(kind_of(launched))
    assert name.startswith(expected)


@pytest.mark.parametrize("case", GEMMS)
def test_a_projections_name_is_that_of_the_kernel_launched(launched, monkeypatch, case):
    dtype, batch, tokens, N, K, *_ = GEMMS[case]
    a, weight = torch.zeros(batch, tokens, K, dtype=dtype), torch.zeros(N, K, dtype=dtype)
    kernels.linear_gelu(a, weight, None, implementation="triton")
    assert kernels.gemm_kernel(a.device, dtype, batch * tokens, N, K).startswith(kind_of(launched))

    launched.clear()
    called = []
    monkeypatch.setattr(reference, "linear_qkv", lambda *_: called.append(choice.LINEAR) or (a, a, a))
    kernels.linear_qkv(a, [weight] * 3, [None] * 3, implementation="triton")
    name, reason = kernels.linear_qkv_kernel(a.device, dtype, batch * tokens, N, K)
    assert [name] == (called or [kind_of(launched)])
    assert (reason is None) == (name == choice.GLUON)


@pytest.mark.parametrize("format", [kernels.INT8, kernels.FP8])
@pytest.mark.parametrize(("N", "K"), [(256, 64), (252, 64), (256, 56), (264, 64)])
def test_the_name_of_8_bits_is_that_of_the_kernel_launched(launched, format, N, K):
    a = kernels.Quantized(torch.zeros(600, K).to(format), torch.ones(600), torch.ones(600))
    weight = kernels.QuantizedWeight(torch.zeros(N, K).to(format), torch.ones(N), torch.ones(()))
    residual = torch.zeros(600, N, dtype=BF16)
    for result, op in (
        (BF16, lambda: kernels.linear_8bit(a, weight, implementation="triton")),
        (BF16, lambda: kernels.linear_skip(a, weight, None, residual, implementation="triton")),
        (BF16, lambda: kernels.linear_gelu(a, weight, None, implementation="triton")),
        (kernels.FP8, lambda: kernels.linear_gelu(a, weight, None, result=kernels.FP8, implementation="triton")),
    ):
        launched.clear()
        op()
        assert kernels.gemm_kernel(CPU, format, 600, N, K, result=result).startswith(kind_of(launched))
    launched.clear()
    kernels.linear_qkv(a, [weight] * 3, [None] * 3, implementation="triton")
    name, reason = kernels.linear_qkv_kernel(CPU, format, 600, N, K)
    assert len(launched) == (1 if name == choice.GLUON else 3)
    assert {name} == {kind_of([one]) for one in launched}
    assert (reason is None) == (name == choice.GLUON)


def test_the_name_tells_why_gluon_was_not_imported(launched, monkeypatch):
    monkeypatch.setattr(gemm_sm90, "GLUON_ERROR", "cannot import name 'tma'")
    name = kernels.gemm_kernel(CPU, BF16, 600, 256, 64)
    assert name.startswith(choice.PORTABLE)
    assert "cannot import name 'tma'" in name
    name, reason = kernels.linear_qkv_kernel(CPU, BF16, 600, 256, 64)
    assert name == choice.LINEAR
    assert "cannot import name 'tma'" in reason


def test_other_gpus_have_one_name_for_the_portable_kernels():
    assert kernels.gemm_kernel(CPU, BF16, 600, 256, 64) == choice.PORTABLE


def test_on_sm_90_without_gluon_pytorchs_linear_is_taken(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    assert kernels.why_linear("linear_skip", CUDA, BF16) is None
    monkeypatch.setattr(gemm_sm90, "GLUON_ERROR", "cannot import name 'wgmma'")
    assert "cannot import name 'wgmma'" in kernels.why_linear("linear_skip", CUDA, BF16)
