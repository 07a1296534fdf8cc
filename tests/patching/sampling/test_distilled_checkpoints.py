"""A checkpoint that is loaded already: its own name and its files tell the recipe; what diffusers left out is named."""

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file

import turbo_rcm_patch as trp
from tests.tiny_wan import tiny_wan_pipeline
from turbo_rcm_patch.checkpoints import files

LIGHTX2V = "wan2.1_t2v_lora_rank64_lightx2v_4step.safetensors"


@pytest.mark.parametrize(
    ("name", "variant", "recipe"),
    [
        ("FastVideo/FastWan2.1-T2V-1.3B-Diffusers", "t2v", "fastwan"),
        ("IPostYellow/TurboWan2.2-I2V-A14B-Diffusers", "wan22_i2v", "turbowan-i2v"),
        ("IPostYellow/TurboWan2.1-T2V-1.3B-Diffusers", "t2v", "turbowan"),
        ("me/rCM-Wan2.1-Diffusers", "t2v", "rcm"),
        ("me/rCM-Wan2.2-I2V-Diffusers", "wan22_i2v", "rcm-i2v"),
        ("tianweiy/CausVid", "t2v", "causvid"),
        ("lightx2v/Wan2.1-T2V-14B-StepDistill-CfgDistill-Lightx2v", "t2v", "lightx2v"),
    ],
)
def test_a_loaded_checkpoint_is_recognised_by_its_name(name, variant, recipe):
    pipe = tiny_wan_pipeline(variant)
    pipe.transformer.register_to_config(_name_or_path=name)
    with trp.use_distilled(pipe) as handle:
        assert str(handle).startswith(f"{recipe} (named {name.split('/')[1]})")


@pytest.mark.parametrize("inner", ["", "/transformer"])
def test_a_folder_above_a_loaded_model_decides_nothing(inner):
    pipe = tiny_wan_pipeline()
    name = f"/data/lightning/Wan2.1-T2V-14B-Diffusers{inner}"
    pipe.transformer.register_to_config(_name_or_path=name)
    with pytest.raises(ValueError, match=f"neither the name nor the files of the loaded model .{name}"):
        trp.use_distilled(pipe)
    pipe.transformer.register_to_config(_name_or_path=f"/data/lightning/FastWan{inner}")
    with trp.use_distilled(pipe) as handle:
        assert str(handle).startswith("fastwan (named FastWan)")


@pytest.mark.parametrize(("key", "recipe"), [("to_gate_compress", "fastwan"), ("attn1.local_attn.proj_l", "turbowan")])
def test_a_loaded_checkpoint_is_recognised_by_its_files_and_what_is_ignored_is_said(key, recipe, tmp_path, caplog):
    pipe = tiny_wan_pipeline()
    pipe.transformer.save_pretrained(tmp_path / "model")
    extra = {f"blocks.{i}.{key}.{part}": torch.ones(1) for i in range(2) for part in ("weight", "bias")}
    save_file(extra, tmp_path / "model/more.safetensors")
    pipe.transformer.register_to_config(_name_or_path=str(tmp_path / "model"))
    with trp.use_distilled(pipe) as handle:
        assert str(handle).startswith(f"{recipe} (its files hold ")
        assert "4 " in str(handle)
        assert "not used, attention is dense" in str(handle)
    assert "not used, attention is dense" in caplog.text
    pipe.transformer.blocks[0].attn1.proj_l = torch.nn.Linear(1, 1)  # as where SLA is loaded
    with trp.use_distilled(pipe) as handle:
        assert "attention is dense" not in str(handle)


@pytest.fixture
def saved(tmp_path):
    """A pipeline's folder as FastWan's, whose name tells nothing, with gates in the files of its transformer."""
    folder = tmp_path / "model"
    tiny_wan_pipeline().transformer.save_pretrained(folder / "transformer")
    gates = {f"blocks.{i}.to_gate_compress.{part}": torch.ones(1) for i in range(2) for part in ("weight", "bias")}
    save_file(gates, folder / "transformer/more.safetensors")
    return folder


GATES = "4 gates of video sparse attention (VSA): not used, attention is dense"
PERHAPS = "gates of video sparse attention (VSA), if the checkpoint has any, are not used: attention is dense"


def test_gates_are_named_where_the_transformer_was_loaded_alone(saved):
    pipe = tiny_wan_pipeline()
    pipe.transformer = WanTransformer3DModel.from_pretrained(saved, subfolder="transformer")
    with trp.use_distilled(pipe) as handle:
        assert str(handle).splitlines()[1:] == [GATES]


def test_gates_are_named_where_the_hub_s_cache_has_the_files(saved, monkeypatch):
    def cached(repository, local_files_only):
        assert repository == "me/distilled"
        assert local_files_only
        return str(saved)

    monkeypatch.setattr(files, "snapshot_download", cached)
    pipe = tiny_wan_pipeline()
    pipe.transformer.register_to_config(_name_or_path="me/distilled")
    with trp.use_distilled(pipe) as handle:
        assert str(handle).splitlines()[1:] == [GATES]


@pytest.mark.parametrize("name", ["FastVideo/FastWan2.1-T2V-1.3B-Diffusers", ""])
def test_fastwan_s_gates_may_be_unknown_and_it_says_so(name, caplog):
    pipe = tiny_wan_pipeline()
    pipe.transformer.register_to_config(_name_or_path=name)
    with trp.use_distilled(pipe, recipe=None if name else "fastwan") as handle:
        assert str(handle).splitlines()[1:] == [PERHAPS]
    assert PERHAPS in caplog.text
    with trp.use_distilled(pipe, recipe="lightx2v") as handle:
        assert len(str(handle).splitlines()) == 1


def test_fastwan_without_gates_has_no_note(saved):
    (saved / "transformer/more.safetensors").unlink()
    pipe = tiny_wan_pipeline()
    pipe.transformer.register_to_config(_name_or_path=str(saved))
    with trp.use_distilled(pipe, recipe="fastwan") as handle:
        assert len(str(handle).splitlines()) == 1
