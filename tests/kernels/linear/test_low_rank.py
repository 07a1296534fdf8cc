"""The linears with a product of low rank added, which has two factors beside each weight."""

import sys

import pytest
import torch

from tests.kernels.eight_bit import FORMATS, assert_sums_are_right, quantized, quantized_weight
from tests.kernels.linear.sm90 import why_not
from tests.oracle import DTYPES, assert_no_worse, relative_error, torch_device
from turbo_rcm_patch.kernels import (
    FP8,
    INT8,
    LowRank,
    dispatch,
    linear_8bit,
    linear_gelu,
    linear_low_rank,
    linear_qkv,
    linear_skip,
    quantize_weight,
    reference,
)
from turbo_rcm_patch.kernels.choice.registry import PORTABLE
from turbo_rcm_patch.kernels.linear import gemm_sm90
from turbo_rcm_patch.kernels.quantized import LARGEST

gemm = sys.modules["turbo_rcm_patch.kernels.linear.gemm_portable"]
# batch, tokens, N, K, R: tails of everything, a rank below a step and beyond one, and what TMA can read.
SHAPES = [(1, 1, 5, 3, 1), (2, 37, 40, 24, 72), (1, 130, 96, 48, 64)]
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # exp in the GELU, divided by on purpose
    pytest.mark.usefixtures("uninitialised_memory_is_nan"),
]


def operands(B, S, N, K, R, *, weights=1, device="cpu", dtype=torch.float32):
    """Return a, residual, lists of weights and biases, and a LowRank whose product is as large as a weight's."""
    shapes = (B, S, K), (B, S, N), (weights * R, K), (weights * N, R)
    a, residual, down, up = (torch.randn(shape).to(device, dtype) for shape in shapes)
    matrices, biases = ([torch.randn(s).to(device, dtype) for _ in range(weights)] for s in ((N, K), (N,)))
    return a, residual, matrices, biases, LowRank(down, up / R**0.5)


def summed(a, weights, biases, low_rank, dtype):
    """``a Wᵀ + (a downᵀ) upᵀ + b`` of each weight."""
    a, down, up = (t.to(dtype) for t in (a, low_rank.down, low_rank.up))
    parts = reference.parts_of_weights(a @ down.T, up, len(weights))
    each = zip(weights, biases, parts, strict=True)
    return [torch.nn.functional.linear(a, w.to(dtype), b.to(dtype)) + low @ up.T for w, b, (low, up) in each]


def pairs(results, oracles):
    return zip(results, oracles, strict=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_skip_and_gelu_match_the_oracle(shape, device):
    for dtype in DTYPES[device]:
        a, residual, weights, biases, low_rank = operands(*shape, device=torch_device(device), dtype=dtype)
        options = {"low_rank": low_rank, "implementation": "triton"}
        (low,), (oracle,) = (summed(a, weights, biases, low_rank, d) for d in (dtype, torch.float64))
        gate = torch.randn(shape[0], 1, shape[2], device=a.device)
        skipped = linear_skip(a, weights[0], biases[0], residual, c_out=gate, **options)
        assert_no_worse(skipped, (residual + gate * low).to(dtype), residual.double() + gate.double() * oracle)
        gelu = linear_gelu(a, weights[0], biases[0], **options)
        assert_no_worse(gelu, reference.gelu(low), reference.gelu(oracle))


# The shape with one token has more columns than above, so that large errors of a few values by chance count little.
@pytest.mark.parametrize("shape", [(1, 1, 2001, 3, 1), *SHAPES[1:]])
def test_a_linear_alone_matches_the_oracle(shape, device):
    for dtype in DTYPES[device]:
        a, _, (weight,), (bias,), low_rank = operands(*shape, device=torch_device(device), dtype=dtype)
        (low,), (oracle,) = (summed(a, [weight], [bias], low_rank, d) for d in (dtype, torch.float64))
        for implementation in ("triton", "torch"):
            assert_no_worse(linear_low_rank(a, weight, bias, low_rank, implementation=implementation), low, oracle)
        whole, rows = (linear_low_rank(x, weight, 0 * bias, low_rank, implementation="triton") for x in (a, a[0]))
        assert torch.equal(rows, whole[0])
        assert torch.equal(linear_low_rank(a, weight, None, low_rank, implementation="triton"), whole)


@pytest.mark.parametrize("shape", SHAPES)
def test_qkv_matches_the_oracle(shape, device):
    for dtype in DTYPES[device]:
        a, _, weights, biases, low_rank = operands(*shape, weights=3, device=torch_device(device), dtype=dtype)
        lows, oracles = (summed(a, weights, biases, low_rank, d) for d in (dtype, torch.float64))
        for implementation in ("triton", "torch"):
            actual = linear_qkv(a, weights, biases, low_rank=low_rank, implementation=implementation)
            for one, low, oracle in zip(actual, lows, oracles, strict=True):
                assert_no_worse(one, low, oracle)


@pytest.mark.parametrize("descriptors", [True, False])
def test_every_tile(descriptors, device, monkeypatch):
    if not descriptors:
        monkeypatch.setattr(gemm, "TMA_CAPABILITY", (99, 0))
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    for tiles in gemm.tile_candidates(capability, torch.float16, descriptors):
        monkeypatch.setattr(gemm, "choose_tiles", lambda *_, tiles=tiles: tiles)
        sizes = (1, tiles.rows + 2, tiles.columns + 8, tiles.depth + 16, tiles.depth + 8)
        a, _, weights, biases, low_rank = operands(*sizes, device=torch_device(device), dtype=torch.float16)
        actual = linear_gelu(a, weights[0], biases[0], low_rank=low_rank, implementation="triton")
        (low,), (oracle,) = (summed(a, weights, biases, low_rank, d) for d in (torch.float16, torch.float64))
        assert_no_worse(actual, reference.gelu(low), reference.gelu(oracle))


# --- in 8 bits


def operands_8bit(B, S, N, K, R, format, *, weights=1, device="cpu", dtype=torch.float32):
    a = quantized(B, S, K, format=format, device=device)
    matrices = [quantized_weight(N, K, format, device) for _ in range(weights)]
    up = torch.cat([torch.randn(N, R, device=device) * (K * R) ** -0.5 / w.scale[:, None] for w in matrices])
    down = quantize_weight(torch.randn(weights * R, K, device=device), format)
    biases = [torch.randn(N, device=device) for _ in range(weights)]
    return a, matrices, biases, LowRank(down, up.to(dtype))


def summed_8bit(a, weights, biases, low_rank, rounded=None):
    """Return the sums of the quantised operands in fp64. rounded: the dtype of low, which the kernel reads."""
    wide = lambda q: q.values.double() * q.scale.double()[..., None]  # noqa: E731
    low = a.values.double() @ wide(low_rank.down).T
    low = (low if rounded is None else low.to(rounded).double()) * a.scale.double()[..., None]
    parts = reference.parts_of_weights(low, low_rank.up.double(), len(weights))
    each = zip(weights, biases, parts, strict=True)
    return [
        torch.nn.functional.linear(wide(a), wide(w), b.double()) + low @ (up * w.scale.double()[:, None]).T
        for w, b, (low, up) in each
    ]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1, 5, 16, 1), (2, 37, 40, 48, 72)])
def test_8_bits_match_the_oracle(shape, format, device):
    low_dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a, weights, biases, low_rank = operands_8bit(
        *shape, format, weights=3, device=torch_device(device), dtype=low_dtype
    )
    options = {"dtype": torch.float32, "implementation": "triton"}
    outputs = linear_qkv(a, weights, biases, low_rank=low_rank, **options)
    lows, oracles = (summed_8bit(a, weights, biases, low_rank, rounded) for rounded in (low_dtype, None))
    for one, low, oracle in zip(outputs, lows, oracles, strict=True):
        assert_sums_are_right(one, low.float(), oracle, format, shape[3])
    one = low_rank._replace(
        down=type(low_rank.down)(*(t.chunk(3)[0] for t in low_rank.down[:2])), up=low_rank.up.chunk(3)[0]
    )
    residual, gate = torch.randn(*shape[:3]).to(biases[0]), torch.randn(shape[0], 1, shape[2]).to(biases[0])
    low, oracle = lows[0].float(), oracles[0]
    skipped = linear_skip(a, weights[0], biases[0], residual, c_out=gate, low_rank=one, implementation="triton")
    assert_sums_are_right(skipped, residual + gate * low, residual + gate.double() * oracle, format, shape[3])
    gelu = linear_gelu(a, weights[0], biases[0], low_rank=one, **options)
    assert_sums_are_right(gelu, reference.gelu(low), reference.gelu(oracle), format, shape[3])
    plain = linear_8bit(a, weights[0], biases[0], low_rank=one, dtype=torch.float32, implementation="torch")
    assert_sums_are_right(plain, low, oracle, format, shape[3])


def test_the_bound_of_an_fp8_result_counts_the_low_rank(device):
    """One row of the result reaches the bound. A bound without the low-rank product would cut it off."""
    device = torch_device(device)
    a = quantized(1, 3, 64, format=FP8, device=device)
    weight = quantized_weight(32, 64, FP8, device)
    direction = a.dequantize()[0, 0]
    down = quantize_weight(direction[None], FP8)
    up = torch.full((32, 1), 100.0, device=device) / weight.scale[:, None]
    norm = 100 * down.dequantize().norm()
    low_rank = LowRank(down, up, norm)
    implementation = "triton" if device.type == "cuda" else "auto"  # the interpreter rounds e4m3 wrongly
    actual = linear_gelu(a, weight, None, low_rank=low_rank, result=FP8, implementation=implementation)
    (oracle,) = summed_8bit(a, [weight], [torch.zeros(32, device=device)], low_rank)
    assert (actual.scale * LARGEST[FP8] >= oracle.amax(-1)).all()
    assert relative_error(actual.dequantize(), reference.gelu(oracle)) < 0.05  # of e4m3, 2.6 %


# --- what is asked of the factors


def test_autograd_takes_the_reference(device):
    a, residual, weights, biases, low_rank = operands(2, 7, 12, 10, 3, device=torch_device(device))
    leaves = [t.requires_grad_() for t in (a, weights[0], biases[0], residual, *low_rank[:2])]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    for tensors, implementation in ((leaves, "triton"), (wide, "torch")):
        factors = LowRank(*tensors[4:])
        linear_skip(*tensors[:4], low_rank=factors, implementation=implementation).square().sum().backward()
        linear_gelu(*tensors[:3], low_rank=factors, implementation=implementation).sum().backward()
        linear_low_rank(*tensors[:3], factors, implementation=implementation).sum().backward()
    for ours, oracle in zip(leaves, wide, strict=True):
        assert relative_error(ours.grad, oracle.grad) <= 1e-5


def test_compiles_to_one_graph(device):
    a, residual, weights, biases, low_rank = operands(2, 7, 12, 10, 3, weights=3, device=torch_device(device))
    one = LowRank(low_rank.down[:3], low_rank.up[:12])

    def run():
        skipped = linear_skip(a, weights[0], biases[0], residual, low_rank=one, implementation="triton")
        gelu = linear_gelu(a, weights[0], biases[0], low_rank=one, implementation="triton")
        alone = linear_low_rank(a, weights[0], biases[0], one, implementation="triton")
        return skipped, gelu, alone, *linear_qkv(a, weights, biases, low_rank=low_rank, implementation="triton")

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    assert all(torch.equal(ours, eager) for ours, eager in pairs(compiled(), run()))


def test_custom_op_contracts(device):
    a, _, weights, biases, low_rank = operands(2, 3, 8, 4, 5, weights=3, device=torch_device(device))
    ops = torch.ops.turbo_rcm_patch
    low = a @ low_rank.down.T
    one = low[..., :5].contiguous(), low_rank.up[:8]
    torch.library.opcheck(ops.linear_gelu.default, (PORTABLE, a, weights[0], None, torch.float32, None, None, *one))
    torch.library.opcheck(ops.linear_low_rank.default, (PORTABLE, a, weights[0], biases[0], *one))
    a, weights, _, low_rank = operands_8bit(2, 3, 8, 16, 5, INT8, weights=3, device=torch_device(device))
    tensors = (a.values, weights[0].values, None, a.scale, weights[0].scale)
    torch.library.opcheck(ops.linear_8bit.default, (PORTABLE, *tensors, torch.float32, *one))
    scales = (a.scale, *(weight.scale for weight in weights))
    arguments = (a.values, *(weight.values for weight in weights), *(None,) * 3, *scales, torch.float32)
    second = torch.randn(2, 3, 15, device=a.scale.device), low_rank.up
    torch.library.opcheck(ops.linear_qkv.default, (PORTABLE, *arguments, *second))


def test_errors():
    a, residual, weights, biases, low_rank = operands(2, 3, 4, 5, 2)
    wrong = low_rank._replace(up=low_rank.up[:3])
    match = r"linear_skip: low_rank has down \[2, 5\] and up \[3, 2\]; for 1 .* must be \[2, 5\] and \[4, 2\]"
    with pytest.raises(ValueError, match=match):
        linear_skip(a, weights[0], biases[0], residual, low_rank=wrong)
    with pytest.raises(ValueError, match=r"for 3 weight\(s\) \[4, 5\] they must be \[6, 5\] and \[12, 2\]"):
        linear_qkv(a, weights * 3, biases * 3, low_rank=low_rank)
    with pytest.raises(ValueError, match=r"up in torch\.float16; down must have a's dtype"):
        linear_gelu(a, weights[0], biases[0], low_rank=low_rank._replace(up=low_rank.up.half()))
    eight_bit = quantized(2, 3, 16, format=FP8)
    weight = quantized_weight(4, 16, FP8)
    with pytest.raises(ValueError, match="linear_low_rank: a is a Quantized; use linear_8bit"):
        linear_low_rank(eight_bit, weight, None, low_rank)
    with pytest.raises(ValueError, match="linear_8bit: a is a Quantized and low_rank's down a Tensor"):
        linear_8bit(eight_bit, weight, low_rank=low_rank)
    low_rank = LowRank(quantized_weight(2, 16, FP8), torch.zeros(4, 2))
    with pytest.raises(ValueError, match="a result in fp8 needs a low_rank that has its norm"):
        linear_gelu(eight_bit, weight, None, low_rank=low_rank, result=FP8)


def test_what_the_kernel_of_sm_90_takes(monkeypatch):
    monkeypatch.setattr(dispatch, "is_sm90", lambda _: True)
    monkeypatch.setattr(gemm_sm90, "device_properties", lambda _: ((9, 0), 1))
    a, weight, up = (torch.zeros(shape).bfloat16() for shape in ((300, 64), (192, 64), (192, 64)))
    low = torch.zeros(300, 64).bfloat16()
    assert why_not(a, weight, second=gemm.SecondPair(low, up)) is None
    reason = why_not(a, weight, second=gemm.SecondPair(low[:, :32], up[:, :32]))
    assert reason == "a rank that is no multiple of 64"
    assert why_not(a, weight, second=gemm.SecondPair(low.half(), up.half())) == "float16 low"
    in_8_bits = a.to(INT8), weight.to(INT8)
    assert why_not(*in_8_bits, second=gemm.SecondPair(low, up), dtype=torch.float16) is None
    halves = gemm.SecondPair(low.half(), up.half())
    assert why_not(*in_8_bits, second=halves, dtype=torch.float16) == "float16 low"
    kept, gate = torch.empty(len(a), len(weight), dtype=torch.float16), torch.empty(1, 1, len(weight))
    options = {"residual": kept, "dtype": torch.float16, "second": gemm.SecondPair(low, up)}
    assert why_not(*in_8_bits, c_out=gate, **options) == "low rank beside 8 bits, a gate and fp16"
    assert why_not(*in_8_bits, c_out=gate, **{**options, "second": gemm.NO_PAIR}) is None


@pytest.mark.gpu
def test_gpu_kernel_of_sm_90(sm_90):
    """Enough tiles for it, as in test_gemm_sm90, in every mode that it has."""
    shape = (2, 3000, 1544, 200, 128)
    for dtype in (torch.bfloat16, torch.float16):
        a, residual, weights, biases, low_rank = operands(*shape, weights=3, device=sm_90, dtype=dtype)
        second = gemm.SecondPair((a @ low_rank.down.T).flatten(0, 1), low_rank.up)
        assert why_not(a.flatten(0, 1), *weights, second=second) is None
        lows, oracles = (summed(a, weights, biases, low_rank, d) for d in (dtype, torch.float64))
        for one, low, oracle in zip(linear_qkv(a, weights, biases, low_rank=low_rank), lows, oracles, strict=True):
            assert_no_worse(one, low, oracle)
        one = LowRank(low_rank.down[:128], low_rank.up[:1544])
        gate = torch.randn(2, 1, 1544, device=sm_90)
        skipped = linear_skip(a, weights[0], biases[0], residual, c_out=gate, low_rank=one)
        assert_no_worse(skipped, (residual + gate * lows[0]).to(dtype), residual + gate.double() * oracles[0])
    for format in FORMATS:
        low_dtype = torch.bfloat16
        a, weights, biases, low_rank = operands_8bit(*shape, format, weights=3, device=sm_90, dtype=low_dtype)
        biases = [b.bfloat16() for b in biases]
        lows, oracles = (summed_8bit(a, weights, biases, low_rank, rounded) for rounded in (low_dtype, None))
        outputs = linear_qkv(a, weights, biases, low_rank=low_rank)
        for one, low, oracle in zip(outputs, lows, oracles, strict=True):
            assert_sums_are_right(one, low.bfloat16(), oracle, format, shape[3])
