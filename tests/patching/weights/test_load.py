"""Models stored in 8 bits equal freshly patched ones when loaded, and a folder that does not fit changes nothing."""

import json

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef

import turbo_rcm_patch as trp
from tests.oracle import same_tensors
from tests.tiny_families import EACH_MODEL, first_of, tiny_family_inputs, tiny_family_transformer
from tests.tiny_wan import moved, output_of, tiny_transformer_inputs, tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch.kernels.quantized import INT8
from turbo_rcm_patch.patching.weights import load as quantized_converted
from turbo_rcm_patch.patching.weights import store as convert
from turbo_rcm_patch.patching.weights.linear_8bit import PARTS
from turbo_rcm_patch.patching.weights.load import FILE, load_converted
from turbo_rcm_patch.patching.weights.quantize_linears import quantized_linears
from turbo_rcm_patch.patching.weights.store import convert_model

CONFIG = trp.Quantized()
BF16 = torch.bfloat16


def convert_folder(source, target, keep=(), **options):
    convert_model(source, target, trp.Quantized(keep=keep), **options)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder in bf16, with the modules in fp32 that diffusers keeps so."""
    folder = tmp_path_factory.mktemp("source")
    tiny_wan_transformer(dtype=BF16).save_pretrained(folder / "in")
    return folder / "in"


@pytest.fixture(scope="module")
def stored(source):
    convert_folder(source, source.parent / "out")
    return source.parent / "out"


def patched(**options):
    model = tiny_wan_transformer(dtype=BF16, **options)
    trp.patch(model, CONFIG)
    return model


def empty(folder):
    with init_empty_weights():
        return WanTransformer3DModel.from_config(WanTransformer3DModel.load_config(folder)).eval()


def all_on_meta(folder):
    with torch.device("meta"):
        return WanTransformer3DModel.from_config(WanTransformer3DModel.load_config(folder)).eval()


MODELS = {
    "parameters on meta": empty,
    "buffers too": all_on_meta,
    "other weights": lambda folder: tiny_wan_transformer(seed=9),
    "other weights in bf16": lambda folder: tiny_wan_transformer(seed=9, dtype=BF16),
}


@pytest.mark.parametrize("build", MODELS)
def test_a_loaded_model_is_the_patched_one(stored, build):
    model, expected = MODELS[build](stored), patched()
    patch = load_converted(stored, model, CONFIG)
    assert torch.equal(output_of(model), output_of(expected))
    assert "are freed" in patch.summary()
    assert not patch.config.restorable
    ours, theirs = dict(model.named_parameters()), dict(expected.named_parameters())
    assert list(ours) == list(theirs)
    assert all(ours[name].dtype == theirs[name].dtype for name in ours)
    assert {weight.weight_dtype for weight in quantized_linears(model)} == {BF16}
    with pytest.raises(trp.PatchError, match="freed"):
        patch.restore()


def test_a_module_that_is_in_the_model_twice(stored):
    """A file has weights for each of its places. The last ones count, as with load_state_dict."""
    model, expected = tiny_wan_transformer(), patched()
    first, second = (block.attn1 for block in model.blocks[:2])
    second.norm_q = first.norm_q
    load_converted(stored, model, CONFIG)
    assert second.norm_q is first.norm_q
    assert torch.equal(first.norm_q.weight, expected.blocks[1].attn1.norm_q.weight)


def test_what_a_model_held_before_is_let_go(stored):
    model = tiny_wan_transformer()
    names = ("blocks.0.attn1.to_q.weight", "blocks.0.attn1.to_q.bias", "patch_embedding.weight")
    storages = [model.get_parameter(name).untyped_storage() for name in names]
    references = [StorageWeakRef(storage) for storage in storages]
    del storages
    load_converted(stored, model, CONFIG)
    assert all(reference.expired() for reference in references)


@pytest.mark.parametrize("name", EACH_MODEL)
def test_every_family(name, tmp_path):
    model = tiny_family_transformer(name, layers=2 if name == "vace" else 1)
    model.save_pretrained(tmp_path / "in")
    convert_folder(tmp_path / "in", tmp_path / "out", dtype=torch.float32)
    with init_empty_weights():
        other = type(model).from_config(model.config).eval()
    load_converted(tmp_path / "out", other, CONFIG)
    trp.patch(model, CONFIG)
    inputs = tiny_family_inputs(name, model)
    with torch.no_grad():
        assert torch.equal(first_of(other(**inputs)), first_of(model(**inputs)))


def test_pipelines_and_shards(tmp_path):
    tiny_wan_pipeline("wan22", dtype=BF16).save_pretrained(tmp_path / "in", max_shard_size="200KB")
    assert len(list((tmp_path / "in/transformer").glob("*.safetensors"))) > 2
    lines = []
    convert_folder(tmp_path / "in", tmp_path / "out", report=lines.append)
    assert [line.split(": ")[1] for line in lines] == ["20 linears in 8 bits, 0.00 GiB in all"] * 2
    pipe, other = tiny_wan_pipeline("wan22", dtype=BF16), tiny_wan_pipeline("wan22", dtype=BF16, seed=5)
    trp.patch(pipe, CONFIG)
    load_converted(tmp_path / "out", other, CONFIG)
    for name in ("transformer", "transformer_2"):
        assert torch.equal(output_of(getattr(other, name)), output_of(getattr(pipe, name)))
    alone = empty(tmp_path / "out/transformer_2")
    load_converted(tmp_path / "out/transformer_2" / FILE, alone, CONFIG)  # the file means its folder
    assert torch.equal(output_of(alone), output_of(pipe.transformer_2))
    both = "transformer and transformer_2"
    for folder, model, message in (
        ("out", tiny_wan_transformer(), f"holds {both}, but the model has transformer; give the folder of one."),
        (
            "out/transformer",
            tiny_wan_pipeline("wan22"),
            f"holds one transformer, but the model has {both}; give a folder that holds both.",
        ),
    ):
        with pytest.raises(trp.PatchError, match=message):
            load_converted(tmp_path / folder, model, CONFIG)


def test_formats_dtypes_and_kept_layers(source, tmp_path):
    convert_folder(source, tmp_path / "out", capability=(8, 0), dtype=torch.float16, keep=["blocks.0.*"])
    tensors = load_file(tmp_path / "out" / FILE)
    assert tensors["blocks.1.attn1.to_q.weight"].dtype == INT8
    assert tensors["blocks.1.attn1.to_q.weight_scale"].dtype == torch.float32
    assert tensors["blocks.0.attn1.to_q.weight"].dtype == tensors["patch_embedding.weight"].dtype == torch.float16
    assert tensors["condition_embedder.time_embedder.linear_1.weight"].dtype == torch.float32
    model = empty(tmp_path / "out")
    load_converted(tmp_path / "out", model, CONFIG)
    assert {linear.quantized().format for linear in quantized_linears(model)} == {INT8}
    assert len(quantized_linears(model)) == 10


def test_only_a_tensor_at_a_time_is_held(source, tmp_path, monkeypatch):
    before, original = [], convert.convert

    def watched(weight, *arguments):
        assert all(reference.expired() for reference in before)
        before.append(StorageWeakRef(weight.untyped_storage()))
        return original(weight, *arguments)

    monkeypatch.setattr(convert, "convert", watched)
    convert_folder(
        source, tmp_path / "out", dtype=torch.float16
    )  # another than the file's: no tensor is a view of that
    assert len(before) == 20


# What does not fit


def refusal(folder, model=None, config=CONFIG):
    """Return the error of loading a folder, and check that the model is unchanged."""
    model = tiny_wan_transformer() if model is None else model
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    with pytest.raises(trp.PatchError) as raised:
        load_converted(folder, model, config)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert not quantized_linears(model)
    assert not any("_turbo_rcm_patch" in name for module in model.modules() for name in vars(module))
    return str(raised.value)


def damaged(stored, folder, change, metadata=None):
    """A copy of a stored model with changed tensors, metadata and config."""
    tensors = load_file(stored / FILE)
    config = json.loads((stored / "config.json").read_text())
    change(tensors, config)
    folder.mkdir()
    save_file(tensors, folder / FILE, {"version": "1"} if metadata is None else metadata)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_every_difference_is_listed(stored, tmp_path):
    def change(tensors, config):
        del tensors["blocks.0.attn1.to_q.weight_scale"], tensors["proj_out.bias"]
        tensors["blocks.7.attn1.to_q.weight"] = torch.zeros(2, 2)
        tensors["blocks.1.ffn.net.2.bias"] = torch.zeros(3)
        tensors["blocks.1.attn1.to_v.weight_norm"] = torch.zeros(2)
        tensors["proj_out.weight"] = tensors["proj_out.weight"].to(torch.float8_e4m3fn)

    reason = refusal(damaged(stored, tmp_path / "x", change))
    for part in (
        "blocks.0.attn1.to_q.weight_scale is missing",
        "proj_out.bias is missing",
        "blocks.7.attn1.to_q.weight is unexpected",
        "blocks.1.ffn.net.2.bias is [3], not [128]",
        "blocks.1.attn1.to_v.weight_norm is [2], not []",
        "proj_out.weight is in 8 bits",
    ):
        assert part in reason


def test_other_versions_and_models(stored, tmp_path):
    nothing = lambda tensors, config: None  # noqa: E731
    assert "format version 2, but this package reads 1" in refusal(
        damaged(stored, tmp_path / "a", nothing, {"version": "2"})
    )
    assert "format version None" in refusal(damaged(stored, tmp_path / "b", nothing, {}))
    reason = refusal(stored, tiny_wan_transformer(layers=3, ffn_dim=64))
    assert "num_layers is 2, the model's 3" in reason
    assert "ffn_dim is 48, the model's 64" in reason
    flux = lambda tensors, config: config.update(_class_name="FluxTransformer2DModel")  # noqa: E731
    other = damaged(stored, tmp_path / "c", flux)
    assert "it is a FluxTransformer2DModel, the model a WanTransformer3DModel" in refusal(other)
    left_out = damaged(stored, tmp_path / "d", lambda tensors, config: config.pop("patch_size"))
    load_converted(left_out, tiny_wan_transformer(), CONFIG)  # has the default


def test_folders_that_hold_nothing(stored, tmp_path):
    assert "nowhere: no such file or folder" in refusal(tmp_path / "nowhere")
    assert "holds no transformer" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert f"has no {FILE}; write it with turbo-rcm convert" in refusal(tmp_path)
    (tmp_path / FILE).write_bytes((stored / FILE).read_bytes()[:-3])
    assert "download or convert it again" in refusal(tmp_path)
    (tmp_path / FILE).write_bytes((stored / FILE).read_bytes())
    assert "holds no JSON object" in refusal(tmp_path)


def test_a_patched_model_and_another_tier(stored):
    with trp.patch(model := tiny_wan_transformer()), pytest.raises(trp.PatchError, match="is patched already"):
        load_converted(stored, model, CONFIG)
    with pytest.raises(ValueError, match="the config is of the exact tier; give the preset that they were stored for"):
        load_converted(stored, model, "exact")


def test_a_failure_while_loading_takes_all_back(stored, monkeypatch):
    model = tiny_wan_transformer(seed=9)
    expected = output_of(model)
    put, count = quantized_converted.put_in_8_bits, []

    def failing(*arguments):
        count.append(arguments)
        if len(count) == 13:
            raise MemoryError("halfway")
        put(*arguments)

    monkeypatch.setattr(quantized_converted, "put_in_8_bits", failing)
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    with pytest.raises(MemoryError):
        load_converted(stored, model, CONFIG)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    assert torch.equal(output_of(model), expected)


def test_sources_that_cannot_be_converted(source, stored, tmp_path):
    for folder, reason in ((tmp_path, "holds no transformer"), (stored, "is converted already")):
        with pytest.raises(ValueError, match=reason):
            convert_folder(folder, tmp_path / "out")
    with pytest.raises(ValueError, match="exists and is not empty"):
        convert_folder(source, stored)
    with pytest.raises(ValueError, match="keep='x' fits no module"):
        convert_folder(source, tmp_path / "out", keep=["x"])
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae/config.json").write_text('{"_class_name": "AutoencoderKLWan"}')
    (tmp_path / "vae/diffusion_pytorch_model.safetensors").write_bytes(
        (source / "diffusion_pytorch_model.safetensors").read_bytes()
    )
    with pytest.raises(ValueError, match="holds an AutoencoderKLWan; supported: WanTransformer3DModel"):
        convert_folder(tmp_path / "vae", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"vae"}


def test_the_files_that_diffusers_reads_are_converted(source, stored, tmp_path):
    """Not those beside them: an old whole file, the index of a variant, a file that was converted."""
    model = WanTransformer3DModel.from_pretrained(source)
    name = "diffusion_pytorch_model.safetensors"
    model.save_pretrained(tmp_path / "in", max_shard_size="200KB")
    assert (tmp_path / f"in/{name}.index.json").is_file()
    (tmp_path / f"in/{name}").write_bytes(b"old")
    (tmp_path / "in/diffusion_pytorch_model.fp16.safetensors.index.json").write_text("{}")
    (tmp_path / "in" / FILE).write_bytes((stored / FILE).read_bytes())
    convert_model(tmp_path / "in", tmp_path / "out", trp.Exact())
    again = WanTransformer3DModel.from_pretrained(tmp_path / "out")
    assert same_tensors(again.state_dict(), model.state_dict())


def test_a_failure_while_writing_leaves_no_folder(source, tmp_path, monkeypatch):
    def failing(*_):
        raise OSError("disk full")

    monkeypatch.setattr(convert, "write_tensors", failing)
    with pytest.raises(OSError, match="disk full"):
        convert_folder(source, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_loading_to_a_gpu(stored):
    model = empty(stored)
    load_converted(stored, model, CONFIG, device="cuda")
    assert all(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))
    inputs = moved(tiny_transformer_inputs(model), "cuda")
    expected = patched().cuda()
    for ours, theirs in zip(quantized_linears(model), quantized_linears(expected), strict=True):
        for name in PARTS[:2]:  # but for the norms, all bits: they were converted on the CPU and on a GPU
            assert torch.equal(ours._parameters[name].float(), theirs._parameters[name].float())
        ours._parameters[PARTS[2]].copy_(theirs._parameters[PARTS[2]])
    with torch.no_grad():
        assert torch.equal(model(**inputs)[0], expected(**inputs)[0])
