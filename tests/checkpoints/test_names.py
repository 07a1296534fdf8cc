"""Every module and parameter of a Wan transformer is found by diffusers', the authors' and Kohya's names."""

import pytest
import torch
from peft import LoraConfig

import turbo_rcm_patch as trp
from tests.official_names import BLOCK, WHOLE
from tests.tiny_wan import tiny_wan_transformer
from turbo_rcm_patch.checkpoints.names import ModelNames, owner_in
from turbo_rcm_patch.patching.families.wan.names import WAN_NAMES

IMAGE = {"image_dim": 4, "added_kv_proj_dim": "inner", "in_channels": 36, "pos_embed_seq_len": 8}


def expected(model):
    """The authors' names and diffusers'."""
    return {f"blocks.{i}.{theirs}": f"blocks.{i}.{ours}" for i in range(2) for theirs, ours in BLOCK.items()} | WHOLE


@pytest.fixture
def model():
    return tiny_wan_transformer(**IMAGE)


@pytest.mark.parametrize("around", ["nothing", "lora", "patch", "quantized"])
def test_modules_are_found_by_every_name(model, around):
    modules = {name: model.get_submodule(name) for name in expected(model).values()}
    if around == "lora":
        model.add_adapter(LoraConfig(target_modules=["to_q", "ffn.net.2", "proj_out"]))
    elif around != "nothing":
        trp.patch(model, "exact" if around == "patch" else "quantized")
    names = ModelNames(model, WAN_NAMES)
    for theirs, ours in expected(model).items():
        for name in (theirs, ours, theirs.replace(".", "_"), ours.replace(".", "_"), theirs.replace(".", "_", 2)):
            assert names.module(name) == ours, name
        assert WAN_NAMES.official(ours) == theirs
        assert names.modules[ours] is modules[ours]


def test_every_parameter_has_a_name_and_an_owner(model):
    names, found = ModelNames(model, WAN_NAMES), set()
    for path, _ in model.named_parameters():
        module, _, own = path.rpartition(".")
        if own in ("weight", "bias"):
            assert names.parameter(WAN_NAMES.official(module), own) == path
        elif own == "scale_shift_table":
            assert names.parameter(module or "head", "modulation") == path
            assert names.parameter(f"{module or 'head'}.modulation", "weight") == path
        else:
            assert names.parameter("img_emb.emb_pos", "weight") == path
        owner, own = owner_in(names.modules, path)
        assert getattr(owner, own) is model.get_parameter(path)
        found.add(path)
    assert len(found) > 60


def test_what_is_not_there():
    names = ModelNames(tiny_wan_transformer(), WAN_NAMES)
    assert names.module("blocks.0.cross_attn.k_img") is None
    assert (
        names.why_absent("blocks.0.cross_attn.k_img")
        == names.why_absent("img_emb.proj.1")
        == "the model takes no image"
    )
    assert names.why_absent("blocks.0.cross_attn.x") == "the model has no module of this name"
    assert names.parameter("blocks.0.self_attn.norm_q", "bias") is None
    assert names.parameter("blocks.0.scale_shift_table", "bias") is None
    assert names.parameter("blocks.0.self_attn.q", "modulation") is None
    assert names.module("blocks.0.scale_shift_table") is None
    assert [names.block_beyond(f"blocks{dot}{n}{dot}ffn") for dot in "._" for n in (1, 2, 39)] == [
        False,
        True,
        True,
    ] * 2
    assert not names.block_beyond("head.head")


def test_the_norm_without_a_weight_does_not_hide_the_other(model):
    """diffusers' norm3 has none; the authors' norm3 is diffusers' norm2."""
    names = ModelNames(model, WAN_NAMES)
    assert names.parameter("blocks.1.norm3", "weight") == names.parameter("blocks.1.norm2", "weight")
    assert names.parameter("blocks.1.norm3", "weight") == "blocks.1.norm2.weight"
    assert torch.equal(getattr(*owner_in(names.modules, "blocks.1.norm2.weight")), model.blocks[1].norm2.weight)
