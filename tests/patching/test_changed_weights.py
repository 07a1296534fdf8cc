"""Every change since a plan was decided takes effect."""

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


def test_autocast_and_inference_mode_leave_nothing_behind(models):
    inputs = tiny_transformer_inputs(models[0])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(models[0](**inputs)[0], models[1](**inputs)[0])
    with torch.inference_mode():
        models[0](**inputs)
    assert_same(models, inputs)


def test_stacked_parameters_can_be_mapped_over():
    model = tiny_wan_transformer()
    inputs = tiny_transformer_inputs(model)
    parameters = {name: torch.stack([p.detach(), 0.9 * p.detach()]) for name, p in model.named_parameters()}
    call = lambda p: torch.func.functional_call(model, p, (), inputs)[0]  # noqa: E731
    with torch.no_grad():
        expected = torch.vmap(call)(parameters)
        with trp.patch(model):
            assert relative_error(torch.vmap(call)(parameters), expected) <= 1e-5


class Scaled(torch.nn.Module):
    """A layer whose output depends on more than parameters."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.scale = inner, 1.0

    def forward(self, x):
        return self.scale * self.inner(x)


@pytest.mark.parametrize("name", ["attn2.to_v", "attn1.to_out.0", "ffn.net.2"])
def test_unknown_layers_are_called_every_time(models, name):
    assert_same(models, tiny_transformer_inputs(models[0]))  # the plan knows the plain layers
    parent, child = name.rsplit(".", 1)
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


def test_a_global_hook_leaves_nothing_behind(models):
    inputs = tiny_transformer_inputs(models[0])
    double = lambda module, _, output: 2 * output if isinstance(module, torch.nn.Linear) else None  # noqa: E731
    handle = torch.nn.modules.module.register_module_forward_hook(double)
    try:
        assert_same(models, inputs)
    finally:
        handle.remove()
    assert_same(models, inputs)
