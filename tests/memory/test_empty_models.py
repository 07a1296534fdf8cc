"""Models from configs alone have the sizes and dtypes of the loaded ones."""

import json

import pytest
import torch
from diffusers import DiffusionPipeline

from tests.tiny_wan import tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch.memory.empty_models import empty_models, facts_of_class, with_empty_projections
from turbo_rcm_patch.patching.families import CASES


def tensors_of(model):
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in named}


@pytest.mark.parametrize("variant", ["i2v", "wan22"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_pipelines_models_are_those_that_are_loaded(variant, dtype, tmp_path):
    tiny_wan_pipeline(variant).save_pretrained(tmp_path)
    loaded = DiffusionPipeline.from_pretrained(tmp_path, dtype=dtype)
    expected = {name: m for name, m in loaded.components.items() if isinstance(m, torch.nn.Module)}
    empty = empty_models(tmp_path, dtype)
    assert empty.keys() == expected.keys()
    for name, model in empty.items():
        assert tensors_of(model) == tensors_of(expected[name])
        assert all(parameter.is_meta for parameter in model.parameters())
        assert type(model) is type(expected[name])


def test_a_lone_transformer_has_the_vae_beside_it(tmp_path):
    pipe = tiny_wan_pipeline("t2v")
    pipe.transformer.save_config(tmp_path / "transformer")
    assert empty_models(tmp_path / "transformer").keys() == {"transformer"}
    pipe.vae.save_config(tmp_path / "vae")
    assert empty_models(tmp_path / "transformer").keys() == {"transformer", "vae"}


def test_a_known_size_has_the_encoders_of_its_checkpoint():
    models = empty_models("wan2.1-i2v-14b")
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    assert 5.6e9 < sizes["text_encoder"] < 5.75e9  # UMT5-XXL's encoder, whose table of tokens counts once
    assert 0.62e9 < sizes["image_encoder"] < 0.64e9
    assert {"transformer", "vae"} < models.keys()
    for name, case in CASES.items():
        width = case.transformer.get("caption_channels") or case.transformer.get("text_dim", 4096)
        for encoder, (_, config) in case.encoders.items():
            found = getattr(config, "text_config", config).hidden_size
            assert found == (case.transformer["image_dim"] if encoder == "image_encoder" else width), name


def test_projections_of_the_sparse_tier():
    model = tiny_wan_transformer(dtype=torch.bfloat16).to("meta")
    sparse = with_empty_projections(model)
    assert not hasattr(model.blocks[0].attn1, "proj_l")
    for block in sparse.blocks:
        assert block.attn1.proj_l.weight.shape == (64, 64)
        assert block.attn1.proj_l.weight.dtype == torch.bfloat16


def test_folders_that_hold_no_pipeline(tmp_path):
    with pytest.raises(ValueError, match=r"no such folder; give the folder .* or a size: wan2\.1-1\.3b, "):
        empty_models(tmp_path / "none")
    with pytest.raises(ValueError, match="holds no transformer"):
        empty_models(tmp_path)
    tiny_wan_pipeline("t2v").save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps({**index, "text_encoder": ["transformers", "NoEncoder"]}))
    with pytest.raises(ValueError, match="text_encoder holds a NoEncoder, which neither diffusers nor transformers"):
        empty_models(tmp_path)


@pytest.mark.parametrize(("name", "named"), [("text_encoder", "a UMT5EncoderModel"), ("vae", "an AutoencoderKLWan")])
def test_a_folder_that_lacks_a_model_is_refused(name, named, tmp_path):
    """A plan without it would be too small."""
    tiny_wan_pipeline("t2v").save_pretrained(tmp_path)
    (tmp_path / name / "config.json").unlink()
    message = rf"has no {name}/config\.json, but its model_index\.json names {named}"
    with pytest.raises(ValueError, match=message):
        empty_models(tmp_path)


@pytest.mark.parametrize(
    ("class_names", "expected"),
    [
        ("LTX2Pipeline", False),
        ("LTX2ImageToVideoPipeline", True),
        ("Mine LTX2Pipeline", False),
        ("MyLTX2Pipeline LTX2ImageToVideoPipeline", True),
    ],
)
def test_a_given_frame_of_ltx2_has_its_own_timestep(class_names, expected):
    """A user's pipeline is known by its base classes, whatever its own name is."""
    assert facts_of_class(class_names, {})["own_timesteps"] is expected
