"""Weights in 8 bits under LoRAs, offloading, casting, copies and gradients."""

import copy

import accelerate
import pytest
import torch
from peft import LoraConfig
from torch import nn

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.pairs import through_pickle, through_torch_save
from tests.patching.quantized_models import (
    CONFIG,
    CPU,
    ERROR,
    FREED,
    PER_BLOCK,
    add_lora,
    like_unpatched,
    up_to_date,
)
from tests.tiny_wan import output_of, tiny_wan_transformer
from turbo_rcm_patch.patching.weights.linear_8bit import PARTS, QuantizedLinear
from turbo_rcm_patch.patching.weights.quantize_linears import quantized_linears


@pytest.mark.parametrize("when", ["before", "after"])
def test_lora(model, when):
    plain = tiny_wan_transformer()
    base = output_of(plain)
    add_lora(plain)
    if when == "before":
        add_lora(model)
    patch = trp.patch(model, CONFIG)
    if when == "after":
        add_lora(model)
    assert len(quantized_linears(model)) == 2 * PER_BLOCK
    assert relative_error(output_of(plain), base) > 2 * ERROR
    like_unpatched(model, plain)
    adapters = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    assert len(adapters) == 2 * PER_BLOCK * 2
    assert {parameter.dtype for parameter in adapters} == {torch.float32}
    patch.restore()
    for each in (model, plain):
        each.fuse_lora()
    assert torch.equal(output_of(model), output_of(plain))
    for each in (model, plain):
        each.unfuse_lora()
        each.unload_lora()
    assert torch.equal(output_of(model), output_of(plain))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_lora_gets_the_dtype_of_the_model(dtype):
    """PEFT casts an adapter to the dtype of its base layer's weight."""
    model = tiny_wan_transformer(dtype=dtype)
    trp.patch(model, CONFIG)
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "ffn.net.2"]), adapter_name="first")
    model.load_lora_adapter(
        {
            "blocks.0.attn1.to_v.lora_A.weight": torch.randn(4, 128),
            "blocks.0.attn1.to_v.lora_B.weight": torch.randn(128, 4),
        },
        prefix=None,
        adapter_name="second",
    )
    adapters = {name: parameter.dtype for name, parameter in model.named_parameters() if "lora_" in name}
    assert any("to_v" in name for name in adapters)
    assert set(adapters.values()) <= {dtype, torch.float32}


def test_sequential_offload_never_moves_an_original(model, monkeypatch):
    plain = tiny_wan_transformer()
    patch = trp.patch(model, CONFIG)
    expected = output_of(model)
    accelerate.cpu_offload(model, execution_device=CPU)
    placed = []
    place = accelerate.hooks.set_module_tensor_to_device

    def watched(module, name, *arguments, **options):
        placed.append((module, name))
        return place(module, name, *arguments, **options)

    monkeypatch.setattr(accelerate.hooks, "set_module_tensor_to_device", watched)
    assert torch.equal(output_of(model), expected)
    assert {name for module, name in placed if isinstance(module, QuantizedLinear)} == {"bias"}
    patch.restore()
    assert torch.equal(output_of(model), output_of(plain))
    accelerate.hooks.remove_hook_from_submodules(model)
    assert torch.equal(output_of(model), output_of(plain))
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_model_offload_and_moves_leave_the_originals_alone(model):
    trp.patch(model, CONFIG)
    originals = [(linear.original, linear.original.data_ptr()) for linear in quantized_linears(model)]
    expected = output_of(model)
    hook = accelerate.cpu_offload_with_hook(model, execution_device=CPU)[1]
    assert torch.equal(output_of(model), expected)
    hook.offload()
    model.to("cpu", torch.float32)
    assert torch.equal(output_of(model), expected)
    assert all(
        linear.original is original and original.data_ptr() == pointer
        for linear, (original, pointer) in zip(quantized_linears(model), originals, strict=True)
    )


def test_a_move_takes_the_8_bit_weight_and_not_the_original(model):
    """The move is to the meta device, the only other device without a GPU."""
    trp.patch(model, CONFIG)
    model.blocks.to("meta")
    for linear in quantized_linears(model):
        assert linear.weight.device.type == linear.bias.device.type == "meta"
        assert all(linear._parameters[name].is_meta for name in PARTS)
        assert linear.original.device == CPU


def test_layerwise_casting_leaves_the_8_bit_weights_alone():
    model = tiny_wan_transformer(dtype=torch.bfloat16)
    patch = trp.patch(model, CONFIG)
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    output_of(model)
    assert all(map(up_to_date, quantized_linears(model)))
    patch.restore()
    output_of(model)


@pytest.mark.parametrize("config", [CONFIG, FREED], ids=["kept", "freed"])
@pytest.mark.parametrize("make", [copy.deepcopy, through_pickle, through_torch_save])
def test_copies_have_weights_of_their_own(model, make, config):
    plain = output_of(model)
    trp.patch(model, config)
    expected = output_of(model)
    twin = make(model)
    assert torch.equal(output_of(twin), expected)
    pointers = [{parameter.data_ptr() for parameter in each.parameters()} for each in (model, twin)]
    assert pointers[0].isdisjoint(pointers[1])
    if config is FREED:
        return
    for linear in quantized_linears(model):
        linear.original.data.zero_()
    trp.restore(twin)
    assert torch.equal(output_of(twin), plain)
    assert quantized_linears(model)


def test_a_copy_of_a_weight_alone_is_a_tensor(model):
    plain = tiny_wan_transformer().blocks[0].attn1.to_q.weight
    trp.patch(model, CONFIG)
    weight = model.blocks[0].attn1.to_q.weight
    for twin in (copy.deepcopy(weight), weight.clone(), weight.float() * 1, copy.deepcopy(weight[:])):
        assert type(twin) is torch.Tensor
        assert torch.equal(twin, plain)
        twin.zero_()
    assert torch.equal(weight, plain)
    assert "the original on the CPU" in repr(weight)
    assert isinstance(weight, nn.Parameter)
