"""The 8-bit weights that FusedRCMAttention keeps: made once, and made again when a weight changes."""

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.modules.rcm_formula import inputs
from turbo_rcm_patch import kernels
from turbo_rcm_patch.modules import FusedRCMAttention


def quantized(**options):
    options = {"implementation": "torch", "preset": "quantized", **options}
    return FusedRCMAttention(128, 2, **options).requires_grad_(False)


@pytest.fixture
def converted(monkeypatch):
    """The tensors that were converted, weights among them."""
    tensors, quantize_rows = [], kernels.quantize_rows

    def watched(x, *arguments, **options):
        tensors.append(x)
        return quantize_rows(x, *arguments, **options)

    monkeypatch.setattr(kernels, "quantize_rows", watched)
    return tensors


def weights_in(tensors, module):
    weights = (module.qkv.weight, module.proj.weight)
    return sum(any(tensor is weight for weight in weights) for tensor in tensors)


def assert_up_to_date(module):
    """The module computes the same as one that has kept no copies."""
    x, _ = inputs(2, 19, 128, module.qkv.weight.dtype)
    fresh = quantized().to(module.qkv.weight.dtype)
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(module(x, 1.0), fresh(x, 1.0))


def _adam(module):
    """A fused optimizer, whose writes torch does not count."""
    module.requires_grad_(True)
    x, _ = inputs(2, 19, 128)
    module(x, 1.0).square().sum().backward()
    torch.optim.AdamW(module.parameters(), lr=0.1, fused=True).step()
    module.requires_grad_(False)


def _assign(module):
    module.load_state_dict({name: 2 * tensor for name, tensor in module.state_dict().items()}, assign=True)


CHANGES = {
    "in place": lambda m: m.proj.weight.mul_(-1.5),
    "in inference mode": lambda m: torch.inference_mode()(m.qkv.weight.mul_)(-1.5),
    "of its data": lambda m: setattr(m.qkv.weight, "data", -1.5 * m.qkv.weight.data),
    "transposed": lambda m: setattr(m.proj.weight, "data", m.proj.weight.data.t()),
    "replaced": lambda m: setattr(m.proj, "weight", nn.Parameter(-m.proj.weight, requires_grad=False)),
    "loaded": lambda m: m.load_state_dict(quantized().state_dict()),
    "assigned": _assign,
    "another dtype": lambda m: m.to(torch.bfloat16),
    "fused optimizer": _adam,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_converted_anew(change):
    module = quantized()
    assert_up_to_date(module)
    CHANGES[change](module)
    assert_up_to_date(module)
    assert_up_to_date(module)


def test_only_the_changed_weight_is_converted(converted):
    module = quantized()
    x, _ = inputs(2, 19, 128)
    for _ in range(3):
        module(x, 1.0)
    assert weights_in(converted, module) == 2
    module.proj.weight.mul_(2)
    module(x, 1.0)
    assert weights_in(converted, module) == 3


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_module_have_their_own(way):
    """A copied weight starts to count its writes anew: it comes to the count that its original had."""
    module = quantized()
    module.proj.weight.mul_(2)
    x, _ = inputs(2, 19, 128)
    module(x, 1.0)
    twin = way(module)
    assert_up_to_date(twin)
    while twin.proj.weight._version <= module.proj.weight._version and twin.proj.weight is not module.proj.weight:
        twin.proj.weight.mul_(-2)
        assert_up_to_date(twin)
    assert_up_to_date(module)


def test_no_trace_of_them_in_the_state():
    module = quantized()
    names = set(module.state_dict())
    module(inputs(2, 19, 128)[0], 1.0)
    assert set(module.state_dict()) == names
    assert not list(module.buffers())


def test_inference_tensors_are_converted_each_time(converted):
    with torch.inference_mode():
        module = quantized()
        x, _ = inputs(2, 19, 128)
        for _ in range(2):
            module(x, 1.0)
    assert weights_in(converted, module) == 4


def test_what_inference_mode_kept_serves_outside_of_it(converted):
    module = quantized()
    x, _ = inputs(2, 19, 128)
    with torch.inference_mode():
        inside = module(x, 1.0)
    assert torch.equal(module(x, 1.0), inside)
    assert weights_in(converted, module) == 2


def test_a_compiled_module_takes_weights_as_they_are():
    torch.compiler.reset()
    module = quantized()
    x, _ = inputs(2, 19, 128)
    module(x, 1.0)  # keeps copies
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    compiled(x, 1.0)
    module.proj.weight.mul_(-2)
    torch.testing.assert_close(compiled(x, 1.0), module(x, 1.0), rtol=1e-6, atol=1e-6)


def test_moving_the_module_lets_go_of_them():
    module = quantized()
    x, _ = inputs(2, 19, 128)
    module(x, 1.0)
    assert module._copies._kept
    nn.Sequential(module).to("cpu")
    assert not module._copies._kept


@pytest.mark.gpu
def test_a_captured_graph_takes_weights_as_they_are():
    module = quantized(implementation="triton").to("cuda", torch.bfloat16)
    x, timestep = torch.randn(2, 19, 128, device="cuda", dtype=torch.bfloat16), torch.ones(2, device="cuda")
    module(x, timestep)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = module(x, timestep)
    module.proj.weight.mul_(-2)
    graph.replay()
    assert torch.equal(captured, module(x, timestep))
