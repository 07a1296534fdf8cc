"""conv_skip in 8 bits: what each kernel computes against the reference, and how far that is from exact."""

import pytest
import torch

from tests.kernels.turns import dtypes_in_turns
from tests.oracle import DTYPES, relative_error, torch_device
from turbo_rcm_patch.kernels import range_8bit, reference
from turbo_rcm_patch.kernels.choice.registry import PORTABLE
from turbo_rcm_patch.kernels.conv.conv_8bit import (
    CONV_8BIT,
    channel_divisor,
    convolve_reference,
    quantize_conv_weight,
)
from turbo_rcm_patch.kernels.rows.rms_norm_silu_8bit import MEASURE_NORM_SILU, QUANTIZE_NORM_SILU

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")

# B, T, H, W, C, N, kt. Boxes of one row and of several, a tail of columns, a rest of channels.
SIZES = {
    "one pixel": (1, 1, 1, 1, 16, 16, 3),
    "two samples": (2, 2, 5, 7, 32, 24, 3),
    "96 channels": (1, 1, 3, 9, 96, 96, 3),
    "an image": (1, 1, 4, 131, 48, 40, 1),
}


@pytest.fixture(autouse=True)
def _references_without_tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def launch(op, name="Triton"):
    return op.named(name).launch


def activations(B, T, H, W, C, device="cpu", dtype=torch.float32):
    x = 3 * torch.randn(B, T, H, W, C) + torch.randn(C)
    return x.to(device, dtype), (1 + 0.5 * torch.randn(C)).to(device, dtype)


def quantized(x, gain, before=None):
    """x behind the norm in 8 bits, by the references, its range and the divisor."""
    divisor = channel_divisor(gain)
    bounds = torch.zeros(2, device=x.device) if before is None else before.clone()
    range_8bit.measure_norm_silu(x, gain, divisor, bounds)
    return range_8bit.quantize_norm_silu(x, gain, divisor, bounds), bounds, divisor


def operands(B, T, H, W, C, N, kt, device="cpu", dtype=torch.float32):
    """The arguments of the op, with the frames before x as front, and those of the exact convolution in fp64."""
    x, gain = activations(B, T + kt - 1, H, W, C, device, dtype)
    q, bounds, divisor = quantized(x, gain)
    weight = (torch.randn(N, C, kt, 3, 3) * (9 * kt * C) ** -0.5).to(x).permute(0, 2, 3, 4, 1)
    bias, residual = torch.randn(N).to(x), torch.randn(B, T, H, W, N).to(x)
    front = q[:, : kt - 1].contiguous() if kt > 1 else None
    values, scale, total = quantize_conv_weight(weight, divisor)
    combined = range_8bit.combined(bounds, scale, total, bias)
    given = q[:, kt - 1 :].contiguous(), combined, values, dtype, residual, front
    y = reference.rms_norm_silu(x.double(), gain.double())
    return given, reference.conv_skip(y, weight.double(), bias.double(), residual.double())


def of_result(N, device, dtype=torch.float32):
    """The scale, the total and the bias of a convolution's result."""
    return (
        torch.rand(N, device=device),
        torch.arange(N, dtype=torch.int32, device=device),
        torch.randn(N).to(device, dtype),
    )


def by_kernel(x, gain, divisor, bounds, before=None, front=None):
    """x in 8 bits by the kernel. The frames before x move from a range to that of x."""
    before = bounds if before is None else before
    values, _ = launch(QUANTIZE_NORM_SILU)(x, gain, divisor, before, bounds, front, *of_result(16, x.device, x.dtype))
    return values


@pytest.mark.parametrize("name", SIZES)
def test_sums_are_exact(name, device):
    """The kernel differs from the reference by the rounding of its result only."""
    for dtype in dtypes_in_turns(device, (name, SIZES)):
        given, exact = operands(*SIZES[name], torch_device(device), dtype)
        wide = convolve_reference(*given[:3], torch.float64, *given[4:])
        actual = launch(CONV_8BIT, PORTABLE)(*given)
        assert (actual.shape, actual.dtype) == (exact.shape, dtype)
        assert relative_error(actual, wide) <= max(torch.finfo(dtype).eps, 1e-6)
        assert relative_error(actual, exact) < 0.01


def test_without_a_residual_the_frames_before_in_x(device):
    (x, *others, _, front), _ = operands(*SIZES["two samples"], torch_device(device), DTYPES[device][0])
    given = torch.cat((front, x), 1), *others, None, None
    assert relative_error(launch(CONV_8BIT, PORTABLE)(*given), convolve_reference(*given)) < 1e-3


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 16), (2, 3, 5, 4, 48), (1, 2, 3, 7, 192)])
def test_range_and_values(shape, device):
    """Rounding may go the other way where a value lies in the middle."""
    for dtype in DTYPES[device]:
        x, gain = activations(*shape, torch_device(device), dtype)
        before = torch.tensor([1e-3, 40.0], device=x.device)
        q, bounds, divisor = quantized(x, gain, before)
        measured = before.clone()
        launch(MEASURE_NORM_SILU)(x, gain, divisor, measured)
        torch.testing.assert_close(measured, bounds, rtol=1e-5, atol=0)
        assert measured[1] == 40  # the range only grows
        q, bounds, _ = quantized(x, gain)
        actual = by_kernel(x, gain, divisor, bounds)
        assert (actual.shape, actual.is_contiguous()) == (q.shape, True)
        difference = (actual.int() - q.int()).abs()
        assert difference.max() <= 1
        assert difference.float().mean() < 0.01
        exact = reference.rms_norm_silu(x.double(), gain.double())
        stands_for = range_8bit.dequantize(actual, bounds) * divisor
        step, _ = range_8bit.step_and_zero_reference(bounds)
        assert ((stands_for[:, :, 1:-1, 1:-1] - exact).abs() <= 0.6 * step * divisor).all()
        edges = stands_for.clone()
        edges[:, :, 1:-1, 1:-1] = 0
        assert not edges.any()


def test_frames_that_are_not_packed(device):
    x, gain = activations(1, 3, 4, 5, 32, torch_device(device), DTYPES[device][0])
    x = x[:, :, :, ::2]
    q, bounds, divisor = quantized(x, gain)
    assert (by_kernel(x, gain, divisor, bounds).int() - q.int()).abs().max() <= 1


@pytest.mark.parametrize("shape", [(1, 2, 3, 4, 32), (2, 2, 9, 11, 48)])  # some 4,096 values, and more
def test_frames_before_move_to_another_range(shape, device):
    """Values move to a larger range. In the same range they stay, and the empty one's stand for zero."""
    x, gain = activations(*shape, torch_device(device), DTYPES[device][0])
    q, bounds, divisor = quantized(x, gain)

    def moved_by_kernel(values, old, new):
        values = values.clone()
        by_kernel(x, gain, divisor, new, old, values)
        return values

    for larger in (bounds, bounds * 1.5, bounds + torch.tensor([0.0, 2.0]).to(bounds)):
        actual, expected = moved_by_kernel(q, bounds, larger), q.clone()
        range_8bit.requantize(expected, bounds, larger)
        assert (actual.int() - expected.int()).abs().max() <= 1
        step, _ = range_8bit.step_and_zero_reference(larger)
        moved = range_8bit.dequantize(actual, larger) - range_8bit.dequantize(q, bounds)
        assert moved.abs().max() <= 0.51 * step
    assert torch.equal(moved_by_kernel(q, bounds, bounds), q)
    empty = moved_by_kernel(torch.full_like(q, range_8bit.EMPTY), torch.zeros_like(bounds), bounds)
    assert not range_8bit.dequantize(empty, bounds).any()


@pytest.mark.parametrize("N", [16, 200])
def test_what_a_result_is_multiplied_by_and_what_is_added(N, device):
    x, gain = activations(2, 1, 3, 4, 32, torch_device(device), DTYPES[device][0])
    _, bounds, divisor = quantized(x, gain)
    parts = of_result(N, x.device, x.dtype)
    _, actual = launch(QUANTIZE_NORM_SILU)(x, gain, divisor, bounds, bounds, None, *parts)
    expected = range_8bit.combined(bounds.double(), parts[0].double(), *parts[1:])
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6 * expected.abs().max().item())


def test_nan_reaches_the_result(device):
    x, gain = activations(1, 1, 2, 3, 16, torch_device(device), DTYPES[device][0])
    x[0, 0, 1, 1, 5] = torch.nan
    given, _ = operands(1, 1, 2, 3, 16, 16, 1, torch_device(device), DTYPES[device][0])
    divisor, before = channel_divisor(gain), torch.zeros(2, device=x.device)
    bounds = before.clone()
    launch(MEASURE_NORM_SILU)(x, gain, divisor, bounds)
    assert bounds.isnan().any()
    parts = of_result(16, x.device, x.dtype)
    _, combined = launch(QUANTIZE_NORM_SILU)(x, gain, divisor, before, bounds, None, *parts)
    assert launch(CONV_8BIT, PORTABLE)(given[0], combined, *given[2:]).isnan().all()
