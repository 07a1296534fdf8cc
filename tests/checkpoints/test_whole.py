"""Whole models' files in any naming: every value in its place, and misfits listed in the file's spelling."""

import json

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors.torch import save_file

from tests.official_names import in_8_bits, official_state_dict, with_proj_l
from tests.oracle import same_tensors
from tests.tiny_wan import tiny_wan_transformer
from turbo_rcm_patch.checkpoints.lazy import open_tensors
from turbo_rcm_patch.checkpoints.whole import WholeModel, cast, dequantize_blocks
from turbo_rcm_patch.patching.families.wan.names import WAN_NAMES

I2V = {"in_channels": 36, "image_dim": 4, "added_kv_proj_dim": "inner"}


def write(path, state_dict, how):
    if how == "safetensors":
        path = path / "model.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in state_dict.items()}, path)
        return path
    path = path / "model.pth"
    torch.save({"state_dict": state_dict} if how == "wrapped" else state_dict, path, **OLD.get(how, {}))
    return path


OLD = {"old": {"_use_new_zipfile_serialization": False}}


def read(path, model, **options):
    with open_tensors(path) as tensors:
        found = WholeModel(path, tensors, model, WAN_NAMES, **options)
        parameters = dict(model.named_parameters())
        weights = {name: cast(weight, parameters[name]).clone() for name, weight in found.weights.items()}
        proj_l = {name: {part: t.load().clone() for part, t in parts.items()} for name, parts in found.proj_l.items()}
    return found, weights, proj_l


@pytest.mark.parametrize("options", [{}, I2V], ids=["t2v", "i2v"])
def test_the_names_written_here_are_those_that_diffusers_converts(options):
    model = tiny_wan_transformer(**options)
    converted = convert_wan_transformer_to_diffusers(official_state_dict(model))
    assert set(converted) == set(model.state_dict())


@pytest.mark.parametrize("how", ["safetensors", "pth", "wrapped", "old"])
@pytest.mark.parametrize("prefix", ["", "net.", "model.diffusion_model."])
@pytest.mark.parametrize("options", [{}, I2V], ids=["t2v", "i2v"])
def test_every_value_comes_to_its_place(tmp_path, how, prefix, options):
    model, other = tiny_wan_transformer(seed=1, **options), tiny_wan_transformer(seed=2, **options)
    path = write(tmp_path, official_state_dict(model, prefix=prefix, flat_patches=prefix == "net."), how)
    found, weights, proj_l = read(path, other)
    assert (found.quantized, found.unfit, proj_l) == ([], [], {})
    other.load_state_dict(weights)
    assert same_tensors(other.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    "prefix",
    ["pipe.dit.", "transformer._orig_mod.", "module.", "model._fsdp_wrapped_module.", "base_model.model."],
)
def test_the_prefixes_of_loras_are_known_of_whole_models_too(tmp_path, prefix):
    model, other = tiny_wan_transformer(seed=1, layers=1), tiny_wan_transformer(seed=2, layers=1)
    state_dict = official_state_dict(model, prefix=prefix)
    state_dict |= {name.replace("blocks.0.", "blocks.0._orig_mod."): state_dict.pop(name) for name in list(state_dict)}
    found, weights, _ = read(write(tmp_path, state_dict, "safetensors"), other)
    assert found.unfit == []
    other.load_state_dict(weights)
    assert same_tensors(other.state_dict(), model.state_dict())


def test_a_tensor_that_is_there_under_two_prefixes_is_unexpected(tmp_path):
    model = tiny_wan_transformer()
    state_dict = official_state_dict(model, prefix="net.")
    state_dict["model.head.head.bias"] = torch.ones(64)
    with pytest.raises(ValueError, match=r"(model|net)\.head\.head\.bias is unexpected\."):
        read(write(tmp_path, state_dict, "safetensors"), model)


def test_a_folder_in_diffusers_names_in_shards(tmp_path):
    model = tiny_wan_transformer(seed=1)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    _, weights, _ = read(tmp_path, tiny_wan_transformer(seed=2))
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


def test_weights_are_cast_to_each_parameter(tmp_path):
    model = tiny_wan_transformer(seed=1)
    path = write(tmp_path, official_state_dict(model), "pth")
    low = tiny_wan_transformer(seed=2).bfloat16()
    low.scale_shift_table.data = low.scale_shift_table.data.float()
    _, weights, _ = read(path, low)
    assert {name: tensor.dtype for name, tensor in weights.items()} == {
        name: parameter.dtype for name, parameter in low.named_parameters()
    }


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_projections_of_the_linear_branch(tmp_path, suffix):
    model = tiny_wan_transformer()
    state_dict = with_proj_l(official_state_dict(model, prefix="net."), model, prefix="net.")
    _, _, proj_l = read(write(tmp_path, state_dict, suffix), model)
    assert list(proj_l) == [f"blocks.{number}.attn1" for number in range(len(model.blocks))]
    for path, parts in proj_l.items():
        for part, tensor in parts.items():
            key = f"net.{path.removesuffix('.attn1')}.self_attn.attn_op.local_attn.proj_l.{part}"
            assert torch.equal(tensor, state_dict[key])


def test_projections_in_diffusers_names(tmp_path):
    model = tiny_wan_transformer()
    state_dict = dict(model.state_dict())
    for number in range(len(model.blocks)):
        state_dict[f"blocks.{number}.attn1.proj_l.weight"] = torch.eye(model.config.attention_head_dim)
        state_dict[f"blocks.{number}.attn1.proj_l.bias"] = torch.zeros(model.config.attention_head_dim)
    _, _, proj_l = read(write(tmp_path, state_dict, "safetensors"), model)
    assert len(proj_l) == len(model.blocks)


def test_8_bit_files_are_dequantised(tmp_path):
    """Every linear errs at most half a step of its 128×128 block; a value of -128/127 steps is saturated to one."""
    model = tiny_wan_transformer(seed=1, heads=4, head_dim=40, ffn_dim=200)
    plain = official_state_dict(model)
    path = write(tmp_path, with_proj_l(in_8_bits(plain), model), "pth")
    found, weights, proj_l = read(path, tiny_wan_transformer(seed=2, heads=4, head_dim=40, ffn_dim=200))
    assert len(found.quantized) == 10 * len(model.blocks)
    assert len(proj_l) == len(model.blocks)
    for name, tensor in model.state_dict().items():
        step = tensor.abs().max() / 128 if name in found.quantized else 0.0
        assert (weights[name] - tensor).abs().max() <= step * 1.001, name
        assert torch.equal(weights[name], tensor) == (name not in found.quantized)


def test_dequantising_by_blocks():
    values = torch.randint(-128, 128, (130, 257), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    scale = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    dequantised = dequantize_blocks(values, scale)
    for i, j in ((0, 0), (127, 127), (127, 128), (128, 127), (129, 256), (5, 256)):
        assert dequantised[i, j] == values[i, j] * scale[i // 128, j // 128]


def test_all_that_does_not_fit_is_listed_as_the_file_spells_it(tmp_path):
    model = tiny_wan_transformer()
    state_dict = official_state_dict(model, prefix="net.")
    del state_dict["net.blocks.1.self_attn.q.weight"]
    state_dict["net.head.head.bias"] = torch.zeros(3)
    state_dict["net.something.weight"] = torch.zeros(3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="does not fit the WanTransformer3DModel") as error:
        read(write(tmp_path, state_dict, "pth"), model)
    message = str(error.value)
    assert "net.blocks.1.self_attn.q.weight is missing" in message
    assert "net.something.weight is unexpected" in message
    assert "net.head.head.bias is [3], not [64]" in message
    assert same_tensors(model.state_dict(), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("blocks.0.ffn.0.scale"), "blocks.0.ffn.0.scale is missing"),
        (lambda d: d.update({"blocks.0.ffn.0.scale": torch.ones(3, 1)}), r"blocks.0.ffn.0.scale is \[3, 1\], not"),
        (
            lambda d: d.update({"blocks.1.self_attn.attn_op.local_attn.proj_l.weight": torch.ones(3, 3)}),
            r"proj_l.weight is \[3, 3\]",
        ),
        (
            lambda d: d.update({"blocks.7.self_attn.attn_op.local_attn.proj_l.weight": torch.ones(3, 3)}),
            "blocks.7.self_attn.attn_op.local_attn.proj_l.weight is unexpected",
        ),
    ],
)
def test_8_bit_files_and_projections_that_do_not_fit(tmp_path, change, message):
    model = tiny_wan_transformer()
    state_dict = with_proj_l(in_8_bits(official_state_dict(model)), model)
    change(state_dict)
    with pytest.raises(ValueError, match=message):
        read(write(tmp_path, state_dict, "pth"), model)


@pytest.mark.parametrize("prefix", ["", "net."])
@pytest.mark.parametrize("kept", ["weight", "bias"])
def test_missing_projections_are_spelled_as_those_that_are_there(tmp_path, prefix, kept):
    model = tiny_wan_transformer()
    state_dict = with_proj_l(official_state_dict(model, prefix=prefix), model, prefix=prefix)
    names = [name for name in state_dict if "proj_l" in name]
    present = f"{prefix}blocks.1.self_attn.attn_op.local_attn.proj_l.{kept}"
    state_dict = {name: tensor for name, tensor in state_dict.items() if name not in names or name == present}
    with pytest.raises(ValueError, match="does not fit") as error:
        read(write(tmp_path, state_dict, "pth"), model)
    lines = str(error.value).rstrip(".").partition("give a file that does. ")[2].split("; ")
    assert sorted(lines) == sorted(f"{name} is missing" for name in names if name != present)


def test_a_projection_of_another_shape_is_not_missing(tmp_path):
    model = tiny_wan_transformer()
    state_dict = with_proj_l(official_state_dict(model), model)
    state_dict["blocks.1.self_attn.attn_op.local_attn.proj_l.weight"] = torch.ones(3, 3)
    with pytest.raises(ValueError, match="does not fit") as error:
        read(write(tmp_path, state_dict, "pth"), model)
    assert "missing" not in str(error.value)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"heads": 3}, r"head\.modulation is \[1, 2, 192\], not \[1, 2, 128\]\. Give a file"),
        ({"layers": 3}, "it has 3 blocks, the model 2"),
        ({"layers": 1}, r"it has 1 block, the model 2\. Give .* the folder of a model in several files"),
    ],
)
def test_a_model_of_another_size_is_one_sentence(tmp_path, other, message):
    path = write(tmp_path, official_state_dict(tiny_wan_transformer(**other)), "safetensors")
    with pytest.raises(ValueError, match=f"holds a model of another size than this WanTransformer3DModel: {message}"):
        read(path, tiny_wan_transformer())


def test_all_keys_are_listed_however_many(tmp_path):
    model = tiny_wan_transformer(layers=3)
    state_dict = official_state_dict(model, prefix="net.")
    lacking = [name for name in state_dict if name.startswith("net.blocks.1.")]
    odd = [f"net.odd.{number}" for number in range(40)]
    state_dict = {name: tensor for name, tensor in state_dict.items() if name not in lacking}
    path = write(tmp_path, state_dict | {name: torch.zeros(1) for name in odd}, "pth")
    with pytest.raises(ValueError, match="does not fit") as error:
        read(path, model)
    message = str(error.value)
    assert all(f"{name} is missing" in message for name in lacking)
    assert all(f"{name} is unexpected" in message for name in odd)


@pytest.mark.parametrize("values_in_a_byte", [1, 2])
@pytest.mark.parametrize("how", ["pth", "safetensors"])
def test_integers_without_their_scales_are_no_weights(tmp_path, how, values_in_a_byte):
    model = tiny_wan_transformer()
    state_dict = official_state_dict(model)
    name = "blocks.0.self_attn.q.weight"
    state_dict[name] = state_dict[name][:, ::values_in_a_byte].to(torch.int8).contiguous()
    with pytest.raises(ValueError, match=f"{name} holds integers"):
        read(write(tmp_path, state_dict, how), model)


@pytest.mark.parametrize("how", ["pth", "safetensors"])
def test_dtypes_that_mean_something_else_are_refused(tmp_path, how):
    """The error lists all of these keys, spelled as in the file."""
    model = tiny_wan_transformer(heads=4, head_dim=40, ffn_dim=200)
    state_dict = with_proj_l(in_8_bits(official_state_dict(model, prefix="net."), prefix="net."), model, prefix="net.")
    block, proj_l = "net.blocks.1", "net.blocks.0.self_attn.attn_op.local_attn.proj_l"
    for key, dtype in (
        (f"{block}.self_attn.q.int8_weight", torch.float32),
        (f"{block}.self_attn.k.int8_weight", torch.uint8),
        (f"{block}.ffn.0.int8_weight", torch.int32),
        (f"{block}.ffn.0.scale", torch.int64),
        (f"{proj_l}.weight", torch.int8),
        (f"{proj_l}.bias", torch.int32),
    ):
        state_dict[key] = state_dict[key].to(dtype)
    with pytest.raises(ValueError, match="does not fit the WanTransformer3DModel") as error:
        read(write(tmp_path, state_dict, how), model)
    for line in (
        f"{block}.self_attn.q.int8_weight is float32, not int8",
        f"{block}.self_attn.k.int8_weight is uint8, not int8",
        f"{block}.ffn.0.int8_weight is int32, not int8",
        f"{block}.ffn.0.scale is int64, not float",
        f"{proj_l}.weight is int8, not float",
        f"{proj_l}.bias is int32, not float",
    ):
        assert line in str(error.value)


def test_patches_in_8_bits_are_refused(tmp_path):
    """TurboDiffusion keeps the linear over patches in 16 bits."""
    model = tiny_wan_transformer()
    state_dict = official_state_dict(model, flat_patches=True)
    patches = state_dict.pop("patch_embedding.weight")
    state_dict |= {"patch_embedding.int8_weight": patches.to(torch.int8), "patch_embedding.scale": torch.ones(1, 1)}
    with pytest.raises(ValueError, match=r"patch_embedding\.int8_weight is \[128, 64\], not \[128, 16, 1, 2, 2\]"):
        read(write(tmp_path, state_dict, "pth"), model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_and_projections_of_any_floats(tmp_path, dtype):
    model = tiny_wan_transformer(heads=4, head_dim=40, ffn_dim=200)
    state_dict = with_proj_l(in_8_bits(official_state_dict(model)), model)
    state_dict = {n: t.to(dtype) if n.endswith("scale") or "proj_l" in n else t for n, t in state_dict.items()}
    found, _, proj_l = read(write(tmp_path, state_dict, "safetensors"), model)
    assert len(found.quantized) == 10 * len(model.blocks)
    assert proj_l["blocks.0.attn1"]["weight"].dtype == dtype


def test_a_training_checkpoint_with_a_step_beside_the_weights(tmp_path):
    model = tiny_wan_transformer(seed=1)
    torch.save({"model": official_state_dict(model), "step": torch.tensor(3)}, tmp_path / "model.pth")
    _, weights, _ = read(tmp_path / "model.pth", tiny_wan_transformer(seed=2))
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


def test_a_part_of_a_model(tmp_path):
    model = tiny_wan_transformer(layers=2)
    state_dict = official_state_dict(tiny_wan_transformer(seed=5, layers=3))
    del state_dict["head.modulation"]
    found, weights, _ = read(write(tmp_path, state_dict, "pth"), model, partial=True)
    assert "head.modulation is missing" in found.unfit
    assert "blocks.2.modulation is unexpected" in found.unfit
    assert set(weights) == set(model.state_dict()) - {"scale_shift_table"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"net": {"a": 1}, "optimizer": {"b": 2}}, "holds a"),
        ({}, "holds nothing"),
        ([1, 2], "holds a list"),
    ],
)
def test_files_of_something_else(tmp_path, content, message):
    path = tmp_path / "model.pth"
    torch.save(content, path)
    with pytest.raises(ValueError, match=message), open_tensors(path):
        pass


class _Command:
    def __reduce__(self):
        return print, ("code of the file ran",)


def test_a_file_runs_no_code(tmp_path, capsys):
    path = tmp_path / "model.pth"
    torch.save({"blocks.0.modulation": _Command()}, path)
    with pytest.raises(ValueError, match="without running code in it"), open_tensors(path):
        pass
    assert "ran" not in capsys.readouterr().out


def test_places_without_one_file_of_weights(tmp_path):
    for path, message in ((tmp_path / "none", "no such file"), (tmp_path, "give the path of one file")):
        with pytest.raises(ValueError, match=message), open_tensors(path):
            pass
    (tmp_path / "notes.txt").write_text("")
    with (
        pytest.raises(ValueError, match=r"is not a file of weights; accepted are files ending in \.safetensors"),
        open_tensors(tmp_path / "notes.txt"),
    ):
        pass
    index = {"weight_map": {"a": "missing.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"lacks missing\.safetensors"), open_tensors(tmp_path):
        pass
