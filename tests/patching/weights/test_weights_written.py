"""Models, or parts of them, that torch.compile took with weights in 8 bits, whose originals were written to."""

import copy
import functools

import pytest
import torch

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.quantized_models import CONFIG, ERROR, output_of
from tests.tiny_families import tiny_family_inputs, tiny_family_transformer
from tests.tiny_wan import tiny_wan_transformer
from turbo_rcm_patch.patching.weights.convert import quantized_linears
from turbo_rcm_patch.patching.weights.weights_written import with_weights_up_to_date

NAME = "blocks.0.ffn.net.2.weight"
REFUSED = r"weights in 8 bits \(1\) were written to .* converted now: call it again"


def write(model):
    model.state_dict()[NAME].mul_(-1.5)


@pytest.fixture
def model():
    torch._dynamo.reset()
    return tiny_wan_transformer()


def test_a_call_that_may_have_read_old_weights_is_refused():
    """Of a family whose embedder is any but Wan's own, which the other tests have."""
    torch._dynamo.reset()
    model, plain = tiny_family_transformer("skyreels"), tiny_family_transformer("skyreels")
    inputs = tiny_family_inputs("skyreels", plain)
    parameter = model.get_parameter(NAME)  # held from before the patch
    trp.patch(model, CONFIG)
    model.compile(backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        model(**inputs)
        for written in (lambda: write(model), lambda: parameter.data.mul_(-1.5)):
            written()
            write(plain)
            with pytest.raises(RuntimeError, match=REFUSED):
                model(**inputs)
            assert relative_error(model(**inputs)[0], plain(**inputs)[0]) <= ERROR
        for each in (model, plain):
            write(each)
        model.load_state_dict(model.state_dict())
        assert relative_error(model(**inputs)[0], plain(**inputs)[0]) <= ERROR
        for each in (model, plain):
            each.blocks[1].attn1.to_v.weight.mul_(-1.5)
        assert relative_error(model(**inputs)[0], plain(**inputs)[0]) <= ERROR


def test_nothing_is_refused_that_nobody_wrote_to(model):
    """Neither for a copy nor for weights of two linears, which the remedy converts both."""
    for each in (model, plain := tiny_wan_transformer()):
        each.blocks[1].ffn.net[2].weight = each.blocks[0].ffn.net[2].weight
    trp.patch(model, CONFIG)
    model.compile(backend="aot_eager", fullgraph=True)
    output_of(model)
    twin = copy.deepcopy(model)
    output_of(model)
    assert not any(linear.is_outdated for each in (model, twin) for linear in quantized_linears(each))
    for each in (model, plain):
        write(each)
    with pytest.raises(RuntimeError, match=r"weights in 8 bits \(2\) .* converted now"):
        output_of(model)
    assert relative_error(output_of(model), output_of(plain)) <= ERROR
    for each in (model, plain):
        write(each)
    model.load_state_dict(model.state_dict())
    assert relative_error(output_of(model), output_of(plain)) <= ERROR
    for each in (model, plain):
        each.to(torch.bfloat16)
    assert model.state_dict()[NAME].dtype == torch.bfloat16  # casts it
    assert not any(linear.is_outdated for linear in quantized_linears(model))


def test_nothing_is_refused_for_a_model_with_the_same_weights(model):
    """When that is patched, and restored."""
    other = tiny_wan_transformer()
    for mine, theirs in zip(model.modules(), other.modules(), strict=True):
        theirs._parameters.update(mine._parameters)
    before = output_of(other)
    trp.patch(model, CONFIG)
    patch = trp.patch(other, CONFIG)
    assert not any(linear.is_outdated for each in (model, other) for linear in quantized_linears(each))
    patch.restore()
    assert not any(linear.is_outdated for linear in quantized_linears(model))
    assert torch.equal(output_of(other), before)


def test_an_exact_model_compares_nothing(model):
    graphs = []
    trp.patch(model)
    model.compile(backend=lambda graph, inputs: graphs.append(graph) or graph, fullgraph=True)
    output_of(model)
    assert len(graphs) == 1
    assert "refuse_old_weights" not in graphs[0].code


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
def test_inductor_keeps_the_op_and_the_timesteps(model, dtype):
    trp.patch(model, CONFIG)
    compiled = torch.compile(lambda t: with_weights_up_to_date(t, CONFIG), fullgraph=True)
    for t in (torch.tensor([999, 3, 0]), torch.arange(8).expand(2, 8)[:, ::2]):
        result = compiled(t.to(dtype))
        assert result.dtype == dtype
        assert torch.equal(result, t.to(dtype))
        write(model)
        with pytest.raises(RuntimeError, match=REFUSED):
            compiled(t.to(dtype))


def tripled(t):
    return 3 * with_weights_up_to_date(t, CONFIG)


def test_derivatives_pass():
    torch._dynamo.reset()
    compiled = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    t, direction = torch.tensor([999.0, 3.0]), torch.tensor([1.0, -2.0])
    forward = compiled(lambda t: torch.func.jvp(tripled, (t,), (direction,)))
    assert torch.equal(forward(t)[1], 3 * direction)
    t.requires_grad_()
    compiled(tripled)(t).backward(direction)
    assert torch.equal(t.grad, 3 * direction)
