"""Parameters that somebody holds from before their linears went into 8 bits: writes through ``.data`` take effect."""

import copy
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from diffusers.training_utils import EMAModel
from torch import nn

import turbo_rcm_patch as trp
from tests.patching.quantized_models import CONFIG, FREED, like_unpatched, output_of, up_to_date
from tests.tiny_wan import tiny_wan_transformer
from turbo_rcm_patch.patching.weights.convert import is_quantized
from turbo_rcm_patch.patching.weights.linear_8bit import bring_all_up_to_date
from turbo_rcm_patch.patching.weights.original_parameter import OriginalParameter

NAME = "blocks.0.ffn.net.2.weight"


@pytest.fixture
def model():
    return tiny_wan_transformer()


def linear_of(model):
    return model.get_submodule(NAME.removesuffix(".weight"))


def kinds_of(model):
    return {type(parameter) for parameter in model.parameters()}


def assign(weight):
    weight.data = weight.data * -1.5


def assign_inference_tensor(weight):
    with torch.inference_mode():
        value = weight.detach() * -1.5
    weight.data = value


def assign_what_the_linear_shows(weight):
    """Of a patched model a weight in 8 bits."""
    weight.data = weight.linear.weight.data if hasattr(weight, "linear") else weight.data
    weight.data.mul_(-1.5)


WRITES = {
    "in place": lambda weight: weight.mul_(-1.5),
    "detached": lambda weight: weight.detach().mul_(-1.5),
    "data": lambda weight: weight.data.mul_(-1.5),
    "a row": lambda weight: weight.data[3].zero_(),
    "an element of a view": lambda weight: weight.data.view(-1)[-1].add_(3.0),
    "as bits": lambda weight: weight.data.view(torch.int32).bitwise_xor_(1 << 22),
    "indexed": lambda weight: weight.data.__setitem__((0, slice(2, 7)), 2.0),
    "copied": lambda weight: weight.data.copy_(torch.ones_like(weight)),
    "new data": assign,
    "new data of inference mode": assign_inference_tensor,
    "new data, its own": assign_what_the_linear_shows,
}


MODES = [(torch.no_grad, write) for write in WRITES] + [(torch.inference_mode, "data"), (torch.inference_mode, "a row")]


@pytest.mark.parametrize(("mode", "write"), MODES)
def test_writes_are_converted(model, mode, write):
    plain = tiny_wan_transformer()
    held = [each.get_parameter(NAME) for each in (model, plain)]
    held[0].linear = linear_of(model)
    patch = trp.patch(model, CONFIG)
    for _ in range(2):
        with mode():
            for weight in held:
                WRITES[write](weight)
        like_unpatched(model, plain)
    assert torch.equal(linear_of(model).weight, held[1])
    patch.restore()
    assert model.get_parameter(NAME) is held[0]
    assert kinds_of(model) == {nn.Parameter}
    assert torch.equal(output_of(model), output_of(plain))


def test_averaged_weights_are_converted(model):
    """diffusers writes them through ``.data`` to the parameters that its user took from the model."""
    plain, other = tiny_wan_transformer(), tiny_wan_transformer(seed=5)
    average = EMAModel(other.parameters())
    held = [list(each.parameters()) for each in (model, plain)]
    trp.patch(model, CONFIG)
    for parameters in held:
        average.store(parameters)
        average.copy_to(parameters)
    like_unpatched(model, other)
    average.restore(held[0])
    like_unpatched(model, tiny_wan_transformer())


def test_another_shape_is_refused(model):
    weight = model.get_parameter(NAME)
    trp.patch(model, CONFIG)
    with pytest.raises(RuntimeError, match=r"shape \(128, 48\) in 8 bits cannot become \(0,\)"):
        weight.data = torch.empty(0)
    assert up_to_date(linear_of(model))


def test_it_is_a_parameter_as_any(model):
    weight, plain = model.get_parameter(NAME), tiny_wan_transformer().get_parameter(NAME)
    weight.tag = "kept"
    trp.patch(model, CONFIG)
    assert type(weight) is OriginalParameter
    assert isinstance(weight, nn.Parameter)
    for twin in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert type(twin) is nn.Parameter
        assert torch.equal(twin, plain)
    frozen = nn.Parameter(torch.ones(2, 3), requires_grad=False)
    frozen.__class__ = OriginalParameter
    assert [each.requires_grad for each in copy.deepcopy([weight, frozen])] == [True, False]
    first, second = copy.deepcopy([weight] * 2)
    assert first is second
    product = torch.compile(lambda weight, x: x @ weight.T, backend="eager", fullgraph=True)
    x = torch.randn(2, 48)
    assert torch.equal(product(weight, x), x @ plain.T)
    assert torch.equal(torch.vmap(lambda x: weight @ x)(x), torch.vmap(lambda x: plain @ x)(x))
    trp.restore(model)
    assert weight.tag == "kept"


@pytest.mark.parametrize("restored_first", [0, 1])
def test_models_that_share_parameters(model, restored_first):
    """On the CPU, as a model that was patched on a GPU has its originals elsewhere."""
    other, plain = tiny_wan_transformer(seed=5), tiny_wan_transformer()
    for name, parameter in model.named_parameters():
        other.get_submodule(name.rpartition(".")[0]).register_parameter(name.rpartition(".")[2], parameter)
    models, weight = [model, other], model.get_parameter(NAME)
    for each in models:
        trp.patch(each, CONFIG)
        assert is_quantized(linear_of(each))
    trp.restore(models.pop(restored_first))
    with torch.no_grad():
        for each in (weight, plain.get_parameter(NAME)):
            each.data.mul_(-1.5)
    like_unpatched(models[0], plain)
    trp.restore(models[0])
    assert kinds_of(model) == kinds_of(other) == {nn.Parameter}


def test_one_of_tied_weights_that_gets_another(model):
    plain = tiny_wan_transformer()
    weight, path = model.get_parameter(NAME), "blocks.1.ffn.net.2"
    for each in (model, plain):
        each.get_submodule(path).weight = each.get_parameter(NAME)
    trp.patch(model, CONFIG)
    theirs = {"weight": torch.randn_like(weight)}
    for each in (model, plain):
        each.get_submodule(path).load_state_dict(theirs, strict=False, assign=True)
    with torch.no_grad():
        for each in (weight, plain.get_parameter(NAME)):
            each.data.mul_(-1.5)
    like_unpatched(model, plain)
    trp.restore(model)
    assert kinds_of(model) == {nn.Parameter}
    assert torch.equal(output_of(model), output_of(plain))


def test_what_is_loaded_in_its_place_is_counted_instead(model):
    plain = tiny_wan_transformer()
    held, state = model.get_parameter(NAME), tiny_wan_transformer(seed=5).state_dict()
    loaded = [nn.Parameter(state[NAME].clone()) for _ in range(2)]
    trp.patch(model, CONFIG)
    for each, theirs in zip((model, plain), loaded, strict=True):
        each.load_state_dict({NAME: theirs}, strict=False, assign=True)
    assert (type(held), type(loaded[0])) == (nn.Parameter, OriginalParameter)
    for theirs in loaded:
        theirs.data.mul_(-1.5)
    like_unpatched(model, plain)
    trp.restore(model)
    assert type(loaded[0]) is nn.Parameter
    assert torch.equal(output_of(model), output_of(plain))


def test_models_that_are_restored_in_threads_at_once():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(5) as threads:
            restored = [threads.submit(patched_and_restored, seed) for seed in range(4)]
            called = threads.submit(look_for_writes, restored)  # as a call of another model does
            assert all(each.result() == {nn.Parameter} for each in restored)
            assert called.result() == 0
    finally:
        sys.setswitchinterval(interval)


def look_for_writes(until):
    return sum(iter(lambda: -1 if all(each.done() for each in until) else bring_all_up_to_date(), -1))


def patched_and_restored(seed):
    model = tiny_wan_transformer(seed=seed)
    for _ in range(40):
        trp.patch(model, CONFIG)
        trp.restore(model)
    return kinds_of(model)


@pytest.mark.parametrize("theirs", [lambda weight: weight, lambda weight: nn.Parameter(torch.randn_like(weight))])
def test_a_replaced_parameter_is_plain_again(model, theirs):
    weight = model.get_parameter(NAME)
    patch = trp.patch(model, CONFIG)
    linear_of(model).weight = replacement = theirs(weight)
    patch.restore()
    assert linear_of(model).weight is replacement
    assert type(weight) is type(replacement) is nn.Parameter


def test_a_freed_original_is_plain_again(model):
    weight = model.get_parameter(NAME)
    trp.patch(model, FREED)
    assert type(weight) is nn.Parameter


def test_a_copied_model_does_not_share(model):
    trp.patch(model, CONFIG)
    twin, before = copy.deepcopy(model), output_of(model)
    with torch.no_grad():
        linear_of(twin).weight.data.mul_(-1.5)
    assert not torch.equal(output_of(twin), before)
    assert torch.equal(output_of(model), before)
    trp.restore(twin)
    assert kinds_of(twin) == {nn.Parameter}
    assert type(linear_of(model).eight_bit.original) is OriginalParameter
