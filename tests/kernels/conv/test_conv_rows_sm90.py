"""The convolution that loads rows once: its hand-overs on the CPU, and on a GPU of sm_90 against the oracle."""

from functools import partial
from itertools import product

import pytest
import torch

from tests.kernels import gluon_on_cpu
from tests.kernels.conv.test_conv_sm90 import MODULES, arguments, check, operands
from turbo_rcm_patch.kernels import conv_skip, reference
from turbo_rcm_patch.kernels.conv import conv_rows_sm90, conv_sm90

kernel_module = pytest.importorskip("turbo_rcm_patch.kernels.conv.conv_rows_sm90_kernel")

OTHER_SIZES = "not for other windows than 3×3 or other channels of the result than 96"

# B, T, H, W, C, N, kt, kh, upsample, interleave: whole and cut tiles, one row and one column of pixels.
SIZES = {
    "96 channels": (1, 2, 9, 70, 96, 96, 3, 3, False, 1),
    "whole tiles, two samples": (2, 1, 4, 64, 32, 96, 3, 3, False, 1),
    "images": (1, 2, 5, 3, 64, 96, 1, 3, False, 1),
    "few columns": (2, 2, 9, 66, 32, 72, 3, 3, False, 1),
    "one row": (1, 3, 1, 65, 32, 96, 3, 3, False, 1),
    "one pixel in a row": (1, 1, 6, 1, 32, 96, 3, 3, False, 1),
}


@pytest.fixture
def on_cpu(monkeypatch):
    """Runs the launcher with its kernel on the CPU, as a number of programs."""
    monkeypatch.setattr(conv_rows_sm90, "device_properties", lambda device: ((9, 0), 1))

    def run(tensors, programs, seed=0, has_front=True, **names):
        out = torch.full_like(reference.conv_skip(*tensors, None, False, 1), torch.nan)
        launch = partial(conv_rows_sm90.launch, *arguments(tensors, has_front), out, False, 1)
        modules = kernel_module, *MODULES
        gluon_on_cpu.run_launches(monkeypatch, conv_rows_sm90, launch, modules, programs, seed, **names)
        return out

    return run


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(("programs", "has_front"), [(1, True), (3, False)])
def test_every_step_and_tile(name, programs, has_front, on_cpu):
    x, weight, bias, residual = operands(*SIZES[name])
    for tensors in ((x, weight, bias, residual), (x, weight, None, None)):
        check(on_cpu(tensors, programs, programs, has_front), tensors, False, 1)


@pytest.mark.parametrize("seed", range(5))
def test_loads_may_arrive_at_any_time(seed, on_cpu):
    tensors = operands(*SIZES["96 channels"])
    check(on_cpu(tensors, 1, seed), tensors, False, 1)


def test_a_wait_too_few_shows(on_cpu):
    tensors = operands(*SIZES["96 channels"])
    with pytest.raises(AssertionError, match="before it was waited for"):
        on_cpu(tensors, 1, warpgroup_mma_wait=lambda outstanding, deps: deps)


@pytest.mark.parametrize(
    ("shape", "weight_shape", "upsample", "interleave", "expected"),
    [
        ((1, 4, 480, 832, 96), (96, 3, 3, 3, 96), False, 1, None),
        ((1, 1, 480, 832, 64), (96, 1, 3, 3, 64), False, 1, None),
        ((1, 1, 8, 64, 96), (96, 3, 3, 3, 96), False, 1, "not for fewer tiles than multiprocessors"),
        ((1, 4, 240, 416, 192), (192, 3, 3, 3, 192), False, 1, OTHER_SIZES),  # tiles of 192 columns
        ((1, 4, 240, 416, 192), (96, 1, 3, 3, 192), True, 1, OTHER_SIZES),
        ((1, 4, 480, 832, 96), (192, 3, 1, 1, 96), False, 2, OTHER_SIZES),
        ((1, 4, 480, 832, 96), (96, 3, 1, 1, 96), False, 1, OTHER_SIZES),
    ],
)
def test_sizes(shape, weight_shape, upsample, interleave, expected, monkeypatch):
    monkeypatch.setattr(conv_rows_sm90, "device_properties", lambda device: ((9, 0), 132))
    assert conv_rows_sm90.why_not(torch.device("cpu"), shape, weight_shape, upsample, interleave) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*SIZES, "the decoder's"])
def test_matches_the_oracle(name, dtype, sm_90, monkeypatch):
    """Each program has one tile at most, and then as on a GPU of two multiprocessors several."""
    if conv_sm90.why_not_on(sm_90, dtype) is not None:
        pytest.skip(conv_sm90.why_not_on(sm_90, dtype))
    sizes = SIZES.get(name, (1, 2, 480, 832, 96, 96, 3, 3, False, 1))
    for multiprocessors in (1, 2, 132):
        monkeypatch.setattr(conv_rows_sm90, "device_properties", lambda device, n=multiprocessors: ((9, 0), n))
        x, weight, bias, residual = operands(*sizes, device=sm_90, dtype=dtype)
        for given, has_front in product(((x, weight, bias, residual), (x, weight, None, None)), (True, False)):
            out = torch.full_like(residual, torch.nan)
            conv_rows_sm90.launch(*arguments(given, has_front), out, False, 1)
            check(out, given, False, 1)


@pytest.mark.gpu
def test_the_op_takes_it(sm_90):
    if conv_sm90.why_not_on(sm_90, torch.bfloat16) is not None:
        pytest.skip(conv_sm90.why_not_on(sm_90, torch.bfloat16))
    tensors = operands(1, 2, 480, 832, 96, 96, 3, 3, False, 1, sm_90, torch.bfloat16)
    out = torch.full_like(tensors[3], torch.nan)
    conv_rows_sm90.launch(*arguments(tensors, False), out, False, 1)
    assert torch.equal(conv_skip(*tensors), out)
