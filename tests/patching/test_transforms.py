"""Patched models under torch's transforms, tracers and modes that compute with other tensors than usual."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.tiny_wan import moved, tiny_transformer_inputs, tiny_wan_transformer

CONFIGS = [trp.Exact(), trp.Exact(implementation="triton")]


@pytest.fixture(params=["auto", "triton"])
def models(request):
    """A model, patched and not; where the interpreter runs the kernels, one of a single block."""
    layers = 2 if request.param == "auto" else 1
    patched, plain = (tiny_wan_transformer(layers=layers).requires_grad_(False) for _ in range(2))
    trp.patch(patched, trp.Exact(implementation=request.param))
    return patched, plain


def few_tokens(model):
    return tiny_transformer_inputs(model, batch=1, frames=1, height=4, width=4, text_tokens=3)


def of_prompt(model):
    inputs = few_tokens(model)
    prompt = inputs.pop("encoder_hidden_states")
    return lambda prompt: model(encoder_hidden_states=prompt, **inputs)[0], prompt


def test_forward_mode_with_respect_to_the_prompt_is_right_every_time(models):
    (ours, prompt), (theirs, _) = map(of_prompt, models)
    tangent = torch.randn_like(prompt)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        expected = torch.func.jvp(theirs, (prompt,), (tangent,))
        for _ in range(3):
            for ours_part, theirs_part in zip(torch.func.jvp(ours, (prompt,), (tangent,)), expected, strict=True):
                assert relative_error(ours_part, theirs_part) <= 1e-5
        assert expected[1].abs().max() > 0


def test_forward_mode_with_respect_to_a_cross_attention_weight_is_right_every_time(models):
    results = []
    for model in models:
        name, inputs = "blocks.0.attn2.to_k.weight", few_tokens(model)
        weight = dict(model.named_parameters())[name].detach()
        call = lambda w, m=model, n=name, i=inputs: torch.func.functional_call(m, {n: w}, (), i)[0]  # noqa: E731
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            results.append([torch.func.jvp(call, (weight,), (torch.ones_like(weight),))[1] for _ in range(2)])
    for ours, theirs in zip(*results, strict=True):
        assert relative_error(ours, theirs) <= 1e-5
        assert theirs.abs().max() > 0


def test_vmap_over_prompts(models):
    (ours, prompt), (theirs, _) = map(of_prompt, models)
    prompts = torch.stack([prompt, -prompt, 2 * prompt])
    with torch.no_grad():
        assert relative_error(torch.vmap(ours)(prompts), torch.vmap(theirs)(prompts)) <= 1e-5


def test_stacked_parameters_can_be_mapped_over():
    model = tiny_wan_transformer()
    inputs = few_tokens(model)
    parameters = {name: torch.stack([p.detach(), 0.9 * p.detach()]) for name, p in model.named_parameters()}
    call = lambda p: torch.func.functional_call(model, p, (), inputs)[0]  # noqa: E731
    with torch.no_grad():
        expected = torch.vmap(call)(parameters)
        with trp.patch(model):
            assert relative_error(torch.vmap(call)(parameters), expected) <= 1e-5


def test_meta_tensors():
    model = tiny_wan_transformer().to("meta")
    inputs = moved(tiny_transformer_inputs(model), "meta")
    with torch.no_grad(), trp.patch(model):
        assert model(**inputs)[0].shape == inputs["hidden_states"].shape


@pytest.mark.parametrize("config", CONFIGS)
def test_fake_tensors(config):
    model = tiny_wan_transformer()
    inputs = tiny_transformer_inputs(model)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad(), trp.patch(model, config):
        fakes = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        assert model(**fakes)[0].shape == inputs["hidden_states"].shape


def test_traced_graphs_compute_what_the_model_does(models):
    (ours, prompt), (theirs, _) = map(of_prompt, models)
    with torch.no_grad():
        graphs = [make_fx(ours)(prompt), torch.jit.trace(ours, (prompt,), check_trace=False)]
        for graph in graphs:
            assert relative_error(graph(-1.5 * prompt), theirs(-1.5 * prompt)) <= 1e-5
        assert relative_error(ours(prompt), theirs(prompt)) <= 1e-5
