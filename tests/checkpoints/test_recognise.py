"""Published names are recognised; what tells nothing is not guessed."""

from pathlib import Path

import pytest

from tests import lora_files
from tests.lora_files import read_lora
from tests.tiny_wan import tiny_wan_transformer
from turbo_rcm_patch.checkpoints.recognise import (
    by_name,
    checkpoint_by_keys,
    ignored_parts,
    lora_by_contents,
    lora_claims,
    own_name,
    swapped_files,
)
from turbo_rcm_patch.patching.families.wan.parts import linears_in_loras
from turbo_rcm_patch.recipes import RECIPES

CACHE = "/home/me/.cache/huggingface/hub/models--{}/snapshots/0123abc/{}"
PUBLISHED = {
    "rcm": [
        "rCM_Wan2.1_T2V_14B_720p.pt",
        "Wan2.2-I2V-A14B-high-rCM4.0-merged.pt",
        "Wan_2_1_T2V_14B_480p_rCM_lora_average_rank_83_bf16.safetensors",
    ],
    "turbowan": ["TurboWan2.1-T2V-1.3B-480P-quant.pth", "IPostYellow/TurboWan2.1-T2V-1.3B-Diffusers"],
    "fastwan": [
        "FastVideo/FastWan2.1-T2V-1.3B-Diffusers",
        "FastVideo/FastWan-QAD-FP8-1.3B",
        CACHE.format("FastVideo--FastWan2.2-TI2V-5B-FullAttn-Diffusers", "transformer"),
    ],
    "lightx2v": [
        "loras/Wan21_T2V_14B_lightx2v_cfg_step_distill_lora_rank64.safetensors",
        "Wan2.1-Distill-Loras/wan2.1_t2v_14b_lora_rank64_lightx2v_4step.safetensors",
        "wan2.2_i2v_A14b_high_noise_lora_rank64_lightx2v_4step_1022.safetensors",
        "lightx2v/Wan2.1-T2V-14B-StepDistill-CfgDistill-Lightx2v",
    ],
    "lightx2v-flf2v": [
        "wan2.1_flf2v_720p_lightx2v_4step.safetensors",
        CACHE.format("lightx2v--Wan2.1-FLF2V-14B-StepDistill", "loras/lora.safetensors"),
    ],
    "lightx2v-nvfp4-i2v": ["wan2.1_i2v_480p_nvfp4_lightx2v_4step.safetensors"],
    "lightning": [
        "Wan2.2-T2V-A14B-4steps-lora-rank64-Seko-V1.1/high_noise_model.safetensors",
        CACHE.format("lightx2v--Wan2.2-Lightning", "Wan2.2-T2V-A14B-4steps-lora-250928/low_noise_model.safetensors"),
        "Wan2.2-Lightning_T2V-A14B-4steps-lora_HIGH_fp16.safetensors",
    ],
    "causvid": ["Wan21_CausVid_14B_T2V_lora_rank32.safetensors", "tianweiy/CausVid"],
}


@pytest.mark.parametrize(("recipe", "name"), [(recipe, name) for recipe, names in PUBLISHED.items() for name in names])
def test_published_names(recipe, name):
    assert recipe in RECIPES
    assert by_name(name).recipe == recipe
    assert not by_name(Path(name)).alone


@pytest.mark.parametrize(
    "name",
    [
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        "my_lora.safetensors",
        "forcmd.safetensors",
        "high_noise_model.safetensors",
        "/home/me/turbo_rcm_patch/style.safetensors",
        "/home/me/turbo-rcm-patch/models/style.safetensors",
        "",
    ],
)
def test_names_that_tell_nothing(name):
    assert by_name(name) is None


def test_the_nearest_name_counts():
    assert by_name("causvid/wan_lightx2v.safetensors").recipe == "lightx2v"
    assert by_name("lightning/a/b/c/d/e/f/lora.safetensors") is None


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/data/lightning/Wan2.1-T2V-14B-Diffusers", "Wan2.1-T2V-14B-Diffusers"),
        ("/data/lightning/Wan2.1-T2V-14B-Diffusers/transformer/", "Wan2.1-T2V-14B-Diffusers"),
        ("lightning/Wan2.2-T2V-A14B-Diffusers/transformer_2", "Wan2.2-T2V-A14B-Diffusers"),
        ("lightning/models/Wan2.1", "Wan2.1"),
        ("./lightning/Wan2.1", "Wan2.1"),
        (Path("/data/rCM"), "rCM"),
        ("FastVideo/FastWan2.1-T2V-1.3B-Diffusers", "FastVideo/FastWan2.1-T2V-1.3B-Diffusers"),
        (CACHE.format("lightx2v--Wan2.1-T2V--14B", "transformer"), "lightx2v/Wan2.1-T2V--14B"),
        (CACHE.format("lightx2v--Wan2.1", ""), "lightx2v/Wan2.1"),
        ("/data/lightning/Wan2.1/snapshots/0123abc", "Wan2.1"),
        ("transformer", ""),
        ("", ""),
    ],
)
def test_a_model_s_own_name_is_without_the_folders_above(path, name):
    assert own_name(path) == name


def test_a_folder_here_is_no_repository_of_the_hub(tmp_path, monkeypatch):
    (tmp_path / "lightning/Wan2.1").mkdir(parents=True)
    assert own_name("lightning/Wan2.1") == "lightning/Wan2.1"
    monkeypatch.chdir(tmp_path)
    assert own_name("lightning/Wan2.1") == "Wan2.1"


def recognised(make, experts=1, drop=None, **options):
    file = make(tiny_wan_transformer(), **options)
    tensors = {key: tensor for key, tensor in file.tensors.items() if drop is None or drop not in key}
    found = lora_by_contents(read_lora(tensors, file.model), linears_in_loras(file.model), experts)
    assert found is None or found.alone == "its contents"
    return found and found.recipe


def test_by_contents_alone():
    assert recognised(lora_files.lightx2v, rank=64) == "lightx2v"
    assert recognised(lora_files.lightx2v, rank=32) == "causvid"
    assert recognised(lora_files.lightning, rank=64, experts=2) == "lightning"
    assert recognised(lora_files.lightning, rank=64, experts=1) is None
    assert recognised(lora_files.lightning, rank=32, experts=2) is None
    assert recognised(lora_files.lightx2v, rank=128) is None
    assert recognised(lora_files.lightx2v, rank=64, drop="blocks.1.ffn.2.") is None
    assert recognised(lora_files.lightx2v, rank=64, drop=".diff") is None
    assert recognised(lora_files.diffusers, experts=2) is None


def claims(path, make=lora_files.kohya, **options):
    file = make(tiny_wan_transformer(), **options)
    found = lora_claims(Path(path), read_lora(file.tensors, file.model), linears_in_loras(file.model), 1)
    return [(claim.recipe, claim.alone) for claim in found]


def test_a_folder_s_name_is_held_against_the_contents():
    assert claims("turbo_rcm_patch/lora.safetensors") == []
    assert claims("rcm/lora.safetensors") == [("rcm", "a folder's name")]
    assert claims("rcm/lora.safetensors", lora_files.lightx2v) == [("rcm", ""), ("lightx2v", "its contents")]
    assert claims("rcm/my_lightx2v.safetensors", lora_files.lightx2v, rank=32) == [("lightx2v", "")]
    assert claims("flf2v/my_lightx2v.safetensors") == [("lightx2v-flf2v", "a folder's name")]
    agreeing = [("lightx2v-flf2v", ""), ("lightx2v-flf2v", "its contents")]
    assert claims("lightx2v/flf2v.safetensors", lora_files.lightx2v) == agreeing


def test_a_file_s_own_name_is_no_proof_where_its_matrices_are_few():
    assert claims("lightning_storm_style.safetensors", lora_files.style) == [
        ("lightning", "its name (it has matrices for 2 of the blocks' 20 linears)")
    ]
    assert claims("wan2.2_lightning.safetensors", lora_files.lightning) == [("lightning", "")]


def test_keys_of_whole_models():
    gates = {f"blocks.{i}.to_gate_compress.{part}" for i in range(3) for part in ("weight", "bias")}
    linear = {"blocks.0.self_attn.attn_op.local_attn.proj_l.weight"}
    assert checkpoint_by_keys(gates).recipe == "fastwan"
    assert checkpoint_by_keys(linear).recipe == "turbowan"
    assert checkpoint_by_keys({"blocks.0.attn1.to_q.weight"}) is None
    assert ignored_parts(gates) == ["6 gates of video sparse attention (VSA): not used, attention is dense"]
    assert "1 tensors of sparse-linear" in ignored_parts(linear)[0]
    assert ignored_parts({"blocks.0.attn1.to_q.weight"}) == []


def test_files_in_the_wrong_order():
    def lines(*names):
        return swapped_files([Path(name) for name in names])

    assert lines("high_noise.safetensors", "low_noise.safetensors") == []
    assert lines("low_noise.safetensors", "high_noise.safetensors") == [
        "low_noise.safetensors is taken for the high-noise expert: the order is (high, low)",
        "high_noise.safetensors is taken for the low-noise expert: the order is (high, low)",
    ]
    (twice,) = lines("high_noise.safetensors", "high_noise.safetensors")
    assert "high_noise.safetensors is taken for the low-noise expert" in twice
    assert lines("lightning_slowmo.safetensors", "lightning_highres_flow.safetensors") == []
    assert lines("Wan22-HIGH_fp16.safetensors", "wan2.2LowNoise.safetensors") == []
    assert lines("T2VHigh_v1.safetensors", "A14BLow.safetensors") == []
    assert len(lines("T2VLow_v1.safetensors", "A14BHigh.safetensors")) == 2
    assert lines("lora.safetensors", "lora.safetensors") == []  # Wan 2.1's, as many use them for both experts
