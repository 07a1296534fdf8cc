import pytest
import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_wan import WanRMS_norm

from tests.oracle import DTYPES, assert_no_worse, relative_error, torch_device
from turbo_rcm_patch.kernels import reference, rms_norm_silu

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")

# (B, T, H, W, C)
SHAPES = [(1, 1, 1, 1, 1), (2, 3, 2, 5, 3), (1, 2, 7, 3, 100), (2, 1, 3, 3, 96), (1, 2, 2, 3, 192), (1, 1, 2, 5, 1024)]


def operands(shape, dtype, device):
    x = 3 * torch.randn(shape).to(torch_device(device), dtype)
    return x, torch.randn(shape[-1]).to(x)


def check(x, weight, silu=True):
    actual = rms_norm_silu(x, weight, silu=silu, implementation="triton")
    low = reference.rms_norm_silu(x, weight, silu)
    assert actual.is_contiguous()
    assert actual.shape == low.shape
    assert_no_worse(actual, low, reference.rms_norm_silu(x.double(), weight.double(), silu))


def diffusers_chain(x, weight, silu):
    """Compute it as the unpatched decoder does, on frames in channels-first memory."""
    norm = WanRMS_norm(x.shape[-1], images=False).to(x)
    norm.gamma.data = weight.reshape(norm.gamma.shape)
    y = norm(x.movedim(-1, 1))
    return (F.silu(y) if silu else y).movedim(1, -1)


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_oracle(shape, silu, device):
    for dtype in DTYPES[device]:
        check(*operands(shape, dtype, device), silu)


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("implementation", ["triton", "torch"])
def test_is_no_less_accurate_than_diffusers_chain(implementation, silu, device):
    for dtype in DTYPES[device]:
        x, weight = operands((2, 3, 4, 5, 96), dtype, device)
        actual = rms_norm_silu(x, weight, silu=silu, implementation=implementation)
        with torch.no_grad():
            chain, oracle = diffusers_chain(x, weight, silu), diffusers_chain(x.double(), weight.double(), silu)
        assert_no_worse(actual, chain, oracle, factor=1.0)


def test_the_reference_in_bf16_is_no_less_accurate_than_diffusers_chain():
    x, weight = operands((2, 3, 4, 5, 96), torch.bfloat16, "interpreter")
    with torch.no_grad():
        chain, oracle = diffusers_chain(x, weight, True), diffusers_chain(x.double(), weight.double(), True)
    assert relative_error(reference.rms_norm_silu(x, weight), oracle) < relative_error(chain, oracle)


def test_programs_walk_several_tiles_of_rows(device):
    frames = 2 if device == "interpreter" else 60
    check(*operands((2, frames, 90, 100, 3), torch.float32, device))


def test_non_contiguous(device):
    x, weight = operands((2, 3, 4, 5, 24), torch.float32, device)
    check(x.transpose(2, 3), weight)  # rows at unequal distances
    check(x[:, 1:], weight)
    check(x[..., :12], weight[::2])
    check(x[..., ::2], weight[:12])


def test_rows_of_zeros_and_of_large_and_small_values(device):
    x, weight = operands((1, 1, 1, 4, 24), torch.float32, device)
    x *= torch.tensor([0.0, 1.0, 1e15, 1e-15], device=x.device)[:, None]
    check(x, weight)
    actual = rms_norm_silu(x, weight, silu=False, implementation="triton")
    assert torch.equal(actual[..., 0, :], torch.zeros_like(actual[..., 0, :]))
    assert actual[..., 2, :].square().mean() > 0.1  # its length is not cut off
    assert actual[..., 3, :].abs().max() < 0.1 * weight.abs().max()  # divided by 1e-12, not by its length


def test_large_negative_results_give_no_nan(device):
    x = -torch.ones(1, 1, 2, 24, device=torch_device(device))
    actual = rms_norm_silu(x, torch.full((24,), 1e4, device=x.device), implementation="triton")
    assert torch.equal(actual, torch.zeros_like(actual))


def test_rows_do_not_mix(device):
    x, weight = operands((2, 1, 5, 24), torch.float32, device)
    alone = rms_norm_silu(x, weight, implementation="triton")
    x[0, 0, 4] = x[1, 0, 0] = torch.nan
    actual = rms_norm_silu(x, weight, implementation="triton")
    assert torch.equal(actual[0, 0, :4], alone[0, 0, :4])
    assert torch.equal(actual[1, 0, 1:], alone[1, 0, 1:])


def test_nothing_to_norm(device):
    x, weight = operands((2, 3, 4, 24), torch.float32, device)
    assert rms_norm_silu(x[:, :0], weight, implementation="triton").shape == (2, 0, 4, 24)


def test_autograd_takes_the_reference(device):
    leaves = [t.requires_grad_() for t in operands((2, 3, 5, 24), torch.float32, device)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    (rms_norm_silu(*leaves, implementation="triton") ** 3).sum().backward()
    (reference.rms_norm_silu(*wide) ** 3).sum().backward()
    for ours, oracle in zip(leaves, wide, strict=True):
        assert relative_error(ours.grad, oracle.grad) <= 1e-5


def test_compiles_to_one_graph(device):
    inputs = operands((2, 3, 5, 24), torch.float32, device)
    compiled = torch.compile(rms_norm_silu, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*inputs, implementation="triton"), rms_norm_silu(*inputs, implementation="triton"))


def test_custom_op_contract(device):
    inputs = operands((2, 3, 2, 2, 8), torch.float32, device)
    torch.library.opcheck(torch.ops.turbo_rcm_patch.rms_norm_silu.default, (*inputs, True))


def test_errors():
    x, weight = torch.zeros(2, 3, 4, 24), torch.zeros(24)
    with pytest.raises(ValueError, match=r"x has shape \[3, 24\], not \[B, T, ..., C\]"):
        rms_norm_silu(x[0, :, 0], weight)
    with pytest.raises(ValueError, match=r"weight has shape \[8\], not \[C=24\]"):
        rms_norm_silu(x, weight[:8])
