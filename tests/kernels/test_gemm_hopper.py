import pytest
import torch

from tests.oracle import assert_no_worse
from turbo_rcm_patch.kernels import gemm_hopper, reference
from turbo_rcm_patch.kernels.aot import shared_memory_limit
from turbo_rcm_patch.kernels.gemm_hopper import SCHEDULES, Schedule, why_not

# samples, M, N, K: fewer rows than a tile, tails in every dimension, more tiles than multiprocessors, one step along K.
SHAPES = [
    (1, 1, 8, 8),
    (1, 77, 200, 72),
    (1, 129, 264, 24),
    (2, 1000, 1544, 200),
    (3, 300, 136, 1544),
    (1, 20000, 528, 40),
]
GUARD_ROWS = 256  # after the result: no tile may reach into them
SKIPS = {
    "one": lambda B, N: (None, None),
    "gate": lambda B, N: (None, torch.randn(1, 1, N)),
    "sample": lambda B, N: (torch.randn(B, 1, 1), torch.randn(B, 1, 1)),
    "sample and channel": lambda B, N: (torch.randn(B, 1, 1), torch.randn(B, 6, N)[:, 2:3]),
}
# Every combination of kinds and dtype is compiled: each once, and the gate of Wan's blocks on every shape.
CASES = [(shape, "gate", torch.bfloat16) for shape in SHAPES]
CASES += [(SHAPES[3], kind, torch.bfloat16) for kind in SKIPS if kind != "gate"] + [(SHAPES[4], "gate", torch.float16)]


@pytest.fixture(scope="module", params=SCHEDULES)
def schedule(request):
    return SCHEDULES[request.param]


def operands(samples, M, N, K, device="cpu", dtype=torch.bfloat16):
    shapes = (samples * M, K), (N, K), (N,), (samples * M, N)
    return [torch.randn(shape).to(device, dtype) for shape in shapes]


def launch(a, weight, bias, samples=1, **arguments):
    """The result, after a check that nothing was written behind it."""
    memory = a.new_full((a.shape[0] + GUARD_ROWS, weight.shape[0]), torch.nan)
    out, guard = memory.split((a.shape[0], GUARD_ROWS))
    gemm_hopper.launch(a, weight, bias, out, samples, **arguments)
    assert guard.isnan().all()
    return out


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "kind", "dtype"), CASES)
def test_skip_matches_the_oracle(shape, kind, dtype, schedule, sm_90):
    samples, M, N, _ = shape
    tensors = operands(*shape, sm_90, dtype)
    skips = [c if c is None else c.to(sm_90) for c in SKIPS[kind](samples, N)]
    a, weight, bias, residual = tensors
    names = dict(zip(("c_skip", "c_out"), skips, strict=True))
    actual = launch(a, weight, bias, samples, residual=residual, **names, schedule=schedule)
    low, oracle = (
        reference.linear_skip(*(by_sample(t, samples, M) for t in ts), *skips)
        for ts in (tensors, [t.double() for t in tensors])
    )
    assert_no_worse(actual.view_as(low), low, oracle)


def by_sample(tensor, samples, M):
    return tensor.view(samples, M, -1) if tensor.shape[0] == samples * M and tensor.dim() == 2 else tensor


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_and_gelu_match_the_oracle(shape, schedule, sm_90):
    samples, M, N, K = shape
    a, weight, bias, _ = operands(1, samples * M, N, K, sm_90)
    wide = a.double(), weight.double(), bias.double()
    linear = launch(a, weight, None, schedule=schedule)
    assert_no_worse(linear, a @ weight.T, wide[0] @ wide[1].T)
    gelu = launch(a, weight, bias, gelu=True, schedule=schedule)
    assert_no_worse(gelu, reference.linear_gelu(a, weight, bias), reference.linear_gelu(*wide))


@pytest.mark.gpu
def test_tails_of_the_gelu(schedule, sm_90):
    x = torch.tensor([-1e30, -1e10, -50.0, -8.0, -5.0, -1.0, 0.0, 1.0, 5.0, 50.0, 1e10, 1e30], device=sm_90).bfloat16()
    a = torch.zeros(12, 8, device=sm_90, dtype=torch.bfloat16)
    a[:, 0] = x
    weight = torch.eye(8, device=sm_90, dtype=torch.bfloat16)
    actual = launch(a, weight, None, gelu=True, schedule=schedule)[:, 0]
    assert torch.equal(actual[x >= 50], x[x >= 50])
    assert torch.equal(actual[x <= -50], torch.zeros_like(actual[x <= -50]))
    middle = x.abs() < 50
    wide = x[middle].double()
    # tanh itself rounds to -1 at x = -8, in fp64 too; the sigmoid keeps the digits.
    oracle = wide * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3))
    torch.testing.assert_close(actual[middle].double(), oracle, rtol=torch.finfo(torch.bfloat16).eps, atol=0)


@pytest.mark.gpu
def test_samples_do_not_mix(schedule, sm_90):
    samples, M, N, K = 3, 300, 136, 72
    a, weight, bias, residual = operands(samples, M, N, K, sm_90)
    gate = torch.randn(samples, 1, N, device=sm_90)
    middle = slice(M, 2 * M)
    alone = launch(a[middle], weight, bias, residual=residual[middle], c_out=gate[1:2], schedule=schedule)
    for tensor in (a.view(samples, M, K), residual.view(samples, M, N), gate):
        tensor[0::2] = torch.nan
    together = launch(a, weight, bias, samples, residual=residual, c_out=gate, schedule=schedule)
    assert torch.equal(together[middle], alone)
    assert together.view(samples, M, N)[0::2].isnan().all()


@pytest.fixture
def sm_90():
    if torch.cuda.get_device_capability() != gemm_hopper.CAPABILITY:
        pytest.skip("needs a GPU of sm_90")
    return torch.device("cuda")


def test_schedules_fit_a_multiprocessor(schedule):
    assert schedule.shared_memory <= shared_memory_limit(gemm_hopper.CAPABILITY)
    accumulators = schedule.rows * schedule.columns // 128
    assert accumulators <= 192  # of 240 registers a thread
    # In a ring, the first step of a tile and both slots that stage the tile before are held at once.
    assert schedule.stages >= (3 if schedule.ring else 2)
    assert not schedule.ring or (schedule.depth == gemm_hopper.CHUNK.value and not schedule.pingpong)


def test_tiles_are_counted_by_sample():
    pingpong, cooperative = Schedule(128, 192, 64, 4, pingpong=True), Schedule(128, 192, 64, 4, pingpong=False)
    assert (pingpong.tile_rows, cooperative.tile_rows) == (128, 256)
    assert pingpong.count(1, 32760, 1536) == 256 * 8
    assert cooperative.count(1, 32760, 1536) == 128 * 8
    assert pingpong.count(3, 129, 193) == 3 * 2 * 2
    assert cooperative.count(1, 1, 1) == 1


def test_columns_are_cut_into_powers_of_two():
    boxes = [Schedule(64, columns, 64, 3, pingpong=False).weight_boxes for columns in (64, 128, 192, 256)]
    assert boxes == [(64, 0), (128, 0), (128, 64), (256, 0)]


def gpu_of(monkeypatch, multiprocessors=4):
    monkeypatch.setattr(gemm_hopper, "is_hopper", lambda _: True)
    monkeypatch.setattr(gemm_hopper, "device_properties", lambda _: ((9, 0), multiprocessors))


def test_why_not(monkeypatch):
    a, weight, _, residual = operands(2, 300, 256, 64)
    assert why_not(a, weight, 2, residual) == "not a GPU of sm_90"
    gpu_of(monkeypatch)
    gate = torch.randn(2, 1, 256)
    assert why_not(a, weight, 2, residual, c_skip=torch.randn(1, 1, 1), c_out=gate) is None
    assert why_not(a, weight, 1) is None
    assert why_not(a.float(), weight.float(), 2) == "float32 tensors"
    assert why_not(a, weight, 2, residual.float()) == "residual of another dtype"
    assert why_not(a, weight, 2, residual, c_out=torch.randn(2, 300, 256)) == "c_out per token"
    assert why_not(a, weight, 2, residual, c_skip=torch.randn(1, 300, 1)) == "c_skip per channel or token"
    assert why_not(a, weight, 2, residual, c_skip=gate) == "c_skip per channel or token"
    gpu_of(monkeypatch, multiprocessors=1000)
    assert why_not(a, weight, 2, residual) == "fewer tiles than multiprocessors"


def test_why_not_for_what_tma_cannot_read(monkeypatch):
    gpu_of(monkeypatch, multiprocessors=1)
    a, weight, _, _ = operands(1, 16, 16, 24)
    assert why_not(a, weight, 1) is None
    assert why_not(a[:, :16], weight[:, :16], 1) is None
    for odd_a, odd_weight in (
        (a[:, 1:17], weight[:, :16]),  # starts at 2 bytes past a multiple of 16
        (torch.randn(16, 20).bfloat16(), torch.randn(16, 20).bfloat16()),  # rows of 40 bytes
        (a.T.contiguous().T, weight),  # columns are contiguous
        (a[:1].expand(16, 24), weight),  # rows overlap
        (a, weight[:12]),  # the result's rows would have 24 bytes
    ):
        assert why_not(odd_a, odd_weight, 1) == "rows or addresses that are no multiple of 16 bytes"
