"""The attention op against its fp64 reference: lengths, layouts, skips, gradients, and what torch.compile needs."""

import itertools
import re

import pytest
import torch

from tests.oracle import DTYPES, assert_no_worse, relative_error, torch_device
from turbo_rcm_patch.kernels import attention, attention_to_e4m3
from turbo_rcm_patch.kernels.choice.registry import PORTABLE
from turbo_rcm_patch.kernels.quantized import FP8

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")

# B, S, Skv, H, D: self and cross, one token, lengths around the tile sizes, head_dims that fill a tile and that do not.
SHAPES = [
    (1, 1, 1, 1, 32),
    (2, 63, 63, 2, 64),
    (1, 129, 200, 1, 128),
    (2, 200, 7, 1, 32),
    (1, 7, 129, 3, 12),
    (1, 65, 130, 1, 80),
]


def _random(device, dtype, *shapes):
    return [torch.randn(shape, device=torch_device(device)).to(dtype) for shape in shapes]


def _inputs(device, dtype, batch, tokens, kv_tokens, heads, head_dim):
    """q, k, v, residual."""
    q_shape, kv_shape = (batch, tokens, heads, head_dim), (batch, kv_tokens, heads, head_dim)
    return _random(device, dtype, q_shape, kv_shape, kv_shape, q_shape)


def _double(*tensors):
    return [tensor.double() if isinstance(tensor, torch.Tensor) else tensor for tensor in tensors]


def _assert_matches(q, k, v, residual=None, c_skip=1.0, c_out=1.0, scale=None):
    """The kernel is no worse than the reference in its dtype, both judged by the reference in fp64."""
    options = {"residual": residual, "c_skip": c_skip, "c_out": c_out, "scale": scale}
    oracle_options = dict(zip(options, _double(*options.values()), strict=True))
    actual = attention(q, k, v, **options, implementation="triton")
    expected = attention(q, k, v, **options, implementation="torch")
    oracle = attention(*_double(q, k, v), **oracle_options, implementation="torch")
    assert actual.shape == q.shape
    assert actual.dtype == q.dtype
    assert_no_worse(actual, expected, oracle)


@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_reference(device, shape):
    for dtype in DTYPES[device]:
        q, k, v, residual = _inputs(device, dtype, *shape)
        _assert_matches(q, k, v)
        _assert_matches(q, k, v, residual, c_skip=0.7, c_out=-1.3, scale=0.3)


COEFFICIENTS = {
    "zero_dim": ((), ()),
    "per_sample": ((3,), (3, 1, 1)),
    "per_channel": ((24,), (3, 1, 24)),
    "per_channel_of_all": ((1, 1, 24), (24,)),
    "per_token": ((3, 37, 24), (3, 37, 1)),
    "per_token_of_all": ((1, 37, 1), (1, 37, 24)),
}


@pytest.mark.parametrize("shapes", COEFFICIENTS.values(), ids=COEFFICIENTS)
def test_coefficients_of_every_shape(device, shapes):
    for dtype in DTYPES[device]:
        q, k, v, residual = _inputs(device, dtype, 3, 37, 20, 2, 12)
        c_skip, c_out = _random(device, torch.float32, *shapes)
        _assert_matches(q, k, v, residual, c_skip, c_out)
        _assert_matches(q, k, v, residual, c_out.to(dtype), 0.5)


def test_mixed_samples_equal_each_sample_alone(device):
    q, k, v, residual = _inputs(device, torch.float16, 3, 20, 33, 2, 32)
    c_skip, c_out = _random(device, torch.float32, 3, 3)
    together = attention(q, k, v, residual=residual, c_skip=c_skip, c_out=c_out, implementation="triton")
    for i in range(3):
        one = slice(i, i + 1)
        coefficients = {"c_skip": c_skip[i], "c_out": c_out[i]}
        alone = attention(q[one], k[one], v[one], residual=residual[one], **coefficients, implementation="triton")
        assert torch.equal(together[one], alone)


def test_skip_of_one_and_zero_is_the_residual_bit_for_bit(device):
    for dtype in DTYPES[device]:
        q, k, v, residual = _inputs(device, dtype, 2, 21, 21, 2, 32)
        one, zero = torch.ones(2, device=q.device), torch.zeros(2, device=q.device)
        for c_skip, c_out in ((1, 0), (1.0, zero), (one, 0.0), (one, zero)):
            out = attention(q, k, v, residual=residual, c_skip=c_skip, c_out=c_out, implementation="triton")
            assert torch.equal(out, residual)


def test_neighbours_do_not_leak(device):
    """NaN in the next sample's and the next head's rows stays there, forward and backward."""
    for dtype, head_dim in itertools.product(DTYPES[device], (32, 12)):
        inputs = _inputs(device, dtype, 2, 21, 35, 2, head_dim)
        grad = torch.randn_like(inputs[0])
        clean = [tensor[:1, :, :1].clone() for tensor in (*inputs, grad)]
        for tensor in (*inputs, grad):
            tensor[1] = float("nan")
            tensor[0, :, 1] = float("nan")
        poisoned_out, poisoned_grads = _out_and_gradients(inputs, grad)
        clean_out, clean_grads = _out_and_gradients(clean[:4], clean[4])
        assert clean_out.isfinite().all()
        assert torch.equal(poisoned_out[:1, :, :1], clean_out)
        for poisoned, expected in zip(poisoned_grads, clean_grads, strict=True):
            assert expected.isfinite().all()
            assert torch.equal(poisoned[:1, :, :1], expected)


def _out_and_gradients(inputs, grad, implementation="triton", **options):
    """Return the output and the gradients of q, k, v and residual."""
    q, k, v, residual = inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    out = attention(q, k, v, residual=residual, implementation=implementation, **options)
    return out.detach(), torch.autograd.grad(out, inputs, grad)


def test_scores_far_from_zero(device):
    """Padding keys score 0: with all others near -100 they would win the softmax, and overflow in the backward."""
    for dtype in DTYPES[device]:
        inputs = _inputs(device, dtype, 1, 20, 37, 1, 32)
        inputs[0][..., 0], inputs[1][..., 0] = 20, -20
        grad = torch.randn_like(inputs[0])
        out, grads = _out_and_gradients(inputs, grad, scale=0.25)
        expected, expected_grads = _out_and_gradients(_double(*inputs), grad.double(), "torch", scale=0.25)
        reference, reference_grads = _out_and_gradients(inputs, grad, "torch", scale=0.25)
        # Scores of 100 are rounded by up to 100 eps in each of some four steps, which exp makes relative. PyTorch's own
        # error depends on the processor.
        rounded = 4 * 100 * torch.finfo(torch.float32).eps
        for actual, low, oracle in zip(
            (out, *grads), (reference, *reference_grads), (expected, *expected_grads), strict=True
        ):
            if relative_error(actual, oracle) > rounded:
                assert_no_worse(actual, low, oracle, factor=1.2)


def _qkv_chunks(device, dtype):
    """q, k, v as views of one fused projection, as diffusers makes them."""
    (fused,) = _random(device, dtype, (2, 21, 3 * 2 * 32))
    return [chunk.unflatten(2, (2, 32)) for chunk in fused.chunk(3, dim=-1)]


def _heads_first(device, dtype):
    return [x.transpose(1, 2) for x in _random(device, dtype, *[(2, 2, 21, 32)] * 3)]


def _strided_columns(device, dtype):
    return [x[..., ::2] for x in _random(device, dtype, *[(2, 21, 2, 64)] * 3)]


def _misaligned_base(device, dtype):
    return [x[1:].view(2, 21, 2, 32) for x in _random(device, dtype, *[2 * 21 * 2 * 32 + 1] * 3)]


def _misaligned_rows(device, dtype):
    return [x[..., :12] for x in _random(device, dtype, *[(2, 21, 2, 15)] * 3)]


def _expanded_batch(device, dtype):
    return [x.expand(2, -1, -1, -1) for x in _random(device, dtype, *[(1, 21, 2, 32)] * 3)]


def _single_sample_of_a_batch(device, dtype):
    """A dimension of size 1 may have any stride, here one that is not a multiple of 16 bytes."""
    return [x.as_strided((1, 21, 2, 32), (3, 64, 32, 1)) for x in _random(device, dtype, *[(21, 2, 32)] * 3)]


LAYOUTS = [
    _qkv_chunks,
    _heads_first,
    _strided_columns,
    _misaligned_base,
    _misaligned_rows,
    _expanded_batch,
    _single_sample_of_a_batch,
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(device, layout):
    for dtype in DTYPES[device]:
        q, k, v = layout(device, dtype)
        packed = [x.contiguous() for x in (q, k, v, q)]
        grad = torch.randn_like(packed[0])
        out, grads = _out_and_gradients((q, k, v, q), grad.transpose(0, 1).contiguous().transpose(0, 1))
        expected, expected_grads = _out_and_gradients(packed, grad)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(grads, expected_grads)


# Shape, then the shapes of c_skip and c_out; none: both 1. In fp16 the first spans several tiles both ways.
GRADIENTS = [
    ((1, 130, 150, 1, 32), ((1, 1, 32), (1, 130, 1))),
    ((2, 20, 7, 2, 64), ((2,), ())),
    ((1, 33, 17, 1, 128), ((1, 33, 128), (128,))),
    ((2, 7, 37, 3, 12), ((), (2, 1, 36))),
    ((1, 1, 63, 1, 80), ()),
]


@pytest.mark.parametrize(("shape", "coefficient_shapes"), GRADIENTS)
def test_gradients_match_autograd_through_the_reference(device, shape, coefficient_shapes):
    for dtype in DTYPES[device]:
        inputs = _inputs(device, dtype, *shape)
        coefficients = _random(device, torch.float32, *coefficient_shapes)
        grad = torch.randn_like(inputs[0])
        grads = _gradients(inputs, coefficients, grad, "triton")
        expected = _gradients(inputs, coefficients, grad, "torch")
        oracle = _gradients(_double(*inputs), _double(*coefficients), grad.double(), "torch")
        for x, actual, low, exact in zip((*inputs, *coefficients), grads, expected, oracle, strict=True):
            assert actual.shape == x.shape
            assert actual.dtype == x.dtype
            if x.dim() == 4:
                # The kernels round p and its gradient to the dtype, as FlashAttention does. The reference may not.
                assert_no_worse(actual, low, exact, factor=1.5)
        factors = (inputs[3], attention(*_double(*inputs[:3])))
        for actual, exact, factor in zip(grads[4:], oracle[4:], factors, strict=False):
            # Few results, each a long sum of products: the rounding of the products, in fp32 that of the factors too.
            limit = max(torch.finfo(dtype).eps, 1e-5) * (grad.double() * factor.double()).norm()
            assert (actual.double() - exact).norm() <= limit


def _gradients(inputs, coefficients, grad, implementation):
    inputs = [tensor.detach().requires_grad_() for tensor in (*inputs, *coefficients)]
    q, k, v, residual, *coefficients = inputs
    options = dict(zip(("c_skip", "c_out"), coefficients, strict=False))
    out = attention(q, k, v, residual=residual, **options, implementation=implementation)
    return torch.autograd.grad(out, inputs, grad)


def test_gradients_of_a_single_key(device):
    """The softmax of a single score is always 1: no gradient reaches q and k."""
    q, k, v, residual = _inputs(device, torch.float32, 1, 5, 1, 1, 32)
    grad = torch.randn_like(q)
    _, (grad_q, grad_k, grad_v, _) = _out_and_gradients((q, k, v, residual), grad)
    assert grad_q.abs().max() < 1e-5
    assert grad_k.abs().max() < 1e-5
    torch.testing.assert_close(grad_v, grad.sum(1, keepdim=True))


NAMES = ("q", "k", "v", "residual", "c_skip", "c_out")


@pytest.mark.parametrize("wanted", [*[(name,) for name in NAMES], ("q", "c_skip"), ("k", "residual"), ("v", "c_out")])
def test_only_the_wanted_gradients(device, wanted):
    values = _inputs(device, torch.float32, 2, 9, 11, 1, 16) + _random(device, torch.float32, 2, (2, 1, 16))
    everything = dict(zip(NAMES, _gradients(values[:4], values[4:], torch.ones_like(values[0]), "triton"), strict=True))
    inputs = {name: x.detach().requires_grad_(name in wanted) for name, x in zip(NAMES, values, strict=True)}
    q, k, v = (inputs.pop(name) for name in "qkv")
    attention(q, k, v, **inputs, implementation="triton").sum().backward()
    for name, x in {"q": q, "k": k, "v": v, **inputs}.items():
        assert (x.grad is not None) == (name in wanted)
        if name in wanted:
            assert torch.equal(x.grad, everything[name])


def test_no_grad_and_detached_outputs(device):
    q, k, v, _ = (x.requires_grad_() for x in _inputs(device, torch.float32, 1, 5, 6, 1, 16))
    out = attention(q, k, v, implementation="triton")
    with torch.no_grad():
        quiet = attention(q, k, v, implementation="triton")
    assert out.requires_grad
    assert not quiet.requires_grad
    assert torch.equal(out, quiet)


def test_second_derivative_is_refused(device):
    q, k, v, _ = (x.requires_grad_() for x in _inputs(device, torch.float32, 1, 5, 6, 1, 16))
    (grad_q,) = torch.autograd.grad(attention(q, k, v, implementation="triton").square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        grad_q.sum().backward()


def test_opcheck(device):
    q, k, v, residual = _inputs(device, torch.float16, 2, 5, 6, 2, 16)
    coefficients = _random(device, torch.float32, (2, 1, 1), (1, 1, 32))
    op, backward = torch.ops.turbo_rcm_patch.attention.default, torch.ops.turbo_rcm_patch.attention_backward.default
    torch.library.opcheck(op, (PORTABLE, q, k, v, None, None, None, 0.25, False))
    _, raw_out, lse = op(PORTABLE, q, k, v, None, None, None, 0.25, True)
    torch.library.opcheck(backward, (torch.randn_like(q), q, k, v, raw_out, lse, 0.25, False, True))
    operands = [x.requires_grad_() for x in (q, k, v, residual, *coefficients)]
    torch.library.opcheck(op, (PORTABLE, *operands, 0.25, True))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_graph_breaks(device, dynamic):
    def block(q, k, v, residual, c_skip, c_out):
        return attention(q, k, v, residual=residual, c_skip=c_skip, c_out=c_out, implementation="triton") * 2

    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend="eager")
    for tokens in (5, 9):
        inputs = _inputs(device, torch.float32, 2, tokens, 6, 1, 16) + _random(device, torch.float32, 2, (2, 1, 16))
        inputs = [x.requires_grad_() for x in inputs]
        grad = torch.randn_like(inputs[0])
        expected, actual = block(*inputs), compiled(*inputs)
        assert torch.equal(actual, expected)
        expected_grads, grads = torch.autograd.grad(expected, inputs, grad), torch.autograd.grad(actual, inputs, grad)
        for one, other in zip(grads, expected_grads, strict=True):
            assert torch.equal(one, other)


def test_auto_takes_the_reference_where_no_kernel_applies(monkeypatch):
    q, k, v, _ = _inputs("interpreter", torch.float32, 1, 5, 6, 1, 16)
    expected = attention(q, k, v, implementation="torch")
    assert torch.equal(attention(q, k, v), expected)
    assert attention(*_double(q, k, v)).dtype == torch.float64
    q = q[:, :0]
    assert attention(q, k, v).shape == q.shape


def test_wide_heads(device):
    q, k, v, _ = _inputs(device, torch.float16, 1, 40, 40, 1, 200)
    _assert_matches(q, k, v)
    q, k, v, _ = _inputs(device, torch.float32, 1, 5, 6, 1, 264)
    assert torch.equal(attention(q, k, v), attention(q, k, v, implementation="torch"))
    with pytest.raises(ValueError, match=r"head_dim is 264; the kernel takes up to 256"):
        attention(q, k, v, implementation="triton")


def _tensor(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


BAD_CALLS = {
    "q has shape [2, 5, 16]": {"q": _tensor(2, 5, 16)},
    "k has shape [2, 6, 3, 16]": {"k": _tensor(2, 6, 3, 16)},
    "v has shape [2, 7, 2, 16]": {"v": _tensor(2, 7, 2, 16)},
    "v has shape [1, 6, 2, 16]": {"v": _tensor(1, 6, 2, 16)},
    "no tokens (Skv = 0)": {"k": _tensor(2, 0, 2, 16), "v": _tensor(2, 0, 2, 16)},
    "residual has shape [2, 6, 2, 16]": {"residual": _tensor(2, 6, 2, 16)},
    "k is torch.float16 but q is torch.float32": {"k": _tensor(2, 6, 2, 16, dtype=torch.float16)},
    "residual is torch.float16": {"residual": _tensor(2, 5, 2, 16, dtype=torch.float16)},
    "without a residual": {"c_skip": 0.5},
    "c_skip or c_out": {"c_out": _tensor(2)},
    "c_out has shape [3]": {"residual": _tensor(2, 5, 2, 16), "c_out": _tensor(3)},
    "scale=0.0": {"scale": 0.0},
    "scale=nan": {"scale": float("nan")},
    "implementation='cuda'": {"implementation": "cuda"},
    "sdpa='nonsense'; accepted are FlashAttention, memory-efficient, cuDNN, math": {"sdpa": "nonsense"},
    "attention='nonsense'; accepted are auto, triton, sdpa": {"attention": "nonsense"},
}


@pytest.mark.parametrize(("message", "arguments"), BAD_CALLS.items(), ids=BAD_CALLS)
def test_errors_name_what_was_given(message, arguments):
    valid = {"q": _tensor(2, 5, 2, 16), "k": _tensor(2, 6, 2, 16), "v": _tensor(2, 6, 2, 16)}
    with pytest.raises(ValueError, match=re.escape(message)):
        attention(**valid | arguments)


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    """More than 2**31 elements: the last rows equal the same rows computed alone."""
    shape = (1, 2**20 + 200, 16, 128)
    q = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 65, 16, 128, device="cuda", dtype=torch.bfloat16)
    last = slice(shape[1] - 300, None)
    out = attention(q, k, v, residual=q, c_out=0.5, implementation="triton")[:, last]
    assert torch.equal(out, attention(q[:, last], k, v, residual=q[:, last], c_out=0.5, implementation="triton"))


@pytest.mark.parametrize("shape", SHAPES)
def test_results_in_e4m3_are_the_rounded_attention(device, shape):
    """On the CPU only the reference is tested, because the interpreter rounds e4m3 wrongly."""
    for dtype in DTYPES[device]:
        q, k, v, _ = _inputs(device, dtype, *shape)
        v = v * torch.tensor([1e3, 1e-3], device=v.device, dtype=dtype)[: shape[0], None, None, None]
        result = attention_to_e4m3(q, k, v)
        exact = attention(*_double(q, k, v), implementation="torch").flatten(2)
        assert (result.values.shape, result.format, result.scale.shape) == (exact.shape, FP8, exact.shape[:2])
        largest = v.float().abs().amax((1, 2, 3))
        torch.testing.assert_close(result.scale[:, 0], largest / 448)
        # e4m3 rounds by 1/16 at most, values below 2^-6 of the scale by 2^-10 of it; the rest is the attention's own.
        error = (result.dequantize(torch.float64) - exact).abs()
        own = 2 * torch.finfo(dtype).eps * largest.double()[:, None, None]
        assert (error <= exact.abs() / 16 + result.scale.double()[..., None] * 2**-10 + own).all()


def test_results_in_e4m3_of_zeros_are_zeros(device):
    q, k, v, _ = _inputs(device, DTYPES[device][0], 2, 5, 7, 2, 64)
    result = attention_to_e4m3(q, k, 0 * v)
    assert not result.dequantize().any()
    assert (result.scale > 0).all()


def test_results_in_e4m3_do_not_depend_on_strides(device):
    for dtype in DTYPES[device]:
        q, k, v = _qkv_chunks(device, dtype)
        packed = attention_to_e4m3(*(x.contiguous() for x in (q, k, v)))
        torch.testing.assert_close(attention_to_e4m3(q, k, v).dequantize(), packed.dequantize())


@pytest.mark.gpu
@pytest.mark.parametrize("kv_tokens", [512, 20_000])
def test_results_in_e4m3_of_many_tokens_match_those_in_bf16(kv_tokens):
    """On sm_90 the sm_90 kernel computes them, and joins the parts of long sequences of keys."""
    q, k, v, _ = _inputs("cuda", torch.bfloat16, 2, 1000, kv_tokens, 3, 128)
    wide, result = attention(q, k, v, implementation="triton").flatten(2).float(), attention_to_e4m3(q, k, v)
    scale = result.scale[..., None]
    rounded = (wide / scale).to(torch.float8_e4m3fn).float() * scale
    assert_no_worse(result.dequantize(), rounded, wide)


@pytest.mark.gpu
def test_results_in_e4m3_are_a_custom_op_that_compiles():
    q, k, v, _ = _inputs("cuda", torch.bfloat16, 2, 200, 70, 3, 128)
    torch.library.opcheck(torch.ops.turbo_rcm_patch.attention_to_e4m3.default, (PORTABLE, q, k, v, 0.1))
    compiled = torch.compile(attention_to_e4m3, fullgraph=True, backend="eager")
    for ours, eager in zip(compiled(q, k, v)[:2], attention_to_e4m3(q, k, v)[:2], strict=True):
        assert torch.equal(ours.float(), eager.float())


@pytest.mark.parametrize("shape", [(0, 3, 4, 2, 64), (2, 0, 4, 2, 64), (2, 3, 4, 0, 64)])
def test_empty_results_in_e4m3(device, shape):
    result = attention_to_e4m3(*_inputs(device, torch.float32, *shape)[:3])
    assert (result.values.shape, result.scale.shape) == ((*shape[:2], shape[3] * 64), shape[:2])


def test_results_in_e4m3_check_their_inputs(device):
    q, k, v, _ = _inputs(device, DTYPES[device][0], 1, 5, 7, 2, 64)
    with pytest.raises(ValueError, match="k and v must be"):
        attention_to_e4m3(q, k, v[:, :6])
    with pytest.raises(ValueError, match="implementation='fast' is unknown"):
        attention_to_e4m3(q, k, v, implementation="fast")
