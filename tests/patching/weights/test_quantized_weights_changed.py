"""Weights in 8 bits whose originals change: every write takes effect, or is refused."""

import copy
import gc
import pickle

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import nn

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.quantized_models import CONFIG, ERROR, FREED, like_unpatched, output_of, up_to_date
from tests.tiny_families import FAMILIES, tiny_family_inputs, tiny_family_transformer
from tests.tiny_wan import tiny_transformer_inputs, tiny_wan_transformer
from turbo_rcm_patch.patching.weights.convert import quantized_linears, quantized_weight
from turbo_rcm_patch.patching.weights.linear_8bit import BUFFERS, QuantizedLinear


@pytest.fixture
def model():
    return tiny_wan_transformer()


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


NAME = "blocks.0.ffn.net.2.weight"


def written(model, name=NAME, **options):
    """Written to through what `state_dict` returned."""
    model.state_dict(**options)[name].mul_(-1.5)


@pytest.mark.parametrize("name", ["wan", "vace"])  # the other families have the embedder of the latter
def test_writes_to_a_state_dict_reach_compiled_blocks(name):
    torch._dynamo.reset()
    model, plain = tiny_family_transformer(name), tiny_family_transformer(name)
    inputs = tiny_family_inputs(name, plain) if name in FAMILIES else tiny_transformer_inputs(plain)
    trp.patch(model, CONFIG)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        before = model(**inputs)[0]
        for write in (written, torch.inference_mode()(written)):
            for each in (model, plain):
                write(each)
            expected = plain(**inputs)[0]
            assert relative_error(before, expected) > 2 * ERROR
            assert relative_error(model(**inputs)[0], expected) <= ERROR
            assert all(map(up_to_date, quantized_linears(model)))
            before = expected


def test_they_reach_the_compiled_blocks_of_a_copy(model):
    torch._dynamo.reset()
    plain = tiny_wan_transformer()
    trp.patch(model, CONFIG)
    twin, before = pickle.loads(pickle.dumps(model)), output_of(model)
    twin.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    output_of(twin)
    with torch.no_grad():
        written(twin)
        written(plain)
    assert relative_error(output_of(twin), output_of(plain)) <= ERROR
    assert torch.equal(output_of(model), before)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_the_first_writes_to_a_copy_are_converted(model, make, before):
    """Whose originals count from 0, however often those of the model were written to before it was copied."""
    plain = tiny_wan_transformer()
    trp.patch(model, CONFIG)
    with torch.no_grad():
        for each in (model, plain):
            for _ in range(before):  # and no call after it
                written(each)
        twin = make(model)
        assert not any(linear.is_outdated for linear in quantized_linears(twin))
        like_unpatched(twin, plain)
        twin = make(model)
        for each in (twin, plain):
            written(each)
        assert relative_error(output_of(twin), output_of(plain)) <= ERROR


def test_a_copy_under_way_is_not_looked_at(model):
    trp.patch(model, CONFIG)
    make, arguments, *_ = model.blocks[0].attn1.to_q.__reduce_ex__(4)
    half_made = make(*arguments)
    assert output_of(model).isfinite().all()
    assert type(half_made) is QuantizedLinear


@pytest.mark.parametrize("make", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_what_was_patched_or_copied_in_inference_mode_is_converted(model, make):
    plain = tiny_wan_transformer()
    with torch.inference_mode():
        trp.patch(model, CONFIG)
        model = make(model)
    for each in (model, plain):
        written(each)
    like_unpatched(model, plain)
    for each in (model, plain):
        with torch.no_grad():
            each.blocks[1].attn1.to_v.weight.mul_(-1.5)
    like_unpatched(model, plain)


def test_a_copy_of_a_part_takes_no_other_part_along(model):
    trp.patch(model, CONFIG)

    def linears():
        gc.collect()
        return sum(type(thing) is QuantizedLinear for thing in gc.get_objects())

    before = linears()
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model.condition_embedder)))
    assert linears() == before
    del copied


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("write", ["weight", "state_dict"])
def test_tied_weights_are_all_converted(model, write, compiled):
    torch._dynamo.reset()
    plain = tiny_wan_transformer()
    for each in (model, plain):
        each.blocks[1].ffn.net[2].weight = each.blocks[0].ffn.net[2].weight
    trp.patch(model, CONFIG)
    if compiled:
        model.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    output_of(model)
    for each in (model, plain):
        with torch.no_grad():
            written(each) if write == "state_dict" else each.blocks[0].ffn.net[2].weight.mul_(-1.5)
    assert relative_error(output_of(model), output_of(plain)) <= ERROR
    like_unpatched(model, plain)


@pytest.mark.parametrize("mode", ["when it was made", "when it was loaded"])
def test_originals_of_inference_mode_are_converted(model, mode):
    plain = tiny_wan_transformer()
    with torch.inference_mode(mode == "when it was made"):
        model = tiny_wan_transformer()
    trp.patch(model, CONFIG)
    if mode == "when it was loaded":
        with torch.inference_mode():
            model.load_state_dict({n: value.clone() for n, value in plain.state_dict().items()}, assign=True)
    for each in (model, plain):
        with torch.inference_mode():
            written(each)
    like_unpatched(model, plain)


def test_unseen_writes_are_converted_by_loading_what_is_there(model):
    """The remedy of docs/tiers.md."""
    plain = tiny_wan_transformer()
    trp.patch(model, CONFIG)
    for each in (model, plain):
        each.state_dict()[NAME].data.mul_(-1.5)
    assert not up_to_date(model.blocks[0].ffn.net[2])
    model.load_state_dict(model.state_dict())
    like_unpatched(model, plain)


@pytest.mark.parametrize("of", ["weight", "state_dict"])
def test_a_fused_optimizer_is_refused(model, of):
    """torch counts no writes of it, but comes by a weight in 8 bits."""
    trp.patch(model, CONFIG)
    weight = model.blocks[0].ffn.net[2].weight if of == "weight" else model.state_dict(keep_vars=True)[NAME]
    before, weight.grad = weight.clone(), torch.ones_like(weight)
    with pytest.raises(RuntimeError, match="write to each apart"):
        torch.optim.AdamW([weight], lr=0.5, fused=True).step()
    assert torch.equal(model.state_dict()[NAME], before)
    torch.optim.AdamW([weight], lr=0.5, fused=False).step()
    assert not torch.equal(model.state_dict()[NAME], before)
    assert all(map(up_to_date, quantized_linears(model)))


def test_writes_to_the_state_dict_of_a_cast_model_are_converted(model):
    plain = tiny_wan_transformer()
    trp.patch(model, CONFIG)
    for each in (model, plain):
        each.to(torch.bfloat16)
        written(each)
    assert torch.equal(model.state_dict()[NAME], plain.state_dict()[NAME])
    assert all(map(up_to_date, quantized_linears(model)))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("config", [CONFIG, FREED], ids=["kept", "freed"])
def test_a_loaded_state_dict_is_converted(model, assign, config):
    other = tiny_wan_transformer(seed=5)
    patch = trp.patch(model, config)
    state = {name: value.clone() for name, value in other.state_dict().items()}
    with torch.inference_mode(not assign):
        model.load_state_dict(state, assign=assign)
    if not assign:  # what was loaded stays the caller's
        for value in state.values():
            value.zero_()
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


def test_a_part_of_a_state_dict_is_loaded_where_the_originals_were_freed(model):
    plain, other = tiny_wan_transformer(), tiny_wan_transformer(seed=5)
    trp.patch(model, FREED)
    state = {name: value for name, value in other.state_dict().items() if ".ffn." in name}
    state["blocks.0.attn1.to_q.bias"] = other.blocks[0].attn1.to_q.bias
    for each in (model, plain):
        assert "blocks.0.attn1.to_q.weight" in each.load_state_dict(state, strict=False).missing_keys
    assert relative_error(output_of(model), output_of(plain)) <= ERROR
    assert all(linear.eight_bit.freed for linear in quantized_linears(model))


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


def test_a_weight_that_is_kept_beyond_the_patch_is_not_written_to(model):
    patch = trp.patch(model, CONFIG)
    linear = model.blocks[0].attn1.to_q
    kept, part, before = linear.weight, linear.weight.data[1:3], linear.weight.clone()
    patch.restore()
    for weight in (kept, part):
        with (
            torch.no_grad(),
            pytest.raises(RuntimeError, match="not the weight of its linear in 8 bits any more"),
        ):
            weight.mul_(2.0)
    assert torch.equal(linear.weight, before)
    assert torch.equal(kept, before)
    trp.patch(model, CONFIG)
    with torch.no_grad():
        kept.mul_(2.0)  # has the same original
    assert torch.equal(linear.weight, 2.0 * before)
    assert up_to_date(linear)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with torch.no_grad(), pytest.raises(RuntimeError, match="take"):
        part.mul_(2.0)  # of another original


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
