"""Weights in 8 bits: which linears get them, where the originals are, and that every change of them takes effect."""

import copy
import gc
import io
import pickle

import accelerate
import pytest
import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig
from torch import nn

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.tape import assert_replayed, assert_same, make_models, warm
from tests.tiny_families import FAMILIES, tiny_family_inputs, tiny_family_transformer
from tests.tiny_wan import tiny_call, tiny_transformer_inputs, tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch.kernels.quantized import FP8, INT8, quantize_weight
from turbo_rcm_patch.patching import quantized_linear
from turbo_rcm_patch.patching.quantized_linear import AT_ONCE, BUFFERS, QuantizedLinear, convert
from turbo_rcm_patch.patching.quantized_weights import (
    bias_bound,
    format_of,
    quantized_linears,
    quantized_weight,
    why_not_read,
)
from turbo_rcm_patch.tiers import QUANTIZED

CPU = torch.device("cpu")
CONFIG = trp.PatchConfig(tier=QUANTIZED)
FREED = trp.PatchConfig(tier=QUANTIZED, restorable=False)
PER_BLOCK = 10
ERROR = 0.05  # of a tiny model with both operands' worth of e4m3 roundings, 2.6 % each


@pytest.fixture
def model():
    return tiny_wan_transformer()


def output_of(model, **overrides):
    with torch.no_grad():
        return model(**{**tiny_transformer_inputs(model), **overrides})[0]


def up_to_date(linear):
    """Whether a linear's 8-bit weight is what its original becomes."""
    expected = quantize_weight(linear.eight_bit.original, quantized_weight(linear).format)
    return all(
        torch.equal(ours.float(), theirs.float())
        for ours, theirs in zip(quantized_weight(linear), expected, strict=True)
    )


def like_unpatched(model, plain):
    assert all(map(up_to_date, quantized_linears(model)))
    assert relative_error(output_of(model), output_of(plain)) <= ERROR


# ---------------------------------------------------------------------------------------------------------------------
# What is converted
# ---------------------------------------------------------------------------------------------------------------------


def test_the_linears_of_blocks_are_converted_and_nothing_else(model):
    expected = output_of(model)
    trp.patch(model, CONFIG)
    paths = {path for path, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    linears = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert paths == {path for path in linears if path.startswith("blocks.")}
    assert len(paths) == PER_BLOCK * len(model.blocks)
    assert 1e-3 < relative_error(output_of(model), expected) <= ERROR


def test_the_forward_multiplies_by_the_dequantised_weight(model):
    trp.patch(model, CONFIG)
    linear, x = model.blocks[0].ffn.net[2], torch.randn(3, 48)
    expected = nn.functional.linear(x, quantize_weight(linear.weight.clone(), FP8).dequantize(), linear.bias)
    assert torch.equal(linear(x), expected)


@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize("at_once", [1, 4 * 16, AT_ONCE])
@pytest.mark.parametrize("format", [FP8, INT8])
def test_conversion_by_parts_is_conversion(rows, at_once, format, monkeypatch):
    monkeypatch.setattr(quantized_linear, "AT_ONCE", at_once)
    weight = torch.randn(rows, 16)
    for ours, theirs in zip(convert(weight, format, CPU), quantize_weight(weight, format), strict=True):
        assert torch.equal(ours.float(), theirs.float())


def test_formats_follow_the_gpu():
    """And where each row's largest value is known they are int8 on all."""
    for capability in ((8, 0), (8, 6), (8, 9), (9, 0), None):
        newer = capability is None or capability >= (8, 9)
        assert format_of("blocks.0.ffn.net.2", capability) == (FP8 if newer else INT8)
        assert format_of("blocks.0.attn1.to_q", capability) == INT8


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"keep": ["blocks.0.*"]}, PER_BLOCK),
        ({"keep": ["*.ffn.net.2", "blocks.1.attn1.to_q"]}, 2 * PER_BLOCK - 3),
        ({"keep": ["patch_embedding"]}, 2 * PER_BLOCK),
        ({"fuse": ["feed_forward"]}, 4),
        ({"quantize": ["attention"]}, 0),
    ],
)
def test_names_and_groups_keep_layers_as_they_are(model, options, left):
    trp.patch(model, trp.PatchConfig(tier=QUANTIZED, **options))
    assert len(quantized_linears(model)) == left


def test_a_name_that_fits_nothing_is_an_error(model):
    with pytest.raises(ValueError, match=r"keep='blok\.\*' fits no module of the WanTransformer3DModel"):
        trp.patch(model, trp.PatchConfig(tier=QUANTIZED, keep=["blok.*"]))
    assert not quantized_linears(model)
    with pytest.raises(ValueError, match="keep='ffn' is a string"):
        trp.PatchConfig(tier=QUANTIZED, keep="ffn")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name):
    model = tiny_family_transformer(name)
    inputs = tiny_family_inputs(name, model)
    with torch.no_grad():
        expected = model(**inputs)[0]
        with trp.patch(model, CONFIG):
            assert quantized_linears(model)
            assert relative_error(model(**inputs)[0], expected) <= ERROR
        assert torch.equal(model(**inputs)[0], expected)


def test_fused_projections_are_left_alone(model):
    plain = tiny_wan_transformer()
    for each in (model, plain):
        each.fuse_qkv_projections()
    trp.patch(model, CONFIG)
    assert type(model.blocks[0].attn1.to_q) is type(model.blocks[0].attn2.to_k) is nn.Linear
    assert type(model.blocks[0].attn2.to_q) is QuantizedLinear
    assert relative_error(output_of(model), output_of(plain)) <= ERROR


def test_projections_fused_later_are_those_of_the_originals(model):
    trp.patch(model, CONFIG)
    expected = torch.cat([linear.weight.clone() for linear in (model.blocks[0].attn1.to_q, model.blocks[0].attn1.to_k)])
    model.fuse_qkv_projections()
    assert torch.equal(model.blocks[0].attn1.to_qkv.weight[: len(expected)], expected)
    assert relative_error(output_of(model), output_of(tiny_wan_transformer())) <= ERROR


def test_what_kernels_ask(model):
    trp.patch(model, CONFIG)
    linear = model.blocks[0].ffn.net[0].proj
    assert bias_bound(linear.bias) == linear.bias.abs().max()
    assert why_not_read(linear, CPU) is None
    assert why_not_read(linear, torch.device("meta")) == "weight on cpu"
    handle = linear.register_forward_hook(lambda *_: None)
    assert why_not_read(linear, CPU) == "torch hook"
    handle.remove()
    linear.weight = nn.Parameter(linear.weight.clone())
    assert why_not_read(linear, CPU) == "weight replaced after the patch"
    linear.bias = None
    assert bias_bound(linear.bias) is None


def test_the_summary_tells_where_the_originals_are(model):
    with trp.patch(model, CONFIG) as patch:
        assert "weights of 20 linears in 8 bits: 0.3 MiB on cpu; the originals, 1.1 MiB, are kept" in patch.summary()
    assert "are freed" in trp.patch(model, FREED).summary()


# ---------------------------------------------------------------------------------------------------------------------
# The way back
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restore_brings_the_same_parameters_back(dtype):
    model = tiny_wan_transformer(dtype=dtype)
    parameters = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    attributes = {name: (type(module), set(vars(module))) for name, module in model.named_modules()}
    buffers = list(dict(model.named_buffers()))
    expected = output_of(model)
    patch = trp.patch(model, CONFIG)
    output_of(model)
    patch.restore()
    restored = dict(model.named_parameters())
    assert list(restored) == list(parameters)
    for name, (parameter, value) in parameters.items():
        assert restored[name] is parameter
        assert torch.equal(parameter, value)
    assert {name: (type(module), set(vars(module))) for name, module in model.named_modules()} == attributes
    assert list(dict(model.named_buffers())) == buffers
    assert torch.equal(output_of(model), expected)


def test_a_cast_model_gets_its_originals_back_in_its_dtype(model):
    with trp.patch(model, CONFIG):
        model.to(torch.bfloat16)
        assert model.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16
        assert model.state_dict()["blocks.0.attn1.to_q.weight"].dtype == torch.bfloat16
        assert quantized_weight(model.blocks[0].ffn.net[2]).values.dtype == FP8
        assert all(map(up_to_date, quantized_linears(model)))
    assert {parameter.dtype for parameter in model.blocks.parameters()} == {torch.bfloat16}


def test_a_failure_leaves_all_as_it_was(monkeypatch):
    pipe = tiny_wan_pipeline("wan22")
    models = pipe.transformer, pipe.transformer_2
    parameters = [[id(parameter) for parameter in model.parameters()] for model in models]
    expected = [output_of(model) for model in models]
    conversions = []

    def failing(*arguments):
        conversions.append(arguments)
        if len(conversions) == 2 * PER_BLOCK + 3:
            raise MemoryError("halfway")
        return convert(*arguments)

    monkeypatch.setattr("turbo_rcm_patch.patching.quantized_weights.convert", failing)
    for config in (CONFIG, FREED):
        conversions.clear()
        with pytest.raises(MemoryError):
            trp.patch(pipe, config)
        assert [[id(parameter) for parameter in model.parameters()] for model in models] == parameters
        assert not any(quantized_linears(model) for model in models)
        assert all(torch.equal(output_of(model), output) for model, output in zip(models, expected, strict=True))


def test_a_model_on_the_meta_device_is_refused():
    with accelerate.init_empty_weights():
        model = WanTransformer3DModel(num_attention_heads=2, attention_head_dim=64, num_layers=1, ffn_dim=48)
    with pytest.raises(ValueError, match=r"blocks\.0\.attn1\.to_q\.weight is on the meta device.*load_converted"):
        trp.patch(model, CONFIG)
    assert not quantized_linears(model)


def test_freed_originals_free_their_memory_and_cannot_come_back(model):
    original = model.blocks[0].attn1.to_q.weight.untyped_storage()
    reference = torch.multiprocessing.reductions.StorageWeakRef(original)
    del original
    expected = output_of(model)
    patch = trp.patch(model, FREED)
    gc.collect()
    assert reference.expired()
    assert relative_error(output_of(model), expected) <= ERROR
    with pytest.raises(
        trp.PatchError, match="cannot restore transformer: the original weights of 20 linears were freed"
    ):
        patch.restore()
    assert patch.active
    with pytest.raises(RuntimeError, match=r"blocks\.0\.attn1\.to_q\.weight: the values of this weight were freed"):
        model.state_dict()
    with pytest.raises(RuntimeError, match=r"the values of this weight were freed.*restorable=True"):
        model.load_state_dict(tiny_wan_transformer().state_dict())
    with pytest.raises(RuntimeError, match="were freed"):
        model.blocks[0].attn1.to_q.weight.data += 1
    with pytest.raises(RuntimeError, match="were freed"):
        model.blocks[0].attn1.to_q.weight.clone()


# ---------------------------------------------------------------------------------------------------------------------
# Changes
# ---------------------------------------------------------------------------------------------------------------------


def assign_data(weight):
    weight.data = weight.data * -1.5


def uninitialised(weight):
    nn.init.constant_(weight, 0.25)


WRITES = {
    "in place": lambda weight: weight.mul_(-1.5),
    "copied": lambda weight: weight.copy_(torch.ones_like(weight)),
    "through data": lambda weight: weight.data.add_(0.5),
    "augmented": lambda weight: setattr(weight, "data", weight.data.__iadd__(0.5)),
    "new data": assign_data,
    "one element": lambda weight: weight.data.view(-1)[-1].add_(3.0),
    "rows": lambda weight: weight[1:5].zero_(),
    "indexed": lambda weight: weight.__setitem__((0, slice(2, 7)), 2.0),
    "transposed": lambda weight: weight.t()[3].mul_(4.0),
    "halves": lambda weight: weight.chunk(2)[1].neg_(),
    "masked": lambda weight: weight.masked_fill_(weight > 0, 0.125),
    "out": lambda weight: torch.mul(weight, 2.0, out=weight),
    "detached": lambda weight: weight.detach().sub_(0.25),
    "initialised": uninitialised,
    "of all together": lambda weight: torch._foreach_mul_([weight], 2.0),
}


@pytest.mark.parametrize("write", WRITES)
def test_every_write_is_converted(model, write):
    plain = tiny_wan_transformer()
    trp.patch(model, CONFIG)
    before = quantized_weight(model.blocks[1].attn1.to_v).dequantize()
    pointers = [model.blocks[1].attn1.to_v._buffers[name].data_ptr() for name in BUFFERS]
    with torch.no_grad():
        for each in (model, plain):
            WRITES[write](each.blocks[1].attn1.to_v.weight)
    linear = model.blocks[1].attn1.to_v
    assert torch.equal(linear.weight, plain.blocks[1].attn1.to_v.weight)
    assert up_to_date(linear)
    assert not torch.equal(quantized_weight(linear).dequantize(), before)
    assert [linear._buffers[name].data_ptr() for name in BUFFERS] == pointers  # where a CUDA graph reads
    like_unpatched(model, plain)
    trp.restore(model)
    assert torch.equal(output_of(model), output_of(plain))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("config", [CONFIG, FREED], ids=["kept", "freed"])
def test_a_loaded_state_dict_is_converted(model, assign, config):
    if config is FREED and not assign:
        pytest.skip("is refused; see above")
    other = tiny_wan_transformer(seed=5)
    patch = trp.patch(model, config)
    model.load_state_dict({name: value.clone() for name, value in other.state_dict().items()}, assign=assign)
    assert relative_error(output_of(model), output_of(other)) <= ERROR
    if config is CONFIG:
        like_unpatched(model, other)
        patch.restore()
        assert torch.equal(output_of(model), output_of(other))


def test_a_state_dict_is_that_of_the_originals_and_writes_to_it_take_effect(model, tmp_path):
    plain = tiny_wan_transformer()
    trp.patch(model, CONFIG)
    state, expected = model.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    assert all(type(value) is torch.Tensor and torch.equal(value, expected[name]) for name, value in state.items())
    model.save_pretrained(tmp_path)
    loaded = WanTransformer3DModel.from_pretrained(tmp_path)
    assert torch.equal(output_of(loaded), output_of(plain))
    for each in (state, expected):
        each["blocks.0.ffn.net.2.weight"].mul_(-1.5)
    like_unpatched(model, plain)


def test_a_missing_weight_is_reported(model):
    trp.patch(model, CONFIG)
    state = model.state_dict()
    del state["blocks.0.attn1.to_q.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"blocks.0.attn1.to_q.weight\""):
        model.load_state_dict(state)
    state["blocks.0.attn1.to_q.weight"] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks.0.attn1.to_q.weight"):
        model.load_state_dict(state)


@pytest.mark.parametrize("name", ["attn1.to_q", "ffn.net.2"])
def test_another_parameter_runs_as_it_is_and_stays(model, name):
    plain = tiny_wan_transformer()
    patch = trp.patch(model, CONFIG)
    output_of(model)
    theirs = nn.Parameter(torch.randn_like(plain.blocks[0].get_submodule(name).weight))
    for each in (model, plain):
        each.blocks[0].get_submodule(name).weight = theirs
    linear = model.blocks[0].get_submodule(name)
    x = torch.randn(2, linear.in_features)
    assert linear.weight is theirs
    assert torch.equal(linear(x), nn.functional.linear(x, theirs, linear.bias))
    assert relative_error(output_of(model), output_of(plain)) <= ERROR
    assert torch.equal(model.state_dict()[f"blocks.0.{name}.weight"], theirs)
    patch.restore()
    assert linear.weight is theirs
    assert torch.equal(output_of(model), output_of(plain))


def test_a_functional_call_with_other_parameters_leaves_nothing_behind(model):
    inputs = tiny_transformer_inputs(model)
    parameters = {name: 1.5 * value for name, value in model.named_parameters()}
    expected = torch.func.functional_call(model, parameters, (), inputs)[0]
    trp.patch(model, CONFIG)
    before = output_of(model)
    assert relative_error(torch.func.functional_call(model, parameters, (), inputs)[0], expected) <= 1e-5
    assert torch.equal(output_of(model), before)


def test_a_weight_of_another_shape_is_refused(model):
    trp.patch(model, CONFIG)
    with pytest.raises(RuntimeError, match=r"shape \(128, 128\) in 8 bits cannot become \(2, 3\)"):
        model.blocks[0].attn1.to_q.weight.data = torch.zeros(2, 3)


def test_a_write_to_a_weight_and_another_tensor_at_once_is_refused(model):
    trp.patch(model, CONFIG)
    other = torch.ones(3)
    with pytest.raises(RuntimeError, match="write to each apart"):
        torch._foreach_mul_([model.blocks[0].attn1.to_q.weight.data, other], 2.0)
    assert torch.equal(other, torch.ones(3))


# ---------------------------------------------------------------------------------------------------------------------
# The rest of diffusers
# ---------------------------------------------------------------------------------------------------------------------

LORA = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]


def add_lora(model):
    torch.manual_seed(5)
    model.add_adapter(LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=LORA), adapter_name="first")


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_lora(model, when, safe):
    plain = tiny_wan_transformer()
    base = output_of(plain)
    add_lora(plain)
    if when == "before":
        add_lora(model)
    patch = trp.patch(model, CONFIG)
    if when == "after":
        add_lora(model)
    assert len(quantized_linears(model)) == 2 * PER_BLOCK
    assert relative_error(output_of(plain), base) > 2 * ERROR
    like_unpatched(model, plain)
    for change in (lambda m: m.fuse_lora(safe_fusing=safe), lambda m: m.unfuse_lora(), lambda m: m.fuse_lora()):
        for each in (model, plain):
            change(each)
        like_unpatched(model, plain)
    for each in (model, plain):
        each.unload_lora()
    like_unpatched(model, plain)
    patch.restore()
    assert torch.equal(output_of(model), output_of(plain))


def test_a_lora_cannot_be_merged_into_a_freed_weight(model):
    trp.patch(model, FREED)
    add_lora(model)
    output_of(model)
    with pytest.raises(RuntimeError, match=r"were freed.*restorable=True"):
        model.fuse_lora()


def test_sequential_offload_never_moves_an_original(model, monkeypatch):
    plain = tiny_wan_transformer()
    patch = trp.patch(model, CONFIG)
    expected = output_of(model)
    accelerate.cpu_offload(model, execution_device=CPU)
    placed = []
    place = accelerate.hooks.set_module_tensor_to_device

    def watched(module, name, *arguments, **options):
        placed.append((module, name))
        return place(module, name, *arguments, **options)

    monkeypatch.setattr(accelerate.hooks, "set_module_tensor_to_device", watched)
    assert relative_error(output_of(model), expected) <= ERROR  # the modules are called: their inputs are not rounded
    assert {name for module, name in placed if isinstance(module, QuantizedLinear)} == {"bias"}
    patch.restore()
    assert torch.equal(output_of(model), output_of(plain))
    accelerate.hooks.remove_hook_from_submodules(model)
    assert torch.equal(output_of(model), output_of(plain))
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    "kind", [{"offload_type": "block_level", "num_blocks_per_group": 1}, {"offload_type": "leaf_level"}]
)
@pytest.mark.parametrize("first", ["patch", "offload"])
def test_group_offload(model, kind, first):
    plain = tiny_wan_transformer()
    options = {"onload_device": CPU, "offload_device": CPU, **kind}
    if first == "offload":
        model.enable_group_offload(**options)
    patch = trp.patch(model, CONFIG)
    if first == "patch":
        model.enable_group_offload(**options)
    error = relative_error(output_of(model), output_of(plain))
    assert 1e-3 < error <= ERROR
    patch.restore()
    assert torch.equal(output_of(model), output_of(plain))


def test_model_offload_and_moves_leave_the_originals_alone(model):
    trp.patch(model, CONFIG)
    originals = [
        (linear.eight_bit.original, linear.eight_bit.original.data_ptr()) for linear in quantized_linears(model)
    ]
    expected = output_of(model)
    hook = accelerate.cpu_offload_with_hook(model, execution_device=CPU)[1]
    assert torch.equal(output_of(model), expected)
    hook.offload()
    model.to("cpu", torch.float32)
    assert torch.equal(output_of(model), expected)
    assert all(
        linear.eight_bit.original is original and original.data_ptr() == pointer
        for linear, (original, pointer) in zip(quantized_linears(model), originals, strict=True)
    )


def test_a_move_takes_the_8_bit_weight_and_not_the_original(model):
    """To the meta device, where there is no other."""
    trp.patch(model, CONFIG)
    model.blocks.to("meta")
    for linear in quantized_linears(model):
        assert linear.weight.device.type == linear.bias.device.type == "meta"
        assert all(linear._buffers[name].is_meta for name in BUFFERS)
        assert linear.eight_bit.original.device == CPU


def test_layerwise_casting_leaves_the_8_bit_weights_alone():
    model = tiny_wan_transformer(dtype=torch.bfloat16)
    patch = trp.patch(model, CONFIG)
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    output_of(model)
    assert all(map(up_to_date, quantized_linears(model)))
    patch.restore()
    output_of(model)


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("config", [CONFIG, FREED], ids=["kept", "freed"])
@pytest.mark.parametrize("make", [copy.deepcopy, through_pickle, through_torch_save])
def test_copies_have_weights_of_their_own(model, make, config):
    plain = output_of(model)
    trp.patch(model, config)
    expected = output_of(model)
    twin = make(model)
    assert torch.equal(output_of(twin), expected)
    if config is FREED:
        return
    with torch.no_grad():
        for linear in quantized_linears(model):
            linear.weight.zero_()
    assert all(linear.eight_bit.linear is linear for linear in quantized_linears(twin))
    assert torch.equal(output_of(twin), expected)
    trp.restore(twin)
    assert torch.equal(output_of(twin), plain)
    assert quantized_linears(model)


def test_a_copy_of_a_weight_alone_is_a_tensor(model):
    plain = tiny_wan_transformer().blocks[0].attn1.to_q.weight
    trp.patch(model, CONFIG)
    weight = model.blocks[0].attn1.to_q.weight
    for twin in (copy.deepcopy(weight), weight.clone(), weight.float() * 1, copy.deepcopy(weight[:])):
        assert type(twin) is torch.Tensor
        assert torch.equal(twin, plain)
        twin.zero_()
    assert up_to_date(model.blocks[0].attn1.to_q)
    assert torch.equal(weight, plain)
    assert "the original on the CPU" in repr(weight)
    assert isinstance(weight, nn.Parameter)


def test_gradients_of_inputs(model):
    plain, gradients = tiny_wan_transformer(), []
    trp.patch(model, CONFIG)
    for each in (model, plain):
        inputs = tiny_transformer_inputs(each)
        inputs["hidden_states"].requires_grad_()
        each(**inputs)[0].square().mean().backward()
        gradients.append(inputs["hidden_states"].grad)
    assert relative_error(*gradients) <= 2 * ERROR
    assert model.blocks[0].attn1.to_q.weight.grad is None


def test_compiled_blocks_are_one_graph_and_see_changes():
    torch._dynamo.reset()
    model = tiny_wan_transformer(layers=3)
    trp.patch(model, CONFIG)
    expected = output_of(model)
    model.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    assert relative_error(output_of(model), expected) <= 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    plain = tiny_wan_transformer(layers=3)
    for each in (model, plain):
        each.blocks[0].ffn.net[2].weight.data.mul_(-3.0)
    like_unpatched(model, plain)
    for each in (model, plain):
        each.blocks[1].ffn.net[2].weight = nn.Parameter(-plain.blocks[1].ffn.net[2].weight.detach())
    assert relative_error(output_of(model), output_of(plain)) <= ERROR


def test_graphs_read_what_was_written_since(tape):
    config = trp.PatchConfig(tier=QUANTIZED, cuda_graph="auto")
    pair = make_models(config=config)
    inputs = tiny_transformer_inputs(pair[0])
    warm(pair, inputs)
    for write in (
        lambda model: model.blocks[0].ffn.net[2].weight.data.mul_(2.0),
        lambda model: model.state_dict()["blocks.1.attn1.to_q.weight"].mul_(-1.0),
        lambda model: model.load_state_dict(tiny_wan_transformer(seed=8).state_dict()),
        lambda model: setattr(model.blocks[0].attn1.to_v, "weight", nn.Parameter(torch.ones(128, 128))),
    ):
        for model in pair:
            write(model)
        assert_same(pair, inputs)
        assert_same(pair, inputs)
    assert_replayed(pair, inputs)


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU
# ---------------------------------------------------------------------------------------------------------------------

LARGE = {"heads": 8, "head_dim": 128, "ffn_dim": 4096, "layers": 4, "dtype": torch.bfloat16}


def moved(inputs, device):
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def on_gpu(model):
    with torch.no_grad():
        return model(**moved(tiny_transformer_inputs(model), "cuda"))[0]


def allocated():
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


@pytest.mark.gpu
@pytest.mark.parametrize("config", [CONFIG, FREED], ids=["kept", "freed"])
@pytest.mark.parametrize("first", ["patch", "move"])
def test_linears_take_half_on_a_gpu(first, config):
    """That this is at most 55 % of real models is test_fits.py's to show: their embeddings are a smaller part."""
    with trp.patch(tiny_wan_transformer(**LARGE).cuda(), CONFIG) as patch:
        on_gpu(patch.transformers["transformer"])  # allocates what libraries keep
    del patch
    empty = allocated()
    model = tiny_wan_transformer(**LARGE).cuda()
    full, expected = allocated() - empty, on_gpu(model)
    sizes = [linear.weight.nbytes for linear in model.blocks.modules() if isinstance(linear, nn.Linear)]
    model.cpu()
    assert allocated() - empty < 0.01 * full
    if first == "move":
        model.cuda()
    torch.cuda.reset_peak_memory_stats()
    trp.patch(model, config)
    if first == "patch":  # a weight at a time comes there, in 8 bits, and a part of it in fp32
        assert torch.cuda.max_memory_allocated() - empty <= max(sizes) / 2 + 5 * 4 * AT_ONCE
        model.cuda()
    assert allocated() - empty <= full - 0.49 * sum(sizes)
    assert relative_error(on_gpu(model), expected) <= ERROR
    assert all(linear.eight_bit.original.device.type in ("cpu", "meta") for linear in quantized_linears(model))
    del model
    assert allocated() - empty < 0.01 * full


@pytest.mark.gpu
@pytest.mark.parametrize("format", [FP8, INT8])
def test_conversion_on_a_gpu_is_that_on_the_cpu(format):
    """The same bits, in several parts, but for the norms: sums in another order."""
    rows, K = AT_ONCE // 256 + 3, 256
    weight = torch.randn(rows, K, dtype=torch.bfloat16)
    ours, theirs = convert(weight.cuda(), format, torch.device("cuda")), quantize_weight(weight, format)
    assert torch.equal(ours.scale.cpu(), theirs.scale)
    assert torch.equal(ours.values.cpu().float(), theirs.values.float())
    torch.testing.assert_close(ours.norm.cpu(), theirs.norm, rtol=K * 2.0**-24, atol=0)


@pytest.mark.gpu
def test_restore_brings_the_originals_to_where_the_model_is():
    model = tiny_wan_transformer(**LARGE).cuda()
    parameters, expected = {name: id(p) for name, p in model.named_parameters()}, on_gpu(model)
    patch = trp.patch(model, CONFIG)
    model.cpu()
    model.cuda()
    patch.restore()
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    assert all(parameter.is_cuda for parameter in model.parameters())
    assert torch.equal(on_gpu(model), expected)
    patch = trp.patch(model, CONFIG)
    model.cpu()
    patch.restore()
    assert not any(parameter.is_cuda for parameter in model.parameters())
    assert torch.equal(on_gpu(model.cuda()), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("when", ["before", "after"])
def test_lora_on_a_gpu(when):
    model, plain = (tiny_wan_transformer().cuda() for _ in range(2))
    for each in (model, plain) if when == "before" else (plain,):
        add_lora(each)
    patch = trp.patch(model, CONFIG)
    if when == "after":
        add_lora(model)
    assert relative_error(on_gpu(model), on_gpu(plain)) <= ERROR
    for each in (model, plain):
        each.fuse_lora()
        each.unload_lora()
    assert relative_error(on_gpu(model), on_gpu(plain)) <= ERROR
    patch.restore()
    assert relative_error(on_gpu(model), on_gpu(plain)) <= 1e-4  # merged on the CPU


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["to", "enable_model_cpu_offload", "enable_sequential_cpu_offload", "group"])
def test_pipelines_never_bring_originals_to_a_gpu(offload, monkeypatch):
    patched, plain = tiny_wan_pipeline(), tiny_wan_pipeline()
    patch = trp.patch(patched, CONFIG)
    on_gpu_once = []
    forward = QuantizedLinear.forward

    def watched(self, x):
        if isinstance(self, QuantizedLinear):  # else accelerate's hooks hold it beyond `restore`
            on_gpu_once.append(x.is_cuda and self.eight_bit.original.is_cuda)
        return forward(self, x)

    monkeypatch.setattr(QuantizedLinear, "forward", watched)
    if offload == "to":
        patched.to("cuda")
        assert patched._execution_device.type == patched.transformer.device.type == "cuda"
    elif offload == "group":
        stream = {"onload_device": torch.device("cuda"), "offload_type": "block_level", "use_stream": True}
        patched.enable_group_offload(num_blocks_per_group=1, **stream)
    else:
        getattr(patched, offload)()
    plain.to("cuda")
    generate = lambda pipe: pipe(**tiny_call(generator=torch.Generator().manual_seed(3))).frames  # noqa: E731
    assert relative_error(generate(patched), generate(plain)) <= 2 * ERROR
    assert on_gpu_once == [] or not any(on_gpu_once)
    patch.restore()
    assert relative_error(generate(patched), generate(plain)) <= 1e-4
