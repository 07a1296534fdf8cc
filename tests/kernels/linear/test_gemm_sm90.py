import pytest
import torch

from tests.kernels.eight_bit import FORMATS
from tests.kernels.linear.sm90 import UNALIGNED, why_not
from tests.kernels.linear.test_linear_gelu import assert_gelu_of
from tests.kernels.runs import runs_of
from tests.oracle import assert_no_worse
from turbo_rcm_patch.kernels import dispatch, linear_gelu, linear_skip, reference
from turbo_rcm_patch.kernels.linear import gemm_sm90
from turbo_rcm_patch.kernels.linear.gemm_sm90 import count_tiles

# samples, M, N, K: fewer rows than a tile, tails in every dimension, more tiles than multiprocessors, one step along K.
SHAPES = [
    (1, 1, 8, 8),
    (1, 77, 200, 72),
    (1, 129, 264, 24),
    (2, 1000, 1544, 200),
    (3, 300, 136, 1544),
    (1, 20000, 528, 40),
    (1, 2000, 264, 8960),
]
GUARD_ROWS = 256  # after the result: no tile may reach into them
SKIPS = {
    "one": lambda B, N: (None, None),
    "gate": lambda B, N: (None, torch.randn(1, 1, N)),
    "sample": lambda B, N: (torch.randn(B, 1, 1), torch.randn(B, 1, 1)),
    "sample and channel": lambda B, N: (torch.randn(B, 1, 1), torch.randn(B, 6, N)[:, 2:3]),
}
WIDTHS = (torch.float32, torch.float64)
# Every combination of kinds and dtype is compiled: each once, and the gate of Wan's blocks on every shape.
CASES = [(shape, "gate", torch.bfloat16) for shape in SHAPES]
CASES += [(SHAPES[3], kind, torch.bfloat16) for kind in SKIPS if kind != "gate"] + [(SHAPES[4], "gate", torch.float16)]


def operands(samples, M, N, K, device="cpu", dtype=torch.bfloat16):
    shapes = (samples * M, K), (N, K), (N,), (samples * M, N)
    return [torch.randn(shape).to(device, dtype) for shape in shapes]


def launch(a, weight, bias, dtype=None, **arguments):
    """The result, after a check that nothing was written behind it."""
    memory = a.new_full((a.shape[0] + GUARD_ROWS, weight.shape[0]), torch.nan, dtype=dtype)
    out, guard = memory.split((a.shape[0], GUARD_ROWS))
    gemm_sm90.launch(a, weight, bias, out, **arguments)
    assert guard.isnan().all()
    return out


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "kind", "dtype"), CASES)
def test_skip_matches_the_oracle(shape, kind, dtype, sm_90):
    samples, M, N, _ = shape
    tensors = operands(*shape, sm_90, dtype)
    skips = [c if c is None else c.to(sm_90) for c in SKIPS[kind](samples, N)]
    a, weight, bias, residual = tensors
    names = dict(zip(("c_skip", "c_out"), skips, strict=True))
    actual = launch(a, weight, bias, samples=samples, residual=residual, **names)
    low, oracle = (
        reference.linear_skip(*(by_sample(t, samples, M) for t in ts), *skips)
        for ts in (tensors, [t.double() for t in tensors])
    )
    assert_no_worse(actual.view_as(low), low, oracle)


@pytest.mark.gpu
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", SKIPS)
def test_residual_and_result_of_two_dtypes(kind, kept, dtype, sm_90):
    samples, M, N, K = 2, 6000, 392, 136  # two or three tiles for a program, on which it uses its buffers again
    a, weight, bias, residual = operands(samples, M, N, K, sm_90)
    tensors = a, weight, bias, residual.to(kept)
    skips = [c if c is None else c.to(sm_90) for c in SKIPS[kind](samples, N)]
    names = dict(zip(("c_skip", "c_out"), skips, strict=True))
    scales = {"residual_scale": 0.25, "result_scale": 32.0}
    factors = 0.25 / 32, 1 / 32
    actual = launch(a, weight, bias, dtype=dtype, samples=samples, residual=tensors[3], factors=factors, **names)
    low, oracle = (
        reference.linear_skip(*(by_sample(t, samples, M) for t in ts), *skips, dtype=result, **scales)
        for ts, result in ((tensors, dtype), ([t.double() for t in tensors], torch.float64))
    )
    assert actual.dtype == dtype
    assert_no_worse(actual.view_as(low), low, oracle)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [[600], [1, 599], [130, 1, 0, 467, 2], [40] * 2 + [20] * 26 + [0] * 4])
def test_gates_by_run_match_the_oracle(lengths, dtype, sm_90):
    """Borders lie within a tile's rows, and a tile has rows of many runs."""
    for samples, M, N, K in ((1, 600, 392, 136), (3, 200, 264, 72)):
        tensors = operands(samples, M, N, K, sm_90)
        runs = runs_of(lengths, N, sm_90)
        c_skip, gates = None if samples == 1 else torch.randn(samples, 1, 1, device=sm_90), runs.values[:, None]
        a, weight, bias, residual = tensors
        skips = {"samples": samples, "residual": residual, "c_skip": c_skip, "c_out": gates, "starts": runs.starts}
        actual = launch(a, weight, bias, dtype=dtype, **skips)
        low, oracle = (
            reference.linear_skip(*(by_sample(t, samples, M) for t in ts), c_skip, gates, result, starts=runs.starts)
            for ts, result in ((tensors, dtype), ([t.double() for t in tensors], torch.float64))
        )
        assert_no_worse(actual.view_as(low), low, oracle)


def by_sample(tensor, samples, M):
    return tensor.view(samples, M, -1) if tensor.shape[0] == samples * M and tensor.dim() == 2 else tensor


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_and_gelu_match_the_oracle(shape, sm_90):
    samples, M, N, K = shape
    a, weight, bias, _ = operands(1, samples * M, N, K, sm_90)
    wide = a.double(), weight.double(), bias.double()
    linear = launch(a, weight, None)
    assert_no_worse(linear, a @ weight.T, wide[0] @ wide[1].T)
    gelu = launch(a, weight, bias, gelu=True)
    assert_no_worse(gelu, reference.linear_gelu(a, weight, bias), reference.linear_gelu(*wide))


@pytest.mark.gpu
def test_tails_of_the_gelu(sm_90):
    x = torch.tensor([-1e30, -1e10, -50.0, -8.0, -5.0, -1.0, 0.0, 1.0, 5.0, 50.0, 1e10, 1e30], device=sm_90).bfloat16()
    a = torch.zeros(12, 8, device=sm_90, dtype=torch.bfloat16)
    a[:, 0] = x
    weight = torch.eye(8, device=sm_90, dtype=torch.bfloat16)
    actual = launch(a, weight, None, gelu=True)[:, 0]
    assert_gelu_of(x, actual, torch.finfo(torch.bfloat16).eps)


@pytest.mark.gpu
def test_samples_do_not_mix(sm_90):
    samples, M, N, K = 3, 300, 136, 72
    a, weight, bias, residual = operands(samples, M, N, K, sm_90)
    gate = torch.randn(samples, 1, N, device=sm_90)
    middle = slice(M, 2 * M)
    alone = launch(a[middle], weight, bias, residual=residual[middle], c_out=gate[1:2])
    for tensor in (a.view(samples, M, K), residual.view(samples, M, N), gate):
        tensor[0::2] = torch.nan
    together = launch(a, weight, bias, samples=samples, residual=residual, c_out=gate)
    assert torch.equal(together[middle], alone)
    assert together.view(samples, M, N)[0::2].isnan().all()


# --- the ops that it serves


@pytest.mark.gpu
def test_ops_of_many_tiles_take_it(sm_90, monkeypatch):
    taken = []
    kernel = gemm_sm90.launch
    monkeypatch.setattr(gemm_sm90, "launch", lambda *args, **options: taken.append(kernel(*args, **options)))
    tensors = [t.view(2, 3000, -1) if len(t) == 6000 else t for t in operands(2, 3000, 1544, 200, sm_90)]
    wide = [t.double() for t in tensors]
    gate = torch.randn(2, 6, 1544, device=sm_90)[:, 2:3]
    low, oracle = (reference.linear_skip(*ts, None, gate) for ts in (tensors, wide))
    assert_no_worse(linear_skip(*tensors, c_out=gate), low, oracle)
    low, oracle = (reference.linear_gelu(*ts[:3]) for ts in (tensors, wide))
    assert_no_worse(linear_gelu(*tensors[:3]), low, oracle)
    assert len(taken) == 2


@pytest.fixture
def stand_in(monkeypatch):
    """Takes every launch, in place of the kernel."""

    def launch(
        a, weight, bias, out, *, samples=1, gelu=False, residual=None, factors=(1, 1), flag=None, scales, bound=None,
        second, **coefficients,
    ):  # fmt: skip
        assert scales == (None, None)
        assert bound is None
        assert second == (None, None)
        kept, added = factors
        assert all(t is None or t.is_contiguous() for t in (bias, residual, out))
        assert a.dim() == out.dim() == 2
        value = reference.linear_gelu(a, weight, bias) if gelu else torch.nn.functional.linear(a, weight, bias)
        if residual is not None:
            residual, value = (t.view(samples, -1, t.shape[1]) for t in (residual, value))
            value = reference.skip(kept * residual, added * value, **coefficients)
        out.copy_(value.view_as(out))

    monkeypatch.setattr(gemm_sm90, "why_not", lambda *_, **__: None)
    monkeypatch.setattr(gemm_sm90, "launch", launch)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (4.0, 0.5)])
@pytest.mark.parametrize("kind", SKIPS)
def test_linear_skip_hands_over_matrices(kind, scales, stand_in):
    a, weight, bias, residual = operands(2, 7, 24, 16, dtype=torch.float32)
    tensors = a.view(7, 2, 16).transpose(0, 1), weight, bias.repeat(2)[::2], residual.view(7, 2, 24).transpose(0, 1)
    c_skip, c_out = SKIPS[kind](2, 24)
    actual = linear_skip(
        *tensors,
        c_skip=1.0 if c_skip is None else c_skip,
        c_out=1.0 if c_out is None else c_out,
        residual_scale=scales[0],
        result_scale=scales[1],
        implementation="triton",
    )
    oracles = (reference.linear_skip(*(t.to(d) for t in tensors), c_skip, c_out, d, *scales) for d in WIDTHS)
    assert_no_worse(actual, *oracles)


def test_linear_skip_hands_over_runs(stand_in):
    a, weight, bias, residual = operands(2, 7, 24, 16, dtype=torch.float32)
    tensors = a.view(2, 7, 16), weight, bias, residual.view(2, 7, 24)
    runs = runs_of([1, 8, 5], 24)
    actual = linear_skip(*tensors, c_out=runs, implementation="triton")
    low, oracle = (
        reference.linear_skip(*(t.to(d) for t in tensors), None, runs.values[:, None].to(d), starts=runs.starts)
        for d in WIDTHS
    )
    assert_no_worse(actual, low, oracle)


def test_linear_gelu_hands_over_matrices(stand_in):
    a, weight, bias, _ = operands(2, 7, 24, 16, dtype=torch.float32)
    for tensors in ((a.view(7, 2, 16).transpose(0, 1), weight, bias.repeat(2)[::2]), (a[0], weight, bias)):
        actual = linear_gelu(*tensors, implementation="triton")
        assert_no_worse(actual, *(reference.linear_gelu(*(t.to(d) for t in tensors)) for d in WIDTHS))


# --- what it takes


def test_tiles_are_counted_by_sample():
    assert count_tiles(1, 32760, 1536) == 256 * 8
    assert count_tiles(3, 129, 193) == 3 * 2 * 2
    assert count_tiles(1, 1, 1) == 1


def gpu_of(monkeypatch, multiprocessors=4):
    monkeypatch.setattr(dispatch, "is_sm90", lambda _: True)
    monkeypatch.setattr(gemm_sm90, "device_properties", lambda _: ((9, 0), multiprocessors))


def test_why_not(monkeypatch):
    a, weight, _, residual = operands(2, 300, 256, 64)
    skip = {"samples": 2, "residual": residual}
    assert why_not(a, weight, **skip) == "no GPU of sm_90"
    gpu_of(monkeypatch)
    gate = torch.randn(2, 1, 256)
    assert why_not(a, weight, **skip, c_skip=torch.randn(1, 1, 1), c_out=gate) is None
    assert why_not(a, weight) is None
    assert why_not(a.float(), weight.float()) == "float32 tensors"
    assert why_not(a, weight, samples=2, residual=residual.float()) == "float32 residual"
    assert why_not(a, weight, samples=2, residual=residual.half(), dtype=torch.float16) is None
    assert why_not(a, weight, **skip, dtype=torch.float32) == "float32 result"
    assert why_not(a, weight, **skip, dtype=torch.float8_e4m3fn) == "float8_e4m3fn result"
    for format in FORMATS:
        low = a.to(format), weight.to(format)
        assert why_not(*low, **skip, dtype=torch.bfloat16) is None
        assert why_not(*low, dtype=torch.float8_e4m3fn) is None
        assert why_not(*low, dtype=torch.float32) == "float32 result"
    assert why_not(a, weight, **skip, c_out=torch.randn(2, 300, 256)) == "c_out per token"
    runs = runs_of([150, 450], 256)
    assert why_not(a, weight, **skip, c_out=runs.values[:, None], starts=runs.starts) is None
    assert why_not(a, weight, **skip, c_skip=torch.randn(1, 300, 1)) == "c_skip per channel or token"
    assert why_not(a, weight, **skip, c_skip=gate) == "c_skip per channel or token"
    monkeypatch.setattr(gemm_sm90, "GLUON_ERROR", "cannot import name 'tma'")
    assert "cannot import name 'tma'" in why_not(a, weight)


def test_every_multiprocessor_gets_a_tile(monkeypatch):
    a, weight, _, _ = operands(2, 300, 256, 64)
    gpu_of(monkeypatch, multiprocessors=13)
    assert why_not(a, weight) == "fewer tiles than multiprocessors"  # 5 by 2 of them
    assert why_not(a, weight, samples=2) == "fewer tiles than multiprocessors"  # 2 by 3 by 2
    assert why_not(a, weight, weight, weight) is None


def test_why_not_for_what_tma_cannot_read(monkeypatch):
    gpu_of(monkeypatch, multiprocessors=1)
    a, weight, _, _ = operands(1, 16, 16, 24)
    assert why_not(a, weight) is None
    assert why_not(a[:, :16], weight[:, :16]) is None
    for odd_a, odd_weight in (
        (a[:, 1:17], weight[:, :16]),  # starts at 2 bytes past a multiple of 16
        (a.T.contiguous().T, weight),  # columns are contiguous
        (a[:1].expand(16, 24), weight),  # rows overlap
    ):
        assert why_not(odd_a, odd_weight) == UNALIGNED
    assert why_not(a, weight, weight, weight.T.contiguous().T) == UNALIGNED
    for odd_a, odd_weight in (
        (torch.randn(16, 20).bfloat16(), torch.randn(16, 20).bfloat16()),  # rows of 40 bytes
        (a, weight[:12]),  # the result's rows would have 24 bytes
    ):
        assert why_not(odd_a, odd_weight) == "rows or addresses that are no multiple of 16 bytes"
    a, weight = torch.zeros(16, 32, dtype=torch.int8), torch.zeros(24, 32, dtype=torch.int8)
    assert why_not(a, weight, dtype=torch.bfloat16) is None
    for odd in ((a[:, :24], weight[:, :24], torch.bfloat16), (a, weight, torch.float8_e4m3fn)):
        assert why_not(*odd[:2], dtype=odd[2]) == "rows or addresses that are no multiple of 16 bytes"


@pytest.mark.parametrize("op", ["skip", "gelu"])
def test_a_launch_with_unaligned_operands_falls_to_the_portable_kernel(op, monkeypatch):
    gpu_of(monkeypatch, multiprocessors=1)
    monkeypatch.setattr(gemm_sm90, "launch", lambda *_, **__: pytest.fail("the kernel for sm_90 was launched"))
    a, weight, bias, residual = operands(1, 16, 16, 24, dtype=torch.float16)
    a = torch.randn(16, 25).half()[:, 1:]  # rows of 50 bytes
    if op == "skip":
        actual = linear_skip(a, weight, bias, residual, implementation="triton")
        expected = reference.linear_skip(a[None], weight, bias, residual[None], None, None)[0]
    else:
        actual = linear_gelu(a, weight, bias, implementation="triton")
        expected = reference.linear_gelu(a, weight, bias)
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)
