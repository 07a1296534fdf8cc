"""A patched VAE falls back to diffusers' own decoder, and the summary says why."""

import accelerate
import pytest
import torch
from diffusers.hooks import apply_group_offloading
from peft import LoraConfig, inject_adapter_in_model

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.families.test_vae import assert_same
from tests.tiny_vae import decode, tiny_latents, tiny_vae
from tests.tiny_wan import tiny_call, tiny_wan_pipeline
from turbo_rcm_patch.patching.families.vae.forward import vae_state

CPU = torch.device("cpu")


def decoder_rows(patch):
    return [row for row in patch.rows() if row.blocks == "decoder"]


def first_row(patch):
    return decoder_rows(patch)[0]


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
    conv.weight = torch.nn.Parameter(torch.Tensor.as_subclass(conv.weight.data, _Marked))


class _Marked(torch.Tensor):
    pass


def _lora(vae):
    lora = LoraConfig(r=2, lora_alpha=8, init_lora_weights=False, target_modules=["to_qkv"])
    torch.manual_seed(0)
    vae.decoder.mid_block = inject_adapter_in_model(lora, vae.decoder.mid_block)


def _compiled_decoder(vae):
    vae.decoder = torch.compile(vae.decoder, backend="eager")


def _another_decoder(vae):
    vae.decoder = Fewer(vae.decoder)


class Fewer(torch.nn.Module):
    """One that has nothing where diffusers' decoder has it."""

    def __init__(self, decoder):
        super().__init__()
        self.others = decoder

    def forward(self, x, **options):
        return 0.5 * self.others(x, **options)


class Engine(torch.nn.Module):
    """One without parameters, as of a compiler or on another machine."""

    def __init__(self, decoder):
        super().__init__()
        self.run = decoder.forward

    def forward(self, x, **options):
        return self.run(x, **options)


def _engine(vae):
    vae.decoder = Engine(vae.decoder)


def _shared_block(vae):
    vae.decoder.mid_block.resnets[1] = vae.decoder.mid_block.resnets[0]


def _shared_convolution(vae):
    first, second = vae.decoder.mid_block.resnets
    second.conv1 = first.conv1


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
    "LoRA layer on decoder.mid_block.attentions.0.to_qkv": _lora,
    "OptimizedModule layer on decoder": _compiled_decoder,
    "Fewer layer on decoder": _another_decoder,
    "Engine layer on decoder": _engine,
    "convolution at two places in decoder": _shared_block,
    "a convolution at two places in decoder": _shared_convolution,
    "torch.compile on decoder.mid_block": _compiled_in_place,
    "replaced blend_h": _blending,
}


# Qwen-Image's own decoder fails if a convolution is at two places.
IN_TURNS = [
    (reason, "qwen image" if i // 2 % 2 and "two places" not in reason else "wan 2.1", i % 2 == 0)
    for i, reason in enumerate(UNUSUAL)
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("reason", "kind", "patched_first"), IN_TURNS)
def test_diffusers_own_decoder_runs_and_the_summary_says_why(reason, kind, patched_first):
    vae, plain, z = tiny_vae(kind), tiny_vae(kind), tiny_latents(2, batch=1, height=3, width=4)
    patch = trp.patch(vae) if patched_first else None
    for each in (vae, plain):
        UNUSUAL[reason](each)
    patch = patch or trp.patch(vae)
    results = []
    for each in (vae, plain):
        torch.manual_seed(0)
        with torch.compiler.set_stance("force_eager"):  # what is compiled need not be traced
            results.append(decode(each, z))
    assert torch.equal(*results)
    assert any(reason in found for found in vae_state(vae).eager)
    (row,) = decoder_rows(patch)
    assert (row.step, row.kernel, row.count) == ("decoder", "PyTorch module", 1)
    assert reason in next(iter(row.reasons))
    assert reason in patch.summary()
    assert "diffusers' own decoder ran: " in patch.summary()


def test_the_summary_of_a_vae_whose_decoder_was_taken_out():
    vae = tiny_vae()
    patch = trp.patch(vae)
    vae.decoder = None
    assert "no decoder" in patch.summary()


def test_what_is_taken_off_again_does_not_count_any_more():
    vae, plain = tiny_vae(), tiny_vae()
    patch = trp.patch(vae)
    handle = vae.decoder.conv_in.register_forward_hook(scaled)
    decode(vae)
    handle.remove()
    assert first_row(patch).kernel == "PyTorch convolution"
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


def test_a_decode_in_tiles_counts_once():
    vae, z = tiny_vae(), tiny_latents(1, 1).requires_grad_()
    trp.patch(vae)
    vae.enable_tiling(16, 16, 8, 8)
    vae.decode(z)
    assert vae_state(vae).eager == {"autograd": 1}
    vae.tiled_decode(z)
    assert vae_state(vae).eager == {"autograd": 2}


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
    few_levels = {"dim_mult": [1] * 3, "temperal_downsample": [True, False]}
    (vae, plain), z = (tiny_vae(**few_levels) for _ in range(2)), tiny_latents(1)
    trp.patch(vae)
    compiled = torch.compile(vae.decode, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(z).sample, plain.decode(z).sample)


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


# Offloading and casting


@pytest.mark.parametrize(
    ("offload", "patched_first"),
    [("group, blocks", True), ("group, leaves", False), ("sequential", True), ("casting", False)],
)
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
    assert next(iter(first_row(patch).reasons)).startswith("hook ")
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
