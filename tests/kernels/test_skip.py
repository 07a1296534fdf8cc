import pytest
import torch
import torch.autograd.forward_ad as fwAD

from tests.oracle import DTYPES, assert_no_worse, relative_error, torch_device
from turbo_rcm_patch.kernels import reference, skip
from turbo_rcm_patch.kernels.coefficient import canonical_coefficient

B, S, C = 3, 11, 70


def coefficients(name, device, dtype=torch.float32):
    shapes = {"sample": (B,), "channel": (C,), "sample and channel": (B, 1, C), "token": (B, S, C), "row": (1, S, 1)}
    return torch.randn(shapes[name], device=device, dtype=dtype)


def canonical(value):
    return canonical_coefficient("c", value, B, S, C, value.device)


@pytest.mark.parametrize("kind", ["sample", "channel", "sample and channel", "token", "row"])
def test_matches_the_oracle(kind, device):
    device_name, device = device, torch_device(device)
    for dtype in DTYPES[device_name]:
        residual, output = torch.randn(2, B, S, C, device=device).to(dtype)
        c_skip, c_out = coefficients(kind, device), coefficients(kind, device)
        actual = skip(residual, output, c_skip=c_skip, c_out=c_out, implementation="triton")
        wide = [x.double() for x in (residual, output, canonical(c_skip), canonical(c_out))]
        expected = reference.skip(residual, output, canonical(c_skip), canonical(c_out))
        assert_no_worse(actual, expected, reference.skip(*wide))


def test_plain_addition_and_identity_are_exact(device):
    device = torch_device(device)
    residual, output = torch.randn(2, 1, S, C, device=device, dtype=torch.float16)
    assert torch.equal(skip(residual, output, implementation="triton"), (residual.float() + output.float()).half())
    assert torch.equal(skip(residual, output, c_skip=1.0, c_out=0.0, implementation="triton"), residual)


def test_non_contiguous(device):
    device = torch_device(device)
    residual, output = torch.randn(2, B, C, S, device=device).transpose(2, 3)
    actual = skip(residual, output, c_out=2.0, implementation="triton")
    assert relative_error(actual, residual + 2 * output) <= 1e-6


@pytest.mark.parametrize("kind", ["sample", "channel", "token"])
def test_gradients(kind, device):
    device = torch_device(device)
    tensors = [*torch.randn(2, B, S, C, device=device), coefficients(kind, device), coefficients(kind, device)]
    ours = [t.clone().requires_grad_() for t in tensors]
    theirs = [t.double().requires_grad_() for t in tensors]
    weight = torch.randn(B, S, C, device=device)
    (skip(*ours[:2], c_skip=ours[2], c_out=ours[3], implementation="triton") * weight).sum().backward()
    (reference.skip(*theirs[:2], canonical(theirs[2]), canonical(theirs[3])) * weight).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert relative_error(mine.grad, other.grad) <= 1e-5


def test_forward_mode_keeps_its_tangent(device):
    """No kernel has a tangent, so a dual tensor takes the reference instead of losing its own."""
    device = torch_device(device)
    residual, output, tangent = torch.randn(3, B, S, C, device=device)
    with fwAD.dual_level():
        dual = skip(fwAD.make_dual(residual, tangent), output, c_skip=3.0, implementation="triton")
        assert relative_error(fwAD.unpack_dual(dual).tangent, 3 * tangent) <= 1e-6


def test_errors():
    x = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"residual has shape \[2, 3, 4\] and output \[2, 3, 5\]"):
        skip(x, torch.zeros(2, 3, 5))
    with pytest.raises(ValueError, match="accepted are"):
        skip(x, x, c_out=torch.zeros(2, 3))
