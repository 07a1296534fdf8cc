"""LoRA files in every published format become the same pairs and differences."""

import json
import re

import pytest
import torch

from tests import lora_files
from tests.lora_files import read_lora
from tests.tiny_wan import tiny_wan_transformer
from turbo_rcm_patch.checkpoints.lora import looks_like_lora

IMAGE = {"image_dim": 4, "added_kv_proj_dim": "inner", "in_channels": 36}


def changes(lora):
    """Return the tensors that a LoRA adds to the parameters, by name."""
    found = {f"{name}.weight": pair.product() for name, pair in lora.pairs.items()}
    found |= {name: product.dense() for name, product in lora.products.items()}
    for name, difference in lora.differences.items():
        found[name] = found.get(name, 0) + difference.float()
    return found


def assert_holds(lora, file):
    found = changes(lora)
    assert set(found) == set(file.changes)
    for name, change in file.changes.items():
        torch.testing.assert_close(found[name], change, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rank", [32, 64, 128])
@pytest.mark.parametrize("image", [False, True])
def test_lightx2v(rank, image):
    file = lora_files.lightx2v(tiny_wan_transformer(**(IMAGE if image else {})), rank)
    lora = read_lora(file.tensors, file.model)
    assert_holds(lora, file)
    assert not lora.unused
    assert (lora.ranks, lora.has_alpha, lora.has_differences) == ([rank], False, True)
    assert len(lora.pairs) == 2 * (12 if image else 10) + 5 + 2 * image


PREFIXES = [
    *(
        "",
        "diffusion_model.",
        "model.diffusion_model.",
        "transformer.",
        "transformer_2.",
        "pipe.dit.",
        "model.",
        "net.",
    ),
    *("transformer._orig_mod.", "_orig_mod.", "base_model.model._orig_mod.", "module._fsdp_wrapped_module."),
    *("lora_unet__", "lora_unet_", "lycoris_", "lora_unet__orig_mod_"),
]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_prefixes_of_trainers(prefix):
    file = lora_files.lightning(tiny_wan_transformer(layers=1), 4, prefix=prefix)
    if prefix.endswith("_"):  # these trainers write all dots of a module's name as underscores
        for key in list(file.tensors):
            for theirs in lora_files.BLOCK:
                key_there = key.replace(f"blocks.0.{theirs}.", f"blocks_0_{theirs.replace('.', '_')}.")
                if key_there != key:
                    file.tensors[key_there] = file.tensors.pop(key)
    assert all(key.startswith(f"{prefix}blocks") for key in file.tensors)
    lora = read_lora(file.tensors, file.model)
    assert_holds(lora, file)
    assert not lora.unused


def test_wrappers_inside_of_names():
    file = lora_files.lightning(tiny_wan_transformer(), 4)
    for part in ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"):
        wrapped = {re.sub(r"blocks\.(\d+)", rf"blocks.\1.{part}", key): t for key, t in file.tensors.items()}
        assert_holds(read_lora(wrapped, file.model), file)


@pytest.mark.parametrize("name", ["default", "style_2"])
def test_the_name_of_peft_s_adapter_in_the_keys(name):
    file = lora_files.diffusers(tiny_wan_transformer())
    tensors = {key.replace(".weight", f".{name}.weight"): tensor for key, tensor in file.tensors.items()}
    assert f"transformer.blocks.0.attn1.to_q.lora_A.{name}.weight" in tensors
    assert_holds(read_lora(tensors, file.model), file)


@pytest.mark.parametrize("prefix", ["diffusion_model.", "", "pipe.dit."])
def test_lokr(prefix):
    file = lora_files.lokr(tiny_wan_transformer(), prefix=prefix)
    lora = read_lora(file.tensors, file.model)
    assert looks_like_lora(file.tensors)
    assert_holds(lora, file)
    assert (lora.unused, lora.assumed, lora.has_alpha, lora.has_differences) == ({}, 0, True, False)
    assert {product.rank for product in lora.products.values()} == {4, None}


def test_loha():
    file = lora_files.loha(tiny_wan_transformer())
    lora = read_lora(file.tensors, file.model)
    assert looks_like_lora(file.tensors)
    assert_holds(lora, file)
    assert not lora.unused
    without = {key: tensor for key, tensor in file.tensors.items() if not key.endswith(".alpha")}
    lora = read_lora(without, file.model)
    assert lora.assumed == len(lora.products) == 20
    assert {product.scale for product in lora.products.values()} == {1.0}


def test_a_lokr_of_both_factors_in_two_matrices_and_one_of_a_convolution():
    model = tiny_wan_transformer()
    w1_a, w1_b, w2_a, w2_b = torch.randn(8, 2), torch.randn(2, 4), torch.randn(16, 2), torch.randn(2, 32)
    names = ("lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b", "alpha")
    tensors = dict(zip(names, (w1_a, w1_b, w2_a, w2_b, torch.tensor(1.0)), strict=True))
    patch = {"lokr_w1": torch.randn(8, 4), "lokr_w2": torch.randn(16, 4, 1, 2, 2)}
    lora = read_lora(named(TO_Q["bare"], tensors) | named("patch_embedding.", patch), model)
    expected = 0.5 * torch.kron(w1_a @ w1_b, w2_a @ w2_b)
    torch.testing.assert_close(lora.products["blocks.0.attn1.to_q.weight"].dense(), expected)
    expected = torch.kron(patch["lokr_w1"][..., None, None, None], patch["lokr_w2"])
    found = lora.products["patch_embedding.weight"].dense().reshape(128, 16, 1, 2, 2)
    torch.testing.assert_close(found, expected)


def test_products_that_do_not_fit_are_named():
    model = tiny_wan_transformer()
    kron, hada = {"lokr_w1": torch.ones(8, 8), "lokr_w2": torch.ones(16, 16)}, {}
    for n in (1, 2):
        hada |= {f"hada_w{n}_a": torch.ones(128, 4), f"hada_w{n}_b": torch.ones(4, 128)}
    assert len(read_lora(named(TO_Q["bare"], kron | hada), model).products) == 1
    for parts, changed, message in (
        (kron, {"lokr_w2": torch.ones(16, 8)}, r"the LoKr of .*lokr_w1 is \[128, 64\], the model takes \[128, 128\]"),
        (kron, {"lokr_w1": torch.ones(8)}, r"has a matrix of shape \[8\]"),
        (kron, {"lokr_w1": torch.ones(8, 0)}, r"has a matrix of shape \[8, 0\]"),
        (kron, {"lokr_w1": torch.ones(8, 8).char()}, "holds int8, not floating-point numbers"),
        (hada, {"hada_w1_b": torch.ones(3, 128)}, r"has matrices \[128, 4\] and \[3, 128\], which have no product"),
        (hada, {"hada_w1_b": torch.ones(4, 64)}, r"the LoHa of .*multiplies \[128, 64\] by \[128, 128\]"),
        (kron, {"alpha": torch.tensor(float("nan"))}, "alpha is nan, not one number"),
    ):
        with pytest.raises(ValueError, match=rf"does not fit the WanTransformer3DModel.*{message}"):
            read_lora(named(TO_Q["bare"], parts | changed), model)
    for missing in (*kron, *hada):
        one = {name: tensor for name, tensor in (kron if missing in kron else hada).items() if name != missing}
        with pytest.raises(ValueError, match=r"the Lo(Kr|Ha) of \S+ lacks a matrix, or has too many"):
            read_lora(named(TO_Q["bare"], one) | named("blocks.1.self_attn.q.", kron), model)


@pytest.mark.parametrize("prefix", ["transformer.", "", "base_model.model."])
def test_diffusers(prefix):
    file = lora_files.diffusers(tiny_wan_transformer(), prefix=prefix)
    lora = read_lora(file.tensors, file.model)
    assert_holds(lora, file)
    assert lora.ranks == [32, 128]


def test_alphas_and_biases_that_diffusers_saves():
    model = tiny_wan_transformer()
    file = lora_files.diffusers(model, ranks=(32,))
    bias = torch.randn(128)
    file.tensors["transformer.blocks.0.attn1.to_k.lora_B.bias"] = bias
    saved = {"transformer.lora_alpha": 16, "transformer.alpha_pattern": {"^blocks.0.attn1.to_q": 8}}
    lora = read_lora(file.tensors, model, {"lora_adapter_metadata": json.dumps(saved)})
    assert lora.pairs["blocks.0.attn1.to_q"].scale == 0.25
    assert lora.pairs["blocks.1.attn1.to_q"].scale == 0.5
    torch.testing.assert_close(lora.differences["blocks.0.attn1.to_k.bias"], 0.5 * bias)


def test_a_pair_of_a_convolution_becomes_a_difference():
    model = tiny_wan_transformer()
    weight = model.patch_embedding.weight
    down, up = torch.randn(8, *weight.shape[1:]), torch.randn(len(weight), 8, 1, 1, 1)
    tensors = {"patch_embedding.lora_down.weight": down, "patch_embedding.lora_up.weight": up}
    lora = read_lora({**tensors, "patch_embedding.alpha": torch.tensor(4.0)}, model)
    assert not lora.pairs
    expected = 0.5 * torch.einsum("or,rcthw->octhw", up.flatten(1), down)
    torch.testing.assert_close(lora.differences["patch_embedding.weight"], expected)


def test_a_linear_written_as_a_convolution():
    file = lora_files.kohya(tiny_wan_transformer())
    tensors = {key: t if t.dim() == 0 else t[..., None, None] for key, t in file.tensors.items()}
    assert_holds(read_lora(tensors, file.model), file)


def test_a_patch_embedding_written_as_a_linear_and_a_modulation_without_its_one():
    model = tiny_wan_transformer()
    patch, modulation = torch.randn(128, 64), torch.randn(6, 128)
    lora = read_lora({"patch_embedding.diff": patch, "blocks.0.diff_m": modulation}, model)
    assert torch.equal(lora.differences["patch_embedding.weight"], patch.view(128, 16, 1, 2, 2))
    assert torch.equal(lora.differences["blocks.0.scale_shift_table"], modulation[None])


def test_what_is_not_used_is_named_key_by_key():
    model = tiny_wan_transformer()
    file = lora_files.lightning(model)
    image = lora_files.lightx2v(tiny_wan_transformer(**IMAGE), 32)
    of_image = {key: t for key, t in image.tensors.items() if "_img" in key or "img_emb" in key}
    odd = {
        "diffusion_model.blocks.0.ffn.7.diff": torch.ones(1),
        "diffusion_model.head.head.alpha": torch.ones(()),
        "step": torch.ones(1),
    }
    lora = read_lora({**file.tensors, **of_image, **odd}, model)
    assert_holds(lora, file)
    reasons = {
        **dict.fromkeys(of_image, "the model takes no image"),
        "diffusion_model.blocks.0.ffn.7.diff": "the model has no module of this name",
        "diffusion_model.head.head.alpha": "the module has no matrices",
        "step": "unknown kind of key",
    }
    assert lora.unused == reasons


@pytest.mark.parametrize("missing", ["lora_down", "lora_up"])
def test_half_a_pair_is_an_incomplete_file(missing):
    file = lora_files.lightning(tiny_wan_transformer())
    whole, key = dict(file.tensors), f"diffusion_model.blocks.1.ffn.0.{missing}.weight"
    del whole[key]
    with pytest.raises(ValueError, match=r"blocks\.1\.ffn\.0\.lora_\w+\.weight lacks the other matrix of its pair"):
        read_lora(whole, file.model)


PAIR = {"lora_down.weight": torch.ones(4, 128), "lora_up.weight": torch.ones(128, 4)}
TO_Q = {
    "official": "diffusion_model.blocks.0.self_attn.q.",
    "diffusers": "transformer.blocks.0.attn1.to_q.",
    "bare": "blocks.0.self_attn.q.",
    "kohya": "lora_unet_blocks_0_self_attn_q.",
}


def named(prefix, tensors):
    return {prefix + name: tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(("one", "other"), [("official", "bare"), ("kohya", "diffusers"), ("diffusers", "official")])
def test_a_linear_named_twice_is_refused(one, other):
    with pytest.raises(ValueError, match="has the same weight twice") as error:
        read_lora(named(TO_Q[one], PAIR) | named(TO_Q[other], PAIR), tiny_wan_transformer())
    assert f"{TO_Q[one]}lora_down.weight and {TO_Q[other]}lora_down.weight" in str(error.value)


@pytest.mark.parametrize(
    ("one", "other"),
    [("blocks.0.diff_m", "lora_unet_blocks_0.modulation.diff"), ("blocks.0.norm3.diff", "blocks.0.norm2.diff")],
)
def test_a_part_under_two_endings_or_two_names_of_a_parameter_is_refused(one, other):
    with pytest.raises(
        ValueError, match=rf"remove one of the two from the file: {re.escape(one)} and {re.escape(other)}\."
    ):
        read_lora({one: torch.ones(128), other: torch.ones(128)}, tiny_wan_transformer())


def test_parts_of_one_linear_may_be_written_by_different_tools():
    bias = torch.ones(128)
    tensors = named(TO_Q["kohya"], PAIR) | {TO_Q["official"] + "diff_b": bias}
    lora = read_lora(tensors, tiny_wan_transformer())
    assert list(lora.pairs) == ["blocks.0.attn1.to_q"]
    assert torch.equal(lora.differences["blocks.0.attn1.to_q.bias"], bias)
    assert not lora.unused


def test_shapes_that_do_not_fit_are_all_named():
    file = lora_files.lightning(tiny_wan_transformer(heads=1))
    with pytest.raises(ValueError, match=r"does not fit the WanTransformer3DModel") as error:
        read_lora(file.tensors, tiny_wan_transformer())
    message = str(error.value)
    assert "diffusion_model.blocks.0.self_attn.q.lora_down.weight is [64, 64], the model takes [rank, 128]" in message
    assert "diffusion_model.blocks.0.self_attn.q.lora_up.weight is [64, 64], the model takes [128, 64]" in message
    assert "more." in message
    with pytest.raises(ValueError, match=r"blocks\.2\.self_attn.*is for a block that the model lacks; it has 2"):
        read_lora(lora_files.lightning(tiny_wan_transformer(layers=3)).tensors, tiny_wan_transformer())
    with pytest.raises(ValueError, match=r"norm3\.diff is \[64\], the model takes \[128\]"):
        read_lora({"blocks.0.norm3.diff": torch.ones(64)}, tiny_wan_transformer())


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("diffusion_model.patch_embedding.lokr_t2", "a LoKr or LoHa in Tucker's form"),
        ("lora_unet_patch_embedding.hada_t1", "a LoKr or LoHa in Tucker's form"),
        ("lycoris_blocks_0_attn1_to_q.dora_scale", "a DoRA"),
        ("blocks.0.self_attn.q.lokr_w1.scale_weight", "a LoRA in 8 bits with scales"),
        ("blocks.0.attn1.to_q.oft_R.weight", "an OFT"),
        ("blocks.0.self_attn.q.lora_mid.weight", "a LoCon of three matrices"),
        ("blocks.0.self_attn.q.lora_down.scale_weight", "a LoRA in 8 bits with scales"),
        ("blocks.0.self_attn.q.lora_A.default.weight_scale", "a LoRA in 8 bits with scales"),
        ("blocks.0.norm3.diff.scale_weight", "a LoRA in 8 bits with scales"),
    ],
)
def test_other_kinds_are_named_in_one_sentence(key, kind):
    model = tiny_wan_transformer()
    for others in ({}, lora_files.style(model).tensors):
        tensors = {key: torch.ones(4, 4), **others}
        assert looks_like_lora(tensors)
        with pytest.raises(ValueError, match=rf"it is {kind} \({re.escape(key)}\), which is not supported; merge it"):
            read_lora(tensors, model)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lora_down.weight": torch.ones(0, 128)}, r"lora_down\.weight is \[0, 128\], the model takes \[rank, 128\]"),
        ({"lora_down.weight": torch.tensor(1.0)}, r"lora_down\.weight is \[\], the model takes \[rank, 128\]"),
        ({"lora_up.weight": torch.tensor(1.0)}, r"lora_up\.weight is \[\], the model takes \[128, 4\]"),
        ({"lora_up.weight": torch.ones(0, 4)}, r"lora_up\.weight is \[0, 4\], the model takes \[128, 4\]"),
        ({"lora_up.weight": torch.ones(128, 4).char()}, r"lora_up\.weight holds int8, not floating-point numbers"),
        ({"alpha": torch.tensor(1j)}, "alpha is 1j, not one number"),
        ({"alpha": torch.ones(2)}, r"alpha is \[1\.0, 1\.0\], not one number"),
        ({"alpha": torch.tensor(float("nan"))}, "alpha is nan, not one number"),
        ({"diff_b": torch.tensor(1.0)}, r"diff_b is \[\], the model takes \[128\]"),
        ({"diff_b": torch.ones(128).int()}, "diff_b holds int32, not floating-point numbers"),
    ],
)
def test_odd_tensors_are_misfits(changed, message):
    with pytest.raises(ValueError, match=rf"does not fit the WanTransformer3DModel.*q\.{message}"):
        read_lora(named(TO_Q["bare"], PAIR | changed), tiny_wan_transformer())


def test_a_pair_and_a_difference_of_one_parameter_add_up():
    model = tiny_wan_transformer()
    bias, other = torch.ones(128), torch.full((128,), 2.0)
    tensors = named(TO_Q["bare"], {**PAIR, "alpha": torch.tensor(2.0), "lora_up.bias": bias, "diff_b": other})
    lora = read_lora(tensors, model)
    torch.testing.assert_close(lora.differences["blocks.0.attn1.to_q.bias"], 0.5 * bias + other)
    patch = {"lora_down.weight": torch.ones(4, 16, 1, 2, 2), "lora_up.weight": torch.ones(128, 4, 1, 1, 1)}
    lora = read_lora(named("patch_embedding.", {**patch, "diff": torch.ones(128, 16, 1, 2, 2)}), model)
    torch.testing.assert_close(lora.differences["patch_embedding.weight"], torch.full((128, 16, 1, 2, 2), 5.0))


def test_files_without_a_lora():
    model = tiny_wan_transformer()
    with pytest.raises(ValueError, match="it holds no LoRA, only a, b"):
        read_lora({"a": torch.ones(1), "b": torch.ones(1)}, model)
    with pytest.raises(ValueError, match=r"none of its keys fit a WanTransformer3DModel: img_emb\.proj\.0\.diff"):
        read_lora({"img_emb.proj.0.diff": torch.ones(1)}, model)
    assert not looks_like_lora(model.state_dict())
    assert not looks_like_lora(["blocks.0.self_attn.q.weight", "blocks.0.self_attn.q.scale_weight"])
    assert looks_like_lora(["blocks.0.diff_m"])
