import sys

import pytest
import torch

from tests.kernels.eight_bit import FORMATS, assert_sums_are_right, oracle_of, quantized, quantized_weight
from tests.kernels.linear.test_linear_skip import tiles_of_this_gpu
from tests.oracle import DTYPES, relative_error, torch_device
from turbo_rcm_patch.kernels import (
    FP8,
    INT8,
    LowRank,
    Quantized,
    QuantizedWeight,
    linear_8bit,
    linear_gelu,
    linear_low_rank,
    linear_qkv,
    linear_skip,
    reference,
)
from turbo_rcm_patch.kernels.choice.registry import PORTABLE

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")

gemm = sys.modules["turbo_rcm_patch.kernels.linear.gemm_portable"]
SHAPES = [((1, 1), 5, 3), ((2, 7), 40, 48), ((63,), 130, 33), ((2, 1, 65), 96, 144), ((), 8, 16)]


def check(a, weight, bias, dtype):
    actual = linear_8bit(a, weight, bias, dtype=dtype, implementation="triton")
    low = reference.linear(a, weight, bias).to(dtype)
    assert (actual.shape, actual.dtype) == (low.shape, dtype)
    assert_sums_are_right(actual, low, oracle_of(a, weight, bias), a.format, a.values.shape[-1])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("lead", "N", "K"), SHAPES)
def test_matches_the_oracle(lead, N, K, format, device):
    a = quantized(*lead, K, format=format, device=torch_device(device))
    weight, bias = quantized_weight(N, K, format, a.values.device), torch.randn(N, device=a.values.device)
    for dtype in DTYPES[device]:
        check(a, weight, bias.to(dtype), dtype)
        check(a, weight, None, dtype)


@pytest.mark.parametrize(("format", "descriptors", "tiles"), list(tiles_of_this_gpu(*FORMATS)))
def test_every_tile(format, descriptors, tiles, device, monkeypatch):
    monkeypatch.setattr(gemm, "choose_tiles", lambda *_: tiles)
    if not descriptors:
        monkeypatch.setattr(gemm, "TMA_CAPABILITY", (99, 0))
    a = quantized(2, tiles.rows + 2, tiles.depth + 16, format=format, device=torch_device(device))
    check(a, quantized_weight(tiles.columns + 8, tiles.depth + 16, format, a.values.device), None, torch.float16)


def test_sums_of_int8_are_exact(device):
    """Sums of 13824 products of the largest magnitudes are 2e8, more than fp32 adds up exactly."""
    device = torch_device(device)
    a = torch.full((2, 13824), 127, dtype=torch.int8, device=device)
    a[1, 0] = 126
    weight = torch.full((3, 13824), 127, dtype=torch.int8, device=device)
    operands = Quantized(a, torch.ones(2, device=device)), QuantizedWeight(weight, torch.ones(3, device=device), None)
    actual = linear_8bit(*operands, dtype=torch.float32, implementation="triton")
    assert torch.equal(actual, (a.double() @ weight.double().T).float())


@pytest.mark.gpu
@pytest.mark.parametrize("K", [1536, 5120, 8960, 13824])
@pytest.mark.parametrize("rows", [100, 4000])  # few tiles and many: on sm_90 by two kernels
def test_sums_of_fp8_lose_less_than_the_format(rows, K):
    """Beside the 3.7 % that quantising both operands costs; int8's sums lose nothing."""
    for format, limit in ((INT8, 1e-6), (FP8, 0.02)):
        a, weight = quantized(rows, K, format=format, device="cuda"), quantized_weight(1544, K, format, "cuda")
        actual = linear_8bit(a, weight, dtype=torch.float32)
        assert relative_error(actual, oracle_of(a, weight, None)) <= limit


def test_non_contiguous(device):
    device = torch_device(device)
    values = torch.randint(-127, 128, (2, 48, 9), dtype=torch.int8, device=device).transpose(1, 2)
    a = Quantized(values, torch.rand(1, 9, device=device).expand(2, 9))
    weight = torch.randint(-127, 128, (48, 24), dtype=torch.int8, device=device).T
    weight = QuantizedWeight(weight, torch.rand(48, device=device)[::2], torch.ones((), device=device))
    check(a, weight, torch.randn(48, device=device)[::2], torch.float32)


def test_nothing_in_nothing_out(device):
    device = torch_device(device)
    a, weight = quantized(2, 0, 16, format=INT8, device=device), quantized_weight(24, 16, INT8, device)
    assert linear_8bit(a, weight, dtype=torch.float16, implementation="triton").shape == (2, 0, 24)


@pytest.mark.parametrize("implementation", ["triton", "torch"])
@pytest.mark.parametrize(("N", "K"), [(0, 16), (16, 0)])
def test_a_weight_without_elements_is_an_error(N, K, implementation):
    a, weight, bias, residual = torch.ones(1, 5, K), torch.ones(N, K), torch.ones(N), torch.ones(1, 5, N)
    low_rank = LowRank(torch.ones(16, K), torch.ones(N, 16))
    eight_bits = Quantized(a.to(INT8), torch.ones(1, 5)), QuantizedWeight(weight.to(INT8), torch.ones(N))
    for run in (
        lambda **options: linear_skip(a, weight, bias, residual, **options),
        lambda **options: linear_gelu(a, weight, bias, **options),
        lambda **options: linear_qkv(a, [weight] * 3, [bias] * 3, **options),
        lambda **options: linear_low_rank(a, weight, bias, low_rank, **options),
        lambda **options: linear_8bit(*eight_bits, bias, dtype=torch.float32, **options),
    ):
        with pytest.raises(ValueError, match=rf"weight has shape \[{N}, {K}\]; it must have elements"):
            run(implementation=implementation)


def test_an_unknown_choice_of_linears_is_an_error():
    a, weight, residual = torch.ones(1, 5, 16), torch.ones(8, 16), torch.ones(1, 5, 8)
    with pytest.raises(ValueError, match="linears='fast'; accepted are auto, triton, torch and None"):
        linear_skip(a, weight, None, residual, linears="fast")


def test_autograd_takes_the_reference(device):
    device = torch_device(device)
    a, weight = quantized(2, 7, 16, format=INT8, device=device), quantized_weight(12, 16, INT8, device)
    bias = torch.randn(12, device=device, requires_grad=True)
    linear_8bit(a, weight, bias, dtype=torch.float32, implementation="triton").sum().backward()
    torch.testing.assert_close(bias.grad, torch.full_like(bias, 14))


def test_compiles_to_one_graph(device):
    device = torch_device(device)
    a, weight = quantized(2, 7, 16, format=INT8, device=device), quantized_weight(12, 16, INT8, device)
    bias = torch.randn(12, device=device)
    compiled = torch.compile(linear_8bit, fullgraph=True, backend="eager")
    options = {"dtype": torch.float32, "implementation": "triton"}
    assert torch.equal(compiled(a, weight, bias, **options), linear_8bit(a, weight, bias, **options))


def test_custom_op_contract(device):
    device = torch_device(device)
    a, weight = quantized(2, 3, 16, format=INT8, device=device), quantized_weight(8, 16, INT8, device)
    arguments = (a.values, weight.values, None, a.scale, weight.scale, torch.float32)
    torch.library.opcheck(torch.ops.turbo_rcm_patch.linear_8bit.default, (PORTABLE, *arguments))


def test_errors():
    a, weight = quantized(2, 3, 16, format=INT8), quantized_weight(4, 16, INT8)
    with pytest.raises(ValueError, match="linear_8bit: a is a Tensor; it must be a Quantized"):
        linear_8bit(a.values, weight)
    with pytest.raises(
        ValueError, match="a is a Quantized and weight a Tensor; give a Quantized and a QuantizedWeight"
    ):
        linear_8bit(a, weight.values)
    with pytest.raises(ValueError, match=r"a is in torch.int8 and weight in torch.float8_e4m3fn; they must be of one"):
        linear_8bit(a, quantized_weight(4, 16, FP8))
    with pytest.raises(ValueError, match=r"a has shape \[2, 3, 16\] and weight \[4, 8\]"):
        linear_8bit(a, quantized_weight(4, 8, INT8))
    with pytest.raises(ValueError, match=r"bias has shape \[3\]; it must be \[C=4\]"):
        linear_8bit(a, weight, torch.zeros(3))
    with pytest.raises(
        ValueError, match=r"a has values \[2, 3, 16\] and scales \[3\] torch.float32; there must be one"
    ):
        linear_8bit(a._replace(scale=a.scale[0]), weight)
    with pytest.raises(ValueError, match=r"dtype=torch.int8; accepted are float32, float16, bfloat16"):
        linear_8bit(a, weight, dtype=torch.int8)
