"""TurboDiffusion's weights in a Wan model: parity with its equations, files in its naming, restore."""

import copy
import weakref

import pytest
import torch
from diffusers import WanTransformer3DModel

import turbo_rcm_patch as trp
from tests import literal_wan
from tests.official_names import in_8_bits, official_state_dict, with_proj_l
from tests.oracle import assert_no_worse, relative_error
from tests.patching.turbowan import BLOCKS, SAGE, SLA, TOPK, is_sparse, literal, run, turbo_weights
from tests.tiny_wan import frames_of, tiny_call, tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch.checkpoints.whole import parameters_of
from turbo_rcm_patch.patching.steps.sparse_linear import SparseAttnProcessor
from turbo_rcm_patch.patching.weights import turbodiffusion
from turbo_rcm_patch.patching.weights.quantize_linears import quantized_linears
from turbo_rcm_patch.tiers import SPARSE


@pytest.mark.parametrize("sla", [(TOPK, *BLOCKS), (1.0, *BLOCKS), (0.4, 128, 3)])
def test_a_loaded_model_equals_the_published_equations(saved, sla):
    model = tiny_wan_transformer()
    weights = turbo_weights(model)
    topk, *blocks = sla
    trp.load_turbodiffusion(saved(weights), model, attention="sla", topk=topk, blocks=blocks)
    assert relative_error(run(model), literal(weights, model, sla)) < 1e-5


def test_weights_without_sla(saved):
    model = tiny_wan_transformer()
    weights = official_state_dict(tiny_wan_transformer(seed=9), prefix="net.")
    patch = trp.load_turbodiffusion(saved(weights), model, attention="dense")
    expected = literal({name.removeprefix("net."): tensor for name, tensor in weights.items()}, model, sla=None)
    assert relative_error(run(model), expected) < 1e-5
    assert patch.config == trp.Exact()


@pytest.mark.parametrize("steps", [1, 4])
def test_a_pipeline_equals_the_published_sampler_and_model(saved, steps):
    pipe = tiny_wan_pipeline()
    weights = turbo_weights(pipe.transformer)
    trp.load_turbodiffusion(saved(weights), pipe, **SLA)
    trp.use_rcm(pipe)
    call = tiny_call(num_inference_steps=steps, guidance_scale=1.0, generator=torch.Generator().manual_seed(3))
    latents = pipe(**call).frames
    with torch.no_grad():
        prompt, _ = pipe.encode_prompt(call["prompt"], max_sequence_length=16, do_classifier_free_guidance=False)

    def velocity(x, timestep):
        return literal_wan.wan(weights, x[0], timestep, prompt[0], heads=2, sla=(TOPK, *BLOCKS))[None]

    expected = literal_wan.rcm_sample(velocity, latents.shape, steps, 80.0, 3, torch.float32)
    assert relative_error(latents, expected) < 1e-4


@pytest.mark.parametrize("stochastic", [False, True])
def test_two_experts_equal_the_published_sampler_and_model(saved, stochastic):
    """Image to video: the high-noise expert runs while t >= 0.9. It sees the image with the latents."""
    pipe = tiny_wan_pipeline("wan22_i2v")
    high, low = (turbo_weights(model, seed=seed) for model, seed in ((pipe.transformer, 21), (pipe.transformer_2, 22)))
    trp.load_turbodiffusion((saved(high, "high.pth"), saved(low, "low.pth")), pipe, **SLA)
    if stochastic:
        trp.use_rcm(pipe, sigma_max=200.0)
    else:
        trp.use_distilled(pipe, recipe="turbowan-i2v")
    options = {"num_inference_steps": 4, "guidance_scale": 1.0, "generator": torch.Generator().manual_seed(3)}
    call = tiny_call("wan22_i2v", **options)
    latents = pipe(**call).frames
    with torch.no_grad():
        prompt, _ = pipe.encode_prompt(call["prompt"], max_sequence_length=16, do_classifier_free_guidance=False)
    condition, used = image_condition(pipe, call), []

    def velocity(x, timestep):
        used.append(high if timestep >= 900 else low)
        seen = torch.cat([x[0], condition])
        return literal_wan.wan(used[-1], seen, timestep, prompt[0], heads=2, sla=(TOPK, *BLOCKS))[None]

    expected = literal_wan.rcm_sample(velocity, latents.shape, 4, 200.0, 3, torch.float32, stochastic)
    assert [weights is high for weights in used] == [True, True, False, False]
    assert relative_error(latents, expected) < 1e-4


@torch.no_grad()
def image_condition(pipe, call):
    """Ones at the first latent frame in 4 channels, then the normalised latents of the image and of grey after it."""
    image = pipe.video_processor.preprocess(call["image"], call["height"], call["width"])[:, :, None]
    grey = image.new_zeros(1, 3, call["num_frames"] - 1, *image.shape[3:])
    encoded = pipe.vae.encode(torch.cat([image, grey], 2)).latent_dist.mode()[0]
    mean, std = (torch.tensor(pipe.vae.config[f"latents_{name}"]).view(-1, 1, 1, 1) for name in ("mean", "std"))
    mask = torch.zeros(4, *encoded.shape[1:])
    mask[:, 0] = 1
    return torch.cat([mask, (encoded - mean) / std])


def test_a_patched_block_is_as_right_as_diffusers_code_with_the_processor(saved):
    """Both run in bf16 and are compared with the equations in fp64."""
    model = tiny_wan_transformer(dtype=torch.bfloat16)
    weights = turbo_weights(model)
    trp.load_turbodiffusion(saved(weights), model, **SLA)
    rounded = with_rounded_weights(weights, model)
    expected = literal(rounded, model)
    plain = copy.deepcopy(model)
    for block in plain.blocks:
        block.forward = type(block).forward.__get__(block)
    assert_no_worse(run(model), run(plain), expected)


def test_a_pipeline_in_bf16_is_as_right_as_diffusers_code_with_the_processor(saved):
    """Four steps, against the equations in fp64. All blocks are kept: a choice between near ties says nothing of it."""
    pipe = tiny_wan_pipeline(dtype=torch.bfloat16)
    patched, sla = pipe.transformer, (1.0, *BLOCKS)
    weights = turbo_weights(patched)
    trp.load_turbodiffusion(saved(weights), pipe, attention="sla", topk=1.0, blocks=BLOCKS)
    trp.use_rcm(pipe)
    plain = copy.deepcopy(patched)
    for block in plain.blocks:
        block.forward = type(block).forward.__get__(block)
    rounded = {name: tensor.double() for name, tensor in with_rounded_weights(weights, patched).items()}
    options = {"num_inference_steps": 4, "guidance_scale": 1.0}
    latents = []
    for pipe.transformer in (patched, plain):
        latents.append(frames_of(pipe, **options))
    with torch.no_grad():
        call = tiny_call(**options)
        prompt, _ = pipe.encode_prompt(call["prompt"], max_sequence_length=16, do_classifier_free_guidance=False)

    def velocity(x, timestep):
        return literal_wan.wan(rounded, x[0], timestep, prompt[0].double(), heads=2, sla=sla)[None]

    expected = literal_wan.rcm_sample(velocity, latents[0].shape, 4, 80.0, 3, torch.float64)
    assert_no_worse(*latents, expected)
    assert relative_error(latents[0], expected) < 0.01


def with_rounded_weights(weights, model):
    """Return the weights as the model holds them, cast to its dtype."""
    rounded = official_state_dict(strip_projections(copy.deepcopy(model)), flat_patches=True)
    for number, block in enumerate(model.blocks):
        for part in ("weight", "bias"):
            tensor = getattr(block.attn1.proj_l, part)
            rounded[f"blocks.{number}.self_attn.attn_op.local_attn.proj_l.{part}"] = tensor.detach()
    assert set(rounded) == set(weights)
    return rounded


def strip_projections(model):
    for block in model.blocks:
        del block.attn1.proj_l
    return model


@pytest.mark.parametrize("quantized_file", [False, True])
def test_8_bits_stay_within_the_tiers_limit(saved, quantized_file):
    model = tiny_wan_transformer(heads=4, ffn_dim=256)
    weights = with_proj_l(official_state_dict(tiny_wan_transformer(seed=9, heads=4, ffn_dim=256)), model)
    path = saved(in_8_bits(weights) if quantized_file else weights)
    patch = trp.load_turbodiffusion(path, model, **SAGE)
    expected = literal(weights, model)
    assert relative_error(run(model), expected) <= SPARSE.limits.step
    assert patch.config.in_8_bits("linears")
    assert patch.config.in_8_bits("attention")
    assert ("to the weights of 20 linears" in patch.summary()) == quantized_file


def test_the_summary_says_what_8_bits_add_to_those_of_the_file(saved):
    model = tiny_wan_transformer()
    patch = trp.load_turbodiffusion(saved(in_8_bits(turbo_weights(model))), model, **SAGE)
    mean, largest = error_added_to(model)
    assert f"which adds a relative error of {mean:.2g} (at most {largest:.2g}) to" in patch.summary()
    assert 1e-3 < mean < largest < 0.04


def error_added_to(model):
    """The mean and the largest relative error of a model's 8-bit weights."""
    errors = [relative_error(linear.quantized().dequantize(), linear.original) for linear in quantized_linears(model)]
    return sum(errors) / len(errors), max(errors)


def test_restore_leaves_the_loaded_weights_and_takes_everything_else_off(saved):
    model = tiny_wan_transformer()
    before, processor = model.state_dict().keys(), model.blocks[0].attn1.processor
    weights = turbo_weights(model)
    patch = trp.load_turbodiffusion(saved(weights), model, **SLA)
    assert "blocks.0.attn1.proj_l.weight" in model.state_dict()
    assert type(model.blocks[0].attn1.processor) is SparseAttnProcessor
    patch.restore()
    assert model.state_dict().keys() == before
    assert model.blocks[0].attn1.processor is processor
    assert not any("proj_l" in vars(module) for module in model.modules())
    assert relative_error(run(model), literal(weights, model, sla=None)) < 1e-5


@pytest.mark.parametrize("options", [SLA, SAGE])
def test_saved_and_loaded_again(saved, tmp_path, options):
    """diffusers' own files then carry proj_l."""
    model = tiny_wan_transformer()
    trp.load_turbodiffusion(saved(turbo_weights(model)), model, **options)
    model.save_pretrained(tmp_path / "model")
    expected = run(model)
    again = WanTransformer3DModel.from_pretrained(tmp_path / "model")
    trp.load_turbodiffusion(tmp_path / "model", again, **options)
    assert torch.equal(run(again), expected)


@pytest.mark.parametrize("options", [SLA, SAGE])
def test_weights_are_read_one_at_a_time(saved, monkeypatch, options):
    """One is written when the next is read, and no more are held."""
    model, read, held = tiny_wan_transformer(), [], []
    right = turbodiffusion.cast

    def watched(weight, like):
        tensor = right(weight, like)
        read.append(weakref.ref(tensor))
        held.append(sum(each() is not None for each in read))
        return tensor

    monkeypatch.setattr(turbodiffusion, "cast", watched)
    weights = {name: tensor.bfloat16() for name, tensor in turbo_weights(model).items()}  # which the model has in fp32
    trp.load_turbodiffusion(saved(weights), model, **options)
    assert len(read) == len(parameters_of(tiny_wan_transformer()))
    assert max(held) <= 2
    assert not any(each() is not None for each in read)


def test_two_experts(saved):
    pipe = tiny_wan_pipeline("wan22_i2v")
    high, low = (turbo_weights(pipe.transformer, seed=seed) for seed in (21, 22))
    paths = saved(high, "high.pth"), saved(low, "low.pth")
    with pytest.raises(trp.PatchError, match=r"1 given, but the model takes two: path=\(high, low\)"):
        trp.load_turbodiffusion(paths[0], pipe, **SLA)
    trp.load_turbodiffusion(paths, pipe, **SLA)
    for model, weights in ((pipe.transformer, high), (pipe.transformer_2, low)):
        assert torch.equal(model.scale_shift_table, weights["head.modulation"])
        assert is_sparse(model)


def test_the_folder_of_a_pipeline(saved, tmp_path):
    """The folder has one transformer or two experts, as diffusers saves them. Each transformer takes its own folder."""
    for kind in ("t2v", "wan22_i2v"):
        pipe, again, folder = tiny_wan_pipeline(kind), tiny_wan_pipeline(kind), tmp_path / kind
        models = [model for model in (pipe.transformer, pipe.transformer_2) if model is not None]
        files = [saved(turbo_weights(model, seed=seed), f"{seed}.pth") for seed, model in enumerate(models, 21)]
        trp.load_turbodiffusion(files, pipe, **SLA)
        for name, model in zip(("transformer", "transformer_2"), models, strict=False):
            model.save_pretrained(folder / name)
        trp.load_turbodiffusion(folder, again, **SLA)
        for name, model in zip(("transformer", "transformer_2"), models, strict=False):
            assert torch.equal(run(getattr(again, name)), run(model))
    with pytest.raises(trp.PatchError, match=r"2 given \(.*transformer, .*transformer_2\), .* one path"):
        trp.load_turbodiffusion(folder, tiny_wan_transformer(), **SLA)
    with pytest.raises(trp.PatchError, match="1 given"):
        trp.load_turbodiffusion(tmp_path / "t2v", tiny_wan_pipeline("wan22_i2v"), **SLA)


def test_low_precision_models_keep_what_they_have_in_fp32(saved):
    model = tiny_wan_transformer(dtype=torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in parameters_of(model).items()}
    trp.load_turbodiffusion(saved(turbo_weights(model)), model, **SLA)
    assert {name: parameter.dtype for name, parameter in parameters_of(model).items()} == dtypes
    assert model.blocks[0].attn1.proj_l.weight.dtype == torch.bfloat16


def test_a_model_that_was_moved_to_meta_gets_its_buffers_back(saved):
    model = tiny_wan_transformer()
    weights = turbo_weights(model)
    model.to("meta")
    trp.load_turbodiffusion(saved(weights), model, **SLA)
    assert relative_error(run(model), literal(weights, model)) < 1e-5


# (attention, offloading, if that comes before the weights)
OFFLOADED = [(SLA, "leaf_level", True), (SAGE, "block_level", True), (SAGE, "leaf_level", False)]


@pytest.mark.parametrize(("options", "kind", "first"), OFFLOADED)
def test_group_offload(saved, options, kind, first):
    model, expected = tiny_wan_transformer(), tiny_wan_transformer()
    weights = saved(turbo_weights(model))
    trp.load_turbodiffusion(weights, expected, **options)
    offload = {"onload_device": torch.device("cpu"), "offload_type": kind, "num_blocks_per_group": 1}
    if first:
        model.enable_group_offload(**offload)
    trp.load_turbodiffusion(weights, model, **options)
    if not first:
        model.enable_group_offload(**offload)
    assert is_sparse(model)
    # Under hooks modules run, not fused steps.
    limit = 1e-5 if options is SLA else SPARSE.limits.step
    assert relative_error(run(model), run(expected)) <= limit


@pytest.mark.parametrize(("options", "first"), [(SLA, True), (SAGE, False)])
def test_layerwise_casting(saved, options, first):
    """The file's weights, proj_l included, are stored in bf16 without a loss."""
    model = tiny_wan_transformer()
    weights = {name: tensor.bfloat16().float() for name, tensor in turbo_weights(model).items()}
    cast = {"storage_dtype": torch.bfloat16, "compute_dtype": torch.float32}
    if first:
        model.enable_layerwise_casting(**cast)
    trp.load_turbodiffusion(saved(weights), model, **options)
    if not first:
        model.enable_layerwise_casting(**cast)
    assert model.blocks[0].attn1.proj_l.weight.dtype == torch.bfloat16
    limit = 1e-5 if options is SLA else SPARSE.limits.step
    assert relative_error(run(model), literal(weights, model)) <= limit
