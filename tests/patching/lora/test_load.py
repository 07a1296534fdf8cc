"""A LoRA on a transformer equals its merged weights, and comes off without a trace."""

import copy
from itertools import cycle

import pytest
import torch
from peft import LoraConfig

import turbo_rcm_patch as trp
from tests import lora_files
from tests.lora_files import read_lora
from tests.tiny_wan import moved, output_of, tiny_transformer_inputs, tiny_wan_pipeline
from turbo_rcm_patch.patching.lora import load as loaded_lora
from turbo_rcm_patch.patching.lora.load import LoadedLora

FREED = trp.Quantized(restorable=False)
FORMATS = {
    "lightx2v": lora_files.lightx2v,
    "lightning": lambda model: lora_files.lightning(model, 64, (8.0, 64.0, 16.0)),
    "kohya": lora_files.kohya,
    "kohya dotted": lambda model: lora_files.kohya(model, dotted=True),
    "diffusers": lora_files.diffusers,
}
PRODUCTS = {"lokr": lora_files.lokr, "loha": lora_files.loha}


def everything(model):
    """Modules, attributes, parameters (the objects, and their values) of a model."""
    modules = {path: (id(module), type(module), set(vars(module))) for path, module in model.named_modules()}
    tensors = {name: (id(tensor), tensor.detach().clone()) for name, tensor in model.named_parameters()}
    return modules, tensors


def assert_as_before(model, before):
    modules, tensors = everything(model)
    assert modules == before[0]
    assert tensors.keys() == before[1].keys()
    for name, (identity, tensor) in tensors.items():
        assert identity == before[1][name][0], name
        assert torch.equal(tensor, before[1][name][1]), name


def load(pipe, file, scale=1.0, model=None):
    model = pipe.transformer if model is None else model
    return LoadedLora(pipe, model, read_lora(file.tensors, model), scale)


@pytest.mark.parametrize(
    ("format", "scale"),
    [*zip([*FORMATS, *PRODUCTS], cycle([0.6, -1.0])), ("lightx2v", 1.0), *((format, 0.0) for format in PRODUCTS)],
)
def test_equals_the_merged_weights(format, scale):
    pipe = tiny_wan_pipeline("i2v" if format == "lightx2v" else "t2v")
    file = (FORMATS | PRODUCTS)[format](pipe.transformer)
    plain, expected, before = output_of(pipe.transformer), output_of(file.merged(scale)), everything(pipe.transformer)
    loaded = load(pipe, file, scale)
    assert not loaded.unused
    torch.testing.assert_close(output_of(pipe.transformer), expected, rtol=2e-5, atol=2e-5)
    assert ((expected - plain).abs().max() > 0.05) == (scale != 0)
    loaded.check_undoable()
    loaded.undo()
    assert_as_before(pipe.transformer, before)
    # They differ in bits, because the image's five tokens lie elsewhere, and the CPU then adds in another order.
    torch.testing.assert_close(output_of(pipe.transformer), plain, rtol=0, atol=5e-6)


def test_adapters_of_others_stay_as_they_are():
    pipe = tiny_wan_pipeline()
    model = pipe.transformer
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "proj_out"], init_lora_weights=False), "style")
    with torch.no_grad():
        styled, file = output_of(model), lora_files.lightning(tiny_wan_pipeline().transformer)
    before = everything(model)
    loaded = load(pipe, file)
    both = output_of(model)
    model.set_adapter("distilled_0")
    alone = output_of(model)
    torch.testing.assert_close(alone, output_of(file.merged()), rtol=2e-5, atol=2e-5)
    model.set_adapter(["style", "distilled_0"])
    assert torch.equal(output_of(model), both)
    assert (both - alone).abs().max() > 1e-3
    loaded.undo()
    assert model.blocks[0].attn1.to_q.active_adapters == ["style"]
    assert torch.equal(output_of(model), styled)
    assert_as_before(model, before)


@pytest.mark.parametrize("active", [[], ["style"], ["style", "other"]])
def test_adapters_that_are_off_or_on_stay_so(active):
    pipe = tiny_wan_pipeline()
    model = pipe.transformer
    for name in ("style", "other"):
        model.add_adapter(LoraConfig(r=4, target_modules=["to_q"], init_lora_weights=False), name)
    model.set_adapter(active)
    loaded = load(pipe, lora_files.lightning(model, 4))
    assert model.blocks[0].attn1.to_q.active_adapters == [*active, "distilled_0"]
    loaded.undo()
    assert model.blocks[0].attn1.to_q.active_adapters == active


def test_two_at_a_time_come_off_in_either_order():
    for first in (0, 1):
        pipe = tiny_wan_pipeline()
        before = everything(pipe.transformer)
        files = [lora_files.lightning(pipe.transformer, 32), lora_files.kohya(pipe.transformer, seed=1)]
        merged = [output_of(file.merged()) for file in files]
        loaded = [load(pipe, file) for file in files]
        loaded[first].undo()
        torch.testing.assert_close(output_of(pipe.transformer), merged[1 - first], rtol=2e-5, atol=2e-5)
        loaded[1 - first].undo()
        assert_as_before(pipe.transformer, before)


def test_a_lora_that_fails_to_load_halfway_leaves_no_layer(monkeypatch):
    pipe = tiny_wan_pipeline()
    before = everything(pipe.transformer)

    def fail(model, *args, **kwargs):
        load_lora_adapter(*args, **kwargs)
        del model.peft_config["distilled_0"]
        raise RuntimeError("halfway")

    load_lora_adapter = pipe.transformer.load_lora_adapter
    monkeypatch.setattr(type(pipe.transformer), "load_lora_adapter", fail)
    with pytest.raises(RuntimeError, match="halfway"):
        load(pipe, lora_files.lightx2v(pipe.transformer))
    assert_as_before(pipe.transformer, before)


@pytest.mark.parametrize("format", FORMATS)
def test_it_knows_whether_it_still_counts_as_it_was_loaded(format):
    pipe = tiny_wan_pipeline()
    loaded = load(pipe, FORMATS[format](pipe.transformer), 0.7)
    name = "distilled_0"
    assert loaded.is_as_loaded()
    pipe.set_adapters(name, 0.5)
    assert not loaded.is_as_loaded()
    pipe.set_adapters(name)
    assert loaded.is_as_loaded()
    pipe.disable_lora()
    assert not loaded.is_as_loaded()
    pipe.enable_lora()
    assert loaded.is_as_loaded()
    pipe.fuse_lora()
    assert loaded.is_as_loaded()
    pipe.transformer.unfuse_lora()  # the pipeline still lists it as fused
    pipe.disable_lora()
    assert not loaded.is_as_loaded()
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    assert not loaded.is_as_loaded()


def test_a_name_that_the_pipeline_holds_for_fused_is_not_taken_again():
    pipe = tiny_wan_pipeline()
    file = lora_files.lightning(pipe.transformer)
    loaded = load(pipe, file)
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    assert loaded.is_as_loaded()  # in the weights
    loaded.undo()
    load(pipe, file)
    assert list(pipe.transformer.peft_config) == ["distilled_1"]


def test_offloading_in_between_is_no_silent_loss():
    pipe = tiny_wan_pipeline()
    file = lora_files.lightx2v(pipe.transformer)
    loaded, norm = load(pipe, file), pipe.transformer.blocks[0].norm2
    ours = norm.weight
    norm.weight = torch.nn.Parameter(torch.empty(128, device="meta"))  # as accelerate's sequential offloading
    with pytest.raises(RuntimeError, match="cannot be put back: offloading keeps the parameter elsewhere; undo that"):
        loaded.check_undoable()
    norm.weight = ours
    loaded.check_undoable()


def test_a_difference_of_a_weight_in_8_bits_is_refused_with_the_rule():
    pipe = tiny_wan_pipeline()
    model, plain = pipe.transformer, output_of(pipe.transformer)
    file = lora_files.lightx2v(model)
    file.difference("diffusion_model.blocks.0.ffn.2.diff", "blocks.0.ffn.net.2.weight")
    patch = trp.patch(pipe, "quantized")
    before, unloaded = everything(model), output_of(model)
    with pytest.raises(RuntimeError, match=r"difference of blocks\.0\.ffn\.net\.2\.weight.*restore\(\) first"):
        load(pipe, file)
    assert_as_before(model, before)
    assert torch.equal(output_of(model), unloaded)
    patch.restore()
    loaded = load(pipe, file)
    trp.patch(pipe, "quantized")
    with pytest.raises(RuntimeError, match="its linear runs in 8 bits"):
        loaded.check_undoable()
    trp.restore(pipe)
    loaded.undo()
    assert torch.equal(output_of(model), plain)


@pytest.mark.parametrize("preset", ["exact", "quantized"])
@pytest.mark.parametrize("format", PRODUCTS)
def test_a_product_is_in_the_weights_that_the_patch_runs(preset, format):
    pipe, merged = tiny_wan_pipeline(), tiny_wan_pipeline()
    model, file = pipe.transformer, PRODUCTS[format](pipe.transformer)
    before, plain = everything(model), output_of(model)
    merged.transformer = file.merged()
    expected = trp.patch(merged, preset) and output_of(merged.transformer)
    loaded = load(pipe, file)
    patch = trp.patch(pipe, preset)
    torch.testing.assert_close(output_of(model), expected, rtol=2e-5, atol=2e-5)
    if preset == "exact":
        loaded.undo()
        torch.testing.assert_close(output_of(model), plain, rtol=3e-5, atol=3e-5)
        loaded = load(pipe, file)
        torch.testing.assert_close(output_of(model), expected, rtol=2e-5, atol=2e-5)
    else:
        with pytest.raises(RuntimeError, match="cannot be put back: its linear runs in 8 bits"):
            loaded.check_undoable()
    patch.restore()
    loaded.check_undoable()
    loaded.undo()
    assert_as_before(model, before)


def test_a_product_for_a_weight_that_cannot_be_written_is_refused_before_anything_is():
    pipe = tiny_wan_pipeline()
    model = pipe.transformer
    lora = read_lora(lora_files.lokr(model).tensors, model)

    def check(match):
        with pytest.raises(RuntimeError, match=match):
            loaded_lora.check_loadable(model, "transformer", lora)

    with trp.patch(pipe, "quantized"):
        check(r"the LoKr changes blocks\.0\.attn1\.to_q\.weight, but .* call restore\(\) first")
    linear = model.blocks[0].attn1.to_q
    for weight, reason in (
        (torch.empty(128, 128, device="meta"), "offloading keeps the parameter elsewhere"),
        (torch.zeros(128, 128).to(torch.float8_e4m3fn), "the parameter is stored as float8_e4m3fn"),
    ):
        linear.weight = torch.nn.Parameter(weight, False)
        check(rf"the LoKr cannot be added to blocks\.0\.attn1\.to_q\.weight: {reason}; load it first")


def test_a_product_beside_a_lora_that_is_fused_into_its_weights_is_neither_added_nor_undone():
    pipe = tiny_wan_pipeline()
    model = pipe.transformer
    style, file = lora_files.style(model), lora_files.loha(model)
    model.load_lora_adapter(style.tensors, prefix=None, adapter_name="style")
    loaded = load(pipe, file)
    pipe.fuse_lora()
    with pytest.raises(RuntimeError, match=r"the LoRA style is fused into the weights; call pipe\.unfuse_lora\(\)"):
        loaded.check_undoable()
    pipe.unfuse_lora()
    loaded.check_undoable()
    loaded.undo()
    lora = read_lora(file.tensors, model)
    loaded_lora.check_loadable(model, "transformer", lora)
    pipe.fuse_lora()
    with pytest.raises(RuntimeError, match="transformer has a fused LoRA, style"):
        loaded_lora.check_loadable(model, "transformer", lora)


def test_what_cannot_be_written_is_named_and_nothing_else_is_lost():
    pipe = tiny_wan_pipeline()
    model = pipe.transformer
    file = lora_files.lightx2v(model)
    model.blocks[0].attn1.norm_q.weight = torch.nn.Parameter(torch.ones(128).to(torch.float8_e4m3fn), False)
    model.proj_out.bias = torch.nn.Parameter(torch.empty(64, device="meta"))
    loaded = load(pipe, file)
    assert loaded.unused == {
        "blocks.0.attn1.norm_q.weight": "the parameter is stored as float8_e4m3fn",
        "proj_out.bias": "offloading keeps the parameter elsewhere",
    }
    assert loaded.differences == len(read_lora(file.tensors, model).differences) - 2
    loaded.undo()

    pipe = tiny_wan_pipeline()
    file.difference("diffusion_model.blocks.0.ffn.2.diff", "blocks.0.ffn.net.2.weight")
    trp.patch(pipe, FREED)
    assert load(pipe, file).unused == {"blocks.0.ffn.net.2.weight": "the values of the parameter were freed"}


def test_on_freed_weights_it_equals_one_loaded_before_the_patch():
    early, late = tiny_wan_pipeline(), tiny_wan_pipeline()
    file = lora_files.lightx2v(early.transformer)
    load(early, file)
    trp.patch(early, FREED)
    patch = trp.patch(late, FREED)
    before, plain = everything(late.transformer), output_of(late.transformer)
    loaded = load(late, file)
    assert not loaded.unused
    assert "+ LoRA" in patch.summary()
    assert torch.equal(output_of(late.transformer), output_of(early.transformer))
    with pytest.raises(RuntimeError, match=r"values .* were freed.*load a LoRA before the patch, or with"):
        late.transformer.state_dict()  # also what pipe.load_lora_weights asks for
    loaded.undo()
    assert_as_before(late.transformer, before)
    assert torch.equal(output_of(late.transformer), plain)


def test_a_failure_leaves_the_model_as_it_was(monkeypatch):
    pipe = tiny_wan_pipeline()
    file, before = lora_files.lightx2v(pipe.transformer), everything(pipe.transformer)
    lora = read_lora(file.tensors, pipe.transformer)

    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(type(pipe.transformer), "set_adapter", fail)
    with pytest.raises(MemoryError):
        LoadedLora(pipe, pipe.transformer, lora, 1.0)
    assert_as_before(pipe.transformer, before)
    monkeypatch.setattr("peft.set_peft_model_state_dict", fail)
    with pytest.raises(MemoryError):
        LoadedLora(pipe, pipe.transformer, lora, 1.0)
    assert_as_before(pipe.transformer, before)


def test_offloaded_copies_get_the_values(monkeypatch):
    """diffusers' group offloading with streams brings weights back from its own copies."""
    pipe = tiny_wan_pipeline()
    norm = pipe.transformer.blocks[0].norm2.weight
    stored = norm.detach().clone()

    class Group:
        stream, offload_to_disk_path = "a stream", None
        cpu_param_dict = {norm: stored}  # noqa: RUF012

    monkeypatch.setattr(loaded_lora, "groups_of", lambda model: [Group])
    before = norm.detach().clone()
    loaded = load(pipe, lora_files.lightx2v(pipe.transformer))
    assert torch.equal(stored, norm)
    assert not torch.equal(stored, before)
    loaded.undo()
    assert torch.equal(stored, before)
    assert torch.equal(norm, before)


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["exact", "quantized"])
def test_gpu_a_recorded_graph_sees_differences_and_their_undoing(preset):
    pipe = tiny_wan_pipeline(dtype=torch.bfloat16, head_dim=128).to("cuda")
    file = lora_files.lightx2v(copy.deepcopy(pipe.transformer).cpu())
    file.tensors = {key: tensor for key, tensor in file.tensors.items() if ".diff" in key}
    config = trp.Exact(cuda_graph="on") if preset == "exact" else "quantized"
    inputs = moved(tiny_transformer_inputs(pipe.transformer.cpu()), "cuda")
    pipe.to("cuda")
    with trp.patch(pipe, config), torch.no_grad():
        outputs = [pipe.transformer(**inputs)[0].clone() for _ in range(3)]
        loaded = load(pipe, file)
        changed = [pipe.transformer(**inputs)[0].clone() for _ in range(3)]
        loaded.undo()
        again = pipe.transformer(**inputs)[0]
    assert torch.equal(changed[0], changed[-1])
    assert not torch.equal(outputs[-1], changed[-1])
    assert torch.equal(outputs[-1], again)
