"""Files of TurboDiffusion and rCM stored for a tier load with the values of the file."""

import json

import pytest
import torch
from diffusers import WanTransformer3DModel

import turbo_rcm_patch as trp
from tests.official_names import in_8_bits, official_state_dict, with_proj_l
from tests.oracle import relative_error, same_tensors
from tests.tiny_wan import output_of, tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch.patching.weights.load import FILE
from turbo_rcm_patch.patching.weights.store import convert_model

I2V = {"in_channels": 36, "image_dim": 4, "added_kv_proj_dim": "inner"}
OF_PROJ_L = {"topk": 0.7, "blocks": (5, 4)}


def model_of(seed=9, head_dim=64, **options):
    return tiny_wan_transformer(seed=seed, head_dim=head_dim, rope_max_seq_len=1024, **options)


def turbo(path, *, prefix="", quant=False, **options):
    model = model_of(**options)
    weights = with_proj_l(official_state_dict(model, prefix=prefix, flat_patches=True), model, prefix=prefix)
    torch.save(in_8_bits(weights, prefix=prefix) if quant else weights, path)
    return weights


@pytest.mark.parametrize("options", [{}, I2V], ids=["t2v", "i2v"])
def test_weights_without_sla_become_diffusers_own(tmp_path, options):
    """The config is inferred: that of a model with heads of 128 channels, as every Wan has."""
    model = model_of(head_dim=128, **options)
    torch.save(official_state_dict(model, prefix="net.", flat_patches=True), tmp_path / "rcm.pt")
    convert_model(tmp_path / "rcm.pt", tmp_path / "out", trp.PRESETS["exact"], dtype=torch.float32)
    again = WanTransformer3DModel.from_pretrained(tmp_path / "out")
    configs = [json.loads(each.to_json_string()) for each in (again, model)]
    assert {**configs[0], "_name_or_path": None} == {**configs[1], "_name_or_path": None}
    assert torch.equal(output_of(again), output_of(model))


def test_weights_with_sla_become_diffusers_files_with_projections(tmp_path):
    turbo(tmp_path / "TurboWan.pth", quant=True)
    convert_model(tmp_path / "TurboWan.pth", tmp_path / "out", trp.PRESETS["exact"], dtype=torch.float32)
    from_file, from_folder = model_of(seed=1), model_of(seed=2)
    trp.load_turbodiffusion(tmp_path / "TurboWan.pth", from_file, attention="sla", **OF_PROJ_L)
    trp.load_turbodiffusion(tmp_path / "out", from_folder, attention="sla", **OF_PROJ_L)
    assert torch.equal(output_of(from_file), output_of(from_folder))


@pytest.mark.parametrize("quant", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_stored_in_8_bits_and_loaded_is_what_is_loaded_from_the_file(tmp_path, quant, again):
    """Also by way of diffusers' files."""
    path = tmp_path / "TurboWan.pth"
    turbo(path, quant=quant)
    sparse = trp.Sparse(**OF_PROJ_L)
    from_file, stored = model_of(seed=1), model_of(seed=2)
    trp.load_turbodiffusion(path, from_file, **OF_PROJ_L)
    if again:
        convert_model(path, tmp_path / "diffusers", trp.PRESETS["exact"], dtype=torch.float32)
        path = tmp_path / "diffusers"
    convert_model(path, tmp_path / "out", sparse, dtype=torch.float32)
    patch = trp.load_converted(tmp_path / "out", stored, sparse)
    # The values are the same; where they lie in memory decides how a CPU adds them up.
    ours, theirs = (dict(model.named_buffers()) | dict(model.named_parameters()) for model in (stored, from_file))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].float(), theirs[name].float()) for name in ours)
    assert relative_error(output_of(stored), output_of(from_file)) < 1e-6
    assert "SLA" in patch.summary()


def test_the_tier_has_to_be_that_of_the_weights(tmp_path):
    turbo(tmp_path / "TurboWan.pth")
    model = model_of(head_dim=128)
    torch.save(official_state_dict(model), tmp_path / "rcm.pt")
    for name, preset, message in (
        (
            "TurboWan.pth",
            "quantized",
            "were trained with sparse-linear attention .*; give the preset 'sparse'",
        ),
        ("rcm.pt", "sparse", "were trained without sparse-linear attention .*; give another preset"),
    ):
        with pytest.raises(ValueError, match=message):
            convert_model(tmp_path / name, tmp_path / "out", trp.PRESETS[preset])
        assert not (tmp_path / "out").exists()
    convert_model(tmp_path / "TurboWan.pth", tmp_path / "sparse", trp.PRESETS["sparse"])
    convert_model(tmp_path / "rcm.pt", tmp_path / "quantized", trp.PRESETS["quantized"])
    with pytest.raises(trp.PatchError, match=r"with proj_l\); give the preset 'sparse'"):
        trp.load_converted(tmp_path / "sparse", model_of())
    with pytest.raises(trp.PatchError, match=r"no proj_l\); give another preset, such as 'quantized'"):
        trp.load_converted(tmp_path / "quantized", model, "sparse")
    with pytest.raises(ValueError, match="the config is of the exact tier"):
        trp.load_converted(tmp_path / "quantized", model, "exact")


def test_files_of_something_else(tmp_path):
    torch.save({"encoder.weight": torch.zeros(3)}, tmp_path / "vae.pth")
    with pytest.raises(ValueError, match=r"holds no Wan transformer: it has no patch_embedding\.weight"):
        convert_model(tmp_path / "vae.pth", tmp_path / "out", trp.PRESETS["exact"])
    weights = turbo(tmp_path / "TurboWan.pth")
    weights["odd"] = torch.zeros(1)
    torch.save(weights, tmp_path / "TurboWan.pth")
    with pytest.raises(ValueError, match="odd is unexpected"):
        convert_model(tmp_path / "TurboWan.pth", tmp_path / "out", trp.PRESETS["exact"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["TurboWan.pth", "vae.pth"]


WRONG_FILES = {
    "nunchaku": (
        "qweight",
        r"net\.blocks\.0\.ffn\.0\.qweight in place of \S+: its weights are quantised in a format that",
    ),
    "quanto": ("weight._data", r"ffn\.0\.weight\._data in place of \S+: its weights are quantised in a format that"),
    "another layer": ("other.weight", r"holds no Wan transformer: it has no blocks\.0\.ffn\.0\.weight or \S+\. Give a"),
}


@pytest.mark.parametrize(("name", "message"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_a_file_without_a_weight(tmp_path, name, message):
    weights, layer = official_state_dict(model_of(head_dim=128), prefix="net."), "net.blocks.0.ffn.0"
    weights[f"{layer}.{name}"] = weights.pop(f"{layer}.weight")
    torch.save(weights, tmp_path / "file.pth")
    with pytest.raises(ValueError, match=message):
        convert_model(tmp_path / "file.pth", tmp_path / "out", trp.PRESETS["exact"])


def test_a_lora_is_no_whole_model(tmp_path):
    parts = {"lora_down.weight": torch.ones(4, 16), "lora_up.weight": torch.ones(16, 4), "alpha": torch.tensor(4.0)}
    torch.save({f"diffusion_model.patch_embedding.{part}": value for part, value in parts.items()}, tmp_path / "l.pth")
    with pytest.raises(ValueError, match=r"is a LoRA, not a whole model; load it with use_distilled"):
        convert_model(tmp_path / "l.pth", tmp_path / "out", trp.PRESETS["exact"])


@pytest.mark.parametrize("preset", ["exact", "sparse"])
def test_a_folder_with_one_file_is_that_file(tmp_path, preset):
    (tmp_path / "in").mkdir()
    turbo(tmp_path / "in/TurboWan.pth")
    (tmp_path / "in/README.md").write_text("")
    convert_model(tmp_path / "in", tmp_path / "1", trp.PRESETS[preset])
    convert_model(tmp_path / "in/TurboWan.pth", tmp_path / "2", trp.PRESETS[preset])
    from_folder, from_file = (sorted((tmp_path / out).iterdir()) for out in "12")
    assert [path.name for path in from_folder] == [path.name for path in from_file]
    assert [path.read_bytes() for path in from_folder] == [path.read_bytes() for path in from_file]
    turbo(tmp_path / "in/another.pth")
    with pytest.raises(ValueError, match=r"holds TurboWan\.pth, another\.pth; give the path of one file"):
        convert_model(tmp_path / "in", tmp_path / "3", trp.PRESETS[preset])


def test_two_experts_are_converted_one_by_one(tmp_path):
    sparse = trp.Sparse(**OF_PROJ_L)
    pipe, expected = tiny_wan_pipeline("wan22"), {}
    for name, seed in (("transformer", 21), ("transformer_2", 22)):
        turbo(tmp_path / f"{name}.pth", seed=seed)
        convert_model(tmp_path / f"{name}.pth", tmp_path / "out" / name, sparse, dtype=torch.float32)
        trp.load_turbodiffusion(tmp_path / f"{name}.pth", expert := model_of(), **OF_PROJ_L)
        setattr(pipe, name, model_of())
        expected[name] = output_of(expert)
    trp.load_converted(tmp_path / "out", pipe, sparse)
    for name, result in expected.items():
        assert relative_error(output_of(getattr(pipe, name)), result) < 1e-6


def test_a_folder_for_the_exact_tier_keeps_every_value(tmp_path):
    model = tiny_wan_transformer(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "in")
    convert_model(tmp_path / "in", tmp_path / "out", trp.PRESETS["exact"])
    assert not (tmp_path / "out" / FILE).exists()
    again = WanTransformer3DModel.from_pretrained(tmp_path / "out", torch_dtype=torch.bfloat16)
    assert same_tensors(again.state_dict(), model.state_dict())
    assert json.loads((tmp_path / "out/config.json").read_text())["_class_name"] == "WanTransformer3DModel"
