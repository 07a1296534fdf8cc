"""Weights in 8 bits are read-only: each way to change one that Python notices is refused, and nothing is changed."""

import warnings

import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig
from torch import nn
from torch.nn.utils import parametrize, prune

import turbo_rcm_patch as trp
from tests.oracle import relative_error, same_tensors
from tests.patching.quantized_models import CONFIG, FREED, PER_BLOCK, add_lora
from tests.tiny_wan import output_of, tiny_wan_transformer
from turbo_rcm_patch.patching.weights.linear_8bit import PARTS
from turbo_rcm_patch.patching.weights.quantize_linears import quantized_linears
from turbo_rcm_patch.tiers import QUANTIZED

AS_A_PARAMETER = LoraConfig(r=4, target_modules=[], target_parameters=["attn1.to_q.weight"], init_lora_weights=False)
RULE = r"call restore\(\) first, change the weight, then patch again"


def by_weight(write):
    return lambda model: write(model.blocks[0].attn1.to_q.weight)


def by_linear(write):
    return lambda model: write(model.blocks[0].attn1.to_q)


def assign_data(weight):
    weight.data = weight.data * -1.5


def foreach(weight):
    torch._foreach_mul_([weight.data], 2.0)


def legacy_weight_norm(linear):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(linear)


def merged(model, **options):
    add_lora(model)
    model.fuse_lora(**options)


WRITES = {
    "in place": by_weight(lambda weight: weight.mul_(-1.5)),
    "copied": by_weight(lambda weight: weight.copy_(torch.ones_like(weight))),
    "through data": by_weight(lambda weight: weight.data.add_(0.5)),
    "augmented": by_weight(lambda weight: setattr(weight, "data", weight.data.__iadd__(0.5))),
    "new data": by_weight(assign_data),
    "rows": by_weight(lambda weight: weight[1:5].zero_()),
    "indexed": by_weight(lambda weight: weight.__setitem__((0, slice(2, 7)), 2.0)),
    "transposed": by_weight(lambda weight: weight.t()[3].mul_(4.0)),
    "a view of a view": by_weight(lambda weight: weight.detach().view(-1)[-1].add_(3.0)),
    "out=": by_weight(lambda weight: torch.add(weight, 1.0, out=weight)),
    "foreach": by_weight(foreach),
    "shared memory": by_weight(lambda weight: weight.share_memory_()),
    "init": by_weight(lambda weight: nn.init.constant_(weight, 0.25)),
    "another parameter": by_linear(lambda linear: setattr(linear, "weight", nn.Parameter(torch.ones(128, 128)))),
    "None": by_linear(lambda linear: setattr(linear, "weight", None)),
    "deleted": by_linear(lambda linear: delattr(linear, "weight")),
    "a part deleted": by_linear(lambda linear: delattr(linear, PARTS[1])),
    "a part set to None": by_linear(lambda linear: setattr(linear, PARTS[0], None)),
    "PEFT's target_parameters": lambda model: model.add_adapter(AS_A_PARAMETER),
    "pruned": by_linear(lambda linear: prune.l1_unstructured(linear, "weight", 0.5)),
    "parametrized": by_linear(lambda linear: parametrize.register_parametrization(linear, "weight", nn.ReLU())),
    "a parametrized bias": by_linear(lambda linear: parametrize.register_parametrization(linear, "bias", nn.ReLU())),
    "weight_norm": by_linear(nn.utils.parametrizations.weight_norm),
    "legacy weight_norm": by_linear(legacy_weight_norm),
    "reset": by_linear(lambda linear: linear.reset_parameters()),
    "loaded": lambda model: model.load_state_dict(tiny_wan_transformer(seed=5).state_dict()),
    "assigned": lambda model: model.load_state_dict(tiny_wan_transformer(seed=5).state_dict(), assign=True),
    "a block loaded": lambda model: model.blocks[0].load_state_dict(tiny_wan_transformer().blocks[1].state_dict()),
    "fuse_lora": merged,
    "fuse_lora, safe": lambda model: merged(model, safe_fusing=True),
}


# The rule is one method's. Freed weights give it another message.
WHEN_FREED = ("in place", "another parameter", "pruned", "parametrized", "loaded", "fuse_lora")


@pytest.mark.parametrize(
    ("write", "config"), [*((write, CONFIG) for write in WRITES), *((write, FREED) for write in WHEN_FREED)]
)
def test_a_write_is_refused_with_the_rule(model, write, config):
    plain = output_of(model)
    patch = trp.patch(model, config)
    expected, parameters = output_of(model), {name: value.clone() for name, value in model.named_parameters()}
    with torch.no_grad(), pytest.raises(RuntimeError, match=RULE if config is CONFIG else "were freed"):
        WRITES[write](model)
    left = {name.replace(".base_layer", ""): value for name, value in model.named_parameters() if "lora_" not in name}
    assert set(left) == set(parameters)
    if write != "a block loaded":  # whose norms come before its linears
        assert all(torch.equal(value, left[name]) for name, value in parameters.items())
        if "lora" in write:
            model.unload_lora()
        assert torch.equal(output_of(model), expected)
    if config is CONFIG:
        patch.restore()
        if write != "a block loaded":
            assert torch.equal(output_of(model), plain)


def test_a_lora_that_was_fused_before_the_patch_stays_fused(model):
    add_lora(model)
    model.fuse_lora()
    plain = output_of(model)
    patch = trp.patch(model, CONFIG)
    expected = output_of(model)
    with pytest.raises(RuntimeError, match=RULE):
        model.unfuse_lora()
    assert torch.equal(output_of(model), expected)
    patch.restore()
    assert torch.equal(output_of(model), plain)
    model.unfuse_lora()
    assert not torch.equal(output_of(model), plain)


# Changes of a weight before the patch, each with what runs it in every call.
BEFORE = ("PEFT's target_parameters", "pruned", "parametrized", "weight_norm", "legacy weight_norm")


@pytest.mark.parametrize("change", BEFORE)
def test_a_weight_that_is_computed_in_every_call_stays_as_it_is(model, change):
    WRITES[change](model)
    plain = output_of(model)
    patch = trp.patch(model, CONFIG)
    assert not any(linear is model.blocks[0].attn1.to_q for linear in quantized_linears(model))
    assert 1e-4 < relative_error(output_of(model), plain) <= QUANTIZED.limits.step
    patch.restore()
    assert torch.equal(output_of(model), plain)


@pytest.mark.parametrize("is_none", [False, True])
@pytest.mark.parametrize("name", ["weight", *PARTS])
def test_restore_brings_back_what_was_torn_out_by_force(model, name, is_none):
    plain = output_of(model)
    patch = trp.patch(model, CONFIG)
    linear = model.blocks[0].attn1.to_q
    if is_none:
        linear._parameters[name] = None
    else:
        del linear._parameters[name]
    patch.restore()
    assert type(linear) is nn.Linear
    assert torch.equal(output_of(model), plain)


@pytest.mark.parametrize("missing", ["deleted", "None"])
def test_a_weight_that_is_missing_before_the_patch_is_named(model, missing):
    if missing == "None":
        model.blocks[1].ffn.net[2].weight = None
    else:
        del model.blocks[1].ffn.net[2]._parameters["weight"]
    with pytest.raises(trp.PatchError, match=r"cannot patch: blocks\.1\.ffn\.net\.2 has no weight"):
        trp.patch(model, CONFIG)
    assert not quantized_linears(model)
    assert type(model.blocks[0]).forward.__get__(model.blocks[0]) == model.blocks[0].forward


def test_a_vector_written_to_all_parameters_is_refused_by_the_next_call(model):
    expected = {name: value.clone() for name, value in model.state_dict().items() if name.endswith("to_q.weight")}
    patch = trp.patch(model, CONFIG)
    vector = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    nn.utils.vector_to_parameters(vector, model.parameters())
    with pytest.raises(RuntimeError, match=r"such as vector_to_parameters wrote to it, call restore\(\) first"):
        output_of(model)
    patch.restore()
    assert same_tensors({name: value for name, value in model.state_dict().items() if name in expected}, expected)


def test_reading_gives_the_original(model, tmp_path):
    plain = tiny_wan_transformer()
    trp.patch(model, CONFIG)
    weight, expected = model.blocks[0].attn1.to_q.weight, plain.blocks[0].attn1.to_q.weight.detach()
    assert (weight.shape, weight.dtype, weight.device) == (expected.shape, expected.dtype, expected.device)
    for read in (lambda w: w.clone(), lambda w: w[3:5], lambda w: w.t(), lambda w: w @ w, lambda w: w.norm()):
        assert torch.equal(read(weight), read(expected))
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    assert all(type(value) is torch.Tensor for value in state.values())
    assert same_tensors(state, plain.state_dict())
    model.save_pretrained(tmp_path)
    loaded = WanTransformer3DModel.from_pretrained(tmp_path)
    assert torch.equal(output_of(loaded), output_of(plain))


READS = {
    "numpy": lambda weight: torch.from_numpy(weight.numpy()),
    "numpy.asarray": lambda weight: torch.from_numpy(np.asarray(weight[2:])),
    "tolist": lambda weight: torch.tensor(weight.tolist()),
    "dlpack": lambda weight: torch.from_dlpack(weight.detach()),
    "into another tensor": lambda weight: torch.zeros_like(weight).lerp_(weight, 0.5),
    "out=": lambda weight: torch.mm(weight, weight.t(), out=torch.empty(weight.shape, dtype=weight.dtype)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # the original's own, and another
@pytest.mark.parametrize("read", READS)
def test_every_way_to_read_takes_the_dtype_of_the_model_and_cannot_write(model, read, dtype):
    trp.patch(model, CONFIG)
    model.to(dtype)
    linear = model.blocks[0].attn1.to_q
    expected = READS[read](linear.original.detach().to(dtype, copy=True))
    for _ in range(2):
        found = READS[read](linear.weight)
        assert type(found) is torch.Tensor
        assert torch.allclose(found, expected.to(found.dtype), rtol=1e-6, atol=0)
        found.zero_()


def test_other_parameters_of_a_state_dict_are_loaded(model):
    other = tiny_wan_transformer(seed=5)
    trp.patch(model, CONFIG)
    state = {name: value for name, value in other.state_dict().items() if "norm" in name or name.endswith("to_q.bias")}
    result = model.load_state_dict(state, strict=False)
    assert not result.unexpected_keys
    assert torch.equal(model.blocks[0].attn1.to_q.bias, other.blocks[0].attn1.to_q.bias)
    assert torch.equal(model.blocks[1].attn1.norm_q.weight, other.blocks[1].attn1.norm_q.weight)


def test_every_8_bit_tensor_is_a_parameter_without_a_gradient(model):
    trp.patch(model, CONFIG)
    linears = quantized_linears(model)
    assert len(linears) == 2 * PER_BLOCK
    found = {id(parameter) for parameter in model.parameters()}
    parts = [getattr(linear, name) for linear in linears for name in PARTS]
    assert all(id(part) in found and type(part) is nn.Parameter and not part.requires_grad for part in parts)
    assert not list(linears[0].named_buffers())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_leaves_the_8_bit_tensors_alone(model, dtype):
    trp.patch(model, CONFIG)
    linear = model.blocks[0].ffn.net[2]
    before = [getattr(linear, name).clone() for name in PARTS]
    identities = [id(getattr(linear, name)) for name in PARTS]
    model.to(dtype)
    assert linear.weight.dtype == linear.bias.dtype == dtype
    after = [getattr(linear, name) for name in PARTS]
    assert [id(part) for part in after] == identities
    assert all(a.dtype == b.dtype and torch.equal(a.float(), b.float()) for a, b in zip(after, before, strict=True))
