"""The changes of TurboDiffusion's training, added to models that were made from Wan."""

import pytest
import torch

import turbo_rcm_patch as trp
from tests.official_names import official_state_dict, with_proj_l
from tests.oracle import same_tensors
from tests.patching.turbowan import BLOCKS, TOPK, turbo_weights
from tests.tiny_families import tiny_family_transformer
from tests.tiny_wan import tiny_wan_transformer
from turbo_rcm_patch.patching.steps.sparse_linear import SparseAttnProcessor
from turbo_rcm_patch.patching.weights import turbodiffusion


def test_a_difference_merged_into_another_model(saved):
    """A VACE of the same sizes keeps its own blocks. Wan's blocks get the difference and attend sparsely."""
    vace = tiny_family_transformer("vace", torch.float32)
    config = vace.config
    sizes = {
        "heads": config.num_attention_heads,
        "head_dim": config.attention_head_dim,
        "layers": config.num_layers,
        "ffn_dim": config.ffn_dim,
        "text_dim": config.text_dim,
        "freq_dim": config.freq_dim,
        "in_channels": config.in_channels,
        "out_channels": config.out_channels,
    }
    base, turbo = (tiny_wan_transformer(seed=seed, **sizes) for seed in (31, 32))
    before = {name: tensor.clone() for name, tensor in vace.state_dict().items()}
    base_path = saved(official_state_dict(base), "Wan.pth")
    turbo_path = saved(with_proj_l(official_state_dict(turbo), turbo), "TurboWan.pth")
    left_out = trp.merge_turbodiffusion(turbo_path, base_path, vace)
    assert any("vace_blocks.0" in line for line in left_out)
    old = base.state_dict()
    merged = {name: before[name].float() + (tensor - old[name]) for name, tensor in turbo.state_dict().items()}
    own = {name: tensor for name, tensor in before.items() if name.startswith("vace_")}
    assert own
    assert same_tensors(vace.state_dict(), merged | own)
    patch = trp.patch(vace, trp.Sparse(quantize=(), topk=TOPK, blocks=BLOCKS))
    assert type(vace.blocks[0].attn1.processor) is SparseAttnProcessor
    assert type(vace.vace_blocks[0].attn1.processor) is not SparseAttnProcessor
    patch.restore()
    assert "blocks.0.attn1.proj_l.weight" in vace.state_dict()


def test_a_model_with_more_channels_keeps_its_patch_embedding(saved):
    """Fun, Move and image to video see more than latents. Both files' tensors are listed."""
    turbo, base = (tiny_wan_transformer(seed=seed) for seed in (31, 32))
    target = tiny_wan_transformer(in_channels=turbo.config.in_channels + 20)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    paths = (
        saved(with_proj_l(official_state_dict(turbo, flat_patches=True), turbo), "TurboWan.pth"),
        saved(official_state_dict(base), "Wan.pth"),
    )
    left_out = trp.merge_turbodiffusion(*paths, target)
    assert len(left_out) == 2
    for line, path in zip(left_out, paths, strict=True):
        assert line.startswith(f"{path}: patch_embedding.weight is ")
    assert torch.equal(target.patch_embedding.weight, before["patch_embedding.weight"])
    new, old = turbo.state_dict(), base.state_dict()
    merged = {name: before[name] + (new[name] - old[name]) for name in new if name != "patch_embedding.weight"}
    assert same_tensors(target.state_dict(), merged)
    assert "blocks.1.attn1.proj_l.weight" in target.state_dict()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blocks.0.own", "have no common weights for a WanTransformer3DModel"),
        ("encoder.weight", "holds no transformer, but the WanTransformer3DModel takes weights of Wan"),
    ],
)
def test_merging_files_of_another_model(saved, name, message):
    model = tiny_wan_transformer()
    path = saved({name: torch.zeros(3)})
    with pytest.raises(trp.PatchError, match=message):
        trp.merge_turbodiffusion(path, path, model)


@pytest.mark.parametrize("both", [False, True])
def test_a_base_that_is_turbowan_is_refused(saved, both):
    """Swapped paths, or one file twice."""
    model = tiny_wan_transformer()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    turbo, base = saved(turbo_weights(model)), saved(official_state_dict(tiny_wan_transformer(seed=31)), "Wan.pth")
    with pytest.raises(trp.PatchError, match=r"base_path is .*TurboWan\.pth, which has proj_l, as TurboWan has"):
        trp.merge_turbodiffusion(turbo if both else base, turbo, model)
    assert same_tensors(model.state_dict(), before)


def test_the_folders_of_pipelines(saved, tmp_path):
    model, base = tiny_wan_transformer(), tiny_wan_transformer(seed=31)
    expected = model.scale_shift_table + (turbo_weights(model)["head.modulation"] - base.scale_shift_table)
    base.save_pretrained(tmp_path / "Wan/transformer")
    trp.merge_turbodiffusion(saved(turbo_weights(model)), tmp_path / "Wan", model)
    assert torch.equal(model.scale_shift_table, expected)
    base.save_pretrained(tmp_path / "Wan/transformer_2")
    with pytest.raises(trp.PatchError, match="Wan holds two transformers; give the folder of one"):
        trp.merge_turbodiffusion(saved(turbo_weights(model)), tmp_path / "Wan", tiny_wan_transformer())


def test_half_of_a_projection_is_left_out_of_a_merge(saved):
    model = tiny_wan_transformer()
    turbo, base = turbo_weights(model), official_state_dict(tiny_wan_transformer(seed=31))
    del turbo["blocks.0.self_attn.attn_op.local_attn.proj_l.bias"]
    left_out = trp.merge_turbodiffusion(saved(turbo), saved(base, "Wan.pth"), model)
    assert any("blocks.0.self_attn.attn_op.local_attn.proj_l.bias is missing" in line for line in left_out)
    assert not hasattr(model.blocks[0].attn1, "proj_l")
    assert hasattr(model.blocks[1].attn1, "proj_l")


def scaled_fp8(tensor):
    return (tensor / 0.01).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("companion", "which", "to_8_bits"),
    [
        ("scale_weight", "turbo", scaled_fp8),
        ("weight_scale", "base", scaled_fp8),
        ("scale", "turbo", scaled_fp8),
        ("comfy_quant", "turbo", lambda tensor: tensor),
        ("weight.absmax", "base", lambda tensor: tensor.to(torch.int8)),
    ],
)
def test_quantised_weights_of_other_formats_are_refused_before_anything_is_written(saved, companion, which, to_8_bits):
    model = tiny_wan_transformer()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    files = {"turbo": turbo_weights(model), "base": official_state_dict(tiny_wan_transformer(seed=31))}
    name = "blocks.1.ffn.2"
    files[which][f"{name}.weight"] = to_8_bits(files[which][f"{name}.weight"])
    files[which][f"{name}.{companion}"] = torch.tensor([0.01])
    with pytest.raises(trp.PatchError, match=rf"cannot merge: .*{name}\.{companion}"):
        trp.merge_turbodiffusion(saved(files["turbo"]), saved(files["base"], "Wan.pth"), model)
    assert same_tensors(model.state_dict(), before)


def test_a_merge_that_fails_half_way_leaves_the_model_as_it_was(saved, monkeypatch):
    model, sums = tiny_wan_transformer(), turbodiffusion._sums
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def fail(*arguments):
        for written, each in enumerate(sums(*arguments)):
            if written == 5:
                raise MemoryError
            yield each

    monkeypatch.setattr(turbodiffusion, "_sums", fail)
    with pytest.raises(MemoryError):
        trp.merge_turbodiffusion(
            saved(turbo_weights(model)), saved(official_state_dict(tiny_wan_transformer(seed=31)), "Wan.pth"), model
        )
    assert model.state_dict().keys() == before.keys()
    assert same_tensors(model.state_dict(), before)
