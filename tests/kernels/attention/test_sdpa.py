"""A preferred backend of PyTorch's attention goes first, for a context, and leaves calls that it cannot take."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

from turbo_rcm_patch import kernels
from turbo_rcm_patch.kernels import reference
from turbo_rcm_patch.kernels.attention import sdpa


def order():
    return _cur_sdpa_kernel_backends(with_priority=True)


@pytest.fixture
def orders(monkeypatch):
    """PyTorch's order of backends at each call of its attention."""
    found, attend = [], F.scaled_dot_product_attention

    def noted(*arguments, **options):
        found.append(order())
        return attend(*arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(sdpa, "PYTORCHS", noted)
    return found


def inputs(dtype=torch.float32, head_dim=16):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 9, 3, head_dim, generator=generator, dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize("name", sdpa.BACKENDS)
def test_one_goes_first_and_the_others_stay_behind_it(orders, name):
    before = order()
    kernels.attention(*inputs(), implementation="torch", sdpa=name)
    kernels.attention(*inputs(), implementation="torch")
    first = sdpa.BACKENDS[name]
    others = [each for each in before if each in sdpa.BACKENDS.values() and each != first]
    assert orders == [[first, *others], before]
    assert order() == before


def test_what_the_user_switched_off_stays_off(orders):
    with sdpa_kernel(SDPBackend.MATH):
        kernels.attention(*inputs(), implementation="torch", sdpa="FlashAttention")
    assert orders == [[SDPBackend.MATH]]


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 16), (torch.float64, 16), (torch.bfloat16, 7)])
@pytest.mark.parametrize("name", ["cuDNN", "memory-efficient"])
def test_a_backend_that_cannot_take_a_call_leaves_it_to_the_others(name, dtype, head_dim):
    """These two backends cannot take a call on a CPU."""
    q, k, v = inputs(dtype, head_dim)
    q.requires_grad_(True)
    attended = kernels.attention(q, k, v, implementation="torch", sdpa=name)
    assert torch.equal(attended, kernels.attention(q, k, v, implementation="torch"))
    attended.sum().backward()
    assert q.grad.isfinite().all()


def test_traced_by_torch_compile():
    before = order()

    def attend(q, k, v):
        return kernels.attention(q, k, v, implementation="torch", sdpa="cuDNN")

    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    assert torch.equal(compiled(*inputs()), reference.attention(*inputs(), None, None, None, 16**-0.5))
    named = [node.args[0] for node in graphs[0].graph.nodes if "backend_from_string" in str(node.target)]
    assert named[0] == "CUDNN_ATTENTION"
    assert order() == before


def test_pytorch_settles_its_order_before_it_is_read(monkeypatch):
    """On an H100 PyTorch's first choice puts cuDNN in front, and overrides an order that was set before."""
    asked = []
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda q, k, v: asked.append("choice") or 3)
    monkeypatch.setattr(sdpa, "_cur_sdpa_kernel_backends", lambda **_: asked.append("order") or order())
    sdpa._settle_order.cache_clear()
    for _ in range(2):
        with sdpa.preferring("cuDNN"):
            pass
    assert asked == ["choice", "order", "order"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in sdpa.BACKENDS if name != sdpa.MATH])
def test_on_a_gpu_it_is_the_one_that_is_taken_also_in_a_graph_and_compiled(name):
    if sdpa.BACKENDS[name] not in sdpa._cur_sdpa_kernel_backends():
        pytest.skip(f"{name} is switched off")
    q, k, v = (x.to("cuda", torch.bfloat16) for x in inputs(head_dim=64))
    default = sdpa.chosen_backend(*(x.transpose(1, 2) for x in (q, k, v)))
    try:
        with sdpa_kernel(sdpa.BACKENDS[name]):
            expected = kernels.attention(q, k, v, implementation="torch")
    except RuntimeError:
        pytest.skip(f"this GPU has no {name}")

    def attend():
        return kernels.attention(q, k, v, implementation="torch", sdpa=name)

    with sdpa.preferring(name):
        assert sdpa.chosen_backend(*(x.transpose(1, 2) for x in (q, k, v))) == name
    assert torch.equal(attend(), expected)
    torch.compiler.reset()
    assert torch.equal(torch.compile(attend, fullgraph=True)(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = attend()
    graph.replay()
    assert torch.equal(recorded, expected)
    assert sdpa.chosen_backend(*(x.transpose(1, 2) for x in (q, k, v))) == default
