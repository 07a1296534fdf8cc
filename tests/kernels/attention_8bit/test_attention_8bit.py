"""8-bit attention: kernels against the plain-torch definition and an fp64 oracle, and the definition's own error."""

import re

import pytest
import torch

from tests.kernels.attention_8bit.test_quantize_qkv import formats, projections
from tests.oracle import DTYPES, relative_error, torch_device
from turbo_rcm_patch.kernels import reference
from turbo_rcm_patch.kernels.attention_8bit import attention_8bit_reference as definition
from turbo_rcm_patch.kernels.attention_8bit import attention_8bit_sm90
from turbo_rcm_patch.kernels.attention_8bit.attention_8bit import attention_8bit
from turbo_rcm_patch.kernels.attention_8bit.quantize_qkv import quantize_qkv
from turbo_rcm_patch.kernels.choice.registry import PORTABLE
from turbo_rcm_patch.kernels.quantized import FP8

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")

SHAPES = [(1, 1, 1, 64), (2, 63, 3, 64), (1, 129, 2, 128), (2, 200, 1, 128)]


@pytest.fixture(params=["first choice", "portable"])
def kernel(request, monkeypatch):
    """Run a test with each kernel. On sm_90 the Gluon kernel is the first choice."""
    if request.param == "portable":
        if not torch.cuda.is_available():
            pytest.skip("without a GPU it is the only one")
        monkeypatch.setattr(attention_8bit_sm90, "why_not", lambda *_: "test")


def oracle(q, k, v, heads):
    """Return the attention in fp64, [B, S, H, D]."""
    q, k, v = (x.double().unflatten(-1, (heads, -1)) for x in (q, k, v))
    return reference.attention(q, k, v, None, None, None, q.shape[-1] ** -0.5)


def assert_as_good(actual, defined, exact):
    """Assert that the kernel's error is about as large as the definition's.

    The kernel rounds weights relative to a row's maximum so far, so the two errors differ. With 64 values and more
    chance makes them differ by less than a tenth.
    """
    resolution = torch.finfo(actual.dtype).eps
    assert actual.isfinite().all()
    assert relative_error(actual, exact) <= 1.1 * relative_error(defined, exact) + resolution


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_oracle_as_well_as_the_definition(device, shape):
    for dtype in DTYPES[device]:
        q, k, v = projections(device, dtype, *shape)
        exact = oracle(q, k, v, shape[2])
        for v_format in formats(device):
            qkv = quantize_qkv(q, k, v, heads=shape[2], v_format=v_format)
            actual, defined = (attention_8bit(qkv, implementation=name) for name in ("triton", "torch"))
            assert actual.dtype == dtype
            assert_as_good(actual, defined, exact)


COEFFICIENTS = {
    "numbers": (0.7, -1.3),
    "per_sample": ((3,), (3, 1, 1)),
    "per_channel": ((128,), (3, 1, 128)),
    "per_token": ((3, 37, 128), (3, 37, 1)),
}


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("kinds", COEFFICIENTS.values(), ids=COEFFICIENTS)
def test_the_skip_is_one_store(device, kinds):
    for dtype in DTYPES[device]:
        q, k, v = projections(device, dtype, 3, 37, 2, 64)
        qkv = quantize_qkv(q, k, v, heads=2, v_format=formats(device)[0])
        residual = torch.randn(3, 37, 2, 64, device=q.device).to(dtype)
        c_skip, c_out = (c if isinstance(c, float) else torch.randn(c, device=q.device) for c in kinds)
        assert_skip(qkv, residual, c_skip, c_out)


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", [(1.0, 1.0), ((1, 1, 384), (2, 1, 384)), ((2, 3000, 384), (2, 3000, 1))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_skip_of_tiles_whose_keys_are_cut(kinds, dtype):
    """96 tiles of queries, fewer than multiprocessors: on sm_90 another kernel joins their parts and adds the skip."""
    q, k, v = projections("cuda", dtype, 2, 3000, 3, 128)
    qkv = quantize_qkv(q, k, v, heads=3)
    residual = torch.randn(2, 3000, 5, 128, device="cuda").to(dtype)[:, :, 1:4]
    c_skip, c_out = (c if isinstance(c, float) else torch.randn(c, device="cuda") for c in kinds)
    assert_skip(qkv, residual, c_skip, c_out)


def assert_skip(qkv, residual, c_skip, c_out):
    """Compare with the skip of the same kernel's attention alone. Each of the two is rounded, by half of eps."""
    dtype = residual.dtype
    out = attention_8bit(qkv, residual=residual, c_skip=c_skip, c_out=c_out, implementation="triton")
    alone = attention_8bit(qkv, result=dtype, implementation="triton")
    wide = [c if isinstance(c, float) else c.double() for c in (c_skip, c_out)]
    wide = [c.view(-1, 1, 1) if isinstance(c, torch.Tensor) and c.dim() == 1 and len(c) < 64 else c for c in wide]
    scaled = wide[1] * alone.double().flatten(2)
    expected = wide[0] * residual.double().flatten(2) + scaled
    rounded = 0.5 * torch.finfo(dtype).eps * (1 + scaled.norm() / expected.norm())
    assert out.dtype == dtype
    assert relative_error(out.flatten(2), expected) <= rounded + torch.finfo(torch.float32).eps


def test_skip_of_one_and_zero_is_the_residual_bit_for_bit(device):
    q, k, v = projections(device, torch.float32, 2, 21, 2, 64)
    qkv = quantize_qkv(q, k, v, heads=2, v_format=torch.float16)
    residual = torch.randn(2, 21, 2, 64, device=q.device)
    assert torch.equal(attention_8bit(qkv, residual=residual, c_out=0.0, implementation="triton"), residual)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("shape", SHAPES)
def test_e4m3_results_have_the_scale_of_a_bound(device, shape):
    q, k, v = projections(device, torch.float32, *shape)
    qkv = quantize_qkv(q, k, v, heads=shape[2])
    wide, result = (attention_8bit(qkv, result=dtype) for dtype in (torch.float16, FP8))  # of the same kernel
    wide = wide.float()
    assert result.values.shape == q.shape
    assert result.format == FP8
    assert result.scale.shape == q.shape[:2]
    assert result.values.float().abs().max() <= 448 / definition.BOUND_SLACK * 1.01
    # e4m3 rounds by 1/16 at most, values below 2^-6 of the scale by 2^-10 of it; fp16 by 2^-11.
    error = (result.dequantize() - wide.flatten(2)).abs()
    assert (error <= wide.flatten(2).abs() / 15 + result.scale[..., None] * 2**-9).all()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("descending", [False, True])
def test_a_maximum_that_rises_from_key_to_key(device, descending):
    """Weights are relative to the maximum so far: none may saturate, and earlier sums must fade."""
    x = torch.zeros(3, 1, 600, 64, device=torch_device(device))
    q, k, v = x[0], 0.1 * torch.randn_like(x[1]), torch.randn_like(x[2])
    q[..., 0], k[..., 0] = 8, torch.linspace(-40, 40, 600, device=x.device)
    k = k.flip(1) if descending else k
    exact = oracle(q, k, v, 1)
    for v_format in formats(device):
        qkv = quantize_qkv(q, k, v, heads=1, v_format=v_format)
        actual, defined = (attention_8bit(qkv, implementation=name) for name in ("triton", "torch"))
        assert_as_good(actual, defined, exact)


@pytest.mark.usefixtures("kernel")
def test_zeros(device):
    """All weights are equal, so q and k of any size change nothing."""
    zeros, v = torch.zeros(1, 70, 64, device=torch_device(device)), torch.randn(1, 70, 64, device=torch_device(device))
    for v_format in formats(device):
        qkv = quantize_qkv(zeros, zeros, v, heads=1, v_format=v_format)
        actual = attention_8bit(qkv, implementation="triton")
        mean = attention_8bit(qkv, implementation="torch")
        torch.testing.assert_close(actual, mean, rtol=1e-3, atol=1e-4)
        qkv = quantize_qkv(zeros, zeros, zeros, heads=1, v_format=v_format)
        assert not attention_8bit(qkv, implementation="triton").any()


@pytest.mark.usefixtures("kernel")
def test_a_huge_channel_of_k_costs_nothing(device):
    """Trained models have such a channel, equal for all tokens. It is in the mean, which is subtracted."""
    q, k, v = projections(device, torch.float32, 1, 130, 1, 64)
    k = k.clone()
    k[..., 5] += 1000
    out = attention_8bit(quantize_qkv(q, k, v, heads=1, v_format=formats(device)[0]), implementation="triton")
    assert relative_error(out, oracle(q, k, v, 1)) <= 4.1e-2


@pytest.mark.usefixtures("kernel")
def test_a_huge_channel_of_k_that_varies(device):
    """Such a channel leaves few of the 8 bits to the others, in the definition and in the kernel (docs/tiers.md)."""
    q, k, v = projections(device, torch.float32, 1, 130, 1, 64)
    q, k = q.clone(), k.clone()
    q[..., 5], k[..., 5] = 0.01 * q[..., 5], 300 * k[..., 5]
    exact = oracle(q, k, v, 1)
    qkv = quantize_qkv(q, k, v, heads=1, v_format=formats(device)[0])
    actual, defined = (attention_8bit(qkv, implementation=name) for name in ("triton", "torch"))
    assert_as_good(actual, defined, exact)


def test_accuracy_on_normal_data():
    """e4m3 for weights and values alone costs 3.75e-2."""
    q, k, v = torch.randn(3, 1, 1024, 256)
    assert relative_error(attention_8bit(quantize_qkv(q, k, v, heads=2)), oracle(q, k, v, 2)) <= 4.1e-2


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel")
def test_noise_does_not_grow_with_the_tokens():
    q, k, v = torch.randn(3, 1, 170_000, 128, device="cuda").bfloat16()
    out = attention_8bit(quantize_qkv(q, k, v, heads=1))
    rows = slice(0, None, 4000)
    scores = (q[0, rows].double() @ k[0].double().mT) * 128**-0.5
    assert relative_error(out[0, rows, 0], scores.softmax(-1) @ v[0].double()) <= 4.1e-2


def test_compiles_to_one_graph(device):
    q, k, v = projections(device, torch.float32, 2, 40, 2, 64)
    qkv = quantize_qkv(q, k, v, heads=2, v_format=torch.float16)
    residual = torch.randn(2, 40, 2, 64, device=q.device)

    def block(residual, c_out):
        return attention_8bit(qkv, residual=residual, c_out=c_out, implementation="triton")

    c_out = torch.randn(2, 1, 1, device=q.device)
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    assert torch.equal(compiled(residual, c_out), block(residual, c_out))


def test_custom_op_contract(device):
    q, k, v = projections(device, torch.float32, 2, 5, 2, 64)
    qkv = quantize_qkv(q, k, v, heads=2, v_format=torch.float16)
    residual = torch.randn(2, 5, 2, 64, device=q.device)
    arguments = (*qkv[:6], residual, None, torch.randn(2, 1, 1, device=q.device), torch.float32, None)
    torch.library.opcheck(torch.ops.turbo_rcm_patch.attention_8bit.default, (PORTABLE, *arguments))


@pytest.mark.parametrize("implementation", ["triton", "torch"])
@pytest.mark.parametrize("shape", [(2, 0, 128), (0, 5, 128)])
def test_nothing_in_nothing_out(shape, implementation):
    q = torch.zeros(shape)
    qkv = quantize_qkv(q, q, q, heads=2, v_format=torch.float16, implementation=implementation)
    residual = torch.zeros(*shape[:2], 2, 64)
    for options in ({}, {"residual": residual, "c_out": 0.5}):
        assert attention_8bit(qkv, **options, implementation=implementation).shape == residual.shape
    in_8_bits = attention_8bit(qkv, result=FP8, implementation=implementation)
    assert (in_8_bits.values.shape, in_8_bits.scale.shape) == (shape, shape[:2])


def test_heads_without_channels_are_an_error():
    q = torch.zeros(2, 5, 0)
    with pytest.raises(ValueError, match=r"q has shape \[2, 5, 0\]"):
        quantize_qkv(q, q, q, heads=2)


def test_errors_name_what_was_given():
    q, k, v = torch.randn(3, 2, 5, 128)
    qkv = quantize_qkv(q, k, v, heads=2)
    residual = torch.zeros(2, 5, 2, 64)
    for message, arguments in {
        "q is torch.float32": {"qkv": qkv._replace(q=residual)},
        "k torch.int8 [2, 4, 2, 64]": {"qkv": qkv._replace(k=qkv.k[:, :4])},
        "result=torch.int8": {"result": torch.int8},
        "without a residual": {"c_skip": 0.5},
        "a residual is given with result=float8_e4m3fn": {"residual": residual, "result": FP8},
        "residual has shape [2, 4, 2, 64]": {"residual": residual[:, :4]},
        "c_out has shape [3]": {"residual": residual, "c_out": torch.zeros(3)},
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            attention_8bit(**{"qkv": qkv} | arguments)
