import pytest
import torch

from tests.kernels.eight_bit import FORMATS, assert_sums_are_right, oracle_of, quantized, quantized_weight
from tests.oracle import DTYPES, assert_no_worse, relative_error, torch_device
from turbo_rcm_patch.kernels import FP8, INT8, linear_qkv, quantize_rows, reference
from turbo_rcm_patch.kernels.choice.registry import PORTABLE
from turbo_rcm_patch.kernels.linear import gemm_sm90

GUARD_ROWS = 256  # after each result: no tile may reach into them
# M, N, K for the kernel of sm_90. There are fewer rows than a tile and tails in every dimension. N is within a tile, a
# multiple of its columns, and past one. There are fewer and more tiles than multiprocessors.
SHAPES = [(1, 8, 8), (77, 200, 72), (129, 192, 64), (300, 264, 1544), (2000, 1544, 200), (20000, 528, 40)]


def operands(*lead, N, K, device="cpu", dtype=torch.float32):
    a, *others = (torch.randn(shape).to(device, dtype) for shape in [(*lead, K)] + 3 * [(N, K)] + 3 * [(N,)])
    return a, others[:3], others[3:]


def check(actual, a, weights, biases):
    low = reference.linear_qkv(a, weights, biases)
    wide = ([None if t is None else t.double() for t in tensors] for tensors in (weights, biases))
    oracle = reference.linear_qkv(a.double(), *wide)
    assert len(actual) == 3
    for one, *expected in zip(actual, low, oracle, strict=True):
        assert (one.shape, one.dtype) == (expected[0].shape, expected[0].dtype)
        assert one.is_contiguous()
        assert_no_worse(one, *expected)


@pytest.mark.parametrize("lead", [(), (7,), (1, 1), (2, 9), (2, 0)])
def test_is_three_linears(lead, device):
    for dtype in DTYPES[device]:
        a, weights, biases = operands(*lead, N=40, K=24, device=torch_device(device), dtype=dtype)
        for b in (biases, [None] * 3):
            for implementation in ("auto", "torch", "triton"):
                actual = linear_qkv(a, weights, b, implementation=implementation)
                expected = [torch.nn.functional.linear(a, w, one) for w, one in zip(weights, b, strict=True)]
                assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


def test_non_contiguous(device):
    a, weights, biases = operands(16, 2, N=12, K=9, device=torch_device(device))
    weights = [w.T.contiguous().T for w in weights]
    biases = [b.repeat(2)[::2] for b in biases]
    check(linear_qkv(a.transpose(0, 1), weights, biases, implementation="triton"), a.transpose(0, 1), weights, biases)


def test_autograd_takes_the_reference(device):
    a, weights, biases = operands(2, 7, N=12, K=10, device=torch_device(device))
    wide = [t.double().requires_grad_() for t in (a, *weights, *biases)]
    leaves = [t.requires_grad_() for t in (a, *weights, *biases)]
    for tensors in (leaves, wide):
        q, k, v = linear_qkv(
            tensors[0], tensors[1:4], tensors[4:], implementation="triton" if tensors is leaves else "auto"
        )
        (q + 2 * k * v).sum().backward()
    for ours, oracle in zip(leaves, wide, strict=True):
        assert relative_error(ours.grad, oracle.grad) <= 1e-5


def test_compiles_to_one_graph(device):
    tensors = operands(2, 7, N=12, K=10, device=torch_device(device))
    compiled = torch.compile(linear_qkv, fullgraph=True, backend="eager")
    wanted = linear_qkv(*tensors, implementation="triton")
    actual = compiled(*tensors, implementation="triton")
    assert all(torch.equal(one, other) for one, other in zip(actual, wanted, strict=True))


@pytest.mark.parametrize("has_bias", [True, False])
def test_custom_op_contract(has_bias, device):
    device = torch_device(device)
    a, weights = quantized(2, 3, 16, format=INT8, device=device), [quantized_weight(8, 16, INT8, device)] * 3
    biases = [torch.randn(8, device=device) if has_bias else None for _ in range(3)]
    scales = (a.scale, *(weight.scale for weight in weights))
    arguments = (a.values, *(weight.values for weight in weights), *biases, *scales, torch.float32)
    torch.library.opcheck(torch.ops.turbo_rcm_patch.linear_qkv.default, (PORTABLE, *arguments))


def test_the_kernel_gets_matrices(monkeypatch):
    def launch_three(a, weights, biases, outs, scales, second):
        assert (scales, second) == ((None,) * 4, (None, None))
        assert a.dim() == 2
        assert all(t.is_contiguous() for t in (*biases, *outs))
        for out, value in zip(outs, reference.linear_qkv(a, weights, biases), strict=True):
            out.copy_(value)

    monkeypatch.setattr(gemm_sm90, "why_not", lambda *_, **__: None)
    monkeypatch.setattr(gemm_sm90, "launch_three", launch_three)
    a, weights, biases = operands(9, 2, N=24, K=16)
    biases = [b.repeat(2)[::2] for b in biases]
    for x in (a.transpose(0, 1), a[0, 0]):
        check(linear_qkv(x, weights, biases, implementation="triton"), x, weights, biases)


def test_errors():
    a, weights, biases = operands(2, 3, N=4, K=5)
    with pytest.raises(
        ValueError, match=r"weights have the shapes \[4, 5\], \[4, 5\]; they must be three of one \[N, K\]"
    ):
        linear_qkv(a, weights[:2], biases)
    with pytest.raises(ValueError, match=r"weights have the shapes \[4, 5\], \[4, 5\], \[3, 5\]"):
        linear_qkv(a, [*weights[:2], weights[2][:3]], biases)
    with pytest.raises(ValueError, match=r"biases have the shapes \[4\], \[4\], None; they must be three of \[N\] or"):
        linear_qkv(a, weights, [*biases[:2], None])
    with pytest.raises(ValueError, match=r"biases have the shapes \[4\]; they"):
        linear_qkv(a, weights, biases[:1])
    with pytest.raises(ValueError, match=r"linear_qkv: a has shape \[2, 3, 4\] and weight \[4, 5\]"):
        linear_qkv(a[..., :4], weights, biases)
    with pytest.raises(ValueError, match=r"bias has shape \[3\]; it must be \[C=4\]"):
        linear_qkv(a, weights, [*biases[:2], biases[2][:3]])
    with pytest.raises(ValueError, match="cast them to one"):
        linear_qkv(a, [*weights[:2], weights[2].half()], biases)
    a, weights = quantized(2, 3, 16, format=INT8), [quantized_weight(4, 16, INT8)] * 3
    with pytest.raises(ValueError, match="a is a Quantized and weight a Tensor"):
        linear_qkv(a, [*weights[:2], weights[2].values], biases)
    with pytest.raises(ValueError, match=r"a is in torch.int8 and weight in torch.float8_e4m3fn"):
        linear_qkv(a, [*weights[:2], quantized_weight(4, 16, FP8)], biases)


# --- operands in 8 bits


def check_8bit(actual, a, weights, biases, dtype):
    low = reference.linear_qkv(a, weights, biases, dtype)
    for one, expected, weight, bias in zip(actual, low, weights, biases, strict=True):
        assert (one.shape, one.dtype) == (expected.shape, dtype)
        oracle = oracle_of(a, weight, bias)
        assert_sums_are_right(one, expected, oracle, a.format, a.values.shape[-1])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("lead", [(), (7,), (2, 65), (2, 0)])
def test_8_bits_match_the_oracle(lead, format, device):
    device = torch_device(device)
    a = quantize_rows(torch.randn(*lead, 48, device=device), format, implementation="torch")
    weights = [quantized_weight(40, 48, format, device) for _ in range(3)]
    biases = [torch.randn(40, device=device) for _ in range(3)]
    for b in (biases, [None] * 3):
        actual = linear_qkv(a, weights, b, dtype=torch.float32, implementation="triton")
        check_8bit(actual, a, weights, b, torch.float32)


def test_8_bits_compile_to_one_graph(device):
    device = torch_device(device)
    a, weights = quantized(2, 7, 16, format=INT8, device=device), [quantized_weight(8, 16, INT8, device)] * 3
    compiled = torch.compile(linear_qkv, fullgraph=True, backend="eager")
    options = {"dtype": torch.float32, "implementation": "triton"}
    actual, wanted = (function(a, weights, [None] * 3, **options) for function in (compiled, linear_qkv))
    assert all(torch.equal(one, other) for one, other in zip(actual, wanted, strict=True))


# --- the kernel of sm_90


def launch(a, weights, biases):
    """The results, after a check that nothing was written behind them."""
    memories = [a.new_full((len(a) + GUARD_ROWS, len(weight)), torch.nan) for weight in weights]
    outs, guards = zip(*(memory.split((len(a), GUARD_ROWS)) for memory in memories), strict=True)
    gemm_sm90.launch_three(a, weights, biases, outs)
    assert all(guard.isnan().all() for guard in guards)
    return outs


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_launch_matches_the_oracle(shape, dtype, sm_90):
    M, N, K = shape
    a, weights, biases = operands(M, N=N, K=K, device=sm_90, dtype=dtype)
    for b in (biases, [None] * 3):
        check(launch(a, weights, b), a, weights, b)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(3000, 1544, 208), (20000, 528, 48), (4000, 272, 8960)])
def test_one_launch_of_8_bits_matches_the_oracle(shape, format, sm_90, monkeypatch):
    taken = []
    kernel = gemm_sm90.launch_three
    monkeypatch.setattr(gemm_sm90, "launch_three", lambda *args: taken.append(kernel(*args)))
    M, N, K = shape
    a = quantized(M, K, format=format, device=sm_90)
    weights = [quantized_weight(N, K, format, sm_90) for _ in range(3)]
    biases = [torch.randn(N, device=sm_90) for _ in range(3)]
    for b, dtype in ((biases, torch.bfloat16), ([None] * 3, torch.float16)):
        check_8bit(linear_qkv(a, weights, b, dtype=dtype), a, weights, b, dtype)
    assert len(taken) == 2


@pytest.mark.gpu
def test_weights_do_not_mix(sm_90):
    a, weights, biases = operands(3000, N=264, K=72, device=sm_90, dtype=torch.bfloat16)
    alone = launch(a, weights, biases)
    for tensors in (weights, biases):
        tensors[0][:], tensors[2][:] = torch.nan, torch.nan
    q, k, v = launch(a, weights, biases)
    assert torch.equal(k, alone[1])
    assert q.isnan().all()
    assert v.isnan().all()


@pytest.mark.gpu
def test_many_tiles_take_one_launch(sm_90, monkeypatch):
    taken = []
    kernel = gemm_sm90.launch_three
    monkeypatch.setattr(gemm_sm90, "launch_three", lambda *args: taken.append(kernel(*args)))
    a, weights, biases = operands(2, 3000, N=1544, K=200, device=sm_90, dtype=torch.bfloat16)
    check(linear_qkv(a, weights, biases), a, weights, biases)
    assert len(taken) == 1
