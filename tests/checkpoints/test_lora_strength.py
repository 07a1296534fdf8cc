"""A LoRA file has the strength with which PEFT trained it, wherever its trainer wrote alpha, ranks and rsLoRA."""

import copy
import json

import peft
import pytest
import torch
from diffusers import WanPipeline
from peft import LoHaConfig, LoKrConfig, LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.loha import layer as loha
from peft.tuners.lokr import layer as lokr
from safetensors.torch import load_file, save_file

import turbo_rcm_patch as trp
from tests import lora_files
from tests.lora_files import read_lora
from tests.tiny_wan import tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch.checkpoints.files import find_files, read_tensors
from turbo_rcm_patch.checkpoints.peft_config import PeftConfig

PATTERNS = {"alpha_pattern": {"blocks.1.attn1.to_q": 1}, "rank_pattern": {"^blocks.0.attn2.to_k": 4}}
CONFIGS = {
    "alpha": {},
    "patterns": PATTERNS,
    "rslora": {"use_rslora": True},
    "rslora and patterns": {"use_rslora": True, **PATTERNS},
    "options without effect": {"fan_in_fan_out": True, "lora_bias": True, "lora_dropout": 0.5},
}


def trained(**options):
    """A model that PEFT gave a LoRA, and its configuration."""
    options = {"r": 16, "lora_alpha": 4, "target_modules": ["to_q", "to_k"], "init_lora_weights": False, **options}
    return tiny_wan_transformer(), LoraConfig(**options)


def by_model(model, config, folder):
    model.add_adapter(config)
    model.save_lora_adapter(folder)


def by_pipeline(model, config, folder):
    model.add_adapter(config)
    metadata = model.peft_config["default"].to_dict()
    layers = get_peft_model_state_dict(model)
    WanPipeline.save_lora_weights(folder, layers, transformer_lora_adapter_metadata=metadata)


def by_finetrainers(model, config, folder):
    by_pipeline(model, config, folder)
    path = folder / "pytorch_lora_weights.safetensors"
    options = model.peft_config["default"].to_dict()
    options = {name: list(value) if isinstance(value, set) else value for name, value in options.items()}
    save_file(load_file(path), path, {"lora_config": json.dumps(options)})


def by_peft(model, config, folder):
    get_peft_model(model, config).save_pretrained(folder)


SAVERS = {"model": by_model, "pipeline": by_pipeline, "finetrainers": by_finetrainers, "peft": by_peft}


def added_by_peft(model):
    """Return what PEFT adds to each weight and bias, by name."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, peft.tuners.lora.Linear)}
    names = {name.removeprefix("base_model.model."): layer for name, layer in layers.items()}
    weights = {f"{name}.weight": layer.get_delta_weight("default").detach() for name, layer in names.items()}
    biases = {
        f"{name}.bias": layer.scaling["default"] * layer.lora_B["default"].bias.detach()
        for name, layer in names.items()
        if layer.lora_B["default"].bias is not None
    }
    return weights | biases


def added(lora):
    return {f"{name}.weight": pair.product() for name, pair in lora.pairs.items()} | lora.differences


def read(source, model):
    tensors, metadata = read_tensors(find_files(source, 1)[0])
    return read_lora(tensors, model, metadata)


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("options", CONFIGS)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_the_strength_is_peft_s(saver, options, tmp_path):
    model, config = trained(**CONFIGS[options])
    SAVERS[saver](model, config, tmp_path)
    lora, expected = read(tmp_path, tiny_wan_transformer()), added_by_peft(model)
    found = added(lora)
    assert set(found) == set(expected)
    for name, change in expected.items():
        torch.testing.assert_close(found[name], change, rtol=1e-5, atol=1e-6)
    assert not lora.unused
    assert not lora.assumed
    assert lora.has_alpha


PRODUCTS = {
    "lokr": LoKrConfig(r=4, alpha=8, decompose_factor=8),
    "lokr, both in two matrices": LoKrConfig(r=2, alpha=1, decompose_both=True, alpha_pattern={"1.attn1.to_q": 3}),
    "lokr, whole matrices": LoKrConfig(r=64, alpha=16, rank_pattern={"1.attn1.to_q": 32}),
    "loha": LoHaConfig(r=4, alpha=2),
}


@pytest.mark.parametrize("kind", PRODUCTS)
def test_lokr_and_loha_are_peft_s(kind, tmp_path):
    model, config = tiny_wan_transformer(), copy.deepcopy(PRODUCTS[kind])
    config.init_weights, config.target_modules = False, {"to_q", "net.0.proj"}
    by_peft(model, config, tmp_path)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, (lokr.Linear, loha.Linear))}
    found = read(tmp_path, tiny_wan_transformer())
    assert set(found.products) == {f"{name}.weight" for name in layers}
    for name, layer in layers.items():
        expected = layer.get_delta_weight("default").detach()
        torch.testing.assert_close(found.products[f"{name}.weight"].dense(), expected, rtol=1e-5, atol=1e-6)
    assert (found.unused, found.assumed) == ({}, 0)


def test_peft_s_configuration_counts_for_a_file_that_is_given_by_its_path_and_for_pickled_ones(tmp_path):
    model, config = trained()
    by_peft(model, config, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    assert {pair.scale for pair in read(file, tiny_wan_transformer()).pairs.values()} == {0.25}
    pickled = tmp_path / "adapter_model.bin"
    torch.save(load_file(file), pickled)
    assert {pair.scale for pair in read(pickled, tiny_wan_transformer()).pairs.values()} == {0.25}
    other = lora_files.style(tiny_wan_transformer()).save(tmp_path / "another_tool_s.safetensors")
    assert {pair.scale for pair in read(other, tiny_wan_transformer()).pairs.values()} == {1.0}


def test_peft_s_configuration_counts_for_the_only_file_of_weights_beside_it(tmp_path):
    model, config = trained()
    by_peft(model, config, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    bare = {name.removeprefix("base_model.model."): tensor for name, tensor in load_file(file).items()}
    exported = tmp_path / "style.safetensors"
    save_file(bare, exported)
    assert {pair.scale for pair in read(exported, tiny_wan_transformer()).pairs.values()} == {1.0}
    file.unlink()
    assert {pair.scale for pair in read(exported, tiny_wan_transformer()).pairs.values()} == {0.25}


def test_kohya_s_header_is_ignored_because_musubi_keeps_it_for_matrices_that_hold_the_alpha():
    file = lora_files.lightning(tiny_wan_transformer(), 32, alphas=(None,))
    lora = read_lora(file.tensors, file.model, {"ss_network_alpha": "8", "ss_network_dim": "32"})
    assert {pair.scale for pair in lora.pairs.values()} == {1.0}
    assert lora.assumed == 20


def test_a_tensor_with_the_alpha_goes_before_the_configuration():
    file = lora_files.lightning(tiny_wan_transformer(), 64, (8.0,))
    saved = {"lora_adapter_metadata": json.dumps({"lora_alpha": 64, "r": 64})}
    assert {pair.scale for pair in read_lora(file.tensors, file.model, saved).pairs.values()} == {0.125}
    fastvideo = {key.replace(".alpha", ".lora_alpha"): tensor for key, tensor in file.tensors.items()}
    assert {pair.scale for pair in read_lora(fastvideo, file.model).pairs.values()} == {0.125}


def test_the_handle_says_which_strength_it_assumed(tmp_path):
    pipe = tiny_wan_pipeline()
    without = lora_files.lightx2v(pipe.transformer).save(tmp_path / "lightx2v_step_distill.safetensors")
    with trp.use_distilled(pipe, without) as handle:
        assert "rank 64, no alpha (alpha = rank assumed), 44 differences" in str(handle)
    file = lora_files.lightning(pipe.transformer)
    with trp.use_distilled(pipe, file.save(tmp_path / "lightning.safetensors")) as handle:
        assert "assumed" not in str(handle)
    del file.tensors["diffusion_model.blocks.0.ffn.0.alpha"]
    with trp.use_distilled(pipe, file.save(tmp_path / "lightning.safetensors")) as handle:
        assert "20 linears of rank 64, 1 of them without alpha (alpha = rank assumed)," in str(handle)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"use_dora": True}, "use_dora=true"),
        ({"bias": "lora_only"}, 'bias="lora_only"'),
        ({"init_lora_weights": "pissa_niter_4"}, 'init_lora_weights="pissa_niter_4"'),
        ({"init_lora_weights": "olora"}, 'init_lora_weights="olora"'),
        ({"modules_to_save": ["proj_out"]}, r'modules_to_save=\["proj_out"\]'),
        ({"peft_type": "OFT"}, 'peft_type="OFT"'),
        ({"layer_replication": [[0, 4]]}, r"layer_replication=\[\[0, 4\]\]"),
    ],
)
def test_settings_that_ask_for_other_arithmetic_are_refused_by_name(options, named):
    file = lora_files.style(tiny_wan_transformer())
    saved = {"lora_adapter_metadata": json.dumps({"transformer.r": 4, "transformer.lora_alpha": 4} | options)}
    prefixed = {f"transformer.{name}": value for name, value in options.items()}
    for metadata in (
        {"adapter_config.json": json.dumps({"r": 4, "lora_alpha": 4, **options})},
        {"lora_adapter_metadata": json.dumps({"transformer.r": 4, "transformer.lora_alpha": 4, **prefixed})},
    ):
        with pytest.raises(ValueError, match=f"{named}, which is not supported; merge the LoRA into its model"):
            read_lora(file.tensors, file.model, metadata)
    assert read_lora(file.tensors, file.model, saved)  # another component's settings


@pytest.mark.parametrize("key", ["dora_scale", "lora_magnitude_vector", "lora_magnitude_vector.default.weight"])
def test_the_matrices_of_a_dora_are_not_loaded_without_its_magnitudes(key):
    file = lora_files.style(tiny_wan_transformer())
    file.tensors[f"blocks.0.attn1.to_q.{key}"] = torch.ones(128)
    with pytest.raises(ValueError, match=rf"it is a DoRA \(blocks\.0\.attn1\.to_q\.{key}\), which is not supported"):
        read_lora(file.tensors, file.model)


def test_every_setting_of_this_peft_is_known():
    for config in PRODUCTS.values():
        plain = {**config.to_dict(), "target_modules": ["to_q"]}
        assert PeftConfig({"adapter_config.json": json.dumps(plain)}).unknown == []
    _, config = trained()
    plain = {name: list(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    assert PeftConfig({"adapter_config.json": json.dumps(plain)}).unknown == []
    for name in plain:
        value = {"alpha_pattern": {}, "rank_pattern": {}}.get(name, 7)
        try:
            unknown = PeftConfig({"adapter_config.json": json.dumps({name: value})}).unknown
        except ValueError:  # refused by name
            continue
        assert not unknown


def test_a_setting_of_a_later_peft_is_named_as_unused():
    file = lora_files.style(tiny_wan_transformer())
    lora = read_lora(file.tensors, file.model, {"lora_config": json.dumps({"lora_alpha": 2, "twist": 3, "turn": None})})
    assert lora.unused == {"lora_config: twist": "unknown setting of PEFT"}
    assert {pair.scale for pair in lora.pairs.values()} == {0.5}


WRONG_NUMBERS = [
    *('{"lora_alpha": "4"}', '{"lora_alpha": NaN}', '{"alpha_pattern": [4]}'),
    *('{"alpha_pattern": {"to_q": "x"}}', '{"alpha_pattern": {"(": 4}}', '{"alpha_pattern": {"(?i)to_q": 4}}'),
    *('{"lora_alpha": ""}', f'{{"lora_alpha": 1{400 * "0"}}}'),
]


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ("{", "its lora_config cannot be read as a JSON table"),
        ("[1]", "its lora_config cannot be read as a JSON table"),
        *((wrong, "lora_config has an alpha or a rank that is no number") for wrong in WRONG_NUMBERS),
        ('{"lora_alpha": 4, "r": 8}', r"tells rank 8 for blocks\.0\.attn1\.to_q, but its matrices have rank 4"),
    ],
)
def test_a_broken_configuration_is_an_error(saved, message):
    file = lora_files.style(tiny_wan_transformer())
    with pytest.raises(ValueError, match=message):
        read_lora(file.tensors, file.model, {"lora_config": saved})
