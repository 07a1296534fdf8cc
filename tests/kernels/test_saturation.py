import contextlib

import pytest
import torch

from tests.kernels.linear.test_gemm_sm90 import launch, operands
from tests.oracle import torch_device
from turbo_rcm_patch.kernels import Saturation, linear_skip, skip
from turbo_rcm_patch.kernels.saturation import flag_for

LARGEST = 65504.0
SCALE = 32.0


heard = []


@contextlib.contextmanager
def listening():
    """A context in which `tells` is about the ops that ran in it."""
    heard.append(Saturation())
    with heard[-1].listening():
        yield
    heard.pop()


@pytest.fixture(autouse=True)
def _listening():
    with listening():
        yield


def run(op, residual, implementation, **options):
    """Return the residual [B, S, C] with zeros added by one of the ops."""
    options = {"dtype": torch.float16, "implementation": implementation, **options}
    if op == "skip":
        return skip(residual, torch.zeros_like(residual), **options)
    B, S, C = residual.shape
    a, weight = residual.new_zeros(B, S, 8, dtype=torch.float16), residual.new_zeros(C, 8, dtype=torch.float16)
    return linear_skip(a, weight, None, residual, **options)


def tells(device):
    if device.type == "cuda":
        torch.cuda.synchronize()  # for what is computed; the flag itself needs none
    return heard[-1].happened()


@pytest.mark.parametrize("implementation", ["triton", "torch"])
@pytest.mark.parametrize("op", ["skip", "linear_skip"])
def test_what_fp16_cannot_hold_saturates_and_says_so(op, implementation, device):
    """The places are every border of a tile, and the last of many rows."""
    device = torch_device(device)
    for place, value in (((0, 0, 0), 1e7), ((1, 68, 64), -1e7), ((0, 68, 0), torch.inf), ((1, 0, 64), 2.2e6)):
        with listening():
            residual = torch.randn(2, 69, 65, device=device)
            fine = run(op, residual, implementation, result_scale=SCALE)
            assert not tells(device)
            residual[place] = value
            actual = run(op, residual, implementation, result_scale=SCALE)
            assert actual[place].item() == (LARGEST if value > 0 else -LARGEST)
            assert (actual != fine).sum() == 1
            assert tells(device)


@pytest.mark.parametrize("implementation", ["triton", "torch"])
@pytest.mark.parametrize("op", ["skip", "linear_skip"])
def test_the_largest_number_is_no_saturation_and_nan_stays(op, implementation, device):
    device = torch_device(device)
    residual = torch.tensor([LARGEST, -LARGEST, torch.nan, 0.0, 1.0], device=device)[None, :, None].repeat(1, 1, 9)
    actual = run(op, SCALE * residual, implementation, result_scale=SCALE)
    assert torch.equal(actual.nan_to_num(7), residual.half().nan_to_num(7))
    assert not tells(device)


@pytest.mark.parametrize("implementation", ["triton", "torch"])
@pytest.mark.parametrize("op", ["skip", "linear_skip"])
def test_plain_results_overflow_as_ever(op, implementation, device):
    """Such results are fp16 of scale 1, as in an fp16 model, and dtypes that hold larger values."""
    device = torch_device(device)
    residual = torch.full((1, 3, 5), 1e7, device=device)
    assert run(op, residual, implementation).isposinf().all()
    assert (run(op, residual, implementation, result_scale=SCALE, dtype=torch.float32) == 1e7 / SCALE).all()
    assert not tells(device)


def test_it_tells_in_every_mode_of_torch(device):
    """Values that saturate in a transform or on the meta device do so in silence."""
    device = torch_device(device)
    residual = torch.full((2, 3, 5), 1e7, device=device)

    def scaled(x):
        return skip(x, x, dtype=torch.float16, result_scale=SCALE, implementation="torch")

    assert (torch.vmap(scaled)(residual[None]) == LARGEST).all()
    assert (torch.compile(scaled, fullgraph=True, backend="eager")(residual) == LARGEST).all()
    graph = torch.fx.experimental.proxy_tensor.make_fx(scaled)(residual)
    assert (graph(residual) == LARGEST).all()
    scaled(residual.to("meta"))
    assert not tells(device)
    with torch.inference_mode():
        scaled(residual)
    assert tells(device)
    scaled(residual)  # writes to what was made in inference mode
    with listening():
        assert not tells(device)
        scaled(residual)
        assert tells(device)


@pytest.mark.gpu
def test_replays_of_a_graph_tell():
    residual = torch.randn(1, 69, 65, device="cuda")
    run("skip", residual, "triton", result_scale=SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [run(op, residual, "triton", result_scale=SCALE) for op in ("skip", "linear_skip")]
    graph.replay()
    assert not tells(residual.device)
    residual[0, 68, 64] = -1e7
    graph.replay()
    assert tells(residual.device)
    assert all(result[0, 68, 64] == -LARGEST for result in results)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["skip", "linear_skip"])
def test_it_tells_from_the_cuda_graphs_of_torch_compile(op):
    """No tensor may keep a graph's memory, and the first launch, which makes the flag, is in one."""
    torch._dynamo.reset()

    def scaled(residual):
        return run(op, residual, "triton", result_scale=SCALE)

    compiled = torch.compile(scaled, mode="reduce-overhead", fullgraph=True)
    residual = torch.randn(1, 69, 65, device="cuda")
    for _ in range(3):
        compiled(residual)
    assert not tells(residual.device)
    residual[0, 68, 64] = -1e7
    assert compiled(residual)[0, 68, 64] == -LARGEST
    assert tells(residual.device)


@pytest.mark.gpu
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", [(0, 0), (299, 135), (300, 64), (599, 128)])
def test_the_gemm_of_sm_90(place, kept, sm_90):
    """Two samples, each of two tiles and a bit."""
    a, weight, bias, residual = operands(2, 300, 136, 72, sm_90)
    flag = flag_for(torch.float16, SCALE, sm_90)
    options = {"dtype": torch.float16, "samples": 2, "factors": (1.0, 1.0), "flag": flag}
    residual = residual.to(kept)
    fine = launch(a, weight, bias, residual=residual, **options)
    assert not tells(sm_90)
    residual[place] = -LARGEST
    a[place[0]] = -1e4 * weight[place[1]]
    bias[:] = 0
    actual = launch(a, weight, bias, residual=residual, **options)
    assert actual[place] == -LARGEST
    assert tells(sm_90)
    assert fine.isfinite().all()
    a[place[0]] = torch.nan
    assert launch(a, weight, bias, residual=residual, **options)[place[0]].isnan().all()
