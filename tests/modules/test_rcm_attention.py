"""The three rCM attention modules against the block's formula in fp64, against each other, and at their edges."""

import copy
import pickle

import pytest
import torch

from tests.modules.rcm_formula import check_compiled, check_gradients, inputs, oracle
from tests.oracle import DTYPES, assert_no_worse, relative_error, torch_device
from turbo_rcm_patch import kernels
from turbo_rcm_patch.kernels.choice.registry import PORTABLE, REFERENCE, Op
from turbo_rcm_patch.kernels.linear.linear_skip import LINEAR_SKIP
from turbo_rcm_patch.kernels.linear.spec import LINEAR
from turbo_rcm_patch.modules import FusedRCMAttention, TorchFusedRCMAttention, TwoPassRCMAttention

modules = pytest.mark.parametrize("module_class", [TwoPassRCMAttention, TorchFusedRCMAttention, FusedRCMAttention])


@modules
def test_fp32_equals_the_formula_with_a_mixed_batch_of_timesteps(module_class):
    module = module_class(96, 3)
    x, residual = inputs(3, 19, 96)
    timestep = torch.tensor([0.02, 0.7, 40.0])
    output, expected = module(x, timestep, residual), oracle(module, x, timestep, residual)
    for sample in range(3):  # each by itself: the large timestep must not cover an error in the small one
        assert relative_error(output[sample], expected[sample]) <= 1e-5
    assert relative_error(module(x, timestep), oracle(module, x, timestep, x)) <= 1e-5


@pytest.mark.parametrize("tokens", [1, 19, 70])
@pytest.mark.parametrize(("dim", "heads"), [(96, 3), (64, 1)])
def test_triton_is_no_worse_than_two_passes(device, tokens, dim, heads):
    fused, two_pass = FusedRCMAttention(dim, heads, implementation="triton"), TwoPassRCMAttention(dim, heads)
    two_pass.load_state_dict(fused.state_dict())
    for dtype in DTYPES[device]:
        x, residual = inputs(2, tokens, dim, dtype, torch_device(device))
        timestep = torch.tensor([0.3, 5.0], device=x.device)
        fused.to(x.device, dtype), two_pass.to(x.device, dtype)
        output = fused(x, timestep, residual)
        assert output.dtype == dtype
        assert_no_worse(output, two_pass(x, timestep, residual), oracle(fused, x, timestep, residual))


def test_triton_timestep_zero_is_the_residual_bit_for_bit(device):
    for dtype in DTYPES[device]:
        module = FusedRCMAttention(48, 2, implementation="triton").to(torch_device(device), dtype)
        x, residual = inputs(dtype=dtype, device=torch_device(device))
        output = module(x, torch.tensor([0.0, 1.0], device=x.device), residual)
        assert torch.equal(output[0], residual[0])
        assert not torch.equal(output[1], residual[1])


@modules
@pytest.mark.parametrize("zero", [0.0, torch.tensor(0.0), torch.tensor([0, 0])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_timestep_zero_is_the_residual_bit_for_bit(module_class, zero, dtype):
    module = module_class(48, 2).to(dtype)
    x, residual = inputs(dtype=dtype)
    assert torch.equal(module(x, zero, residual), residual)
    assert torch.equal(module(x, zero), x)


@modules
def test_one_state_dict(module_class):
    source, module = TwoPassRCMAttention(48, 2), module_class(48, 2)
    assert list(module.state_dict()) == ["qkv.weight", "qkv.bias", "proj.weight", "proj.bias"]
    module.load_state_dict(source.state_dict())
    x, _ = inputs()
    assert relative_error(module(x, 0.5), source(x, 0.5)) <= 1e-6
    assert list(module_class(48, 2, qkv_bias=False).state_dict()) == ["qkv.weight", "proj.weight", "proj.bias"]


@modules
def test_timestep_types_agree(module_class):
    module = module_class(48, 2)
    x, _ = inputs()
    expected = module(x, 0.75)
    for timestep in (torch.tensor(0.75), torch.tensor([0.75, 0.75]), torch.tensor([0.75, 0.75], dtype=torch.bfloat16)):
        assert relative_error(module(x, timestep), expected) <= 1e-6


@modules
def test_sigma_data_and_user_coefficients(module_class):
    def c_out(t):
        return 0.5 * t / (t * t + 0.25).sqrt()

    by_sigma = module_class(48, 2, sigma_data=0.5)
    by_user = module_class(48, 2, c_skip=lambda t: 0.25 / (t * t + 0.25), c_out=c_out)
    by_default = module_class(48, 2)
    for module in (by_user, by_default):
        module.load_state_dict(by_sigma.state_dict())
    x, _ = inputs()
    timestep = torch.tensor([0.4, 2.0])
    assert relative_error(by_user(x, timestep), by_sigma(x, timestep)) <= 1e-6
    assert relative_error(by_default(x, timestep), by_sigma(x, timestep)) > 1e-2


@modules
def test_user_coefficients_per_channel(module_class):
    gate = torch.linspace(-1, 1, 48)
    module = module_class(48, 2, c_skip=lambda t: 1.0, c_out=lambda t: gate)
    plain = module_class(48, 2, c_skip=lambda t: 0.0, c_out=lambda t: 1.0)
    plain.load_state_dict(module.state_dict())
    x, residual = inputs()
    assert relative_error(module(x, 1.0, residual), residual + gate * plain(x, 1.0)) <= 1e-6


@modules
def test_per_sample_when_batch_and_channels_are_equally_many(module_class):
    module = module_class(4, 2)
    x, residual = inputs(4, 3, 4)
    timestep = torch.tensor([0.0, 0.5, 3.0, 3.0])
    assert relative_error(module(x, timestep, residual), oracle(module, x, timestep, residual)) <= 1e-5


@modules
def test_gradients_equal_the_formulas(module_class):
    check_gradients(module_class(48, 2), torch_device("interpreter"))


def test_triton_gradients_equal_the_formulas(device):
    check_gradients(FusedRCMAttention(48, 2, implementation="triton"), torch_device(device))


@modules
def test_compiles_to_one_graph(module_class):
    check_compiled(module_class(48, 2), torch_device("interpreter"))


def test_triton_compiles_to_one_graph(device):
    module = FusedRCMAttention(48, 2, implementation="triton")
    check_compiled(module, torch_device(device), [torch.tensor([0.0, 7.0])])


@modules
def test_autocast_keeps_the_residuals_dtype_and_calls_the_modules(module_class):
    module = module_class(48, 2)
    x, residual = inputs()
    timestep = torch.tensor([0.0, 2.0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = module(x, timestep, residual)
    assert output.dtype == torch.float32
    assert torch.equal(output[0], residual[0])
    error = relative_error(output[1], oracle(module, x, timestep, residual)[1])
    assert 1e-4 < error < 2e-2  # ran in bf16, and correctly: bf16 rounding is 4e-3


def test_fused_does_not_drop_what_calling_the_projection_does():
    module = FusedRCMAttention(48, 2, c_skip=lambda t: 0.0, c_out=lambda t: 1.0)
    x, _ = inputs()
    expected = 2 * module(x, 1.0)
    hook = module.proj.register_forward_hook(lambda proj, args, output: 2 * output)
    assert relative_error(module(x, 1.0), expected) <= 1e-6
    hook.remove()
    plain_forward = module.proj.forward
    module.proj.forward = lambda a: 2 * plain_forward(a)
    assert relative_error(module(x, 1.0), expected) <= 1e-6


@modules
def test_pickles_and_copies(module_class):
    module = module_class(48, 2, sigma_data=0.7)
    x, _ = inputs()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x, 0.5), module(x, 0.5))


@modules
def test_on_the_meta_device_a_result_has_its_shape(module_class):
    module, x = module_class(48, 2).to("meta"), torch.empty(2, 5, 48, device="meta")
    assert module(x, 0.5).shape == x.shape


@modules
def test_bad_arguments(module_class):
    with pytest.raises(ValueError, match="dim=50 is not a positive multiple of num_heads=3"):
        module_class(50, 3)
    with pytest.raises(TypeError, match="c_out is None"):
        module_class(48, 2, c_skip=lambda t: t)
    with pytest.raises(ValueError, match="sigma_data=0"):
        module_class(48, 2, sigma_data=0)
    module = module_class(48, 2)
    x, residual = inputs(batch=3)
    for timestep in (torch.ones(2), torch.ones(1), torch.ones(3, 1)):
        with pytest.raises(ValueError, match=r"timestep has shape .* \[B=3\]"):
            module(x, timestep)
    with pytest.raises(ValueError, match="outside"):
        module(x, torch.tensor([1.0, -1.0, 1.0]))
    with pytest.raises(ValueError, match="x has shape"):
        module(x[..., :40], 1.0)
    with pytest.raises(ValueError, match="residual has shape"):
        module(x, 1.0, residual[:1])


def test_sdpa_where_it_is_faster(monkeypatch):
    """The default takes SDPA if a measurement says that it is faster."""
    taken, own = [], kernels.attention

    def noted(*qkv, implementation, attention):
        taken.append((implementation, attention))
        return own(*qkv, implementation=implementation, attention=attention)

    monkeypatch.setattr(kernels, "attention", noted)
    FusedRCMAttention(16, 2, implementation="torch")(torch.randn(2, 5, 16), 0.5)
    FusedRCMAttention(16, 2)(torch.randn(2, 5, 16), 0.5)
    assert taken == [("torch", "auto"), ("auto", "auto")]


def test_measurements_choose_the_projection_unless_an_implementation_is_asked_for(monkeypatch):
    picked, pick = [], Op.pick

    def note(op, spec):
        if op is LINEAR_SKIP:
            picked.append((spec.linears, pick(op, spec).name))
        return pick(op, spec)

    monkeypatch.setattr(Op, "pick", note)
    x = torch.randn(2, 5, 16, dtype=torch.bfloat16)
    module = FusedRCMAttention(16, 2).bfloat16()
    two_passes = TwoPassRCMAttention(16, 2).bfloat16()
    two_passes.load_state_dict(module.state_dict())
    assert torch.equal(module(x, 0.5), two_passes(x, 0.5))  # rounded twice, by PyTorch's linear and by the skip
    module.implementation = "torch"
    module(x, 0.5)
    module.implementation = "triton"
    module.float()(x.float(), 0.5)
    assert picked == [("auto", LINEAR), (None, REFERENCE), (None, PORTABLE)]


def test_bad_implementation():
    with pytest.raises(ValueError, match="implementation='cuda'"):
        FusedRCMAttention(48, 2, implementation="cuda")
