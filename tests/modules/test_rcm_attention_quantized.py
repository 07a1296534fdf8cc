"""FusedRCMAttention in 8 bits, against the block's formula in fp64 within the quantized tier's limits."""

import copy

import pytest
import torch

from tests.modules.rcm_formula import check_compiled, check_gradients, inputs, oracle
from tests.oracle import DTYPES, relative_error, torch_device
from turbo_rcm_patch import kernels
from turbo_rcm_patch.modules import FusedRCMAttention
from turbo_rcm_patch.tiers import QUANTIZED

HEADS = pytest.mark.parametrize(("dim", "heads"), [(128, 2), (128, 1)])  # head_dim 64 and 128
OPS = ("quantize_rows", "linear_8bit", "quantize_qkv", "attention_8bit", "linear_skip", "attention")
ONCE_IN_8_BITS = {"quantize_rows": 4, "linear_8bit": 1, "quantize_qkv": 1, "attention_8bit": 1, "linear_skip": 1}


def quantized(dim=128, heads=2, implementation="torch", score_scale=None, **options):
    """Weights as torch draws them, or such that scores of N(0, 1) inputs have this standard deviation."""
    module = FusedRCMAttention(dim, heads, implementation=implementation, preset="quantized", **options)
    if score_scale is not None:
        rows = torch.tensor([score_scale**0.5, score_scale**0.5, 1.0]).repeat_interleave(dim)[:, None]
        module.qkv.weight.data = rows * dim**-0.5 * torch.randn(3 * dim, dim)
        module.proj.weight.data = dim**-0.5 * torch.randn(dim, dim)
    return module.requires_grad_(False)


def alone(module):
    """Let the module return what it adds to its residual: c_skip = 0 and c_out = 1."""
    module.coefficients = lambda t: (0.0, 1.0)
    return module


def exact_part(module, x):
    """The formula without the skip, in fp64: at a timestep as large as this c_skip is 0 and c_out 1."""
    return oracle(module, x, torch.full((len(x),), 1e12), torch.zeros_like(x))


def structured(kind, batch, tokens, dim):
    noise, place, channel = torch.randn(batch, tokens, dim), torch.linspace(0, 1, tokens)[:, None], torch.arange(dim)
    return {
        "normal": lambda: noise,
        "offsets": lambda: noise + 2 * torch.randn(dim),  # as k has them, which 8-bit attention subtracts
        "waves": lambda: torch.sin(6.28 * place * (1 + channel % 17) + channel) + 0.1 * noise,
        "few directions": lambda: torch.randn(batch, tokens, 8) @ torch.randn(8, dim) * 8**-0.5,
    }[kind]()


@pytest.fixture
def ran(monkeypatch):
    """Count the calls of each op of kernels."""
    counts = {}

    def watch(name):
        op = getattr(kernels, name)

        def counted(*args, **options):
            counts[name] = counts.get(name, 0) + 1
            return op(*args, **options)

        monkeypatch.setattr(kernels, name, counted)

    for name in OPS:
        watch(name)
    return counts


@HEADS
@pytest.mark.parametrize(
    ("kind", "score_scale"),  # offsets alone triple the scores
    [("normal", 1.0), ("normal", 3.0), ("offsets", 1.0), ("waves", 3.0), ("few directions", 3.0)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_is_within_the_tiers_limit(dim, heads, kind, score_scale, dtype):
    module = alone(quantized(dim, heads, score_scale=score_scale)).to(dtype)
    x = structured(kind, 2, 301, dim).to(dtype)
    error = relative_error(module(x, 1.0), exact_part(module, x))
    assert error <= QUANTIZED.limits.part
    assert error > 5e-3  # it is in 8 bits: bf16 errs half as much


@pytest.mark.parametrize(("dim", "heads", "tokens"), [(128, 2, 1), (128, 2, 130), (128, 1, 70)])
def test_quantized_kernels_are_within_the_tiers_limit(device, dim, heads, tokens):
    module = quantized(dim, heads, "triton", score_scale=3.0).to(torch_device(device))
    for dtype in DTYPES[device]:
        module.to(dtype)
        x, residual = inputs(2, tokens, dim, dtype, torch_device(device))
        timestep = torch.tensor([0.3, 5.0], device=x.device)
        output, expected = module(x, timestep, residual), oracle(module, x, timestep, residual)
        assert output.dtype == dtype
        assert module.why_exact(x, timestep, residual) is None
        for sample in range(2):
            assert 1e-4 < relative_error(output[sample], expected[sample]) <= QUANTIZED.limits.part


def test_quantized_at_timestep_zero_is_the_residual_bit_for_bit(device):
    for implementation in ("triton", "torch"):
        for dtype in DTYPES[device]:
            module = quantized(implementation=implementation).to(torch_device(device), dtype)
            x, residual = inputs(2, 9, 128, dtype, torch_device(device))
            output = module(x, torch.tensor([0.0, 1.0], device=x.device), residual)
            assert torch.equal(output[0], residual[0])
            assert not torch.equal(output[1], residual[1])


def test_quantized_runs_each_op_once(ran):
    """quantize_rows of x, of attention's result and, the first time, of both weights; no attention in the model's
    dtype."""
    x, residual = inputs(2, 19, 128)
    module = quantized()
    module(x, 0.5, residual)
    assert ran == ONCE_IN_8_BITS
    module(x, 0.5, residual)
    assert ran == {**{name: 2 * count for name, count in ONCE_IN_8_BITS.items()}, "quantize_rows": 6}


def test_quantized_takes_weights_as_they_are_now():
    x, _ = inputs(2, 19, 128)
    module, fresh = alone(quantized()), alone(quantized())
    before, state = module(x, 1.0), copy.deepcopy(module.state_dict())
    assert {name: value.dtype for name, value in state.items()} == dict.fromkeys(state, torch.float32)
    module.qkv.weight.mul_(1.5), module.proj.bias.add_(1.0)
    after = module(x, 1.0)
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(after, fresh(x, 1.0))
    assert not torch.equal(after, before)
    module.load_state_dict(state)
    assert torch.equal(module(x, 1.0), before)


def test_quantized_without_a_bias_and_with_another_residual_dtype():
    x, residual = inputs(2, 19, 128)
    module = quantized(qkv_bias=False)
    output = module(x, torch.tensor([0.3, 2.0]), residual.double())
    assert output.dtype == torch.float64
    module.qkv.bias = torch.nn.Parameter(torch.zeros(3 * 128), requires_grad=False)
    expected = oracle(module, x, torch.tensor([0.3, 2.0]), residual)
    assert 1e-4 < relative_error(output, expected) <= QUANTIZED.limits.part


def _with_hook(module, x):
    module.qkv.register_forward_hook(lambda linear, args, output: output)


EXACT_REASONS = {
    "autograd": lambda module, x: module.requires_grad_(True),
    "torch hook": _with_hook,
    "cpu tensors": lambda module, x: setattr(module, "implementation", "auto"),
    "float64 tensors": lambda module, x: module.double(),
    "preset 'exact'": lambda module, x: setattr(module, "preset", "exact"),
}


@pytest.mark.parametrize("reason", EXACT_REASONS)
def test_quantized_runs_exactly_where_8_bits_do_not_apply(reason, ran):
    module = quantized()
    x, residual = inputs(2, 19, 128)
    EXACT_REASONS[reason](module, x)
    x, residual = x.to(module.qkv.weight.dtype), residual.to(module.qkv.weight.dtype)
    timestep = torch.tensor([0.3, 2.0])
    assert module.why_exact(x, timestep, residual) == reason
    assert relative_error(module(x, timestep, residual), oracle(module, x, timestep, residual)) <= 1e-5
    assert not {"quantize_rows", "linear_8bit", "quantize_qkv", "attention_8bit"} & set(ran)


def test_quantized_head_dims():
    x, _ = inputs(2, 19, 128)
    for heads, reason in ((4, "head_dim 32"), (2, None), (1, None)):
        assert quantized(128, heads).why_exact(x, 0.5) == reason
    module = quantized(128, 4)
    assert relative_error(module(x, 0.5), oracle(module, x, torch.tensor([0.5, 0.5]), x)) <= 1e-5


def test_quantized_under_autocast_and_for_each_tensor_that_wants_a_gradient():
    module = quantized()
    x, residual = inputs(2, 19, 128)
    timestep = torch.tensor([0.3, 2.0])
    assert module.why_exact(x, timestep, residual) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module.why_exact(x, timestep, residual) == "autocast"
    for leaf in (x, residual, timestep):
        leaf.requires_grad_()
        assert module.why_exact(x, timestep, residual) == "autograd"
        with torch.no_grad():
            assert module.why_exact(x, timestep, residual) is None
        leaf.requires_grad_(False)
    with torch.autograd.forward_ad.dual_level():
        assert module.why_exact(x, timestep, residual) == "autograd"


def test_quantized_gradients_equal_the_formulas():
    check_gradients(FusedRCMAttention(128, 2, preset="quantized", implementation="torch"), torch_device("interpreter"))


def test_quantized_compiles_to_one_graph(device):
    check_compiled(quantized(implementation="triton"), torch_device(device), [torch.tensor([0.0, 7.0])])


@pytest.mark.parametrize("preset", ["fast", "sparse", "block_sparse"])
def test_bad_preset(preset):
    """Sparse attention is not this module's: it would compute exactly."""
    with pytest.raises(ValueError, match=f"preset='{preset}'; accepted are exact, quantized.$"):
        FusedRCMAttention(128, 2, preset=preset)


@pytest.mark.gpu
def test_quantized_on_a_gpu_by_default():
    module = quantized(256, 2, "auto", score_scale=3.0).to("cuda", torch.bfloat16)
    x, residual = inputs(2, 1025, 256, torch.bfloat16, "cuda")
    timestep = torch.tensor([0.3, 5.0], device="cuda")
    assert module.why_exact(x, timestep, residual) is None
    assert relative_error(module(x, timestep, residual), oracle(module, x, timestep, residual)) <= QUANTIZED.limits.part
