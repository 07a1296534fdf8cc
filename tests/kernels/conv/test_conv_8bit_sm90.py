"""The Gluon convolution in 8 bits: its steps and hand-overs on the CPU, and on a GPU of sm_90 against the reference."""

from functools import partial

import pytest
import torch

from tests.kernels import gluon_on_cpu
from tests.kernels.conv.test_conv_8bit import operands
from tests.kernels.conv.test_conv_sm90 import MODULES
from tests.oracle import relative_error
from turbo_rcm_patch.kernels.choice.registry import GLUON
from turbo_rcm_patch.kernels.conv import conv_sm90
from turbo_rcm_patch.kernels.conv.conv_8bit import CONV_8BIT, convolve_reference

# B, T, H, W, C, N, kt: the depths of both VAEs, with and without a rest, and two launches for 256 columns.
SIZES = {
    "96": (1, 2, 3, 17, 96, 96, 3),
    "192": (2, 1, 5, 7, 192, 192, 3),
    "128": (1, 1, 3, 5, 128, 256, 3),
    "an image": (1, 1, 9, 17, 64, 72, 1),
}


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("name", SIZES)
def test_every_step_and_tile(name, programs, monkeypatch):
    x, combined, values, _, residual, front = operands(*SIZES[name], dtype=torch.float16)[0]
    factor, offset = combined
    out = torch.full_like(residual, torch.nan)
    launch = partial(conv_sm90.launch, x, front, values, offset, residual, out, False, 1, factor)
    gluon_on_cpu.run_launches(monkeypatch, conv_sm90, launch, MODULES, programs)
    wide = convolve_reference(x, combined, values, torch.float64, residual, front)
    assert relative_error(out, wide) <= torch.finfo(torch.float16).eps


def test_depths_fill_lines():
    """A step reads 128 bytes of a pixel if they divide its channels. A rest beside a tail of columns costs registers:
    only 96 channels need one."""
    depths = {C: conv_sm90.choose_depths(C, in_8_bits=True) for C in (32, 64, 96, 128, 160, 192, 256, 384, 1024)}
    assert depths == {
        **{32: (32, 0), 64: (64, 0), 96: (64, 32), 128: (128, 0), 160: (32, 0)},
        **{192: (64, 0), 256: (128, 0), 384: (128, 0), 1024: (128, 0)},
    }


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SIZES)
def test_matches_the_reference(name, dtype, sm_90, monkeypatch):
    """Each program has one tile at most, and then as on a GPU of two multiprocessors several."""
    if conv_sm90.why_not_on(sm_90, dtype) is not None:
        pytest.skip(conv_sm90.why_not_on(sm_90, dtype))
    for multiprocessors in (132, 2):
        monkeypatch.setattr(conv_sm90, "device_properties", lambda device, n=multiprocessors: ((9, 0), n))
        given = operands(*SIZES[name], device=sm_90, dtype=dtype)[0]
        for residual in (given[4], None):
            wide = convolve_reference(*given[:3], torch.float64, residual, given[5])
            actual = CONV_8BIT.named(GLUON).launch(*given[:4], residual, given[5])
            assert relative_error(actual, wide) <= torch.finfo(dtype).eps
