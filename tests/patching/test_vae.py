"""Patching a VAE, alone and with pipelines: what it changes, when diffusers' own decoder runs, and the way back."""

import copy
import filecmp
import gc
import io
import pickle

import accelerate
import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLWan, WanPipeline
from diffusers.hooks import apply_group_offloading

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.tiny_vae import tiny_latents, tiny_vae
from tests.tiny_wan import tiny_call, tiny_wan_pipeline
from turbo_rcm_patch.patching.families.wan_vae.forward import decode as patched_decode
from turbo_rcm_patch.patching.families.wan_vae.forward import vae_state

CPU = torch.device("cpu")


def decode(vae, z=None):
    with torch.no_grad():
        return vae.decode(tiny_latents() if z is None else z, return_dict=False)[0]


def is_patched(vae):
    return getattr(vars(vae).get("_decode"), "__func__", None) is patched_decode


def attributes(vae):
    """Without what diffusers' own decoder leaves behind."""
    left = ("_conv_num", "_conv_idx", "_feat_map", "_enc_conv_num", "_enc_conv_idx", "_enc_feat_map")
    return {name: set(vars(module)) - set(left) for name, module in vae.named_modules()}


def assert_same(actual, expected):
    assert actual.shape == expected.shape
    assert relative_error(actual, expected) <= 1e-5


def convolution_row(patch):
    return next(row for row in patch.rows() if (row.blocks, row.step) == ("decoder", "convolution"))


# ---------------------------------------------------------------------------------------------------------------------
# What a patch changes
# ---------------------------------------------------------------------------------------------------------------------


def test_patch_leaves_the_vae_as_it_is_and_restore_leaves_nothing(tmp_path):
    vae, z = tiny_vae(), tiny_latents()
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


def test_encode_is_diffusers_own():
    vae, video = tiny_vae(), torch.rand(1, 3, 5, 16, 24)
    with torch.no_grad():
        expected = vae.encode(video).latent_dist.parameters
        trp.patch(vae)
        decode(vae)
        assert torch.equal(vae.encode(video).latent_dist.parameters, expected)


@pytest.mark.parametrize("variant", ["t2v", "wan22", "ti2v_i2v"])
def test_a_pipelines_video_is_the_same(variant):
    pipe = tiny_wan_pipeline(variant)

    def video():
        return pipe(**tiny_call(variant, output_type="pt"), generator=torch.Generator().manual_seed(0)).frames

    expected = video()
    with trp.patch(pipe) as patch:
        assert is_patched(pipe.vae)
        assert_same(video(), expected)
        assert not vae_state(pipe.vae).eager
        assert "vae: AutoencoderKLWan, decoder, float32 on cpu" in patch.summary()
    assert not is_patched(pipe.vae)
    assert torch.equal(video(), expected)


def test_left_out_by_the_option():
    pipe = tiny_wan_pipeline()
    before = attributes(pipe.vae)
    with trp.patch(pipe, trp.PatchConfig(vae=False)) as patch:
        assert attributes(pipe.vae) == before
        assert patch.vae is None
        assert "vae" not in patch.summary()
    with trp.patch(pipe.vae, trp.PatchConfig(vae=False)):  # asked for by itself
        assert is_patched(pipe.vae)


def test_a_vae_of_another_class_is_left_alone_and_named():
    class Finetuned(AutoencoderKLWan):
        pass

    pipe = tiny_wan_pipeline()
    options = {key: value for key, value in pipe.vae.config.items() if not key.startswith("_")}
    others = [
        (AutoencoderKL(block_out_channels=(4,), norm_num_groups=1), "AutoencoderKL"),
        (Finetuned(**options), "Finetuned"),
        (torch.compile(pipe.vae, backend="eager"), "OptimizedModule"),
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
            with pytest.raises(trp.PatchError, match=f"cannot patch vae: its class is .*{name}, not AutoencoderKLWan"):
                trp.patch(vae)
    with pytest.raises(trp.PatchError, match="AutoencoderKL; supported"):
        trp.patch(others[0][0])


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
    bindings = apply.wan_vae.bindings

    def failing(vae, config):
        yield from bindings(vae, config)[:-1]
        raise MemoryError("halfway")

    monkeypatch.setattr(apply.wan_vae, "bindings", failing)
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


# ---------------------------------------------------------------------------------------------------------------------
# One VAE in several pipelines
# ---------------------------------------------------------------------------------------------------------------------


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


def test_a_pipeline_that_is_gone_holds_no_vae():
    first, second = two_pipelines()
    vae = first.vae
    trp.patch(first)
    patch = trp.patch(second)
    del first
    gc.collect()  # a patched model is in a cycle with what is bound on it
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


# ---------------------------------------------------------------------------------------------------------------------
# Weights that change
# ---------------------------------------------------------------------------------------------------------------------


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


# ---------------------------------------------------------------------------------------------------------------------
# Diffusers' own decoder where something is not plain
# ---------------------------------------------------------------------------------------------------------------------


def scaled(module, args, output):
    return 1.5 * output


def _hook(vae):
    vae.decoder.up_blocks[0].register_forward_hook(scaled)


def _hook_on_a_convolution(vae):
    vae.decoder.up_blocks[2].upsamplers[0].resample[1].register_forward_hook(scaled)


def _hook_before(vae):
    vae.post_quant_conv.register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:]))


def _replaced_forward(vae):
    norm = vae.decoder.mid_block.attentions[0].norm
    norm.forward = lambda x: 0.5 * type(norm).forward(norm, x)


def _replaced_module(vae):
    vae.decoder.norm_out = torch.nn.Identity()


def _subclass(vae):
    class Louder(type(vae.decoder.conv_out)):
        def forward(self, x, cache_x=None):
            return 2 * super().forward(x, cache_x)

    vae.decoder.conv_out.__class__ = Louder


def _other_padding(vae):
    vae.decoder.up_blocks[1].upsamplers[0].resample[1].padding_mode = "circular"


def _other_upsampling(vae):
    vae.decoder.up_blocks[1].upsamplers[0].resample[0].mode = "bilinear"


def _dropout(vae):
    for module in vae.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    vae.decoder.train()


def _tensor_subclass(vae):
    conv = vae.decoder.conv_in
    conv.weight = torch.nn.Parameter(accelerate.utils.operations.torch.Tensor.as_subclass(conv.weight.data, _Marked))


class _Marked(torch.Tensor):
    pass


def _compiled_decoder(vae):
    vae.decoder = torch.compile(vae.decoder, backend="eager")


def _compiled_in_place(vae):
    vae.decoder.mid_block.compile(backend="eager")


def _blending(vae):
    vae.enable_tiling(24, 24, 16, 16)
    vae.blend_h = lambda a, b, blend_extent: b


UNUSUAL = {
    "torch hook on decoder.up_blocks.0": _hook,
    "torch hook on decoder.up_blocks.2.upsamplers.0.resample.1": _hook_on_a_convolution,
    "torch hook on post_quant_conv": _hook_before,
    "replaced forward on decoder.mid_block.attentions.0.norm": _replaced_forward,
    "torch Identity layer on decoder.norm_out": _replaced_module,
    "Louder layer on decoder.conv_out": _subclass,
    "changed attributes on decoder.up_blocks.1.upsamplers.0.resample.1": _other_padding,
    "changed attributes on decoder.up_blocks.1.upsamplers.0.resample.0": _other_upsampling,
    "dropout on decoder": _dropout,
    "_Marked weight on decoder.conv_in": _tensor_subclass,
    "OptimizedModule layer on decoder": _compiled_decoder,
    "torch.compile on decoder.mid_block": _compiled_in_place,
    "replaced blend_h": _blending,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reason", UNUSUAL)
@pytest.mark.parametrize("patched_first", [True, False])
def test_diffusers_own_decoder_runs_and_the_summary_says_why(reason, patched_first):
    vae, plain, z = tiny_vae(), tiny_vae(), tiny_latents(2, height=5, width=6)
    patch = trp.patch(vae) if patched_first else None
    for each in (vae, plain):
        UNUSUAL[reason](each)
    patch = patch or trp.patch(vae)
    results = []
    for each in (vae, plain):
        torch.manual_seed(0)
        results.append(decode(each, z))
    assert torch.equal(*results)
    assert any(reason in found for found in vae_state(vae).eager)
    row = convolution_row(patch)
    assert row.kernel == "PyTorch module"
    assert reason in next(iter(row.reasons))
    assert reason in patch.summary()
    assert "diffusers' own decoder ran: " in patch.summary()


def test_what_is_taken_off_again_does_not_count_any_more():
    vae, plain = tiny_vae(), tiny_vae()
    patch = trp.patch(vae)
    handle = vae.decoder.conv_in.register_forward_hook(scaled)
    decode(vae)
    handle.remove()
    assert convolution_row(patch).kernel == "PyTorch convolution"
    assert_same(decode(vae), decode(plain))
    assert vae_state(vae).eager.total() == 1


def test_autograd():
    vae, plain = tiny_vae(), tiny_vae()
    trp.patch(vae)
    leaves = [tiny_latents().requires_grad_() for _ in range(2)]
    for each, z in zip((vae, plain), leaves, strict=True):
        each.decode(z).sample.square().mean().backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad)
    theirs = dict(plain.named_parameters())
    for name, parameter in vae.named_parameters():
        assert (parameter.grad is None) == (theirs[name].grad is None)
        assert parameter.grad is None or torch.equal(parameter.grad, theirs[name].grad), name
    assert vae_state(vae).eager == {"autograd": 1}
    vae.requires_grad_(False)
    assert not vae.decode(tiny_latents()).sample.requires_grad  # with gradients on and nothing that wants one: ours
    assert vae_state(vae).eager == {"autograd": 1}


def test_function_transforms():
    vae, plain, z = tiny_vae().requires_grad_(False), tiny_vae().requires_grad_(False), tiny_latents(2, batch=1)
    trp.patch(vae)
    ours, theirs = (torch.func.grad(lambda x, vae=vae: vae.decode(x).sample.square().mean())(z) for vae in (vae, plain))
    assert torch.equal(ours, theirs)
    assert vae_state(vae).eager == {"autograd": 1}


def test_autocast():
    vae, plain = tiny_vae(), tiny_vae()
    trp.patch(vae)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = decode(vae), decode(plain)
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)
    assert vae_state(vae).eager == {"autocast": 1}


def test_inference_mode():
    vae, plain = tiny_vae(), tiny_vae()
    trp.patch(vae)
    with torch.inference_mode():
        assert_same(vae.decode(tiny_latents()).sample, plain.decode(tiny_latents()).sample)
    assert not vae_state(vae).eager


def test_a_compiled_decode():
    vae, plain = tiny_vae(), tiny_vae()
    trp.patch(vae)
    compiled = torch.compile(vae.decode, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(tiny_latents(2)).sample, plain.decode(tiny_latents(2)).sample)


@pytest.mark.parametrize("z", [torch.zeros(2, 16, 3, 4), torch.zeros(1, 5, 2, 3, 4), tiny_latents(dtype=torch.float64)])
def test_latents_that_do_not_fit_raise_diffusers_errors(z):
    vae, plain = tiny_vae(), tiny_vae()
    trp.patch(vae)
    messages = []
    for each in (vae, plain):
        with pytest.raises((RuntimeError, ValueError)) as error:
            decode(each, z)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


# ---------------------------------------------------------------------------------------------------------------------
# Offloading, casting, copies
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patched_first", [True, False])
@pytest.mark.parametrize("offload", ["group, blocks", "group, leaves", "sequential", "casting"])
def test_offloading_of_parts_and_casting(offload, patched_first):
    vae, plain = tiny_vae(), tiny_vae()
    patch = trp.patch(vae) if patched_first else None
    for each in (vae, plain):
        if offload == "sequential":
            accelerate.cpu_offload(each, execution_device=CPU)
        elif offload == "casting":
            each.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
        elif offload == "group, blocks":
            apply_group_offloading(each, CPU, CPU, offload_type="block_level", num_blocks_per_group=1)
        else:
            each.enable_group_offload(CPU, CPU, offload_type="leaf_level")
    patch = patch or trp.patch(vae)
    assert torch.equal(decode(vae), decode(plain))
    reasons = vae_state(vae).eager
    assert reasons.total() == 1
    assert next(iter(reasons)).startswith("hook ")
    assert next(iter(convolution_row(patch).reasons)).startswith("hook ")
    patch.restore()
    assert torch.equal(decode(vae), decode(plain))


def test_offloading_of_the_whole_vae_keeps_our_decoder():
    vae, plain = tiny_vae(), tiny_vae()
    trp.patch(vae)
    _, hook = accelerate.cpu_offload_with_hook(vae, CPU)
    moved = []
    pre_forward = vae._hf_hook.pre_forward
    vae._hf_hook.pre_forward = lambda *args, **options: moved.append(1) or pre_forward(*args, **options)
    assert_same(decode(vae), decode(plain))
    assert moved
    assert not vae_state(vae).eager
    hook.remove()


@pytest.mark.gpu
def test_offloading_on_a_gpu():
    pipe = tiny_wan_pipeline()
    pipe.enable_model_cpu_offload()
    call = tiny_call(output_type="pt")
    expected = pipe(**call, generator=torch.Generator().manual_seed(0)).frames
    with trp.patch(pipe) as patch:
        actual = pipe(**call, generator=torch.Generator().manual_seed(0)).frames
        assert not vae_state(pipe.vae).eager
        assert "norm + SiLU  Triton" in patch.summary()
    assert relative_error(actual, expected) <= 1e-4


def through_pickle(vae):
    return pickle.loads(pickle.dumps(vae))


def through_torch_save(vae):
    buffer = io.BytesIO()
    torch.save(vae, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


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
