"""The pre-pass of 8-bit attention: kernels against the plain-torch definition, and that against unrounded values."""

import re

import pytest
import torch

from tests.oracle import DTYPES, relative_error, torch_device
from turbo_rcm_patch.kernels import reference
from turbo_rcm_patch.kernels.attention_8bit import attention_8bit_reference as definition
from turbo_rcm_patch.kernels.attention_8bit.attention_8bit import attention_8bit
from turbo_rcm_patch.kernels.attention_8bit.quantize_qkv import KEY_GROUP, quantize_qkv
from turbo_rcm_patch.kernels.attention_8bit.spec import default_v_format
from turbo_rcm_patch.kernels.quantized import FP8

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")

# B, S, heads, head_dim: one token, lengths around groups of keys, heads that fill a power of two and that do not.
SHAPES = [(1, 1, 1, 64), (2, 63, 3, 64), (1, 129, 5, 128), (2, 128, 2, 128)]


def projections(device, dtype, batch, tokens, heads, head_dim):
    """q, k, v as parts of a fused projection; k's channels have a mean."""
    fused = torch.randn(batch, tokens, 3 * heads * head_dim, device=torch_device(device))
    k = fused.chunk(3, -1)[1]
    k += 3 * torch.randn(heads * head_dim, device=k.device)
    return fused.to(dtype).chunk(3, -1)


def norms_and_angles(x, heads):
    angle = torch.randn(x.shape[1], x.shape[2] // heads // 2, device=x.device)
    gains = 1 + 0.3 * torch.randn(2, x.shape[2], device=x.device)
    return {"norm_q": gains[0], "norm_k": gains[1], "cos": angle.cos(), "sin": angle.sin()}


def formats(device):
    """Triton's interpreter rounds fp32 to e4m3 wrongly."""
    return (torch.float16,) if torch_device(device).type == "cpu" else (FP8, torch.float16)


def assert_same(actual, expected):
    """Compare two results, except for roundings of values that lie between two of the format.

    A single token's k is its own mean. Without the mean nothing is left of it, or a rounding.
    """
    names = ("q", "k") if actual.q.shape[1] > 1 else ("q",)
    for name in names:
        ours, wanted = (getattr(x, name).int() for x in (actual, expected))
        assert (ours - wanted).abs().max() <= 1
        assert (ours != wanted).sum() <= max(1, 1e-3 * ours.numel())
    for name in (*(f"{name}_scale" for name in names), "v_scale"):
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), rtol=1e-5, atol=0)
    if "k" not in names:
        assert (actual.k_scale * 127 <= 1e-5).all()
    assert actual.v.shape == expected.v.shape
    assert actual.v.dtype == expected.v.dtype
    assert relative_error(actual.v, expected.v) < 2e-3
    assert actual.dtype == expected.dtype


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normed", [True, False])
def test_matches_the_definition(device, shape, normed):
    for dtype in DTYPES[device]:
        q, k, v = projections(device, dtype, *shape)
        options = norms_and_angles(q, shape[2]) if normed else {}
        for v_format in formats(device):
            both = [
                quantize_qkv(q, k, v, heads=shape[2], v_format=v_format, implementation=implementation, **options)
                for implementation in ("triton", "torch")
            ]
            assert_same(*both)


def test_what_is_quantised_is_the_norm_the_rotation_and_k_without_its_mean():
    q, k, v = projections("interpreter", torch.float32, 2, 200, 3, 64)
    options = norms_and_angles(q, 3)
    cos, sin = options["cos"], options["sin"]
    quantized = quantize_qkv(q, k, v, heads=3, scale=0.25, **options)
    expected_q = reference.rms_norm_rope(q, options["norm_q"], cos, sin, 3, 1e-6)
    expected_k = reference.rms_norm_rope(k, options["norm_k"], cos, sin, 3, 1e-6)
    expected_k -= expected_k.mean(1, keepdim=True)
    unit = quantized.q_scale / (0.25 * 1.4426950408889634)
    per_token = quantized.k_scale.repeat_interleave(KEY_GROUP, 2)[..., :200].mT
    # int8 rounds to steps of the largest of a row's 64 values, about 3 standard deviations, over 127: 0.7 percent.
    assert relative_error(quantized.q * unit[..., None], expected_q) < 0.01
    assert relative_error(quantized.k * per_token[..., None], expected_k) < 0.015
    for v_format in (FP8, torch.float16):
        values = quantize_qkv(q, k, v, heads=3, v_format=v_format, implementation="torch").dequantize_v()
        assert relative_error(values.flatten(2), v) < 0.03


def test_values_beyond_the_tokens_are_zero(device):
    q, k, v = projections(device, torch.float32, 1, 130, 2, 64)
    quantized = quantize_qkv(q, k, v, heads=2)
    assert quantized.v.shape == (1, 2, 64, 256)
    beyond = definition.key_order(256, q.device) >= 130
    assert not quantized.v.float()[..., beyond].any()


def test_the_order_of_keys_is_that_of_an_operand():
    """A thread of a quad has columns 2c, 2c + 1 of every 8 after QKᵀ, and gives columns 4c to 4c + 3 of every 16."""
    order = definition.key_order(64).view(2, 2, 4, 4)
    for thread in range(4):
        owned = {8 * group + 2 * thread + i for group in range(8) for i in range(2)}
        assert set(order[:, :, thread].flatten().tolist()) == owned
    assert torch.equal(order.flatten().sort().values, torch.arange(64))


def test_zeros(device):
    zeros = torch.zeros(1, 5, 128, device=torch_device(device))
    quantized = quantize_qkv(zeros, zeros, zeros, heads=2, v_format=torch.float16, implementation="triton")
    for tensor in quantized[:6]:
        assert tensor.float().isfinite().all()
    assert not quantized.q.any()
    assert not quantized.k.any()
    assert not quantized.v.any()


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_is_not_lost(device, name, normed):
    """NaN spreads as in bf16 attention: from q to its query, from k to every query, from v to its channel."""
    q, k, v = projections(device, torch.float32, 1, 70, 2, 64)
    {"q": q, "k": k, "v": v}[name][0, 3, 5] = torch.nan
    options = norms_and_angles(q, 2) if normed else {}
    quantized = quantize_qkv(q, k, v, heads=2, v_format=torch.float16, implementation="triton", **options)
    is_nan = torch.zeros_like(q, dtype=torch.bool)
    heads = slice(0, 128 if normed else 64)  # the norm goes over all heads
    {"q": is_nan[:, 3, heads], "k": is_nan[:, :, heads], "v": is_nan[:, :, 5]}[name].fill_(True)
    assert torch.equal(attention_8bit(quantized).flatten(2).isnan(), is_nan)


def test_samples_do_not_mix(device):
    q, k, v = projections(device, torch.float32, 2, 40, 2, 64)
    alone = quantize_qkv(q[:1], k[:1], v[:1], heads=2, v_format=torch.float16, implementation="triton")
    q[1] = k[1] = v[1] = torch.nan
    both = quantize_qkv(q, k, v, heads=2, v_format=torch.float16, implementation="triton")
    for ours, wanted in zip(both[:6], alone[:6], strict=True):
        torch.testing.assert_close(ours[:1], wanted)


def test_strided_inputs(device):
    x = torch.randn(3, 2, 128, 33, device=torch_device(device)).transpose(2, 3)
    options = {"heads": 2, "v_format": torch.float16, "implementation": "triton"}
    strided, packed = quantize_qkv(*x, **options), quantize_qkv(*x.contiguous(), **options)
    for ours, wanted in zip(strided[:6], packed[:6], strict=True):
        assert torch.equal(ours, wanted)


def test_a_head_dim_without_a_kernel_takes_the_definition():
    q, k, v = projections("interpreter", torch.float32, 1, 9, 2, 32)
    assert quantize_qkv(q, k, v, heads=2).v.shape == (1, 2, 32, 128)
    with pytest.raises(ValueError, match=r"no kernel can run .*head_dim 32"):
        quantize_qkv(q, k, v, heads=2, implementation="triton")


def test_compiles_to_one_graph(device):
    q, k, v = projections(device, torch.float32, 2, 40, 2, 64)
    options = {"heads": 2, "v_format": torch.float16, "implementation": "triton"} | norms_and_angles(q, 2)
    compiled = torch.compile(lambda *x: quantize_qkv(*x, **options)[:6], fullgraph=True, backend="eager")
    for ours, wanted in zip(compiled(q, k, v), quantize_qkv(q, k, v, **options)[:6], strict=True):
        assert torch.equal(ours, wanted)


def test_custom_op_contract(device):
    q, k, v = projections(device, torch.float32, 2, 5, 2, 64)
    options = norms_and_angles(q, 2)
    arguments = (q, k, v, *options.values(), 2, 1e-6, 0.2, torch.float16)
    torch.library.opcheck(torch.ops.turbo_rcm_patch.quantize_qkv.default, arguments)


def _zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


BAD_CALLS = {
    "q has shape [2, 3, 100]": {"q": _zeros(2, 3, 100)},
    "k is torch.float32 [2, 4, 128]": {"k": _zeros(2, 4, 128)},
    "v is torch.float16": {"v": _zeros(2, 3, 128, dtype=torch.float16)},
    "norm_k has shape [64]": {"norm_k": _zeros(64)},
    "cos and sin together": {"cos": _zeros(3, 32)},
    "sin has shape [2, 32]": {"cos": _zeros(3, 32), "sin": _zeros(2, 32)},
    "scale=-1.0": {"scale": -1.0},
    "v_format=torch.int8": {"v_format": torch.int8},
}


@pytest.mark.parametrize(("message", "arguments"), BAD_CALLS.items(), ids=BAD_CALLS)
def test_errors_name_what_was_given(message, arguments):
    valid = dict.fromkeys("qkv", _zeros(2, 3, 128)) | {"heads": 2 if "100" not in message else 3}
    with pytest.raises(ValueError, match=re.escape(message)):
        quantize_qkv(**valid | arguments)


def test_the_default_format_is_one_that_the_kernels_take(device):
    """e4m3, which the interpreter rounds wrongly."""
    q, k, v = projections(device, torch.float32, 1, 9, 2, 64)
    quantized = quantize_qkv(q, k, v, heads=2, implementation="triton")
    assert quantized.v.dtype == (torch.float16 if device == "interpreter" else default_v_format(q.device))
    assert quantize_qkv(q.cpu(), k.cpu(), v.cpu(), heads=2, implementation="torch").v.dtype == FP8
