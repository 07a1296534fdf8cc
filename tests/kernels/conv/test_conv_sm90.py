"""The Gluon convolution: its tiles, steps and hand-overs on the CPU, and on a GPU of sm_90 against the oracle."""

import types
from functools import partial
from itertools import cycle, product

import pytest
import torch

from tests.kernels import gluon_on_cpu
from tests.oracle import assert_no_worse
from turbo_rcm_patch.kernels import conv_skip, reference
from turbo_rcm_patch.kernels.conv import conv_sm90, conv_tiles
from turbo_rcm_patch.kernels.linear import gemm_portable as gemm
from turbo_rcm_patch.kernels.linear import gemm_sm90_kernel

conv_sm90_kernel = pytest.importorskip("turbo_rcm_patch.kernels.conv.conv_sm90_kernel")
MODULES = (conv_sm90_kernel, gemm_sm90_kernel, gemm, conv_tiles)

# B, T, H, W, C, N (of one frame), kt, kh, upsample, interleave: all columns, boxes and depths; sizes that boxes pass.
SIZES = {
    "96 columns": (1, 2, 9, 17, 96, 96, 3, 3, False, 1),
    "96 columns, 64 channels": (1, 2, 9, 17, 64, 96, 3, 3, False, 1),
    "192 columns, 96 channels": (1, 1, 9, 17, 96, 192, 1, 3, True, 1),
    "128 columns, 96 channels": (2, 1, 5, 7, 96, 128, 3, 3, False, 1),
    "384 and 128 columns": (1, 2, 3, 7, 64, 512, 3, 1, False, 1),
    "64 columns": (2, 2, 5, 3, 32, 72, 3, 3, False, 1),
    "192 columns": (1, 1, 17, 7, 64, 384, 1, 3, False, 1),
    "128 columns": (1, 1, 3, 7, 32, 256, 3, 3, False, 1),
    "upsampled": (1, 2, 9, 5, 64, 192, 1, 3, True, 1),
    "frames alone": (2, 3, 5, 29, 64, 96, 3, 1, False, 1),
    "interleaved": (1, 3, 5, 29, 96, 192, 3, 1, False, 2),
    "upsampled and interleaved": (1, 2, 3, 9, 32, 192, 1, 3, True, 2),
    "pixels alone": (1, 2, 11, 13, 64, 136, 1, 1, False, 1),
}

# Tiles of two boxes: an odd number of boxes, several samples, every phase.
SHARED = {
    "odd": (1, 3, 9, 7, 64, 256, 3, 3, False, 1),
    "two samples": (2, 1, 8, 17, 128, 256, 3, 3, False, 1),
    "upsampled, 512": (1, 2, 9, 9, 64, 512, 1, 3, True, 1),
}


def operands(B, T, H, W, C, N, kt, kh, upsample, interleave, device="cpu", dtype=torch.float16):
    scale = 2 if upsample else 1
    x = torch.randn(B, T + kt - 1, H, W, C)
    weight = torch.randn(interleave * N, kt, kh, kh, C) * (kt * kh * kh * C) ** -0.5
    bias, residual = torch.randn(interleave * N), torch.randn(B, T * interleave, H * scale, W * scale, N)
    return [tensor.to(device, dtype) for tensor in (x, weight, bias, residual)]


def check(actual, tensors, upsample, interleave):
    low = reference.conv_skip(*tensors, None, upsample, interleave)
    wide = [None if tensor is None else tensor.double() for tensor in tensors]
    assert_no_worse(actual, low, reference.conv_skip(*wide, None, upsample, interleave))


def arguments(tensors, has_front):
    """Return the launcher's tensors. has_front: give the first frames of x as front, if the window spans several."""
    x, weight, bias, residual = tensors
    before = weight.shape[1] - 1
    if not before or not has_front:
        return x, None, weight, bias, residual
    return x[:, before:].contiguous(), x[:, :before].contiguous(), weight, bias, residual


@pytest.fixture
def on_cpu(monkeypatch):
    """Runs the launcher with its kernel on the CPU, as a number of programs."""

    def run(tensors, upsample, interleave, programs, seed=0, has_front=True, **names):
        without_values = [None if tensor is None else tensor.to("meta") for tensor in tensors]
        shape = reference.conv_skip(*without_values, None, upsample, interleave).shape
        out = torch.full(shape, torch.nan, dtype=tensors[0].dtype)
        launch = partial(conv_sm90.launch, *arguments(tensors, has_front), out, upsample, interleave)
        gluon_on_cpu.run_launches(monkeypatch, conv_sm90, launch, MODULES, programs, seed, **names)
        return out

    return run


@pytest.mark.parametrize(
    ("name", "programs", "has_front"), [*zip(SIZES, cycle((1, 4)), cycle((True, False, False, True)))]
)
def test_every_step_and_tile(name, programs, has_front, on_cpu):
    *_, upsample, interleave = SIZES[name]
    tensors = operands(*SIZES[name])
    check(on_cpu(tensors, upsample, interleave, programs, has_front=has_front), tensors, upsample, interleave)


def test_tiles_of_known_sizes():
    """Tiles of 192 columns, the fastest, are used as far as they fill without waste."""
    plain = {N: conv_sm90.choose_tile(N, False, 1) for N in (64, 96, 128, 192, 256, 384, 768)}
    assert plain == {
        **{64: (64, 0), 96: (64, 32), 128: (128, 0), 192: (128, 64)},
        **{256: (128, 0), 384: (128, 64), 768: (128, 64)},
    }
    assert {N: conv_sm90.choose_tile(N, True, 1) for N in (96, 192, 512, 1024)} == {
        **{96: (64, 32), 192: (128, 64), 512: (128, 0), 1024: (128, 0)}
    }
    split = {N: conv_sm90.split_columns(N) for N in (64, 128, 192, 256, 384, 512, 1024)}
    assert {N: parts for N, parts in split.items() if parts != [(0, N)]} == {
        512: [(0, 384), (384, 512)],
        1024: [(0, 768), (768, 1024)],
    }
    assert conv_sm90.choose_tile(768, False, 2) == (128, 64)
    assert conv_sm90.choose_tile(2048, False, 2) == (128, 0)
    assert conv_sm90.choose_tile(72, True, 1) == (0, 0)


@pytest.mark.parametrize(
    ("repeats", "T"), [((2, 2, 2), 3), ((2, 2, 2), 2), ((1, 1, 2), 2), ((2, 1, 1), 3), ((1, 2, 1), 2)]
)
def test_a_residual_that_counts_twice(T, repeats, on_cpu):
    """Each value counts for two frames, rows or columns of two samples. The first of three frames has its own."""
    x, weight, bias, residual = operands(2, T, 9, 17, 32, 64, 1, 3, True, 1)
    tensors = x, weight, bias, halved(residual, repeats)
    check(on_cpu(tensors, True, 1, 2), tensors, True, 1)


def halved(residual, repeats):
    frames, rows, columns = repeats
    return residual[:, : -(-residual.shape[1] // frames), ::rows, ::columns].contiguous()


@pytest.mark.parametrize(
    ("name", "programs", "has_front"),
    [("odd", 1, True), ("two samples", 3, False), ("upsampled, 512", 1, True), ("upsampled, 512", 3, False)],
)
def test_two_boxes_share_the_rows_of_the_weight(name, programs, has_front, on_cpu, monkeypatch):
    monkeypatch.setattr(conv_sm90, "device_properties", lambda device: ((9, 0), 2))
    *sizes, upsample, interleave = SHARED[name]
    tensors = operands(*SHARED[name])
    B, T, H, W, C = sizes[:5]
    assert conv_sm90.shares_rows(2, (B, T, H, W, C), tensors[1].shape, upsample)
    check(
        on_cpu(tensors, upsample, interleave, programs, seed=programs, has_front=has_front),
        tensors,
        upsample,
        interleave,
    )
    if upsample:
        x, weight, bias, residual = tensors
        tensors = x, weight, bias, halved(residual, (2, 2, 2))
        check(on_cpu(tensors, upsample, interleave, programs), tensors, upsample, interleave)


@pytest.mark.parametrize(
    ("sizes", "programs"),
    [
        *((SIZES[name], 2) for name in ("upsampled", "192 columns, 96 channels", "upsampled and interleaved")),
        *((SHARED["upsampled, 512"], count) for count in (1, 3)),
        ((2, 1, 8, 8, 64, 256, 1, 3, True, 1), 2),  # one box per phase and sample, of two in a tile
    ],
)
def test_upsampling_that_is_folded_into_the_weight(sizes, programs, on_cpu, monkeypatch):
    """Sixteenths up to 2, whose sums are exact in fp16."""
    monkeypatch.setattr(conv_sm90, "device_properties", lambda device: ((9, 0), 2))
    x, weight, bias, residual = operands(*sizes)
    weight = (weight * 16).round().clamp(-32, 32) / 16
    expected = reference.conv_skip(*(t.double() for t in (x, weight, bias, residual)), None, True, sizes[-1])
    out = torch.full(expected.shape, torch.nan, dtype=x.dtype)
    launch = partial(conv_sm90.launch, x, None, folded(weight), bias, residual, out, True, sizes[-1])
    gluon_on_cpu.run_launches(monkeypatch, conv_sm90, launch, MODULES, programs, programs)
    assert_no_worse(out, expected.half(), expected)


def folded(weight):
    """Return the windows of the four phases. An even row reads the row before it once and its own twice."""
    phases = torch.tensor([[[1, 0, 0], [0, 1, 1]], [[1, 1, 0], [0, 0, 1]]]).to(weight)
    return torch.einsum("pai,qbj,nijc->npqabc", phases, phases, weight[:, 0]).flatten(1, 2).contiguous()


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
        {"warpgroup_mma_wait": lambda outstanding, deps: deps},
    ],
)
def test_a_wait_too_few_shows(broken, on_cpu):
    tensors = operands(*SIZES["96 columns"])
    with pytest.raises(AssertionError, match=r"before it was waited for|relative error nan"):
        check(on_cpu(tensors, False, 1, 1, **broken), tensors, False, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*SIZES, *SHARED])
def test_matches_the_oracle(name, dtype, sm_90, monkeypatch):
    """Each program has one tile at most, and then as on a GPU of two multiprocessors several."""
    if conv_sm90.why_not_on(sm_90, dtype) is not None:
        pytest.skip(conv_sm90.why_not_on(sm_90, dtype))
    sizes = (SIZES | SHARED)[name]
    *_, upsample, interleave = sizes
    for multiprocessors in (132, 2):
        monkeypatch.setattr(conv_sm90, "device_properties", lambda device, n=multiprocessors: ((9, 0), n))
        tensors = operands(*sizes, device=sm_90, dtype=dtype)
        for given, has_front in product((tensors, [*tensors[:2], None, None]), (True, False)):
            out = torch.full_like(reference.conv_skip(*given, None, upsample, interleave), torch.nan)
            conv_sm90.launch(*arguments(given, has_front), out, upsample, interleave)
            check(out, given, upsample, interleave)


@pytest.mark.gpu
@pytest.mark.parametrize("repeats", [(2, 2, 2), (1, 1, 2)])
def test_a_residual_that_counts_twice_on_a_gpu(repeats, sm_90):
    if conv_sm90.why_not_on(sm_90, torch.bfloat16) is not None:
        pytest.skip(conv_sm90.why_not_on(sm_90, torch.bfloat16))
    for T in (2, 3):
        x, weight, bias, residual = operands(2, T, 44, 80, 64, 512, 1, 3, True, 1, sm_90, torch.bfloat16)
        tensors = x, weight, bias, halved(residual, repeats)
        out = torch.full_like(residual, torch.nan)
        conv_sm90.launch(*arguments(tensors, False), out, True, 1)
        check(out, tensors, True, 1)


@pytest.mark.gpu
def test_many_tiles(sm_90):
    """More than 2³¹ elements of the result: its last frame is that of the frame alone."""
    if conv_sm90.why_not_on(sm_90, torch.bfloat16) is not None:
        pytest.skip(conv_sm90.why_not_on(sm_90, torch.bfloat16))
    x = torch.randn(1, 59, 480, 832, 96, device=sm_90, dtype=torch.bfloat16)
    weight = torch.randn(96, 3, 3, 3, 96, device=sm_90, dtype=torch.bfloat16) * (27 * 96) ** -0.5
    whole = conv_skip(x, weight, None, x[:, 2:], implementation="triton")
    assert conv_sm90.why_not(sm_90, x.dtype, whole.shape, weight.shape) is None
    assert whole.numel() > 2**31
    assert torch.equal(whole, conv_skip(x[:, 2:], weight, None, x[:, 2:], front=x[:, :2], implementation="triton"))
    last = (x[:, -3:].clone(), weight, None, x[:, -1:].clone())
    assert torch.equal(whole[:, -1:], conv_skip(*last, implementation="triton"))
    check(whole[:, -1:], last, False, 1)
