"""`keep`: names of linears and attentions that stay in the model's dtype, and the file that holds such names."""

import copy
import json
import pickle
from dataclasses import replace

import pytest
import torch

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.tiny_wan import output_of, tiny_wan_transformer
from turbo_rcm_patch.bench.cases import add_random_projections
from turbo_rcm_patch.keep_list import KeepList
from turbo_rcm_patch.patching.weights.quantize_linears import quantized_linears
from turbo_rcm_patch.patching.weights.store import convert_model

ATTENTION, LINEAR = "blocks.1.attn1.processor", "blocks.0.ffn.net.2"
PER_MODEL = 20


def content(**changes):
    config = tiny_wan_transformer().config
    sizes = {name: config[name] for name in ("num_layers", "num_attention_heads", "patch_size")}
    entries = [{"name": name, "error": 0.1} for name in (ATTENTION, LINEAR)]
    return {"version": 1, "model": "WanTransformer3DModel", "sizes": sizes, "keep": entries} | changes


def written(folder, **changes):
    path = folder / "keep.json"
    path.write_text(json.dumps(content(**changes)))
    return path


def test_a_named_attention_is_in_the_models_dtype_and_its_linears_are_not():
    model = tiny_wan_transformer()
    expected, errors = output_of(model), []
    for keep in ((), (ATTENTION,), ("*.processor",)):
        with trp.patch(model, trp.Quantized(quantize=["attention"], keep=keep)) as patch:
            errors.append(relative_error(output_of(model), expected))
            assert ("named in keep" in patch.summary()) == bool(keep)
    assert errors[0] > errors[1] > 1e-3 > 1e-5 > errors[2]  # nothing is in 8 bits in the end
    with trp.patch(model, trp.Quantized(keep=[ATTENTION])):
        assert len(quantized_linears(model)) == PER_MODEL


@pytest.mark.parametrize("config_class", [trp.Sparse, trp.BlockSparse])
def test_the_sparse_tiers_take_it_too(config_class):
    model = tiny_wan_transformer(head_dim=64)
    options = {"topk": 0.5} if config_class is trp.Sparse else {"min_tokens": 0, "mass": 0.5}
    if config_class is trp.Sparse:
        add_random_projections(type("Pipe", (), {"transformer": model}))
    outputs = {}
    for name, changes in {
        "8 bits": {},
        "kept": {"keep": ["*.processor"]},
        "not quantized": {"quantize": []},
    }.items():
        config = config_class(**{"quantize": ["attention"], "blocks": (4, 4), **options, **changes})
        with trp.patch(model, config):
            outputs[name] = output_of(model)
    unlike = relative_error(outputs["kept"], outputs["8 bits"])
    assert unlike > 1e-4
    if config_class is trp.Sparse:  # the same key blocks, without 8 bits
        assert relative_error(outputs["kept"], outputs["not quantized"]) < unlike / 10
    else:  # dense
        assert relative_error(outputs["kept"], output_of(model)) < 1e-5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blocks.2.attn1.processor", r"fits no self-attention of the WanTransformer3DModel; .* blocks\.0\.attn1"),
        ("blocks.0.attn2.processor", "fits no self-attention"),  # cross-attention is never in 8 bits
        ("blocks.0.ffn.net.7", "fits no module of the WanTransformer3DModel"),
    ],
)
@pytest.mark.parametrize("quantize", [["attention"], ["attention", "linears"]])
def test_a_name_that_fits_nothing_is_an_error_before_anything_changes(name, message, quantize):
    model = tiny_wan_transformer()
    before = dict(vars(model))
    with pytest.raises(ValueError, match=message):
        trp.patch(model, trp.Quantized(keep=[name], quantize=quantize))
    assert vars(model) == before


def test_a_file_is_the_list_of_its_names(tmp_path):
    model = tiny_wan_transformer()
    path = written(tmp_path)
    for given in (path, str(path)):
        config = trp.Quantized(keep=given)
        assert config == trp.Quantized(keep=[ATTENTION, LINEAR])
        for same in (replace(config, restorable=False), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
            assert isinstance(same.keep, KeepList)
            assert same.keep.why_not_for("WanTransformer3DModel", model.config) is None
    with trp.patch(model, config) as patch:
        assert len(quantized_linears(model)) == PER_MODEL - 1
        assert "named in keep" in patch.summary()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("{", "cannot read it as JSON"),
        ("[]", "it holds other data"),
        (json.dumps({"version": 1}), "it holds other data"),
        (json.dumps({"settings": {}, "keep": ["blocks.0"]}), "it holds other data"),
        (json.dumps({"version": 1, "model": "M", "sizes": {}, "keep": ["blocks.0"]}), "it holds other data"),
        (json.dumps({"version": 1, "model": "M", "sizes": {}, "keep": [{"name": ""}]}), "it holds other data"),
        (json.dumps({"version": 2, "keep": []}), "it has version 2, not 1"),
    ],
)
def test_another_file_is_an_error_that_says_what_to_give(tmp_path, text, message):
    path = tmp_path / "keep.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        trp.Quantized(keep=path)
    assert str(raised.value).startswith(f"keep={str(path)!r}: ")
    assert str(raised.value).endswith("or a file that turbo-rcm verify --keep-out wrote.")


def test_a_list_of_another_model_is_refused_with_both_sizes(tmp_path):
    path, model = written(tmp_path), tiny_wan_transformer(layers=3)
    with pytest.raises(ValueError, match=r"was measured on a WanTransformer3DModel with num_layers=2, .*num_layers=3"):
        trp.patch(model, trp.Quantized(keep=path))
    other = written(tmp_path, model="WanVACETransformer3DModel")
    with pytest.raises(ValueError, match=r"on a WanVACETransformer3DModel .* this is a WanTransformer3DModel"):
        trp.patch(tiny_wan_transformer(), trp.Quantized(keep=other))
    assert not quantized_linears(model)


def test_a_converted_model_takes_the_list_that_it_was_converted_with(tmp_path):
    model, path = tiny_wan_transformer(), written(tmp_path)
    model.save_pretrained(tmp_path / "model")
    config = trp.Quantized(keep=path)
    convert_model(tmp_path / "model", tmp_path / "kept", config, dtype=torch.float32)
    convert_model(tmp_path / "model", tmp_path / "whole", trp.Quantized(), dtype=torch.float32)
    with trp.patch(model, config):
        expected = output_of(model)
    loaded = tiny_wan_transformer(seed=9)
    with pytest.raises(trp.PatchError, match=rf"convert the model again with the same --keep: {LINEAR} is in 8 bits"):
        trp.load_converted(tmp_path / "whole", loaded, config)
    assert "named in keep" in trp.load_converted(tmp_path / "kept", loaded, config).summary()
    assert torch.equal(output_of(loaded), expected)
