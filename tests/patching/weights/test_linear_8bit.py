"""Calls of a linear in 8 bits: nn.Linear's results for its dequantised weight, or by the kernels, and its errors."""

import copy

import accelerate
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from tests.oracle import relative_error
from turbo_rcm_patch import kernels
from turbo_rcm_patch.kernels import FP8, INT8, quantize_weight
from turbo_rcm_patch.patching.weights import linear_8bit as quantized_linear
from turbo_rcm_patch.patching.weights.linear_8bit import QuantizedLinear
from turbo_rcm_patch.patching.weights.read_only import ReadOnlyWeight

IN, OUT = 48, 24
FORMATS = (INT8, FP8)


def plain_linear(bias=True, dtype=torch.float32, device="cpu"):
    return nn.Linear(IN, OUT, bias=bias).to(device, dtype)


def in_8_bits(linear, format=INT8):
    """A copy of a linear, begun."""
    linear = copy.deepcopy(linear)
    QuantizedLinear.begin(linear, quantize_weight(linear.weight, format))
    return linear


def dequantised(linear):
    """An nn.Linear with the weight that a linear in 8 bits multiplies by."""
    twin = nn.Linear(IN, OUT, bias=linear.bias is not None)
    twin = twin.to(linear.weight.device, linear.weight_dtype).requires_grad_(False)
    twin.weight.copy_(linear.quantized().dequantize())
    if linear.bias is not None:
        twin.bias.copy_(linear.bias)
    return twin


def by_kernels(linear, x):
    """Return the kernels' result on a GPU, and their reference's on the CPU."""
    implementation, weight = "triton" if x.is_cuda else "torch", linear.quantized()
    rows = kernels.quantize_rows(x, weight.format, implementation=implementation)
    return kernels.linear_8bit(rows, weight, linear.bias, dtype=x.dtype, implementation=implementation)


@pytest.fixture
def kernels_everywhere(monkeypatch):
    """The CPU counts as a GPU that knows all formats; the ops run their reference there."""
    monkeypatch.setattr(quantized_linear, "_has_kernels", lambda *_: True)


def shapes(device="cpu"):
    wide = torch.randn(2, IN, 9, device=device)
    return {
        "matrix": torch.randn(7, IN, device=device),
        "batch": torch.randn(2, 3, 5, IN, device=device),
        "vector": torch.randn(IN, device=device),
        "one token": torch.randn(1, 1, IN, device=device),
        "transposed": wide.transpose(1, 2),
        "every other row": torch.randn(2, 9, IN, device=device)[:, ::2],
        "columns of more": torch.randn(3, 2 * IN, device=device)[:, 1 : IN + 1],
        "expanded": torch.randn(1, IN, device=device).expand(4, IN),
        "no row": torch.randn(2, 0, IN, device=device),
    }


# Results


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", shapes())
@torch.no_grad()
def test_inputs_of_any_shape(name, format, bias, request):
    linear, x = in_8_bits(plain_linear(bias), format), shapes()[name]
    assert torch.equal(expected := linear(x), dequantised(linear)(x))
    request.getfixturevalue("kernels_everywhere")
    assert torch.equal(linear(x), by_kernels(linear, x))
    assert linear(x).shape == expected.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_results_have_the_dtype_of_the_model(dtype, kernels_everywhere):
    linear = in_8_bits(plain_linear(dtype=dtype))
    x = torch.randn(3, IN, dtype=dtype)
    assert linear(x).dtype == dtype
    assert torch.equal(linear(x), by_kernels(linear, x))
    linear.to(torch.float32)
    assert torch.equal(linear(x.float()), by_kernels(linear, x.float()))


@pytest.mark.parametrize("by", ["modules", "kernels"])
@torch.no_grad()
def test_one_compiled_graph(by, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(quantized_linear, "_has_kernels", lambda *_: by == "kernels")
    linear, x = in_8_bits(plain_linear()), torch.randn(3, IN)
    compiled = torch.compile(lambda x: linear(x), fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(x), linear(x)) <= 1e-6
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert compiled(x).dtype == dtype
            assert relative_error(compiled(x), linear(x)) <= 1e-3


# Autocast, function transforms and LoRA


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_autocast_is_that_of_nn_linear(own, dtype, kernels_everywhere):
    linear = in_8_bits(plain_linear(dtype=own))
    for given in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(3, IN).to(given)
        with torch.autocast("cpu", dtype):
            ours, theirs = linear(x), dequantised(linear)(x)
        assert ours.dtype == theirs.dtype == dtype
        assert torch.equal(ours, theirs)


@torch.no_grad()
def test_function_transforms_are_those_of_the_dequantised_weight(kernels_everywhere):
    linear = in_8_bits(plain_linear())
    twin, x = dequantised(linear), torch.randn(3, 5, IN)
    torch.testing.assert_close(torch.vmap(linear)(x), torch.vmap(twin)(x))
    for ours, theirs in zip(
        torch.func.jvp(linear, (x,), (x.flip(0),)), torch.func.jvp(twin, (x,), (x.flip(0),)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.func.grad(lambda x: linear(x).square().sum())(x), torch.func.grad(lambda x: twin(x).square().sum())(x)
    )
    torch.testing.assert_close(torch.func.jacrev(linear)(x[0, 0]), twin.weight)
    assert torch.equal(linear(x), by_kernels(linear, x))


@torch.no_grad()
def test_a_functional_call_with_another_weight_is_refused():
    linear, x = in_8_bits(plain_linear()), torch.randn(3, IN)
    expected = linear(x)
    with pytest.raises(RuntimeError, match=r"weight: .*restore\(\) first"):
        torch.func.functional_call(linear, {"weight": torch.randn(OUT, IN)}, (x,))
    assert torch.equal(linear(x), expected)
    bias = torch.randn(OUT)
    shifted = torch.func.functional_call(linear, {"bias": bias}, (x,))
    torch.testing.assert_close(shifted, expected - linear.bias + bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_around_it(dtype, kernels_everywhere):
    """The base layer's part is the kernels'; the adapter's, of any dtype, is peft's."""
    config = LoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
    linear = in_8_bits(plain_linear(dtype=dtype).requires_grad_(False))
    model = inject_adapter_in_model(config, nn.Sequential(linear))
    x = torch.randn(3, IN, dtype=dtype)
    layer = model[0]
    with torch.no_grad():
        adapted = layer.lora_B["default"](layer.lora_A["default"](x.to(layer.lora_A["default"].weight.dtype)))
        expected = by_kernels(linear, x) + adapted.to(dtype) * layer.scaling["default"]
        assert relative_error(model(x), expected) <= {torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    model(x).float().square().sum().backward()
    assert layer.lora_A["default"].weight.grad.abs().max() > 0


# Errors

WRONG = {
    "another dtype": lambda: torch.randn(3, IN, dtype=torch.bfloat16),
    "fp64": lambda: torch.randn(3, IN, dtype=torch.float64),
    "integers": lambda: torch.ones(3, IN, dtype=torch.int64),
    "too narrow": lambda: torch.randn(3, IN - 1),
    "too wide": lambda: torch.randn(3, IN + 16),
    "a number": lambda: torch.tensor(1.0),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("wrong", WRONG)
@torch.no_grad()
def test_errors_are_those_of_nn_linear(wrong, bias, kernels_everywhere):
    assert_same_error(in_8_bits(plain_linear(bias)), WRONG[wrong]())


def assert_same_error(linear, x):
    with pytest.raises(RuntimeError) as theirs:
        dequantised(linear)(x)
    with pytest.raises(RuntimeError) as ours:
        linear(x)
    assert str(ours.value) == str(theirs.value)


# Hooks that hold a forward


def with_hook(linear):
    accelerate.hooks.add_hook_to_module(linear, accelerate.hooks.ModelHook())


def with_hook_removed(linear):
    with_hook(linear)
    accelerate.hooks.remove_hook_from_module(linear)


@pytest.mark.parametrize("hook", [with_hook, with_hook_removed])
@torch.no_grad()
def test_hooks_from_before_call_the_8_bit_weight_and_not_the_original(hook, monkeypatch):
    plain, x = plain_linear(), torch.randn(3, IN)
    hook(plain)
    expected, linear = plain(x), plain
    QuantizedLinear.begin(linear, quantize_weight(linear.weight, INT8))
    result = dequantised(linear)(x)
    monkeypatch.setattr(ReadOnlyWeight, "_values", None)
    assert torch.equal(linear(x), result)
    monkeypatch.undo()
    QuantizedLinear.end(linear)
    assert torch.equal(linear(x), expected)
    accelerate.hooks.remove_hook_from_module(linear)
    assert linear.forward.__func__ is nn.Linear.forward


@torch.no_grad()
def test_hooks_from_after_hold_no_8_bit_forward_once_it_ended():
    linear, x = plain_linear(), torch.randn(3, IN)
    expected = linear(x)
    QuantizedLinear.begin(linear, quantize_weight(linear.weight, INT8))
    with_hook(linear)
    QuantizedLinear.end(linear)
    assert torch.equal(linear(x), expected)
    accelerate.hooks.remove_hook_from_module(linear)
    assert linear.forward.__func__ is nn.Linear.forward


# On a GPU

GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", shapes())
@torch.no_grad()
def test_inputs_of_any_shape_on_a_gpu(name, format, bias):
    for dtype in GPU_DTYPES:
        linear, x = in_8_bits(plain_linear(bias, dtype, "cuda"), format), shapes("cuda")[name].to(dtype)
        assert torch.equal(linear(x), by_kernels(linear, x))


@pytest.mark.gpu
@torch.no_grad()
def test_a_weight_that_rests_on_the_cpu_comes_to_the_gpu():
    linear, x = in_8_bits(plain_linear(False)), torch.randn(3, IN, device="cuda")
    expected = copy.deepcopy(linear).cuda()(x)
    assert torch.equal(linear(x), expected)
    assert linear.quantized().values.device.type == "cpu"


@pytest.mark.gpu
def test_derivatives_on_a_gpu():
    """The bias, the input of a LoRA, and everything before it can get gradients."""
    linear = in_8_bits(plain_linear(device="cuda"))
    twin, x = dequantised(linear), torch.randn(3, IN, device="cuda")
    assert torch.equal(linear(x), twin(x))  # the bias requires a gradient
    linear.requires_grad_(False)
    with torch.no_grad():
        assert torch.equal(linear(x), by_kernels(linear, x))
    assert not linear(x).requires_grad
    given = [x.clone().requires_grad_() for _ in range(2)]
    for module, leaf in zip((linear, twin), given, strict=True):
        module(leaf).square().sum().backward()
    torch.testing.assert_close(given[0].grad, given[1].grad)


@pytest.mark.gpu
@torch.no_grad()
def test_transforms_and_autocast_on_a_gpu():
    linear = in_8_bits(plain_linear(device="cuda"))
    twin, x = dequantised(linear), torch.randn(3, 5, IN, device="cuda")
    torch.testing.assert_close(torch.vmap(linear)(x), torch.vmap(twin)(x))
    for ours, theirs in zip(torch.func.jvp(linear, (x,), (x,)), torch.func.jvp(twin, (x,), (x,)), strict=True):
        torch.testing.assert_close(ours, theirs)
    for given in GPU_DTYPES:
        with torch.autocast("cuda", torch.bfloat16):
            ours, theirs = linear(x.to(given)), twin(x.to(given))
        assert ours.dtype == theirs.dtype == torch.bfloat16
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
@torch.no_grad()
def test_one_compiled_graph_on_a_gpu():
    torch._dynamo.reset()
    linear = in_8_bits(plain_linear(dtype=torch.bfloat16, device="cuda"))
    x = torch.randn(3, IN, dtype=torch.bfloat16, device="cuda")
    compiled = torch.compile(lambda x: linear(x), fullgraph=True)
    assert torch.equal(compiled(x), linear(x))


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", WRONG)
@torch.no_grad()
def test_errors_are_those_of_nn_linear_on_a_gpu(wrong):
    assert_same_error(in_8_bits(plain_linear(device="cuda")), WRONG[wrong]().cuda())
