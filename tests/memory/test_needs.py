"""The memory that each tier needs, from configs alone, and what cannot be planned."""

import math

import pytest
import torch

import turbo_rcm_patch as trp
from tests.tiny_families import tiny_family_transformer
from tests.tiny_wan import tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch.memory import plan
from turbo_rcm_patch.memory.components import components_of
from turbo_rcm_patch.memory.needs import VIDEOS, models_by_preset, needs, needs_table
from turbo_rcm_patch.memory.stages import (
    denoising_bytes,
)

TIERS = ["exact", "quantized", "sparse", "block_sparse"]


def held(model):
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def test_weights_are_those_of_the_model(tmp_path):
    model = tiny_wan_transformer(dtype=torch.bfloat16)
    model.save_config(tmp_path)
    weights = {need.tier: need.components[0].weights for need in needs(models_by_preset(tmp_path), VIDEOS[:1])}
    assert list(weights) == TIERS
    assert weights["exact"] == held(model)
    trp.patch(model, trp.Quantized(restorable=False))
    assert weights["quantized"] == weights["block_sparse"] == held(model)
    for block in model.blocks:
        block.attn1.proj_l = torch.nn.Linear(*2 * (model.config.attention_head_dim,), dtype=torch.bfloat16)
    assert weights["sparse"] == held(model)


def test_a_folder_with_the_name_of_a_size_is_the_folder(tmp_path, monkeypatch):
    model = tiny_wan_transformer(dtype=torch.bfloat16)
    model.save_config(tmp_path / "wan2.1-14b")
    weights = lambda: needs(models_by_preset("wan2.1-14b"), VIDEOS[:1])[0].components  # noqa: E731
    assert sum(component.weights for component in weights()) > 2e10
    monkeypatch.chdir(tmp_path)
    assert sum(component.weights for component in weights()) == held(model)


def test_a_model_with_another_attention_has_no_sparse_tier(tmp_path):
    tiny_family_transformer("animate").save_config(tmp_path)
    assert [name for name, _ in models_by_preset(tmp_path)] == ["exact", "quantized", "block_sparse"]
    with pytest.raises(ValueError, match="cannot have sparse-linear attention"):
        list(models_by_preset(tmp_path, preset="sparse"))


def test_a_pipeline_has_a_line_for_each_tier_and_size(tmp_path):
    tiny_wan_pipeline("wan22").save_pretrained(tmp_path)
    found = needs(models_by_preset(tmp_path))
    assert [(need.tier, need.video) for need in found] == [(tier, video) for tier in TIERS for video in VIDEOS]
    names = {component.name for component in found[0].components}
    assert names == {"text_encoder", "transformer", "transformer_2", "vae"}
    assert len(needs_table(found).splitlines()) == 1 + len(found)
    assert all(need.least < need.resident for need in found)
    one = needs(models_by_preset(tmp_path, preset="quantized"), VIDEOS[:1])
    assert one == [found[2]]


def test_the_amounts_in_the_table_are_enough():
    found = list(models_by_preset("wan2.1-1.3b"))
    _, *rows = needs_table(needs(found, VIDEOS[:1])).splitlines()
    for (_, patched), row in zip(found, rows, strict=True):
        *_, resident, least = row.split()
        plan.plan_for(patched, VIDEOS[0], plan.budget_of(f"{least} GB"))
        assert not plan.plan_for(patched, VIDEOS[0], plan.budget_of(f"{resident} GB")).placement.streaming


@pytest.mark.parametrize(("name", "gib"), [("wan2.1-1.3b", 0.86), ("wan2.1-14b", 1.91)])
def test_real_models_take_at_most_55_percent_in_8_bits(name, gib):
    weights, steps = {}, {}
    for preset, patched in models_by_preset(name):
        (transformer,) = (c for c in components_of(patched.models, patched.config) if c.name == "transformer")
        weights[preset] = transformer.weights
        steps[preset] = [max(denoising_bytes("transformer", patched, video)) for video in VIDEOS]
    assert weights["quantized"] < weights["sparse"] <= 0.55 * weights["exact"]
    for exact, quantized, sparse in zip(steps["exact"], steps["quantized"], steps["sparse"], strict=True):
        assert quantized < exact
        assert quantized <= sparse
    assert math.isclose(steps["exact"][0] / 2**30, gib, abs_tol=0.01)


def test_the_pipeline_says_if_each_token_has_its_own_timestep(tmp_path):
    for variant, expected in (("ti2v", True), ("t2v", False)):
        tiny_wan_pipeline(variant).save_pretrained(tmp_path / variant)
        assert [patched.own_timesteps for _, patched in models_by_preset(tmp_path / variant)] == [expected] * 4
    assert all(patched.own_timesteps for _, patched in models_by_preset("wan2.2-5b"))


@pytest.mark.parametrize("options", [{"implementation": "torch"}, {}])
def test_8_bits_without_kernels_are_refused(options, monkeypatch):
    """PyTorch's operations take several times as much there."""
    monkeypatch.setattr(plan, "capability_of", lambda _: None if options else (0, 0))
    pipe, config = tiny_wan_pipeline(), trp.Quantized(**options)
    with pytest.raises(ValueError, match=r"^fit cannot plan the preset 'quantized' .*; give the preset 'exact'\.$"):
        trp.fit(pipe, "8 GB", height=48, width=32, num_frames=5, config=config, device="cpu")
    trp.fit(pipe, "8 GB", height=48, width=32, num_frames=5, device="cpu").undo()


@pytest.mark.parametrize("name", ["anyflow far", "animate 2"])
def test_models_with_caches_are_refused(name, tmp_path):
    pipe = tiny_wan_pipeline()
    pipe.transformer = tiny_family_transformer(name)
    with pytest.raises(ValueError, match=r"has an? \w+Transformer3DModel, whose memory is not known"):
        trp.fit(pipe, "8 GB", height=480, width=832, num_frames=81, device="cpu")
    pipe.transformer.save_pretrained(tmp_path / "transformer")
    with pytest.raises(ValueError, match=r"transformer holds an? \w+Transformer3DModel, whose memory is not known"):
        list(models_by_preset(tmp_path / "transformer"))


def test_a_mask_over_blocks_of_frames_is_refused():
    pipe = tiny_wan_pipeline()
    pipe.transformer = tiny_family_transformer("skyreels", num_frame_per_block=3)
    with pytest.raises(ValueError, match="has a SkyReelsV2Transformer3DModel with num_frame_per_block > 1, whose mask"):
        trp.fit(pipe, "8 GB", height=480, width=832, num_frames=81, device="cpu")
