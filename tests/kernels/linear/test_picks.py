"""The kernel that runs a linear on each GPU, and the reason that is shown."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from turbo_rcm_patch.kernels import FP8, INT8, dispatch
from turbo_rcm_patch.kernels.coefficient import PER_CHANNEL, PER_RUN, PER_TOKEN
from turbo_rcm_patch.kernels.linear import gemm_sm90
from turbo_rcm_patch.kernels.linear.linear import LINEAR_8BIT, LINEAR_LOW_RANK
from turbo_rcm_patch.kernels.linear.linear_gelu import LINEAR_GELU, LINEAR_GELU_QUANTIZED
from turbo_rcm_patch.kernels.linear.linear_qkv import LINEAR_QKV
from turbo_rcm_patch.kernels.linear.linear_skip import LINEAR_SKIP
from turbo_rcm_patch.kernels.linear.spec import LinearSpec, why_linear

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPS = {
    "skip": (LINEAR_SKIP, "linear_skip", {"residual": BF16, "c_out": PER_CHANNEL}),
    "gelu": (LINEAR_GELU, "linear_gelu", {}),
    "qkv": (LINEAR_QKV, "linear_qkv", {"weights": 3}),
    "low rank": (LINEAR_LOW_RANK, "linear_qkv", {"low": BF16, "rank": 64}),
    "8 bits": (LINEAR_8BIT, "linear_8bit", {}),
    "gelu to e4m3": (LINEAR_GELU_QUANTIZED, "linear_gelu", {"result": FP8}),
}
GLUON, PORTABLE, LINEAR, REFERENCE = "sm_90 Gluon", "portable Triton", "PyTorch linear", "torch reference"
FEW = f"{PORTABLE} (fewer tiles than multiprocessors)"
ODD = f"{PORTABLE} (rows or addresses that are no multiple of 16 bytes)"
HOPPER, ADA, AMPERE = (9, 0), (8, 9), (8, 0)
IN_8_BITS = {"dtype": INT8, "eight_bits": (INT8,), "others": (BF16,), "linears": None}
IN_E4M3 = {**IN_8_BITS, "dtype": FP8, "eight_bits": (FP8,)}


@contextlib.contextmanager
def gpu(monkeypatch, capability):
    """A CUDA device of a compute capability with 132 multiprocessors, or for None the CPU."""
    if capability is None:
        yield torch.device("cpu")
        return
    properties = SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(torch.version, "hip", None)
    dispatch._gpu_properties.cache_clear()
    yield torch.device("cuda:0")
    dispatch._gpu_properties.cache_clear()


@pytest.mark.parametrize(
    ("capability", "op", "options", "label", "reason"),
    [
        # measured on sm_90, nowhere else
        (HOPPER, "skip", {}, GLUON, None),
        (HOPPER, "gelu", {}, GLUON, None),
        (HOPPER, "qkv", {}, GLUON, None),
        (HOPPER, "low rank", {}, GLUON, None),
        (ADA, "skip", {}, LINEAR, "not measured on sm_89"),
        (AMPERE, "gelu", {}, LINEAR, "not measured on sm_80"),
        (ADA, "qkv", {}, LINEAR, "not measured on sm_89"),
        (HOPPER, "skip", {"dtype": FP32}, LINEAR, "not measured in float32"),
        # asked for
        (ADA, "skip", {"linears": "triton"}, PORTABLE, None),
        (ADA, "skip", {"linears": None}, PORTABLE, None),
        (ADA, "qkv", {"linears": "triton"}, LINEAR, "no GPU of sm_90"),
        (ADA, "low rank", {"linears": "triton"}, LINEAR, "no GPU of sm_90"),
        (ADA, "low rank", {"linears": None}, PORTABLE, None),
        (HOPPER, "skip", {"linears": "torch"}, LINEAR, "linears='torch'"),
        (HOPPER, "gelu", {"implementation": "torch"}, LINEAR, "implementation='torch'"),
        (HOPPER, "skip", {"implementation": "torch", "linears": None}, REFERENCE, "implementation='torch'"),
        # shapes
        (HOPPER, "skip", {"rows": 100}, FEW, None),
        (HOPPER, "qkv", {"rows": 100}, LINEAR, "fewer tiles than multiprocessors"),
        (HOPPER, "gelu", {"N": 1532}, ODD, None),
        (HOPPER, "skip", {"K": 1532}, ODD, None),
        (HOPPER, "skip", {"c_out": PER_TOKEN}, f"{PORTABLE} (c_out per token)", None),
        (HOPPER, "skip", {"c_out": PER_RUN}, GLUON, None),
        # derivatives
        (HOPPER, "skip", {"derivative": "backward"}, GLUON, None),
        (HOPPER, "skip", {"derivative": "backward", "c_out": PER_RUN}, LINEAR, "autograd"),
        (HOPPER, "skip", {"derivative": "forward"}, LINEAR, "autograd"),
        (HOPPER, "gelu", {"derivative": "backward"}, LINEAR, "autograd"),
        # the CPU
        (None, "skip", {}, LINEAR, "cpu tensors"),
        (None, "skip", {"implementation": "triton", "dtype": FP16, "result": FP16}, PORTABLE, None),
        (None, "qkv", {"implementation": "triton", "dtype": FP16, "result": FP16}, LINEAR, "no GPU of sm_90"),
        # 8 bits
        (HOPPER, "8 bits", IN_8_BITS, GLUON, None),
        (HOPPER, "qkv", IN_8_BITS, GLUON, None),
        (ADA, "qkv", IN_8_BITS, PORTABLE, None),
        (HOPPER, "qkv", {**IN_8_BITS, "rows": 100}, FEW, None),
        # in either format, because files of others bring their own
        (HOPPER, "qkv", IN_E4M3, GLUON, None),
        (ADA, "qkv", IN_E4M3, PORTABLE, None),
        (HOPPER, "gelu to e4m3", IN_E4M3, GLUON, None),
        (HOPPER, "skip", IN_8_BITS, GLUON, None),
        (HOPPER, "skip", IN_E4M3, GLUON, None),
        (ADA, "gelu to e4m3", IN_8_BITS, PORTABLE, None),
        (HOPPER, "gelu to e4m3", IN_8_BITS, GLUON, None),
        (
            AMPERE,
            "8 bits",
            IN_E4M3,
            REFERENCE,
            "fp8 on a GPU older than sm_89",
        ),
        (None, "skip", IN_8_BITS, REFERENCE, "cpu tensors"),
        (
            *(HOPPER, "skip", {**IN_8_BITS, "residual": FP16, "low": BF16, "rank": 64}),
            *(f"{PORTABLE} (low rank beside 8 bits, a gate and fp16)", None),
        ),
    ],
)
def test_the_kernel_of_a_linear(capability, op, options, label, reason, monkeypatch):
    kernels, measured, own = OPS[op]
    fields = {"dtype": BF16, "result": BF16, "rows": 32760, "N": 1536, "K": 1536, "linears": "auto", **own, **options}
    with gpu(monkeypatch, capability) as device:
        pick = kernels.pick(LinearSpec(op=measured, device=device, **fields))
        assert (pick.label, pick.reason) == (label, reason)


def test_without_gluon_pytorchs_linear_is_preferred_on_sm_90(monkeypatch):
    with gpu(monkeypatch, HOPPER) as device:
        assert why_linear("linear_skip", device, BF16) is None
        monkeypatch.setattr(gemm_sm90, "GLUON_ERROR", "cannot import name 'tma'")
        assert "cannot import name 'tma'" in why_linear("linear_skip", device, BF16)
        spec = LinearSpec(op="linear_skip", device=device, dtype=BF16, rows=32760, N=1536, K=1536, linears="auto")
        pick = LINEAR_SKIP.pick(spec)
        assert pick.name == LINEAR
        assert "cannot import name 'tma'" in pick.reason
