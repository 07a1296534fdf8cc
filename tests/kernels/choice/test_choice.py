"""The kernels' names against the kernels that are really launched, and by what PyTorch's are preferred."""

import sys

import pytest
import torch

from scripts.tools import compile_without_gpu, every_launch
from turbo_rcm_patch import kernels
from turbo_rcm_patch.kernels import conv_skip, dispatch, reference
from turbo_rcm_patch.kernels.attention import attention_portable, attention_sm90
from turbo_rcm_patch.kernels.choice import choice, measured
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


@pytest.mark.parametrize(
    ("dtype", "head_dim", "expected"),
    [
        (BF16, 128, choice.GLUON),
        (torch.float16, 64, choice.GLUON),
        (BF16, 96, choice.PORTABLE + " (head_dim 96)"),
        (FP32, 64, choice.PORTABLE + " (float32 tensors)"),
    ],
)
@pytest.mark.parametrize("with_backward", [False, True])
def test_an_attentions_name_is_that_of_the_kernel_launched(launched, dtype, head_dim, with_backward, expected):
    q = torch.zeros(1, 256, 2, head_dim, dtype=dtype, requires_grad=with_backward)
    kernels.attention(q, q, q, implementation="triton")
    name = kernels.attention_kernel_name("triton", q.device, dtype, head_dim, with_backward=with_backward)
    assert name.startswith(kind_of([n for n in launched if n != "_join_kernel"]))
    assert name == expected


def test_the_name_tells_why_gluon_was_not_imported(launched, monkeypatch):
    for module in (gemm_sm90, attention_sm90):
        monkeypatch.setattr(module, "GLUON_ERROR", "cannot import name 'tma'")
    names = [
        kernels.gemm_kernel(CPU, BF16, 600, 256, 64),
        kernels.attention_kernel_name("auto", CPU, BF16, 128),
    ]
    assert all(name.startswith(choice.PORTABLE) and "cannot import name 'tma'" in name for name in names)
    name, reason = kernels.linear_qkv_kernel(CPU, BF16, 600, 256, 64)
    assert name == choice.LINEAR
    assert "cannot import name 'tma'" in reason


def test_other_gpus_have_one_name_for_the_portable_kernels():
    assert kernels.gemm_kernel(CPU, BF16, 600, 256, 64) == choice.PORTABLE
    assert kernels.attention_kernel_name("triton", CPU, FP32, 64) == choice.PORTABLE


def test_sdpas_backend_is_pytorchs_own_choice(monkeypatch):
    name = kernels.attention_kernel_name("torch", CPU, FP32, 64)
    assert name in ("PyTorch SDPA (FlashAttention)", "PyTorch SDPA (math)")
    asked = []
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda q, k, v: asked.append(q) or 3)
    assert kernels.attention_kernel_name("torch", CPU, BF16, 64, with_backward=True) == "PyTorch SDPA (cuDNN)"
    assert (asked[0].dtype, asked[0].shape[-1], asked[0].requires_grad) == (BF16, 64, True)
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda q, k, v: 7)
    assert kernels.attention_kernel_name("torch", CPU, BF16, 64) == "PyTorch SDPA"
    monkeypatch.delattr(torch, "_fused_sdp_choice")
    assert kernels.attention_kernel_name("torch", CPU, BF16, 64) == "PyTorch SDPA"


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "circumstances", "expected"),
    [
        ((9, 0), BF16, 128, {}, None),
        ((9, 0), torch.float16, 64, {}, None),
        ((9, 0), BF16, 128, {"with_backward": True}, "not measured with a backward"),
        ((9, 0), BF16, 96, {}, "head_dim 96"),
        ((9, 0), FP32, 128, {}, "not measured in float32"),
        ((10, 0), torch.float16, 128, {}, "not measured on sm_100"),
        ((8, 9), BF16, 128, {}, "not measured on sm_89"),
    ],
)
def test_where_pytorchs_attention_is_taken(monkeypatch, capability, dtype, head_dim, circumstances, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert kernels.why_sdpa(CUDA, dtype, head_dim, **circumstances) == expected
    assert kernels.why_sdpa(CPU, dtype, head_dim, **circumstances) is None


def test_on_sm_90_without_gluon_pytorchs_attention_is_taken(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(attention_sm90, "GLUON_ERROR", "cannot import name 'tma'")
    assert "cannot import name 'tma'" in kernels.why_sdpa(CUDA, BF16, 128)
    assert kernels.why_linear("linear_skip", CUDA, BF16) is None
    monkeypatch.setattr(gemm_sm90, "GLUON_ERROR", "cannot import name 'wgmma'")
    assert "cannot import name 'wgmma'" in kernels.why_linear("linear_skip", CUDA, BF16)


CONVOLUTIONS = {  # T, H, W, C, N, kt, kh, upsample, interleave
    "3×3×3": (BF16, (2, 9, 17, 96, 96, 3, 3, False, 1), choice.GLUON),
    "upsampled": (torch.float16, (1, 9, 17, 64, 192, 1, 3, True, 1), choice.GLUON),
    "interleaved": (BF16, (4, 9, 17, 64, 192, 3, 1, False, 2), choice.GLUON),
    "pixels": (BF16, (4, 16, 16, 32, 64, 1, 1, False, 1), choice.GLUON),
    "fp32": (FP32, (2, 9, 17, 96, 96, 3, 3, False, 1), choice.PORTABLE + " (float32 tensors)"),
    "channels": (BF16, (2, 9, 17, 16, 96, 3, 3, False, 1), choice.PORTABLE + " (channels that are no multiple of 32)"),
    "last": (BF16, (2, 9, 17, 96, 3, 3, 3, False, 1), choice.PORTABLE + " (fewer than 64 channels of the result"),
    "odd": (BF16, (2, 9, 17, 96, 100, 3, 3, False, 1), choice.PORTABLE + " (fewer than 64 channels of the result"),
    "two phases": (BF16, (1, 9, 17, 64, 72, 1, 3, True, 1), choice.PORTABLE + " (tiles with columns of two pixels"),
    "few tiles": (BF16, (1, 9, 12, 96, 96, 3, 3, False, 1), choice.PORTABLE + " (fewer tiles than multiprocessors)"),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_a_convolutions_name_is_that_of_the_kernel_launched(launched, case):
    dtype, (T, H, W, C, N, kt, kh, upsample, interleave), expected = CONVOLUTIONS[case]
    x, front = (torch.zeros(1, frames, H, W, C, dtype=dtype) for frames in (T, kt - 1))
    weight = torch.zeros(N * interleave, kt, kh, kh, C, dtype=dtype)
    options = {"upsample": upsample, "interleave": interleave}
    conv_skip(x, weight, None, front=front, implementation="triton", **options)
    name = kernels.conv_kernel("triton", x.device, dtype, x.shape, weight.shape, **options)
    assert name.startswith(kind_of(launched))
    assert name.startswith(expected)
    assert kernels.conv_kernel("torch", x.device, dtype, x.shape, weight.shape, **options) == "PyTorch convolution"


@pytest.mark.parametrize("odd", ["x", "front"])
def test_a_convolution_at_an_odd_address_is_not_the_gluon_kernels(odd, launched):
    memory = torch.zeros(8 + 2 * 9 * 17 * 96, dtype=BF16)
    x, front = (memory[name == odd :][: 2 * 9 * 17 * 96].view(1, 2, 9, 17, 96) for name in ("x", "front"))
    conv_skip(x, torch.zeros(96, 3, 3, 3, 96, dtype=BF16), None, front=front, implementation="triton")
    assert kind_of(launched) == choice.PORTABLE


def test_pytorchs_convolution_is_taken_until_ours_is_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    verdicts = dict(measured._VERDICTS)
    monkeypatch.setattr(measured, "_VERDICTS", verdicts)
    shipped = verdicts.pop(("conv_skip", (9, 0)))
    assert kernels.why_conv(CUDA, BF16) == "not measured on sm_90"
    assert kernels.why_conv(CPU, BF16) is None
    verdicts["conv_skip", (9, 0)] = shipped
    assert kernels.why_conv(CUDA, BF16) is None
    monkeypatch.setattr(conv_sm90, "GLUON_ERROR", "cannot import name 'tma'")
    assert "cannot import name 'tma'" in kernels.why_conv(CUDA, BF16)


def test_a_slower_kernel_is_not_taken(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.version, "hip", None)
    slow = measured.Verdict(("NVIDIA L40",), 2.0, 1.0)
    monkeypatch.setattr(measured, "_VERDICTS", {("attention", (8, 9)): slow})
    assert kernels.why_sdpa(CUDA, BF16, 128) == "PyTorch's was faster on NVIDIA L40"


@pytest.mark.parametrize("gluon", [True, False])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "blocks"), [(BF16, 128, (64, 128)), (BF16, 64, (128, 64)), (FP32, 64, (64, 128))]
)
def test_a_sparse_attentions_name_is_that_of_the_kernel_launched(dtype, head_dim, blocks, gluon, monkeypatch):
    if not gluon:
        monkeypatch.setattr(attention_sm90, "GLUON_ERROR", "cannot import name 'tma'")
    x, weight = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((1, 300, 2, head_dim), (head_dim,) * 2))
    options = {"topk": 0.5, "block_q": blocks[0], "block_k": blocks[1], "quantized": True}
    seen = compile_without_gpu.record_launches(
        lambda: kernels.sparse_linear_attention(x, x, x, weight, **options), (9, 0)
    )
    with dispatch.meta_is_gpu((9, 0), 4):
        name, reason = kernels.sparse_attention_kernel(x.device, dtype, head_dim, blocks, quantized=True)
    assert reason is None
    assert name.endswith(" int8, e4m3")
    is_gluon = seen[-1].kernel.fn.__name__ == "sparse_linear_attention_8bit_kernel"
    assert name.startswith(choice.GLUON if is_gluon else choice.PORTABLE)
    assert is_gluon == (gluon and dtype == BF16 and blocks == (64, 128))


@pytest.mark.parametrize("gluon", [True, False])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "blocks"),
    [(BF16, 128, None), (BF16, 64, (128, 64)), (FP32, 64, None), (BF16, 64, (192, 128))],
)
def test_a_block_sparse_attentions_name_is_that_of_the_kernel_launched(dtype, head_dim, blocks, gluon, monkeypatch):
    if not gluon:
        monkeypatch.setattr(attention_sm90, "GLUON_ERROR", "cannot import name 'tma'")
    qkv = every_launch.quantized_qkv(kernels.FP8, head_dim)._replace(dtype=dtype)
    sizes = {} if blocks is None else {"block_q": blocks[0], "block_k": blocks[1]}
    seen = compile_without_gpu.record_launches(
        lambda: kernels.block_sparse_attention_8bit(qkv, mass=0.5, **sizes), (9, 0)
    )
    with dispatch.meta_is_gpu((9, 0), 4):
        blocks = blocks or kernels.block_sparse_sizes(qkv.q.device, dtype, quantized=True)
        name, reason = kernels.block_sparse_attention_kernel(qkv.q.device, dtype, head_dim, blocks, quantized=True)
        wide, _ = kernels.block_sparse_attention_kernel(qkv.q.device, dtype, head_dim, (128, 64), quantized=False)
    assert wide == choice.PORTABLE
    if blocks == (192, 128) and not gluon:
        assert (seen, name) == ([], "torch reference")
        assert "cannot import name 'tma'" in reason
        return
    assert reason is None
    assert name.endswith(" int8, e4m3")
    is_gluon = seen[-1].kernel.fn.__name__ == "attention_8bit_kernel"
    assert name.startswith(choice.GLUON if is_gluon else choice.PORTABLE)
    assert is_gluon == (blocks == (192, 128))
