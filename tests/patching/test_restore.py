"""A patch changes nothing but behaviour, and restore takes back everything."""

import filecmp
import functools
import inspect
from types import MethodType

import pytest
import torch
from diffusers import FirstBlockCacheConfig

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.pairs import attributes_of, blocks_of, every_family, output_of, variants
from tests.tiny_families import tiny_family_transformer
from tests.tiny_wan import tiny_wan_pipeline
from turbo_rcm_patch.patching.families import family_of
from turbo_rcm_patch.patching.families.family import Family

cached = pytest.mark.parametrize("name", ["wan", "vace"])  # diffusers' first-block cache knows no other blocks


def is_fused(model):
    kinds = family_of(model).blocks
    forwards = [(block.forward, kind.forward) for kind in kinds for _, block in kind.of(model)]
    return all(getattr(forward, "__func__", None) is ours for forward, ours in forwards)


@every_family
def test_patch_leaves_the_model_as_it_is(name, tmp_path):
    model = tiny_family_transformer(name)
    keys, classes = list(model.state_dict()), [type(module) for module in model.modules()]
    parameters = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    model.save_pretrained(tmp_path / "before")
    trp.patch(model)
    output_of(name, model)
    assert list(model.state_dict()) == keys
    assert [type(module) for module in model.modules()] == classes
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == parameters
    model.save_pretrained(tmp_path / "after")
    names = [path.name for path in (tmp_path / "before").iterdir()]
    assert filecmp.cmpfiles(tmp_path / "before", tmp_path / "after", names, shallow=False)[0] == names


@variants
def test_restore_leaves_nothing_and_outputs_are_bitwise_the_same(name):
    model = tiny_family_transformer(name)
    attributes, expected = attributes_of(model), output_of(name, model)
    patch = trp.patch(model)
    assert is_fused(model)
    output_of(name, model)
    patch.restore()
    assert attributes_of(model) == attributes
    assert torch.equal(output_of(name, model), expected)


def test_context_manager_and_function_restore():
    pipe = tiny_wan_pipeline("wan22")
    with trp.patch(pipe):
        assert is_fused(pipe.transformer)
        assert is_fused(pipe.transformer_2)
    assert not is_fused(pipe.transformer)
    with trp.patch(pipe) as patch:
        trp.restore(pipe)
        assert not patch.active
    trp.patch(pipe)
    trp.restore(pipe.transformer)
    assert is_fused(pipe.transformer_2)
    trp.restore(pipe)
    assert not is_fused(pipe.transformer_2)


def test_a_failure_rolls_back(monkeypatch):
    pipe = tiny_wan_pipeline("wan22")
    before = [attributes_of(model) for model in (pipe.transformer, pipe.transformer_2)]
    bindings = Family.bindings

    def failing(family, transformer, *options):
        triples = bindings(family, transformer, *options)
        yield from triples[: 3 if transformer is pipe.transformer_2 else None]
        if transformer is pipe.transformer_2:
            raise MemoryError("halfway")

    monkeypatch.setattr(Family, "bindings", failing)
    with pytest.raises(MemoryError):
        trp.patch(pipe)
    assert [attributes_of(model) for model in (pipe.transformer, pipe.transformer_2)] == before


@every_family
def test_patching_twice_and_restoring_unpatched_are_errors(name):
    model = tiny_family_transformer(name)
    with pytest.raises(trp.PatchError, match="not patched"):
        trp.restore(model)
    patch = trp.patch(model)
    with pytest.raises(trp.PatchError, match="patched already"):
        trp.patch(model)
    assert is_fused(model)
    patch.restore()
    with pytest.raises(trp.PatchError, match="restored already"):
        patch.restore()
    with pytest.raises(trp.PatchError, match="restored already"):
        patch.summary()


@pytest.mark.parametrize("first_off", ["patch", "hooks"])
@cached
def test_a_patch_goes_below_the_hooks_of_diffusers(name, first_off):
    model, plain = tiny_family_transformer(name, layers=3), tiny_family_transformer(name, layers=3)
    attributes, expected = attributes_of(plain), output_of(name, plain)
    for each in (model, plain):
        each.enable_cache(FirstBlockCacheConfig(threshold=10.0))
    patch = trp.patch(model)
    with model.cache_context("cond"), plain.cache_context("cond"):
        for _ in range(2):  # the second stops after the first block
            assert torch.allclose(output_of(name, model), output_of(name, plain), rtol=1e-5, atol=1e-6)
    if first_off == "patch":
        patch.restore()
    model.disable_cache()
    assert is_fused(model) == (first_off == "hooks")
    if first_off == "hooks":
        patch.restore()
    assert torch.equal(output_of(name, model), expected)
    left = {n: names - attributes[n] for n, names in attributes_of(model).items()}
    assert not any("_turbo_rcm_patch" in name for names in left.values() for name in names)


@cached
def test_restoring_under_a_later_hook_keeps_the_hook(name):
    model = tiny_family_transformer(name, layers=3)
    expected = output_of(name, model)
    patch = trp.patch(model)
    model.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    patch.restore()
    calls = []
    model.blocks[1]._diffusers_hook.hooks["fbc_block_hook"].pre_forward = lambda *a, **k: calls.append(1) or (a[1:], k)
    with model.cache_context("cond"):
        assert torch.allclose(output_of(name, model), expected, rtol=1e-5, atol=1e-6)
    model.disable_cache()
    assert torch.equal(output_of(name, model), expected)
    assert not any("_turbo_rcm_patch" in name for names in attributes_of(model).values() for name in names)


def with_cache(model):
    """Wrap a forward as cache-dit's enable_cache does, and return a function that unwraps it as disable_cache does."""
    original = model.forward
    model.forward = functools.partial(lambda model, *args, **options: original(*args, **options), model)

    def disable_cache():
        model.forward = original.__get__(model)

    return disable_cache


@pytest.mark.parametrize("first_off", ["patch", "cache"])
def test_a_cache_that_binds_the_forward_again_when_it_goes(first_off):
    model = tiny_family_transformer("wan")
    expected = output_of("wan", model)
    patch = trp.patch(model)
    disable_cache = with_cache(model)
    assert relative_error(output_of("wan", model), expected) <= 1e-5
    if first_off == "patch":
        with pytest.raises(trp.PatchError, match=r"on 1 modules \(WanTransformer3DModel\)"):
            patch.restore()
    disable_cache()
    assert is_fused(model)
    assert relative_error(output_of("wan", model), expected) <= 1e-5
    patch.restore()
    assert torch.equal(output_of("wan", model), expected)


@cached
def test_cache_dit_finds_the_arguments_that_it_looks_for(name):
    """It refuses blocks whose forward, as inspect sees it, lacks one of these names."""
    model = tiny_family_transformer(name)
    with trp.patch(model):
        for block in blocks_of(model):
            assert "forward" in vars(block)
            assert {"hidden_states", "encoder_hidden_states"} <= set(inspect.signature(block.forward).parameters)


@pytest.mark.parametrize("preset", ["exact", "quantized"])
def test_all_that_a_patch_binds_are_bound_methods(preset):
    pipe = tiny_wan_pipeline()
    before = {thing: dict(vars(thing)) for thing in bound_in(pipe)}
    with trp.use_rcm(pipe), trp.patch(pipe, preset):
        for thing, attributes in before.items():
            new = {name: value for name, value in vars(thing).items() if attributes.get(name) is not value}
            methods = [value for value in new.values() if callable(value) and not isinstance(value, torch.nn.Module)]
            assert methods or thing not in (pipe, pipe.video_processor, *pipe.transformer.blocks)
            for method in methods:
                assert type(method) is MethodType
                assert method.__self__ is thing
                assert method.__get__(thing) == method


def bound_in(pipe):
    return [pipe, pipe.video_processor, *pipe.transformer.modules(), *pipe.vae.modules()]


def test_one_model_as_both_transformers():
    pipe = tiny_wan_pipeline("wan22")
    pipe.transformer_2 = pipe.transformer
    patch = trp.patch(pipe)
    patch.restore()
    assert not patch.active
    assert not is_fused(pipe.transformer)


@pytest.mark.parametrize("preset", ["exact", "quantized"])
def test_a_block_that_is_in_a_model_twice(preset):
    model = tiny_family_transformer("wan", layers=3)
    model.blocks[2] = model.blocks[0]
    model.blocks[1].ffn = model.blocks[0].ffn
    before = output_of("wan", model)
    patch = trp.patch(model, preset)
    allowed = patch.config.limits.allowed(0.0, torch.float32, "step")
    assert relative_error(output_of("wan", model), before) <= allowed
    assert "3 blocks" in patch.summary()
    patch.restore()
    assert torch.equal(output_of("wan", model), before)


def test_restore_through_a_compiled_wrapper():
    pipe = tiny_wan_pipeline()
    trp.patch(pipe)
    model, pipe.transformer = pipe.transformer, torch.compile(pipe.transformer, backend="eager")
    trp.restore(pipe)
    assert not is_fused(model)


def test_a_restore_that_fails_at_the_end_of_a_with_raises_but_hides_no_exception_inside():
    model, other = (tiny_family_transformer("wan") for _ in range(2))

    def replace_a_forward(model):
        model.blocks[0].forward = lambda *args: None

    def users_code():
        replace_a_forward(other)
        raise KeyError("the user's")

    with pytest.raises(trp.PatchError, match="forward was replaced"), trp.patch(model):
        replace_a_forward(model)
    with pytest.raises(KeyError), trp.patch(other):
        users_code()


def set_the_class_forward(block):
    block.forward = MethodType(type(block).forward, block)


@pytest.mark.parametrize("tier", ["exact", "quantized"])
@pytest.mark.parametrize("take_off", [lambda block: delattr(block, "forward"), set_the_class_forward])
def test_a_patched_forward_that_was_taken_off_holds_nothing_up(tier, take_off):
    """A program may set a forward of its own on a block, and take it off again."""
    model = tiny_family_transformer("wan")
    expected = output_of("wan", model)
    patch = trp.patch(model, tier)
    take_off(model.blocks[0])
    output_of("wan", model)
    patch.restore()
    assert not is_fused(model)
    assert torch.equal(output_of("wan", model), expected)
