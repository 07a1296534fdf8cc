"""Patching a VAE, alone and with pipelines: its changes, calls that run diffusers' own decoder, and restoring."""

import copy
import filecmp
import gc

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLWan, WanPipeline

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.pairs import through_pickle, through_torch_save
from tests.tiny_vae import decode, tiny_latents, tiny_vae
from tests.tiny_wan import tiny_wan_pipeline
from turbo_rcm_patch.patching.families.vae.forward import decode as patched_decode
from turbo_rcm_patch.patching.families.vae.forward import vae_state


def is_patched(vae):
    return getattr(vars(vae).get("_decode"), "__func__", None) is patched_decode


def attributes(vae):
    """Return each module's attributes, without those that diffusers' own decoder leaves behind."""
    left = ("_conv_num", "_conv_idx", "_feat_map", "_enc_conv_num", "_enc_conv_idx", "_enc_feat_map")
    return {name: set(vars(module)) - set(left) for name, module in vae.named_modules()}


def assert_same(actual, expected):
    assert actual.shape == expected.shape
    assert relative_error(actual, expected) <= 1e-5


# What a patch changes


@pytest.mark.parametrize("kind", ["wan 2.1", "qwen image"])
def test_patch_leaves_the_vae_as_it_is_and_restore_leaves_nothing(kind, tmp_path):
    vae, z = tiny_vae(kind), tiny_latents()
    vae.save_pretrained(tmp_path / "before")
    keys, classes, before = list(vae.state_dict()), [type(m) for m in vae.modules()], attributes(vae)
    parameters = {name: (id(p), p.data_ptr(), p.stride()) for name, p in vae.named_parameters()}
    expected, other = decode(vae, z), decode(vae, tiny_latents(2))
    patch = trp.patch(vae)
    assert is_patched(vae)
    decode(vae, z)
    assert list(vae.state_dict()) == keys
    assert [type(m) for m in vae.modules()] == classes
    assert {name: (id(p), p.data_ptr(), p.stride()) for name, p in vae.named_parameters()} == parameters
    vae.save_pretrained(tmp_path / "after")
    names = [path.name for path in (tmp_path / "before").iterdir()]
    assert filecmp.cmpfiles(tmp_path / "before", tmp_path / "after", names, shallow=False)[0] == names
    patch.restore()
    assert attributes(vae) == before
    assert torch.equal(decode(vae, z), expected)
    assert torch.equal(decode(vae, tiny_latents(2)), other)


def test_left_out_by_the_option():
    pipe = tiny_wan_pipeline()
    before = attributes(pipe.vae)
    with trp.patch(pipe, trp.Exact(vae=False)) as patch:
        assert attributes(pipe.vae) == before
        assert patch.vae is None
        assert "vae" not in patch.summary().replace("vae=False", "")
    with trp.patch(pipe.vae, trp.Exact(vae=False)):  # asked for by itself
        assert is_patched(pipe.vae)


def test_a_vae_of_another_class_is_left_alone_and_named():
    class Finetuned(AutoencoderKLWan):
        pass

    pipe = tiny_wan_pipeline()
    options = {key: value for key, value in pipe.vae.config.items() if not key.startswith("_")}
    others = [
        (AutoencoderKL(block_out_channels=(4,), norm_num_groups=1), "AutoencoderKL"),
        (Finetuned(**options), "Finetuned"),
    ]
    for vae, name in others:
        pipe.vae = vae
        before = set(vars(vae))
        with trp.patch(pipe) as patch:
            line = next(line for line in patch.summary().splitlines() if line.startswith("vae"))
            assert line.startswith(f"vae: {name}, as without the patch: its class is ")
            assert set(vars(vae)) == before
            assert {row.blocks for row in patch.rows()} == {"blocks"}
        if name != "AutoencoderKL":
            known = "AutoencoderKLWan or AutoencoderKLQwenImage"
            with pytest.raises(trp.PatchError, match=f"cannot patch vae: its class is .*{name}, not {known}"):
                trp.patch(vae)
    with pytest.raises(trp.PatchError, match="AutoencoderKL; supported"):
        trp.patch(others[0][0])


def test_a_compiled_vae_is_left_alone_with_a_remedy():
    pipe = tiny_wan_pipeline()
    pipe.vae = torch.compile(pipe.vae, backend="eager")
    remedy = "it is compiled; patch it before compiling it"
    with trp.patch(pipe) as patch:
        assert f"vae: OptimizedModule, as without the patch: {remedy}\n" in patch.summary()
        assert not is_patched(pipe.vae._orig_mod)
    with pytest.raises(trp.PatchError, match=f"cannot patch vae: {remedy}."):
        trp.patch(pipe.vae)


def test_a_pipeline_without_a_vae():
    pipe = tiny_wan_pipeline()
    pipe.vae = None
    with trp.patch(pipe) as patch:
        assert "vae" not in patch.summary()


def test_a_decoder_that_somebody_replaced_is_left_alone():
    pipe = tiny_wan_pipeline()
    pipe.vae._decode = users = lambda z, return_dict=True: (z,)
    with trp.patch(pipe) as patch:
        assert pipe.vae._decode is users
        assert "as without the patch: its _decode was replaced" in patch.summary()
    with pytest.raises(trp.PatchError, match="cannot patch vae: its _decode was replaced"):
        trp.patch(pipe.vae)


def test_a_failure_rolls_back(monkeypatch):
    from turbo_rcm_patch.patching import apply

    pipe = tiny_wan_pipeline()
    models = (pipe.transformer, pipe.vae)
    before = [attributes(model) for model in models]
    bindings = apply.vae_family.bindings

    def failing(vae, config):
        yield from bindings(vae, config)[:-1]
        raise MemoryError("halfway")

    monkeypatch.setattr(apply.vae_family, "bindings", failing)
    with pytest.raises(MemoryError):
        trp.patch(pipe)
    assert [attributes(model) for model in models] == before


def test_patching_twice_restoring_twice_and_a_decoder_replaced_after_the_patch():
    vae = tiny_vae()
    with pytest.raises(trp.PatchError, match="nothing to restore: vae is not patched"):
        trp.restore(vae)
    patch = trp.patch(vae)
    with pytest.raises(trp.PatchError, match="vae is patched already; call restore"):
        trp.patch(vae)
    ours = vae._decode
    vae._decode = lambda *args, **options: ours(*args, **options)
    with pytest.raises(trp.PatchError, match=r"AutoencoderKLWan.* was replaced after the patch"):
        patch.restore()
    vae._decode = ours
    patch.restore()
    assert not is_patched(vae)
    with pytest.raises(trp.PatchError, match="vae was restored already"):
        patch.restore()


def test_restore_through_a_compiled_wrapper():
    pipe = tiny_wan_pipeline()
    trp.patch(pipe)
    vae, pipe.vae = pipe.vae, torch.compile(pipe.vae, backend="eager")
    trp.restore(pipe)
    assert not is_patched(vae)
    trp.patch(vae)
    trp.restore(torch.compile(vae, backend="eager"))
    assert not is_patched(vae)


# One VAE in several pipelines


def two_pipelines():
    first, second = tiny_wan_pipeline(), tiny_wan_pipeline(seed=20)
    second.vae = first.vae
    return first, second


@pytest.mark.parametrize("first_off", [0, 1])
@pytest.mark.parametrize("by_function", [False, True])
def test_a_shared_vae_is_patched_once_and_restored_with_the_last(by_function, first_off):
    pipes = two_pipelines()
    vae, expected = pipes[0].vae, decode(pipes[0].vae)
    before = attributes(vae)
    patches = [trp.patch(pipe) for pipe in pipes]
    ours = vars(vae)["_decode"]
    assert all("vae: AutoencoderKLWan, decoder" in patch.summary() for patch in patches)

    def off(index):
        if by_function:
            trp.restore(pipes[index])
        else:
            patches[index].restore()

    off(first_off)
    assert vars(vae)["_decode"] is ours
    assert not patches[first_off].active
    with pytest.raises(trp.PatchError, match="nothing to restore"):
        off(first_off)
    assert vars(vae)["_decode"] is ours
    off(1 - first_off)
    assert attributes(vae) == before
    assert not any(patch.active for patch in patches)
    assert torch.equal(decode(vae), expected)


def test_the_summary_says_whose_options_a_shared_vae_has():
    first, second = two_pipelines()
    line = "patched by another call of patch, whose options stay: vae=True, vae_chunk=1, implementation='auto'"
    ours = trp.patch(first, trp.Exact(vae_chunk=1))
    for options in ({"vae": False}, {"vae_chunk": 4}, {}):
        with trp.patch(second, trp.Exact(**options)) as patch:
            assert line in patch.summary()
            assert "1 latent frames at a time" in patch.summary()
    with trp.patch(second, trp.Exact(vae_chunk=1)) as patch:
        assert "another call" not in patch.summary()
    assert "another call" not in ours.summary()


def test_a_pipeline_that_is_gone_holds_no_vae():
    first, second = two_pipelines()
    vae = first.vae
    trp.patch(first)
    patch = trp.patch(second)
    del first
    gc.collect()  # a patched model is in a reference cycle with its bound forwards
    patch.restore()
    assert not is_patched(vae)


def test_patched_alone_and_with_a_pipeline():
    pipe = tiny_wan_pipeline()
    alone = trp.patch(pipe.vae)
    patch = trp.patch(pipe)
    patch.restore()
    assert not is_patched(pipe.vae)
    assert not alone.active
    patch = trp.patch(pipe)
    trp.restore(pipe.vae)  # asked for by itself: at once
    assert not is_patched(pipe.vae)
    assert "as without the patch: restored" in patch.summary()
    assert patch.active
    patch.restore()
    assert not patch.active


def test_a_transformer_restored_by_itself_and_patched_again_does_not_hold_the_vae():
    pipe = tiny_wan_pipeline()
    patch = trp.patch(pipe)
    trp.restore(pipe.transformer)
    assert is_patched(pipe.vae)
    assert patch.active
    trp.patch(pipe)
    trp.restore(pipe)
    assert not is_patched(pipe.vae)


# Weights that change


def test_weights_changed_in_place_reloaded_and_cast_take_effect():
    vae, plain = tiny_vae(), tiny_vae()
    trp.patch(vae)
    assert_same(decode(vae), decode(plain))
    for each in (vae, plain):
        with torch.no_grad():
            each.decoder.mid_block.resnets[0].conv1.weight.mul_(1.5)
            each.decoder.up_blocks[1].upsamplers[0].time_conv.bias.add_(0.3)
            each.decoder.norm_out.gamma.mul_(0.7)
    assert_same(decode(vae), decode(plain))
    other = tiny_vae(seed=11).state_dict()
    vae.load_state_dict(other)
    plain.load_state_dict(other)
    assert_same(decode(vae), decode(plain))
    vae.load_state_dict({name: -value for name, value in other.items()}, assign=True)
    plain.load_state_dict({name: -value for name, value in other.items()})
    assert_same(decode(vae), decode(plain))
    assert not vae_state(vae).eager
    vae, plain, z = vae.to(torch.float64), plain.to(torch.float64), tiny_latents(dtype=torch.float64)
    assert decode(vae, z).dtype == torch.float64
    assert_same(decode(vae, z), decode(plain, z))
    assert not vae_state(vae).eager


# Copies


@pytest.mark.parametrize("make", [copy.deepcopy, through_pickle, through_torch_save])
def test_a_whole_copy_is_patched_and_its_own(make):
    vae, plain = tiny_vae(), tiny_vae()
    trp.patch(vae)
    decode(vae)
    twin = make(vae)
    with torch.no_grad():
        for parameter in vae.parameters():
            parameter.zero_()
    assert is_patched(twin)
    assert_same(decode(twin), decode(plain))
    trp.restore(twin)
    assert torch.equal(decode(twin), decode(plain))
    assert not any("_turbo_rcm_patch" in name for name in vars(twin))
    assert is_patched(vae)


def test_a_shallow_copy_runs_on_what_it_holds():
    vae, plain = tiny_vae(), tiny_vae()
    trp.patch(vae)
    twins = []
    for each in (vae, plain):
        twin = copy.copy(each)
        twin._modules = {**each._modules, "decoder": copy.deepcopy(each.decoder)}
        with torch.no_grad():
            twin.decoder.conv_out.weight.neg_()
        twins.append(twin)
    assert_same(*map(decode, twins))
    with pytest.raises(trp.PatchError, match="vae is a shallow copy of a patched model"):
        trp.restore(twins[0])


def test_a_pipeline_saved_and_loaded(tmp_path):
    pipe = tiny_wan_pipeline()
    trp.patch(pipe)
    pipe.save_pretrained(tmp_path)
    loaded = WanPipeline.from_pretrained(tmp_path)
    assert not is_patched(loaded.vae)
    assert_same(decode(loaded.vae), decode(pipe.vae))
