"""The bytes of models: a LoRA counts with the copies that the patch makes."""

import gc

import pytest
import torch
from peft import LoraConfig

import turbo_rcm_patch as trp
from tests.tiny_wan import tiny_transformer_inputs, tiny_wan_transformer
from turbo_rcm_patch.memory.components import component_of
from turbo_rcm_patch.patching.lora.factors import Product


def on(model, product):
    """True if a product is that of a model's layers."""
    layers = set(model.modules())
    return any(adapter.layer in layers for adapters in product.adapters for adapter in adapters)


@pytest.mark.parametrize("rank", [64, 48, 100])
def test_a_lora_counts_with_the_copies_of_the_patch(rank):
    model = tiny_wan_transformer(dtype=torch.bfloat16)
    adapter = LoraConfig(r=rank, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)
    model.add_adapter(adapter)
    model.to(torch.bfloat16)
    trp.patch(model)
    with torch.no_grad():
        model(**tiny_transformer_inputs(model))
    products = [each for each in gc.get_objects() if type(each) is Product and on(model, each)]
    copies = sum(tensor.nbytes for product in products for tensor in product._prepared.values())
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert copies > 0
    predicted = component_of("transformer", model, trp.Exact())
    assert weights + copies <= predicted.weights <= weights + 1.1 * copies
