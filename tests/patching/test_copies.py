"""Copies and pickles of patched models are patched, run on their own weights, and compute the same."""

import copy
import functools
import pickle

import accelerate
import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook

import turbo_rcm_patch as trp
from tests.patching.pairs import through_pickle, through_torch_save
from tests.tiny_families import EACH_MODEL, first_of, tiny_family_inputs, tiny_family_transformer
from tests.tiny_wan import output_of, tiny_wan_transformer


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("make", [copy.deepcopy, through_pickle, through_torch_save])
def test_a_whole_copy_is_patched_and_its_own(make, called):
    model = tiny_wan_transformer()
    expected = output_of(model)
    trp.patch(model)
    if called:
        output_of(model)
    twin = make(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(output_of(twin), expected)
    assert all("forward" in block.__dict__ for block in twin.blocks)
    trp.restore(twin)
    assert not any("_turbo_rcm_patch" in name for module in twin.modules() for name in vars(module))
    assert not any("forward" in vars(module) or "__reduce_ex__" in vars(module) for module in twin.modules())
    assert torch.equal(output_of(twin), expected)
    assert "forward" in model.blocks[0].__dict__


@pytest.mark.parametrize("name", EACH_MODEL)
def test_every_family_can_be_pickled(name):
    model = trp.patch(tiny_family_transformer(name)).transformers["transformer"]
    twin = through_pickle(model)
    with torch.no_grad():
        inputs = tiny_family_inputs(name, model)
        assert torch.equal(first_of(twin(**inputs)), first_of(model(**inputs)))


def test_a_copy_of_one_block_does_not_copy_the_model():
    model = tiny_wan_transformer()
    trp.patch(model)
    output_of(model)
    block = model.blocks[0]
    before = len(pickle.dumps(type(block).state_dict(block)))
    assert len(pickle.dumps(block)) < 1.5 * before
    memo = {}
    twin = copy.deepcopy(block, memo)
    assert id(model) not in memo
    assert id(model.blocks[1]) not in memo
    captured = []
    block.register_forward_pre_hook(lambda _, args: captured.append(args))
    expected = []
    block.register_forward_hook(lambda _, args, output: expected.append(output))
    output_of(model)
    with torch.no_grad():
        block.ffn.net[2].weight.zero_()
        assert torch.equal(twin(*captured[0]), expected[0])


def test_a_shallow_copy_runs_on_what_it_holds():
    model, plain = tiny_wan_transformer(), tiny_wan_transformer()
    trp.patch(model)
    twins = []
    for each in (model, plain):
        output_of(each)
        twin = copy.copy(each)
        twin._modules = dict(each._modules)
        twin.blocks = torch.nn.ModuleList([copy.copy(each.blocks[0])])
        twin.blocks[0]._parameters = {"scale_shift_table": torch.nn.Parameter(-each.blocks[0].scale_shift_table)}
        twins.append(twin)
    ours, theirs = map(output_of, twins)
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(ours, output_of(model), rtol=1e-2)
    with pytest.raises(trp.PatchError, match="transformer is a shallow copy of a patched model; restore that model"):
        trp.restore(twins[0])


def test_data_parallel_is_refused():
    model = tiny_wan_transformer()
    with (
        trp.patch(model),
        pytest.raises(RuntimeError, match="DataParallel cannot replicate a patched WanTransformer3D"),
    ):
        model._replicate_for_data_parallel()
    assert type(model._replicate_for_data_parallel()) is type(model)


def test_a_model_that_accelerate_wrapped_and_unwrapped_can_be_restored():
    model = tiny_wan_transformer()
    expected = output_of(model)
    patch = trp.patch(model)
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare(model)
    output_of(prepared)
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert torch.allclose(output_of(unwrapped), expected, rtol=1e-5, atol=1e-6)
    patch.restore()
    assert torch.equal(output_of(model), expected)


def test_a_users_partial_keeps_its_keywords_in_a_copy():
    model = tiny_wan_transformer()
    trp.patch(model)

    def scaled(module, *args, scale=1.0, **options):
        return (scale * type(module).forward(module, *args, **options)[0],)

    model.forward = functools.partial(scaled, model, scale=3.0)
    assert torch.equal(output_of(copy.deepcopy(model)), output_of(model))


def test_a_copy_under_a_later_hook_can_be_restored():
    model = tiny_wan_transformer()
    expected = output_of(model)
    trp.patch(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    twin = copy.deepcopy(model)
    trp.restore(twin)
    assert torch.equal(output_of(twin), expected)
    assert torch.allclose(output_of(model), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [copy.deepcopy, through_pickle])
def test_a_copy_whose_hooks_were_removed_can_be_patched_again(make):
    model = tiny_wan_transformer()
    hooks = HookRegistry.check_if_exists_or_initialize(model)
    hooks.register_hook(ModelHook(), "a hook")
    trp.patch(model)
    hooks.remove_hook("a hook")
    twin = make(model)
    trp.restore(twin)
    with trp.patch(twin):
        assert torch.allclose(output_of(twin), output_of(model), rtol=1e-5, atol=1e-6)
