"""The linear whose weight may be read for a module, above all behind peft's LoRA layers."""

import pytest
import torch
import torch.nn.functional as F
from diffusers import ContextParallelConfig
from diffusers.hooks import apply_context_parallel
from diffusers.models._modeling_parallel import ContextParallelOutput
from peft import LoraConfig
from torch import nn

from tests.oracle import relative_error
from tests.tiny_wan import tiny_wan_transformer
from turbo_rcm_patch.plain import hook_on, linear_of, why_not_linear

CPU = torch.device("cpu")
TARGET = "blocks.0.attn1.to_q"


def add_lora(model, name="first", **options):
    options = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "target_modules": ["to_q"], **options}
    model.add_adapter(LoraConfig(**options), name)


@pytest.fixture
def model():
    return tiny_wan_transformer(layers=1)


def layer_of(model):
    return model.get_submodule(TARGET)


def reads(model):
    """Return True if the layer's weight may be read, and check that it computes what the layer does."""
    layer = layer_of(model)
    linear = linear_of(layer)
    reason = why_not_linear(linear, CPU, torch.float32)
    if reason is not None:
        assert linear is layer
        assert reason in ("LoRA layer", "torch hook", "replaced forward")
        return False
    x = torch.randn(3, linear.in_features)
    expected = F.linear(x, linear.weight, linear.bias)
    assert linear is layer_of(model).get_base_layer()
    assert torch.equal(layer(x), expected)
    return True


@pytest.mark.parametrize("options", [{}, {"lora_bias": True}, {"use_dora": True}, {"lora_dropout": 0.5}])
def test_a_fused_lora_is_read_and_an_unfused_one_is_not(model, options):
    before = layer_of(model).weight.clone()
    add_lora(model.train(), **options)
    assert not reads(model)
    model.fuse_lora()
    assert reads(model)
    assert relative_error(linear_of(layer_of(model)).weight, before) > 0.1
    model.unfuse_lora()
    assert not reads(model)
    model.fuse_lora()
    model.unload_lora()
    assert linear_of(layer_of(model)) is layer_of(model)
    assert why_not_linear(layer_of(model), CPU, torch.float32) is None


def test_a_disabled_lora_is_read_once_nothing_of_it_is_in_the_weight(model):
    before = layer_of(model).weight.clone()
    add_lora(model)
    model.disable_lora()
    assert reads(model)
    model.enable_lora()
    assert not reads(model)
    model.fuse_lora()
    model.disable_lora()
    layer = layer_of(model)
    assert linear_of(layer) is layer  # its weight is not yet what peft would compute with
    layer(torch.randn(1, layer.in_features))
    assert reads(model)
    assert relative_error(linear_of(layer).weight, before) <= 1e-5


def test_scales_and_adapters_chosen_after_the_fusion(model):
    add_lora(model)
    add_lora(model, "second")
    model.set_adapters(["first"], [0.5])
    model.fuse_lora(adapter_names=["first"])
    assert reads(model)
    model.set_adapters(["first", "second"], [1.0, 2.0])  # peft has no effect of it while anything is merged
    assert reads(model)
    model.unfuse_lora()
    assert not reads(model)


def test_no_active_adapter(model):
    add_lora(model)
    layer_of(model)._active_adapter = []
    assert reads(model)


@pytest.mark.parametrize("of", [lambda layer: layer, lambda layer: layer.base_layer])
def test_hooks_and_forwards_on_a_fused_layer_or_inside(model, of):
    add_lora(model)
    model.fuse_lora()
    hooked = of(layer_of(model))
    handle = hooked.register_forward_hook(lambda module, args, output: 2 * output)
    assert why_not_linear(linear_of(layer_of(model)), CPU, torch.float32) in ("torch hook", "LoRA layer")
    handle.remove()
    assert reads(model)
    hooked.forward = lambda x: -x
    assert why_not_linear(linear_of(layer_of(model)), CPU, torch.float32) in ("replaced forward", "LoRA layer")


def test_a_subclass_of_pefts_layer_is_called(model):
    add_lora(model)
    model.fuse_lora()
    layer = layer_of(model)

    class Linear(type(layer)):
        def forward(self, x):
            return -super().forward(x)

    layer.__class__ = Linear
    assert linear_of(layer) is layer


def test_other_modules_are_themselves():
    for module in (nn.Linear(2, 3), nn.SiLU()):
        assert linear_of(module) is module


def test_context_parallelism_is_one_reason_for_all_layers():
    """diffusers puts a layer's path into the name of its hook. Helios' summary had 40 reasons in each row."""
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    plan = {name: ContextParallelOutput(gather_dim=1, expected_dims=3) for name in ("0", "1")}
    apply_context_parallel(layers, ContextParallelConfig(ulysses_degree=2), plan)
    assert [hook_on(layer) for layer in layers] == ["hook cp_output"] * 2
