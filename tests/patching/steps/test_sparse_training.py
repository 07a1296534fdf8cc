"""Training with sparse attention: a patched model's gradients equal the published equations'."""

from types import SimpleNamespace

import pytest
import torch

import turbo_rcm_patch as trp
from tests.official_names import official_state_dict
from tests.oracle import relative_error
from tests.patching.turbowan import SLA, literal, turbo_weights
from tests.tiny_wan import tiny_transformer_inputs, tiny_wan_transformer


@pytest.mark.parametrize("quantize", [(), ("attention",)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_equations(saved, quantize, checkpointing):
    """All parameters and the latents get them. An attention in 8 bits trains like an exact one."""
    model = tiny_wan_transformer()
    weights = turbo_weights(model)
    patch = trp.load_turbodiffusion(saved(weights), model, **SLA)
    if quantize:
        patch.restore()
        own_projections(model, weights)
        config = trp.Sparse(quantize=quantize, topk=SLA["topk"], blocks=SLA["blocks"])
        patch = trp.patch(model, config)
    if checkpointing:
        model.train().enable_gradient_checkpointing()
    expected = {name: tensor.double().requires_grad_() for name, tensor in weights.items()}
    literal(expected, model).square().sum().backward()
    model(**tiny_transformer_inputs(model))[0].square().sum().backward()
    gradients = gradients_by_official_name(model)
    assert gradients.keys() == expected.keys()
    for name, weight in expected.items():
        assert weight.grad.any(), name
        assert relative_error(gradients[name].view_as(weight), weight.grad) < 1e-4, name
    assert "under autograd steps without a gradient run as torch ops" in patch.summary()


def own_projections(model, weights):
    for number, block in enumerate(model.blocks):
        size = model.config.attention_head_dim
        block.attn1.proj_l = torch.nn.Linear(size, size)
        own = {part: weights[f"{projection(number)}.{part}"] for part in ("weight", "bias")}
        block.attn1.proj_l.load_state_dict(own)


def gradients_by_official_name(model):
    """Return the gradients of all parameters, proj_l included."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    own = {name: gradients.pop(name) for name in list(gradients) if "proj_l" in name}
    found = official_state_dict(SimpleNamespace(state_dict=gradients.copy, blocks=model.blocks))
    for number in range(len(model.blocks)):
        for part in ("weight", "bias"):
            found[f"{projection(number)}.{part}"] = own[f"blocks.{number}.attn1.proj_l.{part}"]
    return found


def projection(number):
    return f"blocks.{number}.self_attn.attn_op.local_attn.proj_l"
