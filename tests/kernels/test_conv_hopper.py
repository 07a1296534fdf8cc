"""The Gluon convolution: its tiles, steps and hand-overs on the CPU, and on a GPU of sm_90 against the oracle."""

import sys
import types

import pytest
import torch

from tests.kernels import gluon_on_cpu
from tests.oracle import assert_no_worse
from turbo_rcm_patch.kernels import conv_hopper, conv_skip, conv_tiles, gemm, gemm_hopper_kernel, reference

launcher = sys.modules["turbo_rcm_patch.kernels.conv_skip"]
conv_hopper_kernel = pytest.importorskip("turbo_rcm_patch.kernels.conv_hopper_kernel")
MODULES = (conv_hopper_kernel, gemm_hopper_kernel, gemm, conv_tiles)

# B, T, H, W, C, N (of one frame), kt, kh, upsample, interleave: all columns, boxes and depths; sizes that boxes pass.
SIZES = {
    "96 columns": (1, 2, 9, 17, 96, 96, 3, 3, False, 1),
    "64 columns": (2, 2, 5, 3, 32, 72, 3, 3, False, 1),
    "192 columns": (1, 1, 17, 7, 64, 384, 1, 3, False, 1),
    "128 columns": (1, 1, 3, 7, 32, 256, 3, 3, False, 1),
    "upsampled": (1, 2, 9, 5, 64, 192, 1, 3, True, 1),
    "frames alone": (2, 3, 5, 29, 64, 96, 3, 1, False, 1),
    "interleaved": (1, 3, 5, 29, 96, 192, 3, 1, False, 2),
    "upsampled and interleaved": (1, 2, 3, 9, 32, 192, 1, 3, True, 2),
    "pixels alone": (1, 2, 11, 13, 64, 136, 1, 1, False, 1),
}
# Of a result with two frames in a tile: an even number of them.
TOGETHER = {
    "96 columns, two frames": (1, 4, 9, 17, 96, 96, 3, 3, False, 1),
    "64 columns, two frames": (2, 2, 5, 3, 32, 64, 3, 3, False, 1),
    "two frames alone": (2, 6, 3, 29, 64, 96, 3, 1, False, 1),
}


def operands(B, T, H, W, C, N, kt, kh, upsample, interleave, device="cpu", dtype=torch.float16):
    scale = 2 if upsample else 1
    x = torch.randn(B, T + kt - 1, H, W, C)
    weight = torch.randn(interleave * N, kt, kh, kh, C) * (kt * kh * kh * C) ** -0.5
    bias, residual = torch.randn(interleave * N), torch.randn(B, T * interleave, H * scale, W * scale, N)
    return [tensor.to(device, dtype) for tensor in (x, weight, bias, residual)]


def check(actual, tensors, upsample, interleave):
    low = reference.conv_skip(*tensors, upsample, interleave)
    wide = [None if tensor is None else tensor.double() for tensor in tensors]
    assert_no_worse(actual, low, reference.conv_skip(*wide, upsample, interleave))


def wide_in_time(weight, bias, frames):
    return launcher._repeat_in_time(weight, frames), None if bias is None else bias.repeat(frames)


@pytest.fixture
def on_cpu(monkeypatch):
    """Runs the launcher with its kernel on the CPU, as a number of programs."""

    def run(tensors, upsample, interleave, programs, seed=0, together=1, **names):
        x, weight, bias, residual = tensors
        shape = reference.conv_skip(x, weight, None, None, upsample, interleave).shape
        out = torch.full(shape, torch.nan, dtype=x.dtype)
        if together > 1:
            weight, bias, interleave = (*wide_in_time(weight, bias, together), together)
        launched = []
        with monkeypatch.context() as patch:
            patch.setattr(conv_hopper, "launch_kernel", lambda *given, **options: launched.append((given, options)))
            conv_hopper.launch(x, weight, bias, residual, out, upsample, interleave, together)
        ((kernel, _, *arguments), options) = launched[0]
        options.pop("num_warps")
        with gluon_on_cpu.on_cpu(monkeypatch, MODULES, programs, seed, **names) as machine:
            gluon_on_cpu.run(machine, kernel.fn, *map(gluon_on_cpu.argument, arguments), **options)
        return out

    return run


@pytest.mark.parametrize("programs", [1, 4])
@pytest.mark.parametrize("name", SIZES)
def test_every_step_and_tile(name, programs, on_cpu):
    *_, upsample, interleave = SIZES[name]
    tensors = operands(*SIZES[name])
    check(on_cpu(tensors, upsample, interleave, programs), tensors, upsample, interleave)


@pytest.mark.parametrize("programs", [1, 4])
@pytest.mark.parametrize("name", TOGETHER)
def test_two_frames_in_a_tile(name, programs, on_cpu):
    tensors = operands(*TOGETHER[name])
    check(on_cpu(tensors, False, 1, programs, together=2), tensors, False, 1)
    tensors = [*tensors[:2], None, None]
    check(on_cpu(tensors, False, 1, programs, together=2), tensors, False, 1)


def test_which_results_have_two_frames_in_a_tile(monkeypatch):
    """Those of half a tile's columns, where there are tiles enough, and frames."""
    monkeypatch.setattr(conv_hopper, "GLUON_ERROR", None)
    capability = lambda device=None: (9, 0)  # noqa: E731
    monkeypatch.setattr(conv_hopper, "why_not_hopper", lambda *_: None)
    monkeypatch.setattr(conv_hopper, "device_properties", lambda device: (capability(), 132))

    def chosen(T, H, W, C, N, kt=3):
        x, weight = (torch.empty(s, device="meta") for s in ((1, T + kt - 1, H, W, C), (N, kt, 3, 3, C)))
        return launcher.choose_frames(x, weight)

    assert chosen(4, 480, 832, 96, 96) == chosen(5, 480, 832, 96, 64) == 2
    assert chosen(4, 480, 832, 96, 3) == 4
    assert chosen(4, 480, 832, 96, 72) == 1  # TMA cannot store the frames of 32 columns apart
    assert chosen(4, 480, 832, 96, 128) == 1
    assert chosen(4, 480, 832, 96, 96, kt=1) == chosen(1, 480, 832, 96, 96) == chosen(3, 480, 832, 96, 3) == 1
    assert chosen(4, 60, 104, 96, 96) == 1  # 100 tiles for 132 multiprocessors


def test_without_bias_and_residual(on_cpu):
    x, weight, _, _ = operands(*SIZES["96 columns"])
    tensors = (x, weight, None, None)
    check(on_cpu(tensors, False, 1, 2), tensors, False, 1)


@pytest.mark.parametrize("seed", range(5))
def test_loads_may_arrive_at_any_time(seed, on_cpu):
    tensors = operands(*SIZES["96 columns"])
    check(on_cpu(tensors, False, 1, 1, seed), tensors, False, 1)


@pytest.mark.parametrize(
    "broken",
    [
        {"tma": types.SimpleNamespace(store_wait=lambda outstanding: None)},  # the buffer is never known to be read
        {"warpgroup_mma_wait": lambda outstanding, deps: gluon_on_cpu.Machine.wait(6 * len(deps), deps)},
    ],
)
def test_a_wait_too_few_shows(broken, on_cpu):
    tensors = operands(*SIZES["96 columns"])
    with pytest.raises(AssertionError, match=r"before it was waited for|relative error nan"):
        check(on_cpu(tensors, False, 1, 1, **broken), tensors, False, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SIZES)
def test_matches_the_oracle(name, dtype, sm_90, monkeypatch):
    """Each program has one tile at most, and then as on a GPU of two multiprocessors several."""
    if conv_hopper.why_not_on(sm_90, dtype) is not None:
        pytest.skip(conv_hopper.why_not_on(sm_90, dtype))
    *_, upsample, interleave = SIZES[name]
    for multiprocessors in (132, 2):
        monkeypatch.setattr(conv_hopper, "device_properties", lambda device, n=multiprocessors: ((9, 0), n))
        tensors = operands(*SIZES[name], device=sm_90, dtype=dtype)
        for given in (tensors, [*tensors[:2], None, None]):
            out = torch.full_like(reference.conv_skip(*given, upsample, interleave), torch.nan)
            conv_hopper.launch(*given, out, upsample, interleave)
            check(out, given, upsample, interleave)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", TOGETHER)
def test_two_frames_in_a_tile_match_the_oracle(name, dtype, sm_90, monkeypatch):
    if conv_hopper.why_not_on(sm_90, dtype) is not None:
        pytest.skip(conv_hopper.why_not_on(sm_90, dtype))
    for multiprocessors in (132, 2):
        monkeypatch.setattr(conv_hopper, "device_properties", lambda device, n=multiprocessors: ((9, 0), n))
        x, weight, bias, residual = operands(*TOGETHER[name], device=sm_90, dtype=dtype)
        for given in ((x, weight, bias, residual), (x, weight, None, None)):
            out = torch.full_like(residual, torch.nan)
            conv_hopper.launch(x, *wide_in_time(weight, given[2], 2), given[3], out, False, 2, 2)
            check(out, given, False, 1)


@pytest.mark.gpu
def test_many_tiles(sm_90):
    """More than 2³¹ elements of the result: its last frame is that of the frame alone."""
    if conv_hopper.why_not_on(sm_90, torch.bfloat16) is not None:
        pytest.skip(conv_hopper.why_not_on(sm_90, torch.bfloat16))
    x = torch.randn(1, 59, 480, 832, 96, device=sm_90, dtype=torch.bfloat16)
    weight = torch.randn(96, 3, 3, 3, 96, device=sm_90, dtype=torch.bfloat16) * (27 * 96) ** -0.5
    assert conv_hopper.why_not(x, weight, None, False, 1) is None
    whole = conv_skip(x, weight, None, x[:, 2:], implementation="triton")
    assert whole.numel() > 2**31
    last = (x[:, -3:].clone(), weight, None, x[:, -1:].clone())
    assert torch.equal(whole[:, -1:], conv_skip(*last, implementation="triton"))
    check(whole[:, -1:], last, False, 1)
