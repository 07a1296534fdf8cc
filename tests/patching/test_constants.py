"""What is computed once per generation is computed once, and never stale."""

import types

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

        # As if defined beside the function: a program's would not be counted but found, and nothing be kept.
        spy = types.FunctionType(wrapper.__code__, function.__globals__, closure=wrapper.__closure__)
        spy.__module__ = function.__module__
        return spy

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


def test_a_rearranged_batch_of_prompts_is_a_new_prompt():
    """A checksum that is linear in the words would not tell A, B, B, A from B, A, A, B."""
    patched, plain = tiny_wan_transformer(), tiny_wan_transformer()
    trp.patch(patched)
    inputs = tiny_transformer_inputs(patched, batch=4)
    prompts = inputs["encoder_hidden_states"]
    for order in ([0, 1, 1, 0], [1, 0, 0, 1]):
        inputs["encoder_hidden_states"] = prompts[order].clone()
        assert_same((patched, plain), inputs)


class Scaled(torch.nn.Module):
    """A layer whose output depends on more than parameters."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.scale = inner, 1.0

    def forward(self, x):
        return self.scale * self.inner(x)


@pytest.mark.parametrize("name", ["attn2.to_v", "attn2.to_k"])
def test_unknown_layers_are_called_every_time(models, name):
    parent, child = name.split(".")
    for model in models:
        attn = model.blocks[0].get_submodule(parent)
        setattr(attn, child, Scaled(getattr(attn, child)))
    inputs = tiny_transformer_inputs(models[0])
    for scale in (1.0, 3.0):
        for model in models:
            model.blocks[0].get_submodule(name).scale = scale
        assert_same(models, inputs)


@pytest.mark.parametrize("name", ["blocks.0.attn2.norm_k", "condition_embedder.image_embedder.norm1"])
def test_norm_eps_changed_after_the_patch_takes_effect(models, name):
    if name not in dict(models[0].named_modules()):
        pytest.skip("this variant has no such norm")
    inputs = tiny_transformer_inputs(models[0])
    for eps in (1e-6, 10.0):
        for model in models:
            model.get_submodule(name).eps = eps
        assert_same(models, inputs)


@pytest.mark.parametrize("part", ["condition_embedder", "rope"])
def test_hooks_on_patched_parts_see_and_change_the_class_outputs(models, part):
    def negate_last_tensor(module, args, output):
        return tuple(-o if torch.is_tensor(o) and i == 1 else o for i, o in enumerate(output))

    for model in models:
        model.get_submodule(part).register_forward_hook(negate_last_tensor)
    assert_same(models, tiny_transformer_inputs(models[0]))


def test_a_subclassed_embedder_is_called_every_time(models):
    base = type(models[0].condition_embedder)

    class Doubled(base):
        def forward(self, *args, **kwargs):
            temb, timestep_proj, text, image = super().forward(*args, **kwargs)
            return temb, timestep_proj, 2 * text, image

    for model in models:
        model.condition_embedder.__class__ = Doubled
    assert_same(models, tiny_transformer_inputs(models[0]))


def _double_context(module, args):
    args[1].mul_(2)


def test_a_context_written_by_a_hook_is_not_kept(models):
    inputs = tiny_transformer_inputs(models[0])
    handles = [model.blocks[1].register_forward_pre_hook(_double_context) for model in models]
    with torch.no_grad():
        for model in models:
            model(**inputs)
    for handle in handles:
        handle.remove()
    assert_same(models, inputs)


def test_a_global_hook_leaves_nothing_behind(models):
    inputs = tiny_transformer_inputs(models[0])
    double = lambda module, _, output: 2 * output if isinstance(module, torch.nn.Linear) else None  # noqa: E731
    handle = torch.nn.modules.module.register_module_forward_hook(double)
    try:
        assert_same(models, inputs)
    finally:
        handle.remove()
    assert_same(models, inputs)
