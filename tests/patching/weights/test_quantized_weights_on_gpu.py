"""Weights in 8 bits on a GPU: the memory they take, and that no original comes back to it."""

import gc

import pytest
import torch
from torch import nn

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.quantized_models import CONFIG, ERROR, FREED, add_lora
from tests.tiny_wan import frames_of, output_of, tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch.kernels.quantized import FP8, INT8, quantize_weight
from turbo_rcm_patch.patching.weights.linear_8bit import AT_ONCE, QuantizedLinear, convert
from turbo_rcm_patch.patching.weights.quantize_linears import quantized_linears

LARGE = {"heads": 8, "head_dim": 128, "ffn_dim": 4096, "layers": 4, "dtype": torch.bfloat16}


def allocated():
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


@pytest.mark.gpu
@pytest.mark.parametrize("config", [CONFIG, FREED], ids=["kept", "freed"])
@pytest.mark.parametrize("first", ["patch", "move"])
def test_linears_take_half_on_a_gpu(first, config):
    """For real models test_needs.py shows at most 55 %: their embeddings are a smaller part."""
    with trp.patch(tiny_wan_transformer(**LARGE).cuda(), CONFIG) as patch:
        output_of(patch.transformers["transformer"], "cuda")  # allocates what libraries keep
    del patch
    empty = allocated()
    model = tiny_wan_transformer(**LARGE).cuda()
    full, expected = allocated() - empty, output_of(model, "cuda")
    sizes = [linear.weight.nbytes for linear in model.blocks.modules() if isinstance(linear, nn.Linear)]
    model.cpu()
    assert allocated() - empty < 0.01 * full
    if first == "move":
        model.cuda()
    torch.cuda.reset_peak_memory_stats()
    trp.patch(model, config)
    if first == "patch":  # a weight at a time comes there, in 8 bits, and a part of it in fp32
        assert torch.cuda.max_memory_allocated() - empty <= max(sizes) / 2 + 5 * 4 * AT_ONCE
        model.cuda()
    assert allocated() - empty <= full - 0.49 * sum(sizes)
    assert relative_error(output_of(model, "cuda"), expected) <= ERROR
    assert all(linear.original.device.type in ("cpu", "meta") for linear in quantized_linears(model))
    del model
    assert allocated() - empty < 0.01 * full


@pytest.mark.gpu
@pytest.mark.parametrize("format", [FP8, INT8])
def test_conversion_on_a_gpu_is_that_on_the_cpu(format):
    """Several parts give the same bits, except for the norms, whose sums have another order."""
    rows, K = AT_ONCE // 256 + 3, 256
    weight = torch.randn(rows, K, dtype=torch.bfloat16)
    ours, theirs = convert(weight.cuda(), format, torch.device("cuda")), quantize_weight(weight, format)
    assert torch.equal(ours.scale.cpu(), theirs.scale)
    assert torch.equal(ours.values.cpu().float(), theirs.values.float())
    torch.testing.assert_close(ours.norm.cpu(), theirs.norm, rtol=K * 2.0**-24, atol=0)


@pytest.mark.gpu
def test_restore_brings_the_originals_to_where_the_model_is():
    model = tiny_wan_transformer(**LARGE).cuda()
    parameters, expected = {name: id(p) for name, p in model.named_parameters()}, output_of(model, "cuda")
    patch = trp.patch(model, CONFIG)
    model.cpu()
    model.cuda()
    patch.restore()
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    assert all(parameter.is_cuda for parameter in model.parameters())
    assert torch.equal(output_of(model, "cuda"), expected)
    patch = trp.patch(model, CONFIG)
    model.cpu()
    patch.restore()
    assert not any(parameter.is_cuda for parameter in model.parameters())
    assert torch.equal(output_of(model.cuda(), "cuda"), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("when", ["before", "after"])
def test_lora_on_a_gpu(when):
    model, plain = (tiny_wan_transformer().cuda() for _ in range(2))
    for each in (model, plain) if when == "before" else (plain,):
        add_lora(each)
    patch = trp.patch(model, CONFIG)
    if when == "after":
        add_lora(model)
    assert relative_error(output_of(model, "cuda"), output_of(plain, "cuda")) <= ERROR
    patch.restore()
    for each in (model, plain):
        each.fuse_lora()
        each.unload_lora()
    assert torch.equal(output_of(model, "cuda"), output_of(plain, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["to", "enable_model_cpu_offload", "enable_sequential_cpu_offload", "group"])
def test_pipelines_never_bring_originals_to_a_gpu(offload, monkeypatch):
    patched, plain = tiny_wan_pipeline(), tiny_wan_pipeline()
    patch = trp.patch(patched, CONFIG)
    on_gpu_once = []
    forward = QuantizedLinear.forward

    def watched(self, x):
        if isinstance(self, QuantizedLinear):  # else accelerate's hooks hold it beyond `restore`
            on_gpu_once.append(x.is_cuda and self.original.is_cuda)
        return forward(self, x)

    monkeypatch.setattr(QuantizedLinear, "forward", watched)
    if offload == "to":
        patched.to("cuda")
        assert patched._execution_device.type == patched.transformer.device.type == "cuda"
    elif offload == "group":
        stream = {"onload_device": torch.device("cuda"), "offload_type": "block_level", "use_stream": True}
        patched.enable_group_offload(num_blocks_per_group=1, **stream)
    else:
        getattr(patched, offload)()
    plain.to("cuda")
    assert relative_error(frames_of(patched), frames_of(plain)) <= 2 * ERROR
    assert on_gpu_once == [] or not any(on_gpu_once)
    patch.restore()
    assert relative_error(frames_of(patched), frames_of(plain)) <= 1e-4
