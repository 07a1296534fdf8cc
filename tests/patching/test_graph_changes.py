"""Graphs: every change since a recording takes effect."""

import contextlib
import copy
import functools

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.models.attention import FeedForward
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from peft import LoraConfig
from torch.nn.attention import SDPBackend, sdpa_kernel

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.tape import (
    AUTO,
    VARIANTS,
    assert_eager,
    assert_replayed,
    assert_same,
    graphs_of,
    inputs_for,
    make_models,
    note,
    replays,
    run,
    warm,
)
from tests.tiny_wan import tiny_wan_transformer
from turbo_rcm_patch.patching import cuda_graphs as graphs

WRITES = {
    "in place": lambda tensor: tensor.mul_(-1.5),
    "through data": lambda tensor: tensor.data.mul_(-1.5),
    "new storage": lambda tensor: setattr(tensor, "data", tensor.data * -1.5),
}
WEIGHTS = [
    "patch_embedding.weight",
    "condition_embedder.time_embedder.linear_1.weight",
    "condition_embedder.text_embedder.linear_1.weight",
    "condition_embedder.image_embedder.ff.net.2.weight",
    "rope.freqs_cos",
    "blocks.0.scale_shift_table",
    "blocks.1.attn1.to_q.weight",
    "blocks.1.attn2.to_k.weight",
    "blocks.1.attn2.to_v.bias",
    "blocks.0.attn2.norm_k.weight",
    "blocks.0.attn2.add_k_proj.weight",
    "blocks.0.ffn.net.2.weight",
    "proj_out.bias",
    "scale_shift_table",
]


@pytest.mark.parametrize("write", WRITES)
def test_weights_changed_between_calls_take_effect(tape, write):
    pair = make_models(VARIANTS["i2v"][0])
    inputs = inputs_for(pair[0])
    before = run(pair[1], inputs)
    for name in WEIGHTS:
        for _ in range(2):
            run(pair[0], inputs)
        assert_replayed(pair, inputs)
        with torch.no_grad():
            for model in pair:
                WRITES[write]({**dict(model.named_parameters()), **dict(model.named_buffers())}[name])
        after = run(pair[0], inputs)
        assert torch.equal(after, run(pair[1], inputs)), name
        assert not torch.equal(after, before), name
        before = after


def test_a_transposed_weight_at_the_same_address_takes_effect(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    for model in pair:
        weight = model.blocks[0].attn1.to_q.weight
        weight.data = weight.data.t()
    warm(pair, inputs)


@pytest.mark.parametrize("assign", [False, True])
def test_a_reloaded_state_dict_takes_effect(tape, assign):
    pair = make_models()
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    for model in pair:
        model.load_state_dict(tiny_wan_transformer(seed=5).state_dict(), assign=assign)
    for _ in range(3):
        assert_same(pair, inputs)
    assert_replayed(pair, inputs)


@contextlib.contextmanager
def hooked(register):
    """A user's forward hook that doubles an output."""
    handle = register(lambda module, args, output: 2 * output)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def changed(thing, name, value):
    before = getattr(thing, name)
    setattr(thing, name, value)
    try:
        yield
    finally:
        setattr(thing, name, before)


class Doubled(FeedForward):
    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs)


class NegatingProcessor(WanAttnProcessor):
    def __call__(self, *args, **kwargs):
        return -super().__call__(*args, **kwargs)


def forward_of_linear(linear):
    return lambda x: -torch.nn.functional.linear(x, linear.weight, linear.bias)


def doubled(forward):
    def twice(*args, **kwargs):
        output = forward(*args, **kwargs)
        return (2 * output[0],) if isinstance(output, tuple) else 2 * output

    return twice


def doubled_under_its_name(forward):
    return functools.wraps(forward)(doubled(forward))


def with_class_forward(cls):
    """Replace the forward of a class, as programs that skip steps do."""
    return lambda m: changed(cls, "forward", doubled(cls.forward))


# name: (what changes the model, the reason to run eagerly while it lasts, or None if a new graph is made)
CHANGES = {
    "eps": (lambda m: changed(m.blocks[0].norm1, "eps", 10.0), None),
    "eps of kept values": (lambda m: changed(m.blocks[0].attn2.norm_k, "eps", 10.0), None),
    "another module": (lambda m: changed(m.blocks[0].attn1, "to_q", copy.deepcopy(m.blocks[0].attn1.to_k)), None),
    "a block less": (lambda m: changed(m, "blocks", m.blocks[:1]), None),
    "class": (lambda m: changed(m.blocks[0].ffn, "__class__", Doubled), "tests Doubled layer"),
    "processor": (
        lambda m: changed(m.blocks[0].attn1, "processor", NegatingProcessor()),
        "processor NegatingProcessor",
    ),
    "forward": (
        lambda m: changed(m.blocks[0].attn1.to_v, "forward", forward_of_linear(m.blocks[0].attn1.to_v)),
        "replaced forward",
    ),
    "forward of the model's class": (with_class_forward(WanTransformer3DModel), "replaced forward of its class"),
    "forward of a layer's class": (with_class_forward(torch.nn.SiLU), "replaced forward of its class"),
    "hook": (lambda m: hooked(m.blocks[1].attn1.to_q.register_forward_hook), "torch hook"),
    "hook on a block": (lambda m: hooked(m.blocks[1].register_forward_hook), "torch hook"),
    "global hook": (
        lambda m: hooked(
            lambda h: torch.nn.modules.module.register_module_forward_hook(
                lambda module, args, output: h(module, args, output) if isinstance(module, torch.nn.Conv3d) else None
            )
        ),
        "global torch hook",
    ),
    "a processor's backend": (
        lambda m: changed(m.blocks[0].attn1.processor, "_attention_backend", "_native_math"),
        "attention backend _native_math",
    ),
    "a backend of all": (lambda m: attention_backend("_native_math"), "attention backend _native_math"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_is_not_replayed(tape, name):
    change, reason = CHANGES[name]
    pair = make_models()
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    before = run(pair[1], inputs)
    with change(pair[0]), change(pair[1]):
        if "backend" not in name:
            assert not torch.equal(run(pair[1], inputs), before)
        if reason is None:
            warm(pair, inputs)
        else:
            assert_eager(pair, inputs, reason)
            assert "none now: " + reason in note(pair[0])
            assert_eager(pair, inputs, reason)
    assert torch.equal(run(pair[1], inputs), before)
    warm(pair, inputs)
    assert_replayed(pair, inputs)


def test_a_processors_class_that_runs_something_else_is_not_replayed(tape):
    pair = make_models(config=trp.Exact(fuse=(), cuda_graph="auto"))
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    before = run(pair[1], inputs)
    with changed(WanAttnProcessor, "__call__", doubled(WanAttnProcessor.__call__)):
        assert not torch.equal(run(pair[1], inputs), before)
        assert_eager(pair, inputs, "WanAttnProcessor changed by a program")
    warm(pair, inputs)


@pytest.mark.parametrize("replaced", [doubled, doubled_under_its_name])
def test_a_class_forward_replaced_before_the_first_call_is_not_recorded(tape, monkeypatch, replaced):
    pair = make_models()
    monkeypatch.setattr(torch.nn.SiLU, "forward", replaced(torch.nn.SiLU.forward))
    assert_eager(pair, inputs_for(pair[0]), "replaced forward of its class")


def test_a_model_that_changes_on_every_step_is_recorded_when_it_stays(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    for step in range(4):
        pair[0].current_step = step
        assert_same(pair, inputs)
    assert replays(pair[0]) == 0
    warm(pair, inputs)
    assert_replayed(pair, inputs)


def test_settings_of_torch_are_told_apart(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    with sdpa_kernel(SDPBackend.MATH):
        assert_eager(pair, inputs, "not recorded yet")
        warm(pair, inputs)
    assert_replayed(pair, inputs)
    assert graphs_of(pair[0]).kept == 2


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
        (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
        (torch.backends.cudnn, "benchmark", True),
    ],
)
def test_the_key_knows_what_chooses_kernels(owner, name, value):
    inputs = [torch.ones(3)]
    before = graphs.call_key(inputs)
    with changed(owner, name, value):
        assert graphs.call_key(inputs) != before
    assert graphs.call_key(inputs) == before


def test_the_key_knows_the_default_device():
    before = graphs.call_key([])
    with torch.device("meta"):
        assert graphs.call_key([]) != before
    assert graphs.call_key([]) == before


def test_an_attention_that_a_program_replaces_takes_effect(tape, monkeypatch):
    pair = make_models()
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    before, attention = run(pair[1], inputs), torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *args, **kwargs: -attention(*args, **kwargs)
    )
    assert not torch.equal(run(pair[1], inputs), before)
    warm(pair, inputs)


def test_dropout_in_training_is_drawn(tape):
    model = tiny_wan_transformer().train()
    trp.patch(model, AUTO)
    inputs = inputs_for(model)
    for _ in range(3):
        run(model, inputs)
    assert replays(model) == 2
    model.blocks[0].attn1.to_out[1].p = 0.5
    assert relative_error(run(model, inputs), run(model, inputs)) > 1e-3
    assert "none now: dropout" in note(model)


def test_lora_between_the_calls(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    base = run(pair[1], inputs)
    for model in pair:
        torch.manual_seed(5)
        targets = ["to_q", "to_k", "to_out.0", "ffn.net.2"]
        model.add_adapter(LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=targets))
    assert relative_error(run(pair[1], inputs), base) > 0.1
    warm(pair, inputs)
    assert_replayed(pair, inputs)
    for scale in (0.3, 1.0):
        for model in pair:
            model.set_adapters(["default"], [scale])
        warm(pair, inputs)
        assert_replayed(pair, inputs)
    for model in pair:
        model.disable_lora()
    warm(pair, inputs)
    assert_replayed(pair, inputs)
    assert relative_error(run(pair[0], inputs), base) <= 1e-5
    for model in pair:
        model.enable_lora()
        model.fuse_lora()
        model.unload_lora()
    fused = run(pair[1], inputs)
    assert relative_error(fused, base) > 0.1
    warm(pair, inputs)
    assert_replayed(pair, inputs)


def test_matrices_of_a_lora_written_in_place_between_two_replays(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    for model in pair:
        torch.manual_seed(5)
        model.add_adapter(LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=["to_q", "ffn.net.2"]))
    warm(pair, inputs)
    assert_replayed(pair, inputs)
    before = run(pair[0], inputs)
    for model in pair:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(-2)
    assert_replayed(pair, inputs)
    assert relative_error(run(pair[0], inputs), before) > 0.01


def test_dora_is_not_recorded(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    for model in pair:
        torch.manual_seed(5)
        model.add_adapter(LoraConfig(r=4, use_dora=True, init_lora_weights=False, target_modules=["to_q"]))
    assert_eager(pair, inputs, "LoRA layer: DoraLinearVariant")


def test_lora_fused_and_unloaded_between_two_calls_is_not_missed(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    before = run(pair[1], inputs)
    for model in pair:
        torch.manual_seed(5)
        model.add_adapter(LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=["to_q", "to_k"]))
        model.fuse_lora()
        model.unload_lora()
    assert relative_error(run(pair[1], inputs), before) > 0.01
    warm(pair, inputs)
