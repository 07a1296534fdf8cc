"""Convolutions of pairs of frames: the sums of frames and weights, the kernel's hand-overs on the CPU, and on a GPU of
sm_90 the result against the oracle."""

from functools import partial

import pytest
import torch

from tests.kernels import gluon_on_cpu
from tests.kernels.conv.test_conv_sm90 import MODULES
from tests.oracle import assert_no_worse, combined_weight, relative_error, torch_device
from turbo_rcm_patch.kernels import reference
from turbo_rcm_patch.kernels.conv import conv_pairs_sm90, conv_sm90
from turbo_rcm_patch.kernels.conv.conv_pairs import CONV_PAIRS, PAIRS, conv_pairs_reference
from turbo_rcm_patch.kernels.conv.conv_pairs_weight import pair_weight
from turbo_rcm_patch.kernels.conv.conv_skip import ConvSpec
from turbo_rcm_patch.kernels.rows.rms_norm_silu_pairs import RMS_NORM_SILU_PAIRS, rms_norm_silu_pairs_reference

kernel_module = pytest.importorskip("turbo_rcm_patch.kernels.conv.conv_pairs_sm90_kernel")

# B, T, H, W, C, N: all columns, one and several depths, cut boxes, odd numbers of boxes and of frames, two samples.
SIZES = {
    "192 columns": (1, 5, 9, 2, 64, 192),
    "192 columns, two depths": (1, 2, 8, 9, 128, 192),
    "128 columns, two samples": (2, 3, 1, 3, 64, 128),
    "384 and 128 columns": (1, 2, 3, 17, 64, 512),
    "one pixel": (2, 2, 1, 1, 64, 192),
}


def operands(B, T, H, W, C, N, device="cpu", dtype=torch.float16):
    """Return a norm's input and weight, the frames before it, a convolution's weight and bias, and the residual."""
    x, before, residual = torch.randn(B, T, H, W, C), torch.randn(B, 2, H, W, C), torch.randn(B, T, H, W, N)
    gain, bias = torch.rand(C) + 0.5, torch.randn(N)
    weight = torch.randn(N, 3, 3, 3, C) * (27 * C) ** -0.5
    return [tensor.to(device, dtype) for tensor in (x, gain, before, weight, bias, residual)]


def oracle_of(x, gain, before, weight, bias, residual):
    normed = reference.rms_norm_silu(x, gain, True)
    return reference.conv_skip(torch.cat((before, normed), 1), weight, bias, residual, None, False, 1)


def check(actual, tensors):
    """The error is at most that of a result that is computed without rounding and rounded once, and a little more.

    A result in fp16, on the CPU, has no more bits than the sums of frames and weights. These are rounded too, so that
    it errs 1.9 times as much.
    """
    exact = oracle_of(*(None if tensor is None else tensor.double() for tensor in tensors))
    more = {"factor": 2} if actual.dtype == torch.float16 else {}
    assert_no_worse(actual, exact.to(actual.dtype), exact, **more)


def planes_of(x, gain, before):
    return rms_norm_silu_pairs_reference(x, gain, before.clone())


@pytest.fixture
def on_cpu(monkeypatch):
    """Runs the launcher with its kernel on the CPU, as a number of programs."""
    monkeypatch.setattr(conv_pairs_sm90, "device_properties", lambda device: ((9, 0), 1))
    monkeypatch.setattr(conv_pairs_sm90, "HAS_WIDE", True)

    def run(x, gain, before, weight, bias, residual, programs=1, seed=0, **names):
        planes = planes_of(x, gain, before)
        B, pairs, _, H, W, _ = planes.shape
        out = torch.full((B, 2 * pairs, H, W, len(weight)), torch.nan, dtype=x.dtype)
        launch = partial(conv_pairs_sm90.launch, planes, combined_weight(weight.float()), bias, residual, out)
        gluon_on_cpu.run_launches(
            monkeypatch, conv_pairs_sm90, launch, (kernel_module, *MODULES), programs, seed, **names
        )
        return out[:, : x.shape[1]]

    return run


@pytest.mark.parametrize("name", SIZES)
def test_every_step_and_tile(name, on_cpu):
    *tensors, bias, residual = operands(*SIZES[name])
    for programs, given in ((1, (*tensors, bias, residual)), (3, (*tensors, None, None))):
        check(on_cpu(*given, programs, programs), given)


@pytest.mark.parametrize("seed", range(5))
def test_loads_may_arrive_at_any_time(seed, on_cpu):
    tensors = operands(*SIZES["128 columns, two samples"])
    check(on_cpu(*tensors, seed=seed), tensors)


def test_a_wait_too_few_shows(on_cpu):
    with pytest.raises(AssertionError, match="before it was waited for"):
        on_cpu(*operands(*SIZES["one pixel"]), warpgroup_mma_wait=lambda outstanding, deps: deps)


@pytest.mark.parametrize("name", SIZES)
def test_the_reference(name):
    """It is right to the bits that fp16 has for the sums of frames and weights."""
    tensors = operands(*SIZES[name], dtype=torch.float32)
    x, gain, before, weight, bias, residual = tensors
    actual = conv_pairs_reference(
        planes_of(x, gain, before), combined_weight(weight), bias, residual, x.shape[1], torch.float32
    )
    assert actual.shape == residual.shape
    exact = oracle_of(*(tensor.double() for tensor in tensors))
    assert relative_error(actual - residual, exact - residual.double()) < 2**-11


@pytest.mark.parametrize(("N", "C"), [(3, 1), (2, 300)])
@pytest.mark.parametrize("packed", [True, False])
def test_weights_are_combined_in_fp32(N, C, packed, device):
    weight = torch.randn(N, C, 3, 3, 3).permute(0, 2, 3, 4, 1)  # a module's memory
    combined = pair_weight((weight.contiguous() if packed else weight).to(torch_device(device))).cpu()
    expected = combined_weight(weight.double(), torch.float64)
    assert (combined.dtype, combined.shape) == (torch.float16, (N, 4, 9, C))
    torch.testing.assert_close(combined.double(), expected, rtol=2**-11, atol=1e-7)


OTHER = "not for other windows than 3×3×3 or other channels"


@pytest.mark.parametrize(
    ("shape", "N", "window", "expected"),
    [
        ((1, 6, 240, 416, 192), 192, (3, 3, 3), None),
        ((1, 2, 352, 640, 512), 256, (3, 3, 3), None),
        ((1, 5, 240, 416, 192), 192, (3, 3, 3), None),
        ((1, 3, 240, 416, 192), 192, (3, 3, 3), "not for so few frames"),  # 8 of 9 products
        ((1, 1, 240, 416, 192), 192, (3, 3, 3), "not for so few frames"),
        ((1, 4, 64, 64, 192), 192, (3, 3, 3), "not for fewer tiles than multiprocessors"),
        ((1, 4, 240, 416, 96), 192, (3, 3, 3), OTHER),
        ((1, 4, 480, 832, 64), 96, (3, 3, 3), OTHER),
        ((1, 4, 480, 832, 64), 64, (3, 3, 3), OTHER),
        ((1, 4, 480, 832, 64), 144, (3, 3, 3), OTHER),
        ((1, 4, 240, 416, 192), 192, (1, 3, 3), OTHER),
        ((1, 4, 240, 416, 192), 384, (3, 1, 1), OTHER),
    ],
)
def test_sizes(shape, N, window, expected, monkeypatch):
    monkeypatch.setattr(conv_pairs_sm90, "device_properties", lambda device: ((9, 0), 132))
    monkeypatch.setattr(conv_pairs_sm90, "HAS_WIDE", True)
    monkeypatch.setattr(conv_sm90, "why_not_on", lambda device, dtype: None)
    sizes = shape, (N, *window, shape[-1])
    assert conv_pairs_sm90.why_not(torch.device("cpu"), torch.bfloat16, *sizes) == expected
    assert "fp16" in conv_pairs_sm90.why_not(torch.device("cpu"), torch.float16, *sizes)


@pytest.mark.parametrize(("N", "expected"), [(192, "not for these channels with Triton 3.8 and later"), (384, None)])
def test_without_tiles_of_192_columns(N, expected, monkeypatch):
    monkeypatch.setattr(conv_pairs_sm90, "device_properties", lambda device: ((9, 0), 132))
    monkeypatch.setattr(conv_pairs_sm90, "HAS_WIDE", False)
    monkeypatch.setattr(conv_sm90, "why_not_on", lambda device, dtype: None)
    sizes = (1, 6, 240, 416, N), (N, 3, 3, 3, N)
    assert conv_pairs_sm90.why_not(torch.device("cpu"), torch.bfloat16, *sizes) == expected


@pytest.mark.parametrize(
    ("N", "has_wide", "expected"),
    [
        (128, True, [(0, 128, 0)]),
        (192, True, [(0, 192, 64)]),
        (256, True, [(0, 256, 0)]),
        (384, True, [(0, 384, 64)]),
        (384, False, [(0, 384, 0)]),
        (512, True, [(0, 384, 64), (384, 512, 0)]),
        (1024, True, [(0, 768, 64), (768, 1024, 0)]),
    ],
)
def test_columns_of_tiles(N, has_wide, expected):
    shapes = (1, 2, 4, 8, 8, 64), None, (1, 4, 8, 8, N)
    launches = conv_pairs_sm90._launches(*shapes, torch.bfloat16, 132, has_wide)
    assert [(columns.start, columns.stop, constants["TAIL"]) for columns, *_, constants in launches] == expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*SIZES, "the decoder's", "TI2V-5B's"])
def test_matches_the_oracle(name, sm_90, monkeypatch):
    """Each program has one tile at most, and then as on a GPU of two multiprocessors several."""
    if conv_sm90.why_not_on(sm_90, torch.bfloat16) is not None:
        pytest.skip(conv_sm90.why_not_on(sm_90, torch.bfloat16))
    large = {"the decoder's": (1, 4, 240, 416, 192, 192), "TI2V-5B's": (1, 2, 176, 320, 512, 512)}
    *tensors, bias, residual = operands(*(SIZES | large)[name], device=sm_90, dtype=torch.bfloat16)
    x, gain, before, weight = tensors
    for multiprocessors in (132, 2):
        monkeypatch.setattr(conv_pairs_sm90, "device_properties", lambda device, n=multiprocessors: ((9, 0), n))
        for given in ((bias, residual), (None, None)):
            planes = planes_of(x, gain, before)
            out = torch.full((*residual[:, :1].shape[:1], 2 * planes.shape[1], *residual.shape[2:]), torch.nan).to(x)
            conv_pairs_sm90.launch(planes, pair_weight(weight), *given, out)
            check(out[:, : x.shape[1]], (*tensors, *given))


@pytest.mark.gpu
def test_the_ops_together(sm_90):
    """The norm and the convolution, as the decoder calls them."""
    *tensors, bias, residual = operands(1, 5, 120, 208, 192, 256, sm_90, torch.bfloat16)
    x, gain, before, weight = tensors
    spec = ConvSpec(device=sm_90, dtype=x.dtype, shape=x.shape, weight_shape=weight.shape)
    if conv_sm90.why_not_on(sm_90, x.dtype) is not None:
        pytest.skip(conv_sm90.why_not_on(sm_90, x.dtype))
    assert CONV_PAIRS.pick(spec).name == PAIRS
    planes = RMS_NORM_SILU_PAIRS.kernels[0].launch(x, gain, before.clone())
    y = CONV_PAIRS.pick(spec).launch(planes, pair_weight(weight), bias, residual, 5, x.dtype)
    assert y.is_contiguous()
    check(y, (*tensors, bias, residual))
