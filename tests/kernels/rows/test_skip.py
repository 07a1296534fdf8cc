import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as fwAD

from tests.kernels.runs import LENGTHS, expand, runs_of
from tests.oracle import DTYPES, assert_no_worse, relative_error, torch_device
from turbo_rcm_patch.kernels import Runs, reference, skip
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


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", LENGTHS)
def test_runs_are_the_same_by_token(name, batch, device):
    device = torch_device(device)
    runs = runs_of(LENGTHS[name], C, device)
    residual, output = torch.randn(2, batch, 30 // batch, C, device=device)
    c_skip = torch.randn(batch, device=device)
    for implementation in ("triton", "torch"):
        by_run, by_token = (
            skip(residual, output, c_skip=c_skip, c_out=c_out, implementation=implementation)
            for c_out in (runs, expand(runs, batch))
        )
        assert torch.equal(by_run, by_token)


def test_gradients_by_run(device):
    """No kernel has them: the reference does."""
    device = torch_device(device)
    runs = runs_of([7, 23], C, device)
    residual, output, weight = torch.randn(3, 2, 15, C, device=device)
    values = [runs.values.clone().requires_grad_() for _ in range(2)]
    for leaf, c_out in (
        (values[0], Runs(values[0], runs.starts)),
        (values[1], expand(Runs(values[1], runs.starts), 2)),
    ):
        (skip(residual, output, c_out=c_out, implementation="triton") * weight).sum().backward()
        assert leaf.grad.any()
    assert relative_error(values[0].grad, values[1].grad) <= 1e-6


def test_plain_addition_and_identity_are_exact(device):
    device = torch_device(device)
    residual, output = torch.randn(2, 1, S, C, device=device, dtype=torch.float16)
    assert torch.equal(skip(residual, output, implementation="triton"), (residual.float() + output.float()).half())
    assert torch.equal(skip(residual, output, c_skip=1.0, c_out=0.0, implementation="triton"), residual)


@pytest.mark.parametrize("kind", ["sample", "token"])
@pytest.mark.parametrize(("kept", "dtype"), [("float16", "float32"), ("float32", "float16"), ("float16", "float16")])
def test_dtypes_and_scales(kind, kept, dtype, device):
    device = torch_device(device)
    kept, dtype = getattr(torch, kept), getattr(torch, dtype)
    residual, output = torch.randn(2, B, S, C, device=device).to(kept)
    tensors = residual, output.half(), coefficients(kind, device), coefficients(kind, device)
    options = {"residual_scale": 4.0, "result_scale": 0.5}
    actual = skip(*tensors[:2], c_skip=tensors[2], c_out=tensors[3], dtype=dtype, implementation="triton", **options)
    assert actual.dtype == dtype
    residual, output, c_skip, c_out = (t.double() for t in (*tensors[:2], *map(canonical, tensors[2:])))
    oracle = (c_skip * 4 * residual + c_out * output) / 0.5
    assert_no_worse(actual, oracle.to(dtype), oracle)


def test_non_contiguous(device):
    device = torch_device(device)
    residual, output = torch.randn(2, B, C, S, device=device).transpose(2, 3)
    actual = skip(residual, output, c_out=2.0, implementation="triton")
    assert relative_error(actual, residual + 2 * output) <= 1e-6


@pytest.mark.parametrize("scales", [(1.0, 1.0), (4.0, 0.5)])
@pytest.mark.parametrize("kind", ["sample", "channel", "token"])
def test_gradients(kind, scales, device):
    device = torch_device(device)
    tensors = [*torch.randn(2, B, S, C, device=device), coefficients(kind, device), coefficients(kind, device)]
    ours = [t.clone().requires_grad_() for t in tensors]
    theirs = [t.double().requires_grad_() for t in tensors]
    weight = torch.randn(B, S, C, device=device)
    options = {**dict(zip(("residual_scale", "result_scale"), scales, strict=True)), "implementation": "triton"}
    (skip(*ours[:2], c_skip=ours[2], c_out=ours[3], **options) * weight).sum().backward()
    oracle = reference.skip(*theirs[:2], canonical(theirs[2]), canonical(theirs[3]), torch.float64, *scales)
    (oracle * weight).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert relative_error(mine.grad, other.grad) <= 1e-5


@pytest.mark.parametrize("scales", [(1.0, 1.0), (4.0, 4.0), (4.0, 0.5)])
def test_gradient_of_a_residual_without_coefficient(scales, device):
    device = torch_device(device)
    residual, output, weight = torch.randn(3, B, S, C, device=device)
    residual = residual.half().requires_grad_()
    options = {"dtype": torch.float32, "residual_scale": scales[0], "result_scale": scales[1]}
    (skip(residual, output, implementation="triton", **options) * weight).sum().backward()
    assert torch.equal(residual.grad, (weight * scales[0] / scales[1]).half())


def test_forward_mode_keeps_its_tangent(device):
    """No kernel has a tangent, so a dual tensor takes the reference instead of losing its own."""
    device = torch_device(device)
    residual, output, tangent = torch.randn(3, B, S, C, device=device)
    with fwAD.dual_level():
        dual = skip(fwAD.make_dual(residual, tangent), output, c_skip=3.0, implementation="triton")
        assert relative_error(fwAD.unpack_dual(dual).tangent, 3 * tangent) <= 1e-6


def test_opcheck(device):
    residual, output = torch.randn(2, B, S, C, device=torch_device(device), requires_grad=True)
    c_out = canonical(coefficients("channel", residual.device)).requires_grad_()
    for arguments in ((None, c_out, torch.float32, 1.0, 1.0), (None, None, torch.float16, 4.0, 0.5)):
        torch.library.opcheck(torch.ops.turbo_rcm_patch.skip.default, (residual, output, *arguments))
    runs = runs_of([20, 13], C, residual.device)
    arguments = (residual.detach(), output.detach(), None, runs.values[:, None], torch.float32, 1.0, 1.0, runs.starts)
    torch.library.opcheck(torch.ops.turbo_rcm_patch.skip.default, arguments)


def test_errors():
    x = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"residual has shape \[2, 3, 4\] and output \[2, 3, 5\]"):
        skip(x, torch.zeros(2, 3, 5))
    with pytest.raises(ValueError, match="accepted are"):
        skip(x, x, c_out=torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"skip: dtype=torch\.int32"):
        skip(x, x, dtype=torch.int32)
    with pytest.raises(ValueError, match="skip: result_scale=inf"):
        skip(x, x, result_scale=float("inf"))
    runs = runs_of([6], 4)
    with pytest.raises(ValueError, match="c_skip varies by run; only scale, shift and c_out may"):
        skip(x, x, c_skip=runs)
    for wrong in (
        Runs(runs.values[:, :3], runs.starts),
        Runs(runs.values, runs.starts.long()),
        Runs(runs.values, runs.starts[:1]),
        runs_of([1] * 33, 4),
    ):
        with pytest.raises(ValueError, match=r"runs have values \[R, C=4\] with R from 1 to 32, and starts \[R \+ 1\]"):
            skip(x, x, c_out=wrong)
    with pytest.raises(ValueError, match="c_out is on meta but the other tensors are on cpu"):
        skip(x, x, c_out=Runs(runs.values.to("meta"), runs.starts))


def test_coefficients_of_other_types_are_errors_or_numbers():
    residual = x = torch.randn(2, 3, 4)
    for number in (np.float32(0.5), np.float64(0.5), np.int64(3)):
        assert torch.equal(skip(residual, x, c_out=number), skip(residual, x, c_out=float(number)))
    for wrong, kind in (([0.5, 0.5], "list"), (np.ones(2), "ndarray"), (0.5j, "complex"), ("0.5", "str")):
        with pytest.raises(ValueError, match=f"c_out is of type {kind}; accepted are a number, a tensor and None"):
            skip(residual, x, c_out=wrong)
    for wrong in (torch.ones(2, dtype=torch.complex64), torch.tensor(1j)):
        with pytest.raises(ValueError, match="c_skip is complex"):
            skip(residual, x, c_skip=wrong)
    runs = Runs(torch.ones(1, 4, dtype=torch.complex64), torch.tensor([0, 6], dtype=torch.int32))
    with pytest.raises(ValueError, match="c_out is complex"):
        skip(residual, x, c_out=runs)
