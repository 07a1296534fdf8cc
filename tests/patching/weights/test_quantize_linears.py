"""Weights in 8 bits: which linears get them, where the originals are, and the way back."""

import gc

import accelerate
import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import nn

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.quantized_models import CONFIG, CPU, ERROR, FREED, PER_BLOCK, up_to_date
from tests.tiny_families import tiny_family_transformer
from tests.tiny_wan import output_of, tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch.kernels.quantized import FP8, INT8, quantize_weight
from turbo_rcm_patch.patching.weights import linear_8bit as quantized_linear
from turbo_rcm_patch.patching.weights.linear_8bit import AT_ONCE, QuantizedLinear, convert
from turbo_rcm_patch.patching.weights.quantize_linears import (
    bias_bound,
    format_for,
    quantized_linears,
    why_not_read,
)

# What is converted


def test_the_linears_of_blocks_are_converted_and_nothing_else(model):
    expected = output_of(model)
    trp.patch(model, CONFIG)
    paths = {path for path, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    linears = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert paths == {path for path in linears if path.startswith("blocks.")}
    assert len(paths) == PER_BLOCK * len(model.blocks)
    assert 1e-3 < relative_error(output_of(model), expected) <= ERROR


def test_the_forward_multiplies_by_the_dequantised_weight(model):
    trp.patch(model, CONFIG)
    linear, x = model.blocks[0].ffn.net[2], torch.randn(3, 48)
    expected = nn.functional.linear(x, quantize_weight(linear.weight.clone(), FP8).dequantize(), linear.bias)
    assert torch.equal(linear(x), expected)


@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize("at_once", [1, 4 * 16, AT_ONCE])
@pytest.mark.parametrize("format", [FP8, INT8])
def test_conversion_by_parts_is_conversion(rows, at_once, format, monkeypatch):
    monkeypatch.setattr(quantized_linear, "AT_ONCE", at_once)
    weight = torch.randn(rows, 16)
    for ours, theirs in zip(convert(weight, format, CPU), quantize_weight(weight, format), strict=True):
        assert torch.equal(ours.float(), theirs.float())


def test_formats_follow_the_gpu():
    """Linears whose input rows have known largest values are int8 on every GPU."""
    for capability in ((8, 0), (8, 6), (8, 9), (9, 0), None):
        newer = capability is None or capability >= (8, 9)
        assert format_for(capability, rows_known=False) == (FP8 if newer else INT8)
        assert format_for(capability, rows_known=True) == INT8


@pytest.mark.parametrize(
    ("family", "known", "unknown"),
    [
        ("wan", ("attn1.to_q", "ffn.net.0.proj"), ("attn1.to_out.0", "ffn.net.2")),
        ("animate 2", ("self_attn.to_q", "ffn.0"), ("self_attn.to_out.0", "ffn.2")),
    ],
)
def test_a_family_tells_which_linears_know_the_largest_values(family, known, unknown):
    model = tiny_family_transformer(family)
    trp.patch(model, CONFIG)
    block = model.blocks[0]
    formats = {path: block.get_submodule(path).quantized().format for path in (*known, *unknown)}
    assert formats == {**dict.fromkeys(known, INT8), **dict.fromkeys(unknown, FP8)}


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"keep": ["blocks.0.*"]}, PER_BLOCK),
        ({"keep": ["blocks.0"]}, PER_BLOCK),  # keep also covers the modules inside
        ({"keep": ["*.attn1"]}, 2 * (PER_BLOCK - 4)),
        ({"keep": ["*.ffn.net.2", "blocks.1.attn1.to_q"]}, 2 * PER_BLOCK - 3),
        ({"keep": ["patch_embedding"]}, 2 * PER_BLOCK),
        ({"fuse": ["feed_forward"]}, 4),
        ({"quantize": ["attention"]}, 0),
    ],
)
def test_names_and_groups_keep_layers_as_they_are(model, options, left):
    trp.patch(model, trp.Quantized(**options))
    assert len(quantized_linears(model)) == left


def test_fused_projections_are_left_alone(model):
    plain = tiny_wan_transformer()
    for each in (model, plain):
        each.fuse_qkv_projections()
    trp.patch(model, CONFIG)
    assert type(model.blocks[0].attn1.to_q) is type(model.blocks[0].attn2.to_k) is nn.Linear
    assert type(model.blocks[0].attn2.to_q) is QuantizedLinear
    assert relative_error(output_of(model), output_of(plain)) <= ERROR


def test_projections_fused_later_are_those_of_the_originals(model):
    trp.patch(model, CONFIG)
    expected = torch.cat([linear.weight.clone() for linear in (model.blocks[0].attn1.to_q, model.blocks[0].attn1.to_k)])
    model.fuse_qkv_projections()
    assert torch.equal(model.blocks[0].attn1.to_qkv.weight[: len(expected)], expected)
    assert relative_error(output_of(model), output_of(tiny_wan_transformer())) <= ERROR


def test_a_weight_that_two_linears_share_stays_as_it_is(model):
    first, second = (block.attn1.to_q for block in model.blocks)
    second.weight = first.weight
    with trp.patch(model, CONFIG):
        assert len(quantized_linears(model)) == 2 * PER_BLOCK - 2
        assert first.weight is second.weight


def test_what_kernels_ask(model):
    trp.patch(model, CONFIG)
    linear = model.blocks[0].ffn.net[0].proj
    assert bias_bound(linear.bias) == linear.bias.abs().max()
    assert why_not_read(linear, CPU) is None
    assert why_not_read(linear, torch.device("meta")) == "weight on cpu"
    handle = linear.register_forward_hook(lambda *_: None)
    assert why_not_read(linear, CPU) == "torch hook"
    handle.remove()


def test_the_summary_tells_where_the_originals_are(model):
    with trp.patch(model, CONFIG) as patch:
        assert "weights of 20 linears in 8 bits: 0.3 MiB on cpu; the originals, 1.1 MiB, are kept" in patch.summary()
    assert "are freed" in trp.patch(model, FREED).summary()


# The way back


def test_a_cast_model_gets_its_originals_back_in_its_dtype(model):
    with trp.patch(model, CONFIG):
        model.to(torch.bfloat16)
        assert model.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16
        assert model.state_dict()["blocks.0.attn1.to_q.weight"].dtype == torch.bfloat16
        assert model.blocks[0].ffn.net[2].quantized().values.dtype == FP8
        assert all(map(up_to_date, quantized_linears(model)))
    assert {parameter.dtype for parameter in model.blocks.parameters()} == {torch.bfloat16}


def test_a_failure_leaves_all_as_it_was(monkeypatch):
    pipe = tiny_wan_pipeline("wan22")
    models = pipe.transformer, pipe.transformer_2
    parameters = [[id(parameter) for parameter in model.parameters()] for model in models]
    expected = [output_of(model) for model in models]
    conversions = []

    def failing(*arguments):
        conversions.append(arguments)
        if len(conversions) == 2 * PER_BLOCK + 3:
            raise MemoryError("halfway")
        return convert(*arguments)

    monkeypatch.setattr("turbo_rcm_patch.patching.weights.quantize_linears.convert", failing)
    for config in (CONFIG, FREED):
        conversions.clear()
        with pytest.raises(MemoryError):
            trp.patch(pipe, config)
        assert [[id(parameter) for parameter in model.parameters()] for model in models] == parameters
        assert not any(quantized_linears(model) for model in models)
        assert all(torch.equal(output_of(model), output) for model, output in zip(models, expected, strict=True))


def test_a_model_on_the_meta_device_is_refused():
    with accelerate.init_empty_weights():
        model = WanTransformer3DModel(num_attention_heads=2, attention_head_dim=64, num_layers=1, ffn_dim=48)
    with pytest.raises(ValueError, match=r"blocks\.0\.attn1\.to_q\.weight is on the meta device.*load_converted"):
        trp.patch(model, CONFIG)
    assert not quantized_linears(model)


def test_freed_originals_free_their_memory_and_cannot_come_back(model):
    original = model.blocks[0].attn1.to_q.weight.untyped_storage()
    reference = torch.multiprocessing.reductions.StorageWeakRef(original)
    del original
    expected = output_of(model)
    patch = trp.patch(model, FREED)
    gc.collect()
    assert reference.expired()
    assert relative_error(output_of(model), expected) <= ERROR
    with pytest.raises(
        trp.PatchError, match="cannot restore transformer: the original weights of 20 linears were freed"
    ):
        patch.restore()
    assert patch.active
    with pytest.raises(RuntimeError, match=r"blocks\.0\.attn1\.to_q\.weight: the values of this weight were freed"):
        model.state_dict()
    with pytest.raises(RuntimeError, match=r"the values of this weight were freed.*restorable=True"):
        model.blocks[0].attn1.to_q.weight.data += 1
    with pytest.raises(RuntimeError, match="were freed"):
        model.blocks[0].attn1.to_q.weight.clone()
