import pytest
import torch

from tests.kernels.eight_bit import FORMATS, assert_sums_are_right, oracle_of, quantized, quantized_weight
from tests.oracle import DTYPES, assert_no_worse, relative_error, torch_device
from turbo_rcm_patch.kernels import FP8, INT8, dispatch, linear_gelu, quantize_rows, quantize_weight, reference
from turbo_rcm_patch.kernels.choice.registry import PORTABLE
from turbo_rcm_patch.kernels.quantized import LARGEST, Quantized, round_to

# The interpreter says that exp overflowed; the kernel divides by the infinity on purpose.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.usefixtures("uninitialised_memory_is_nan"),
]


def operands(*lead, C, K, device="cpu", dtype=torch.float32):
    return [torch.randn(shape).to(device, dtype) for shape in ((*lead, K), (C, K), (C,))]


def check(a, weight, bias):
    actual = linear_gelu(a, weight, bias, implementation="triton")
    wide = [None if t is None else t.double() for t in (a, weight, bias)]
    assert_no_worse(actual, reference.linear_gelu(a, weight, bias), reference.linear_gelu(*wide))


@pytest.mark.parametrize(
    ("lead", "C", "K"), [((1, 1), 5, 3), ((2, 7), 40, 24), ((63,), 130, 33), ((2, 1, 65), 96, 72), ((), 8, 8)]
)
def test_matches_the_oracle(lead, C, K, device):
    for dtype in DTYPES[device]:
        a, weight, bias = operands(*lead, C=C, K=K, device=torch_device(device), dtype=dtype)
        check(a, weight, bias)
        check(a, weight, None)


def test_non_contiguous(device):
    device = torch_device(device)
    a = torch.randn(2, 16, 9, device=device).transpose(1, 2)
    weight = torch.randn(16, 24, device=device).T
    bias = torch.randn(48, device=device)[::2]
    check(a, weight, bias)
    check(a[..., 1:], weight[:, 1:], bias)


def test_tails_of_the_gelu(device):
    device = torch_device(device)
    x = torch.tensor([-1e30, -1e10, -50.0, -8.0, -5.0, -1.0, 0.0, 1.0, 5.0, 50.0, 1e10, 1e30], device=device)
    actual = linear_gelu(x[:, None], torch.ones(1, 1, device=device), None, implementation="triton")[:, 0]
    assert_gelu_of(x, actual, 1e-4)


def assert_gelu_of(x, actual, limit):
    """Compare the GELU of small, large and very large values with an oracle, within a relative limit."""
    assert torch.equal(actual[x >= 50], x[x >= 50])
    assert torch.equal(actual[x <= -50], torch.zeros_like(actual[x <= -50]))
    middle = x.abs() < 50
    wide = x[middle].double()
    # tanh itself rounds to -1 at x = -8, in fp64 too; the sigmoid keeps the digits.
    oracle = wide * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3))
    torch.testing.assert_close(actual[middle].double(), oracle, rtol=limit, atol=0)


def test_autograd_takes_the_reference(device):
    tensors = [t.requires_grad_() for t in operands(2, 7, C=12, K=10, device=torch_device(device))]
    linear_gelu(*tensors, implementation="triton").sum().backward()
    wide = [t.detach().double().requires_grad_() for t in tensors]
    reference.linear_gelu(*wide).sum().backward()
    for ours, oracle in zip(tensors, wide, strict=True):
        assert relative_error(ours.grad, oracle.grad) <= 1e-6


def test_compiles_to_one_graph(device):
    tensors = operands(2, 7, C=12, K=10, device=torch_device(device))
    compiled = torch.compile(linear_gelu, fullgraph=True, backend="eager")
    wanted = linear_gelu(*tensors, implementation="triton")
    assert torch.equal(compiled(*tensors, implementation="triton"), wanted)


def test_custom_op_contract(device):
    arguments = (*operands(2, 3, C=8, K=4, device=torch_device(device)), torch.float32)
    torch.library.opcheck(torch.ops.turbo_rcm_patch.linear_gelu.default, (PORTABLE, *arguments))
    on = torch_device(device)
    a, weight = quantized(2, 3, 16, format=INT8, device=on), quantized_weight(8, 16, INT8, on)
    arguments = (a.values, weight.values, None, torch.float32, a.scale, weight.scale)
    torch.library.opcheck(torch.ops.turbo_rcm_patch.linear_gelu.default, (PORTABLE, *arguments))
    # The fake op alone: the interpreter does not round to fp8.
    arguments = (a.values, weight.values, None, a.scale, weight.scale, a.norm, weight.norm, torch.zeros((), device=on))
    checks = ("test_schema", "test_faketensor") if device == "cuda" else ("test_faketensor",)
    torch.library.opcheck(
        torch.ops.turbo_rcm_patch.linear_gelu_quantized.default, (PORTABLE, *arguments), test_utils=checks
    )


def test_errors():
    a, weight, bias = operands(2, 3, C=4, K=5)
    with pytest.raises(ValueError, match=r"linear_gelu: a has shape \[2, 3, 4\] and weight \[4, 5\]"):
        linear_gelu(a[..., :4], weight, bias)
    with pytest.raises(ValueError, match=r"bias has shape \[3\]"):
        linear_gelu(a, weight, bias[:3])
    with pytest.raises(ValueError, match="cast them to one"):
        linear_gelu(a, weight.half(), bias)
    with pytest.raises(ValueError, match=r"dtype=torch.float16, but with a in torch.float32 the result has a's dtype"):
        linear_gelu(a, weight, bias, dtype=torch.float16)
    with pytest.raises(ValueError, match="a result in fp8 needs a Quantized a that has its norm"):
        linear_gelu(a, weight, bias, result=FP8)
    a, weight = quantized(2, 3, 16, format=INT8), quantized_weight(4, 16, INT8)
    with pytest.raises(ValueError, match="a result in fp8 needs a Quantized a that has its norm"):
        linear_gelu(a._replace(norm=None), weight, bias, result=FP8)
    with pytest.raises(ValueError, match="needs a weight that has its norm"):
        linear_gelu(a, weight._replace(norm=None), bias, result=FP8)
    with pytest.raises(ValueError, match=r"int8 needs the largest value of a row.*quantize_rows"):
        linear_gelu(a, weight, bias, result=INT8)
    with pytest.raises(ValueError, match=r"result=torch.float16; accepted are torch.float8_e4m3fn and None"):
        linear_gelu(a, weight, bias, result=torch.float16)
    with pytest.raises(ValueError, match=r"dtype=torch.int8; accepted are float32, float16, bfloat16"):
        linear_gelu(a, weight, bias, dtype=torch.int8)


# --- operands in 8 bits


def check_8bit(a, weight, bias, dtype):
    actual = linear_gelu(a, weight, bias, dtype=dtype, implementation="triton")
    low = reference.linear_gelu(a, weight, bias, dtype)
    assert (actual.shape, actual.dtype) == (low.shape, dtype)
    oracle = reference.gelu(oracle_of(a, weight, bias))
    assert_sums_are_right(actual, low, oracle, a.format, a.values.shape[-1])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("lead", "C", "K"), [((1, 1), 5, 3), ((2, 70), 136, 48), ((63,), 130, 33), ((), 200, 16)])
def test_8_bits_match_the_oracle(lead, C, K, format, device):
    a, weight = quantized(*lead, K, format=format), quantized_weight(C, K, format)
    a, weight = (type(q)(*(t.to(torch_device(device)) for t in q)) for q in (a, weight))
    bias = torch.randn(C, device=a.values.device)
    for dtype in DTYPES[device]:
        check_8bit(a, weight, bias, dtype)
        check_8bit(a, weight, None, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("rows", "C", "K"), [(1, 24, 16), (77, 200, 144), (3000, 1544, 208), (100, 130, 33)])
def test_a_result_in_fp8_is_the_reference(rows, C, K, format):
    a, weight = quantized(rows, K, format=format, device="cuda"), quantized_weight(C, K, format, "cuda")
    for bias in (torch.randn(C, device="cuda").bfloat16(), None):
        actual = linear_gelu(a, weight, bias, result=FP8)
        expected = linear_gelu(a, weight, bias, result=FP8, implementation="torch")
        assert actual.norm is None
        torch.testing.assert_close(actual.scale, expected.scale, rtol=1e-6, atol=0)
        oracle = reference.gelu(oracle_of(a, weight, bias))
        # Values half way between two of e4m3's go either way, as a sum that lost its last digits does.
        assert relative_error(actual.dequantize(), oracle) <= 1.1 * relative_error(expected.dequantize(), oracle)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("largest", [1.0, 30.0])
@pytest.mark.parametrize("K", [256, 5120])
def test_a_bound_costs_no_more_than_the_largest_value(K, largest, format):
    """Rows scaled by the bound are as good as rows scaled by their own largest values, because e4m3's error is
    relative.

    The bound is some √K times the standard deviation, and 30 times that with one weight row 30 times larger.
    """
    weight = torch.randn(512, K) * K**-0.5
    weight[7] *= largest
    a, weight = quantized(64, K, format=format), quantize_weight(weight, format)
    bias = 0.1 * torch.randn(512)
    actual = linear_gelu(a, weight, bias, result=FP8)
    oracle = reference.gelu(oracle_of(a, weight, bias))
    assert (oracle.abs().amax(-1) <= LARGEST[FP8] * actual.scale).all()
    # By the largest value, but at the bound's place between two powers of two: e4m3's error depends on that too.
    scale = oracle.abs().amax(-1) / LARGEST[FP8]
    scale = actual.scale * torch.exp2(torch.ceil(torch.log2(scale / actual.scale)))
    by_largest = Quantized(round_to(oracle / scale[:, None], FP8), scale)
    for columns in (slice(None), torch.arange(512) != 7):  # the large channel would hide the others
        errors = [relative_error(q.dequantize()[:, columns], oracle[:, columns]) for q in (actual, by_largest)]
        assert errors[0] <= 1.01 * errors[1]


def test_a_bound_holds_where_it_is_reached():
    """One channel is a's own direction, and the bias the largest: nothing saturates."""
    a = quantized(1, 64, format=INT8)
    weight = quantize_weight(torch.cat((a.dequantize(), torch.randn(3, 64) / 64)), INT8)
    bias = torch.tensor([2.0, 0.0, 0.0, 0.0])
    actual = linear_gelu(a, weight, bias, result=FP8)
    torch.testing.assert_close(actual.dequantize()[0, 0], oracle_of(a, weight, bias)[0, 0].float(), rtol=0.07, atol=0)


def test_8_bits_compile_to_one_graph(device):
    device = torch_device(device)
    a, weight = quantized(2, 7, 16, format=INT8, device=device), quantized_weight(12, 16, INT8, device)
    compiled = torch.compile(linear_gelu, fullgraph=True, backend="eager")
    options = {"dtype": torch.float32, "implementation": "triton"}
    assert torch.equal(compiled(a, weight, None, **options), linear_gelu(a, weight, None, **options))
    options = {"result": FP8, "implementation": "torch"}
    actual, expected = compiled(a, weight, None, **options), linear_gelu(a, weight, None, **options)
    assert torch.equal(actual.values.float(), expected.values.float())


@pytest.mark.parametrize(("rows", "N"), [(1, 16), (70, 200)])
def test_the_scale_of_an_fp8_result_is_stored_once_for_every_row(device, monkeypatch, rows, N):
    """Also in the interpreter, which rounds e4m3 wrongly, by about a step of it: an eighth."""
    monkeypatch.setattr(dispatch, "is_rounded_wrongly", lambda *_: False)
    on, generator = torch_device(device), torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).to(on) for shape in ((rows, 64), (N, 64), (N,)))
    a = quantize_rows(x, INT8, with_norm=True, implementation="torch")
    given = a, quantize_weight(weight, INT8), bias
    ours, expected = (linear_gelu(*given, result=FP8, implementation=name) for name in ("triton", "torch"))
    assert torch.allclose(ours.scale, expected.scale, rtol=1e-6)
    assert relative_error(ours.dequantize(), expected.dequantize()) < 2.0**-3
