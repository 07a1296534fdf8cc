"""Processors, classes and modules that somebody changed run as changed, in every family."""

import copy
import functools
from collections import Counter

import pytest
import torch
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from diffusers.models.normalization import FP32LayerNorm, RMSNorm
from torch import nn

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.pairs import assert_same_output, attention_class, every_family, families, make_pair, output_of, row
from tests.tiny_families import tiny_family_transformer
from turbo_rcm_patch.patching.families.wan import block
from turbo_rcm_patch.patching.steps import exact as layers
from turbo_rcm_patch.patching.steps import plan

QKV = ("self_attention", "QKV projection")


@pytest.mark.parametrize("name", ["wan", "vace", "skyreels"])  # animate has as many face adapters as blocks
def test_blocks_that_come_and_go_after_the_patch(name):
    patched, plain, patch = make_pair(name)
    for model in (patched, plain):
        model.blocks.append(copy.deepcopy(plain.blocks[0]))
    assert_same_output(name, patched, plain)
    assert "blocks that came after the patch and run as diffusers' own: 1\n" in patch.summary()
    for model in (patched, plain):
        del model.blocks[:]
    assert_same_output(name, patched, plain)
    assert "0 blocks" in patch.summary()
    patch.restore()
    assert_same_output(name, patched, plain)


@every_family
def test_a_block_that_is_wrapped_after_the_patch_counts_as_it_was(name):
    patched, plain, patch = make_pair(name)
    patched.blocks[0] = torch.compile(patched.blocks[0], backend="eager")
    assert_same_output(name, patched, plain)
    assert "came after the patch" not in patch.summary()


@families
def test_a_custom_processor_is_kept(name):
    patched, plain, patch = make_pair(name)

    class Doubled(attention_class(plain)._default_processor_cls):
        def __call__(self, *args, **kwargs):
            return 2 * super().__call__(*args, **kwargs)

    for model in (patched, plain):
        model.blocks[1].attn1.set_processor(Doubled())
    assert_same_output(name, patched, plain)
    assert row(patch, "self_attention", "projection + skip").reasons["processor Doubled"] == 1


@every_family
def test_a_feed_forward_subclass_is_called(name):
    class Doubled(FeedForward):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    patched, plain, patch = make_pair(name)
    for model in (patched, plain):
        model.blocks[0].ffn.__class__ = Doubled
    assert_same_output(name, patched, plain)
    assert row(patch, "feed_forward", "linear + skip").reasons["tests Doubled layer"] == 1


CLASSES = {
    "linear": nn.Linear,
    "norm": FP32LayerNorm,
    "QK-norm": None,  # the family's
    "attention": None,  # the family's
    "feed-forward": FeedForward,
    "activation": GELU,
    "dropout": nn.Dropout,
}


def class_of(part, model):
    if part == "QK-norm":
        return type(model.blocks[0].attn1.norm_q)
    return attention_class(model) if part == "attention" else CLASSES[part]


def longer(method):
    return lambda self, *args, **kwargs: 1.2 * method(self, *args, **kwargs)


def longer_under_its_name(method):
    return functools.wraps(method)(longer(method))


def longer_in_its_module(method):
    replaced = longer(method)
    replaced.__module__ = method.__module__
    return replaced


def longer_below_a_decorator(method):
    return torch.no_grad()(longer_under_its_name(method))


class Longer:
    """A callable object in place of a method, under the method's name."""

    def __init__(self, method):
        functools.update_wrapper(self, method)

    def __get__(self, instance, owner):
        return self if instance is None else functools.partial(longer(self.__wrapped__), instance)


REPLACED = [longer, longer_in_its_module, longer_under_its_name, longer_below_a_decorator]


OTHERS = ("vace", "skyreels", "animate")


@pytest.mark.parametrize(
    ("name", "replaced"),
    [*(("wan", each) for each in (*REPLACED, Longer)), *((name, longer_under_its_name) for name in OTHERS)],
)
@pytest.mark.parametrize("part", CLASSES)
def test_a_forward_that_a_program_replaces_on_a_class_runs(monkeypatch, name, part, replaced):
    patched, plain, patch = make_pair(name)
    base = output_of(name, plain)
    cls = class_of(part, plain)
    monkeypatch.setattr(cls, "forward", replaced(cls.forward))
    assert relative_error(output_of(name, plain), base) > 1e-3
    assert_same_output(name, patched, plain)
    assert "replaced forward of its class" in patch.summary()


@pytest.mark.parametrize("replaced", REPLACED)
@families
def test_a_processor_whose_class_a_program_changes_runs(monkeypatch, name, replaced):
    patched, plain, patch = make_pair(name)
    base = output_of(name, plain)
    processor = attention_class(plain)._default_processor_cls
    monkeypatch.setattr(processor, "__call__", replaced(processor.__call__))
    assert relative_error(output_of(name, plain), base) > 1e-3
    assert_same_output(name, patched, plain)
    assert f"{processor.__name__} changed" in patch.summary()


@families
@pytest.mark.parametrize("part", CLASSES)
def test_a_decorator_of_torch_on_a_class_changes_nothing(monkeypatch, name, part):
    patched, _, patch = make_pair(name)
    before, cls = patch.summary(), class_of(part, patched)
    monkeypatch.setattr(cls, "forward", torch.no_grad()(cls.forward))
    assert patch.summary() == before


@families
def test_fused_qkv_projections(name):
    patched, plain, patch = make_pair(name)
    if not hasattr(patched, "fuse_qkv_projections"):
        pytest.skip("diffusers does not fuse the projections of this model")
    patched.fuse_qkv_projections()
    assert_same_output(name, patched, plain)
    assert row(patch, *QKV).reasons == {"fused projections": len(patched.blocks)}
    patched.unfuse_qkv_projections()
    assert_same_output(name, patched, plain)
    assert row(patch, *QKV).reasons == {"cpu tensors": len(patched.blocks)}


# name: (what changes, why the projections of the block are not one op then)
QKV_CHANGES = {
    "hook": (lambda attn: attn.to_k.register_forward_hook(lambda module, args, output: -output), "torch hook"),
    "no bias on one": (lambda attn: setattr(attn.to_v, "bias", None), "unequal projections"),
    "no bias": (
        lambda attn: [setattr(linear, "bias", None) for linear in (attn.to_q, attn.to_k, attn.to_v)],
        "cpu tensors",
    ),
}


NORMS = {
    "RMSNorm without a weight": {"elementwise_affine": False},
    "RMSNorm with a bias": {"bias": True},
}


@pytest.mark.parametrize("reason", NORMS)
def test_an_unusual_norm_of_queries_is_called(reason):
    patched, plain, patch = make_pair("anyflow")
    for model in (patched, plain):
        model.blocks[1].attn1.norm_q = RMSNorm(model.blocks[1].attn1.inner_dim, eps=1e-6, **NORMS[reason])
        if reason == "RMSNorm with a bias":
            torch.nn.init.ones_(model.blocks[1].attn1.norm_q.bias)
    assert_same_output("anyflow", patched, plain)
    assert row(patch, "self_attention", "QK-norm + RoPE").reasons == {"cpu tensors": 2, reason: 1}


@families
@pytest.mark.parametrize("kind", QKV_CHANGES)
def test_changed_qkv_projections(name, kind):
    change, reason = QKV_CHANGES[kind]
    patched, plain, patch = make_pair(name)
    base = output_of(name, plain)
    for model in (patched, plain):
        change(model.blocks[1].attn1)
    assert relative_error(output_of(name, plain), base) > 1e-4
    assert_same_output(name, patched, plain)
    others = len(plain.blocks) - 1
    assert row(patch, *QKV).reasons == Counter({"cpu tensors": others}) + Counter({reason: 1})


@families
def test_qkv_of_one_op_are_those_of_the_modules(monkeypatch, name):
    model = tiny_family_transformer(name)
    with trp.patch(model):
        ours = output_of(name, model)
        by_modules = lambda attn, *_: plan.Step(lambda x: layers._qkv_of_modules(attn, x), "modules", "asked")  # noqa: E731
        monkeypatch.setattr(block, "qkv_projection", by_modules)
        for changed in model.blocks:
            changed.attn1.changed = True
        assert torch.equal(ours, output_of(name, model))


@families
def test_dropout_in_training_is_drawn(name):
    model = tiny_family_transformer(name).train()
    model.blocks[0].attn1.to_out[1].p = 0.5
    with trp.patch(model) as patch:
        assert relative_error(output_of(name, model), output_of(name, model)) > 1e-3
        assert row(patch, "self_attention", "projection + skip").reasons["dropout"] == 1
