"""What is computed once per generation is computed once, and never stale."""

import pytest
import torch

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.tiny_wan import tiny_transformer_inputs, tiny_wan_transformer


@pytest.fixture(params=["t2v", "i2v"])
def models(request):
    """The same model twice, the first patched; their weights are separate."""
    options = {"image_dim": 4, "added_kv_proj_dim": "inner", "in_channels": 36} if request.param == "i2v" else {}
    patched, plain = tiny_wan_transformer(**options), tiny_wan_transformer(**options)
    trp.patch(patched)
    return patched, plain


def assert_same(models, inputs):
    with torch.no_grad():
        patched, plain = (model(**inputs)[0] for model in models)
    assert relative_error(patched, plain) <= 1e-5


def test_prompt_and_rope_are_computed_once(models, monkeypatch):
    patched, _ = models
    inputs = tiny_transformer_inputs(patched)
    calls = {"project": 0, "to_k": 0, "rope": 0}

    def counted(name, function):
        def wrapper(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return wrapper

    monkeypatch.setattr(type(patched.rope), "forward", counted("rope", type(patched.rope).forward))
    projection = type(patched.condition_embedder.text_embedder)
    monkeypatch.setattr(projection, "forward", counted("project", projection.forward))
    module = trp.patching.wan.state
    monkeypatch.setattr(module, "_keys_values", counted("to_k", module._keys_values))
    with torch.no_grad():
        for timestep in (900.0, 500.0, 100.0):
            inputs["timestep"] = torch.full_like(inputs["timestep"], timestep)
            inputs["hidden_states"] = torch.randn_like(inputs["hidden_states"])
            patched(**inputs)
    # Two projections of an empty text come with the time embedding of later steps.
    assert calls == {"project": 4, "to_k": len(patched.blocks), "rope": 1}


def test_conditional_and_unconditional_prompts_are_both_kept(models, monkeypatch):
    module, calls = trp.patching.wan.state, []
    keys_values = module._keys_values
    monkeypatch.setattr(module, "_keys_values", lambda *args: calls.append(1) or keys_values(*args))
    first, second = tiny_transformer_inputs(models[0]), tiny_transformer_inputs(models[0], seed=11)
    for _ in range(3):
        assert_same(models, first)
        assert_same(models, second)
    assert len(calls) == 2 * len(models[0].blocks)


WRITES = {
    "in place": lambda tensor: tensor.mul_(-1.5),
    "through data": lambda tensor: tensor.data.mul_(-1.5),
    "one element": lambda tensor: tensor.data.view(-1)[-1].add_(3.0),
    "swapped": lambda tensor: tensor.data.copy_(tensor.data.flip(0).clone()),
    "new storage": lambda tensor: setattr(tensor, "data", tensor.data * -1.5),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_prompt_written_in_place_takes_effect(models, write):
    inputs = tiny_transformer_inputs(models[0])
    assert_same(models, inputs)
    WRITES[write](inputs["encoder_hidden_states"])
    assert_same(models, inputs)
    if "encoder_hidden_states_image" in inputs:
        WRITES[write](inputs["encoder_hidden_states_image"])
        assert_same(models, inputs)


WEIGHTS = [
    "blocks.1.attn2.to_k.weight",
    "blocks.1.attn2.to_v.bias",
    "blocks.0.attn2.norm_k.weight",
    "condition_embedder.text_embedder.linear_1.weight",
    "blocks.0.attn2.add_k_proj.weight",
    "condition_embedder.image_embedder.ff.net.2.weight",
    "rope.freqs_cos",
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_changed_after_the_patch_take_effect(models, name, write):
    tensors = [{**dict(model.named_parameters()), **dict(model.named_buffers())}.get(name) for model in models]
    if tensors[0] is None:
        pytest.skip("this variant has no such weight")
    inputs = tiny_transformer_inputs(models[0])
    assert_same(models, inputs)
    with torch.no_grad():
        for tensor in tensors:
            WRITES[write](tensor)
    with torch.no_grad():
        before, after = models[0](**inputs)[0], models[1](**inputs)[0]
    assert relative_error(before, after) <= 1e-5


@pytest.mark.parametrize("assign", [False, True])
def test_a_reloaded_state_dict_takes_effect(models, assign):
    inputs = tiny_transformer_inputs(models[0])
    assert_same(models, inputs)
    config = {k: v for k, v in models[0].config.items() if k in ("image_dim", "added_kv_proj_dim", "in_channels")}
    other = tiny_wan_transformer(seed=5, **config).state_dict()
    for model in models:
        model.load_state_dict({k: v.clone() for k, v in other.items()}, assign=assign)
    assert_same(models, inputs)


def test_new_sizes_batches_prompts_and_dtypes_take_effect(models):
    for options in ({}, {"batch": 1}, {"height": 6}, {"width": 4, "frames": 1}, {"height": 4, "width": 6}, {}):
        assert_same(models, tiny_transformer_inputs(models[0], **options))
    for model in models:
        model.double()
    assert_same(models, tiny_transformer_inputs(models[0]))


def test_autocast_and_inference_mode_do_not_leak_into_the_cache(models):
    inputs = tiny_transformer_inputs(models[0])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(models[0](**inputs)[0], models[1](**inputs)[0])
    with torch.inference_mode():
        models[0](**inputs)
    assert_same(models, inputs)


def test_a_block_called_with_another_context_does_not_see_the_kept_one(models):
    patched, plain = models
    inputs = tiny_transformer_inputs(patched)
    captured = []
    hook = plain.blocks[0].register_forward_pre_hook(lambda _, args: captured.append(args))
    assert_same(models, inputs)
    hook.remove()
    hidden, context, temb, rotary = captured[0]
    with torch.no_grad():
        assert (
            relative_error(
                patched.blocks[0](hidden, -2 * context, temb, rotary),
                plain.blocks[0](hidden, -2 * context, temb, rotary),
            )
            <= 1e-5
        )


def test_cache_text_can_be_switched_off():
    model = tiny_wan_transformer()
    with trp.patch(model, trp.PatchConfig(cache_text=False)) as patch:
        assert "cache_text=False (2)" in patch.summary()
        state = model._turbo_rcm_patch
        with torch.no_grad():
            model(**tiny_transformer_inputs(model))
        assert not list(state._contexts.values())
