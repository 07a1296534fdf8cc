"""The GEMM of sm_90 with its roles in threads on the CPU, above all its hand-overs."""

import sys
from functools import partial

import pytest
import torch

from tests.kernels import gluon_on_cpu
from tests.kernels.eight_bit import quantized, quantized_weight
from tests.oracle import assert_no_worse, relative_error
from turbo_rcm_patch.kernels import INT8, reference
from turbo_rcm_patch.kernels.linear import gemm_sm90

kernel_module = pytest.importorskip("turbo_rcm_patch.kernels.linear.gemm_sm90_kernel")
epilogue = sys.modules["turbo_rcm_patch.kernels.linear.gemm_sm90_epilogue"]
gemm = sys.modules["turbo_rcm_patch.kernels.linear.gemm_portable"]
# rank: of the second pair. Its depth of a step is 64; four steps are in flight.
NAMES = {"LOW_DEPTH": 64}
SHAPES = {
    "one tile": (1, 50, 104, 80, 64),
    "tails and samples": (2, 150, 200, 144, 128),
    "more steps of the second pair than in flight": (1, 130, 392, 64, 384),
}


@pytest.fixture
def on_cpu(monkeypatch):
    """Runs a launcher of gemm_sm90 with its kernel on the CPU, as a number of programs."""

    def run(launcher, *given, programs, seed=0, **options):
        launch, modules = partial(launcher, *given, **options), (kernel_module, epilogue, gemm)
        gluon_on_cpu.run_launches(monkeypatch, gemm_sm90, launch, modules, programs, seed, **NAMES)

    return run


def second_pair(rows, N, rank, weights=1):
    return gemm.SecondPair(torch.randn(rows, weights * rank).half(), (torch.randn(weights * N, rank) / 8).half())


@pytest.mark.parametrize(("programs", "seed"), [(1, 0), (4, 1)])
@pytest.mark.parametrize("name", SHAPES)
def test_skip_with_a_second_pair(name, programs, seed, on_cpu):
    samples, M, N, K, rank = SHAPES[name]
    shapes = (samples * M, K), (N, K), (N,), (samples * M, N)
    a, weight, bias, residual = (torch.randn(shape).half() for shape in shapes)
    second = second_pair(samples * M, N, rank)
    out = torch.full_like(residual, torch.nan)
    options = {"samples": samples, "residual": residual, "second": second}
    on_cpu(gemm_sm90.launch, a, weight, bias, out, programs=programs, seed=seed, **options)
    low, oracle = (
        residual.to(dtype) + reference.linear(*(t.to(dtype) for t in (a, weight, bias, *second)))
        for dtype in (torch.float16, torch.float64)
    )
    assert_no_worse(out, low, oracle)


def test_a_tile_without_a_second_pair(on_cpu):
    a, weight = torch.randn(150, 144).half(), torch.randn(200, 144).half()
    out = torch.full((150, 200), torch.nan).half()
    on_cpu(gemm_sm90.launch, a, weight, None, out, programs=1)
    assert_no_worse(out, a @ weight.T, a.double() @ weight.double().T)


@pytest.mark.parametrize("programs", [1, 4])
def test_three_weights_with_a_second_pair(programs, on_cpu):
    M, N, K, rank = 150, 200, 136, 64
    a, *weights = (torch.randn(rows, K).half() for rows in (M, N, N, N))
    biases = [torch.randn(N).half() for _ in range(3)]
    second = second_pair(M, N, rank, weights=3)
    outs = [torch.full((M, N), torch.nan).half() for _ in range(3)]
    on_cpu(gemm_sm90.launch_three, a, weights, biases, outs, programs=programs, second=second)
    wide = ([t.double() for t in tensors] for tensors in (weights, biases))
    oracle = reference.linear_qkv(a.double(), *wide, None, *(t.double() for t in second))
    low = reference.linear_qkv(a, weights, biases, None, *second)
    for out, *expected in zip(outs, low, oracle, strict=True):
        assert_no_worse(out, *expected)


@pytest.mark.parametrize("programs", [1, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_8_bits_with_a_second_pair(name, programs, on_cpu):
    samples, M, N, K, rank = SHAPES[name]
    a, weight = quantized(samples * M, K, format=INT8), quantized_weight(N, K, INT8)
    second = second_pair(samples * M, N, rank)
    second = gemm.SecondPair(second.low * 16, second.up * 256)  # beside sums of int8
    bias = torch.randn(N)
    out = torch.full((samples * M, N), torch.nan).half()
    scales = gemm.Scales(a.scale, weight.scale)
    on_cpu(gemm_sm90.launch, a.values, weight.values, bias, out, programs=programs, scales=scales, second=second)
    low = reference.linear(a, weight, bias, *second)
    wide = [t.double() for t in (a.values, weight.values, *second)]
    sums = (wide[0] @ wide[1].T + wide[2] @ wide[3].T) * a.scale.double()[:, None] * weight.scale.double()
    assert_no_worse(out, low.half(), sums + bias.double())
    assert relative_error(wide[0] @ wide[1].T, wide[0] @ wide[1].T + wide[2] @ wide[3].T) > 0.1  # it shows
