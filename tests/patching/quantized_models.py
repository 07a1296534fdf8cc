"""Configurations and checks that the tests of 8-bit weights share."""

import torch
from peft import LoraConfig

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.tiny_wan import output_of
from turbo_rcm_patch.kernels.quantized import quantize_weight
from turbo_rcm_patch.patching.weights.quantize_linears import quantized_linears

CPU = torch.device("cpu")
CONFIG = trp.Quantized()
FREED = trp.Quantized(restorable=False)
PER_BLOCK = 10
ERROR = 0.05  # of a tiny model with both operands' worth of e4m3 roundings, 2.6 % each


def up_to_date(linear):
    """True if a linear's 8-bit weight is what its original becomes."""
    expected = quantize_weight(linear.original, linear.quantized().format)
    return all(
        torch.equal(ours.float(), theirs.float().reshape(ours.shape))
        for ours, theirs in zip(linear.quantized(), expected, strict=True)
    )


def like_unpatched(model, plain):
    assert all(map(up_to_date, quantized_linears(model)))
    assert relative_error(output_of(model), output_of(plain)) <= ERROR


LORA = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]


def add_lora(model):
    torch.manual_seed(5)
    model.add_adapter(LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=LORA), adapter_name="first")
