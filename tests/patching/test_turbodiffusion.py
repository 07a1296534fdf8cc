"""TurboDiffusion's weights in a Wan model: parity with its equations, files in its naming, restore."""

import copy
import logging
import pickle

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.hooks import apply_group_offloading
from peft import LoraConfig

import turbo_rcm_patch as trp
from tests import literal_wan
from tests.official_names import in_8_bits, official_state_dict, with_proj_l
from tests.oracle import relative_error
from tests.tiny_families import tiny_family_transformer
from tests.tiny_wan import tiny_call, tiny_transformer_inputs, tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch.checkpoints.whole import parameters_of
from turbo_rcm_patch.patching import turbodiffusion
from turbo_rcm_patch.patching.sparse import SparseAttnProcessor
from turbo_rcm_patch.tiers import SPARSE

BLOCKS, TOPK = (5, 4), 0.7  # 12 tokens: two of three key blocks
SLA = {"attention": "sla", "topk": TOPK, "blocks": BLOCKS}
SAGE = {**SLA, "attention": "sagesla"}


def turbo_weights(model, *, seed=9, prefix="", flat_patches=True):
    """Of a model of the same sizes with other weights, in TurboWan's naming."""
    other = tiny_wan_transformer(seed=seed, **sizes_of(model))
    return with_proj_l(official_state_dict(other, prefix=prefix, flat_patches=flat_patches), other, prefix=prefix)


def sizes_of(model):
    config = model.config
    return {
        "heads": config.num_attention_heads,
        "head_dim": config.attention_head_dim,
        "layers": config.num_layers,
        "in_channels": config.in_channels,
    }


@pytest.fixture
def saved(tmp_path):
    def save(state_dict, name="TurboWan.pth"):
        torch.save(state_dict, tmp_path / name)
        return tmp_path / name

    return save


def run(model, **options):
    with torch.no_grad():
        return model(**tiny_transformer_inputs(model, **options))[0]


def literal(state_dict, model, sla=(TOPK, *BLOCKS), dtype=torch.float64):
    weights = {name: tensor.to(dtype) for name, tensor in state_dict.items()}
    inputs = tiny_transformer_inputs(model)
    each = zip(inputs["hidden_states"], inputs["timestep"], inputs["encoder_hidden_states"], strict=True)
    heads = model.config.num_attention_heads
    return torch.stack(
        [literal_wan.wan(weights, x.to(dtype), t.to(dtype), c.to(dtype), heads=heads, sla=sla) for x, t, c in each]
    )


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
    assert patch.config == trp.PatchConfig()


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


def test_a_patched_block_is_as_right_as_diffusers_code_with_the_processor(saved):
    """In bf16, against the equations in fp64."""
    model = tiny_wan_transformer(dtype=torch.bfloat16)
    weights = turbo_weights(model)
    trp.load_turbodiffusion(saved(weights), model, **SLA)
    rounded = with_rounded_weights(weights, model)
    expected = literal(rounded, model)
    plain = copy.deepcopy(model)
    for block in plain.blocks:
        block.forward = type(block).forward.__get__(block)
    ours, unpatched = (relative_error(run(each), expected) for each in (model, plain))
    assert ours <= 1.05 * unpatched


def with_rounded_weights(weights, model):
    """What a model holds of weights after it cast them."""
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
def test_8_bits_stay_within_the_tiers_limit(saved, quantized_file, caplog):
    caplog.set_level(logging.INFO, "turbo_rcm_patch")
    model = tiny_wan_transformer(heads=4, ffn_dim=256)
    weights = with_proj_l(official_state_dict(tiny_wan_transformer(seed=9, heads=4, ffn_dim=256)), model)
    path = saved(in_8_bits(weights) if quantized_file else weights)
    patch = trp.load_turbodiffusion(path, model, **SAGE)
    expected = literal(weights, model)
    assert relative_error(run(model), expected) <= SPARSE.limits.step
    assert patch.config.in_8_bits("linears")
    assert patch.config.in_8_bits("attention")
    assert ("adds a relative error" in caplog.text) == quantized_file


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


def test_two_experts(saved):
    pipe = tiny_wan_pipeline("wan22_i2v")
    high, low = (turbo_weights(pipe.transformer, seed=seed) for seed in (21, 22))
    paths = saved(high, "high.pth"), saved(low, "low.pth")
    with pytest.raises(trp.PatchError, match=r"1 given, and the model takes two: path=\(high, low\)"):
        trp.load_turbodiffusion(paths[0], pipe, **SLA)
    trp.load_turbodiffusion(paths, pipe, **SLA)
    for model, weights in ((pipe.transformer, high), (pipe.transformer_2, low)):
        assert torch.equal(model.scale_shift_table, weights["head.modulation"])
        assert is_sparse(model)


def is_sparse(model):
    return all(type(block.attn1.processor) is SparseAttnProcessor for block in model.blocks)


def test_a_model_on_the_meta_device(saved):
    with torch.device("meta"):
        model = tiny_wan_transformer()
    model.rope = tiny_wan_transformer().rope
    weights = turbo_weights(tiny_wan_transformer())
    trp.load_turbodiffusion(saved(weights), model, **SLA)
    assert relative_error(run(model), literal(weights, model)) < 1e-5


def test_low_precision_models_keep_what_they_have_in_fp32(saved):
    model = tiny_wan_transformer(dtype=torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in parameters_of(model).items()}
    trp.load_turbodiffusion(saved(turbo_weights(model)), model, **SLA)
    assert {name: parameter.dtype for name, parameter in parameters_of(model).items()} == dtypes
    assert model.blocks[0].attn1.proj_l.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda w: w.pop("blocks.1.ffn.0.bias"), SLA, "blocks.1.ffn.0.bias is missing"),
        (lambda w: w.update(odd=torch.zeros(1)), SLA, "odd is unexpected"),
        (lambda w: None, {"attention": "dense"}, "was trained with sparse-linear attention"),
        (
            lambda w: [w.pop(name) for name in list(w) if "proj_l" in name],
            SLA,
            "was trained without sparse-linear attention; give attention='dense'",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(saved, change, options, message):
    model = tiny_wan_transformer()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = turbo_weights(model)
    change(weights)
    with pytest.raises(trp.PatchError, match=message):
        trp.load_turbodiffusion(saved(weights), model, **options)
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert "forward" not in vars(model.blocks[0])


def test_bad_options(saved):
    model = tiny_wan_transformer()
    path = saved(turbo_weights(model))
    for options, message in (
        ({"attention": "sage"}, "attention='sage' is unknown; accepted are sagesla, sla, dense"),
        ({"topk": 0.0}, r"topk=0.0; it is a share"),
        ({"blocks": (64,)}, r"blocks=\(64,\); give \(queries, keys\)"),
    ):
        with pytest.raises(ValueError, match=message):
            trp.load_turbodiffusion(path, model, **options)
    with pytest.raises(trp.PatchError, match="no such file"):
        trp.load_turbodiffusion(path.with_name("nothing.pth"), model)


def test_the_preset_alone_names_what_it_needs():
    model = tiny_wan_transformer()
    with pytest.raises(trp.PatchError, match=r"has no proj_l, .* load them with trp\.load_turbodiffusion"):
        trp.patch(model, "sparse")
    assert "forward" not in vars(model.blocks[0])


def test_the_summary_says_how_many_blocks_are_kept(saved):
    model = tiny_wan_transformer()
    patch = trp.load_turbodiffusion(saved(turbo_weights(model)), model, **SLA)
    run(model)
    assert "SLA 4/5 blocks" not in patch.summary()  # 18 tokens a sample
    assert "SLA 3/5 blocks" in patch.summary()
    patch.restore()
    patch = trp.load_turbodiffusion(saved(turbo_weights(model)), model, attention="sla", topk=0.1, blocks=BLOCKS)
    run(model)
    assert "SLA 1/5 blocks, where the published rule keeps none" in patch.summary()


@pytest.mark.parametrize("where", ["attn1", "attn1.to_q", "attn1.proj_l"])
def test_hooks_leave_the_attention_sparse(saved, where):
    model = tiny_wan_transformer()
    weights = turbo_weights(model)
    trp.load_turbodiffusion(saved(weights), model, **SLA)
    calls = []
    model.blocks[0].get_submodule(where).register_forward_hook(lambda *_: calls.append(where))
    assert relative_error(run(model), literal(weights, model)) < 1e-5
    assert calls


def test_autocast_and_gradients_leave_the_attention_sparse(saved):
    model = tiny_wan_transformer()
    weights = turbo_weights(model)
    trp.load_turbodiffusion(saved(weights), model, **SLA)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        low = model(**tiny_transformer_inputs(model))[0]
    dense = literal(weights, model, sla=None)
    expected = literal(weights, model)
    assert relative_error(low, expected) < 0.5 * relative_error(low, dense)
    output = model(**tiny_transformer_inputs(model))[0]
    assert relative_error(output, expected) < 1e-5
    output.sum().backward()
    gradient = model.blocks[0].attn1.proj_l.weight.grad
    assert gradient is not None
    assert gradient.abs().sum() > 0


def test_fused_projections(saved):
    model = tiny_wan_transformer()
    weights = turbo_weights(model)
    trp.load_turbodiffusion(saved(weights), model, **SLA)
    for block in model.blocks:
        block.attn1.fuse_projections()
    assert relative_error(run(model), literal(weights, model)) < 1e-5


def test_a_difference_merged_into_another_model(saved):
    """A VACE of the same sizes: its own blocks stay, those of Wan get the difference, and attend sparsely."""
    vace = tiny_family_transformer("vace", torch.float32)
    config = vace.config
    sizes = {
        "heads": config.num_attention_heads,
        "head_dim": config.attention_head_dim,
        "layers": config.num_layers,
        "ffn_dim": config.ffn_dim,
        "text_dim": config.text_dim,
        "freq_dim": config.freq_dim,
        "in_channels": config.in_channels,
        "out_channels": config.out_channels,
    }
    base, turbo = (tiny_wan_transformer(seed=seed, **sizes) for seed in (31, 32))
    before = {name: tensor.clone() for name, tensor in vace.state_dict().items()}
    base_path = saved(official_state_dict(base), "Wan.pth")
    turbo_path = saved(with_proj_l(official_state_dict(turbo), turbo), "TurboWan.pth")
    left_out = trp.merge_turbodiffusion(turbo_path, base_path, vace)
    assert any("vace_blocks.0" in line for line in left_out)
    for name, tensor in turbo.state_dict().items():
        expected = before[name].float() + (tensor - base.state_dict()[name])
        assert torch.equal(vace.state_dict()[name], expected), name
    own = [name for name in before if name.startswith("vace_")]
    assert own
    assert all(torch.equal(vace.state_dict()[name], before[name]) for name in own)
    patch = trp.patch(vace, trp.PatchConfig(tier="sparse", quantize=(), topk=TOPK, blocks=BLOCKS))
    assert type(vace.blocks[0].attn1.processor) is SparseAttnProcessor
    assert type(vace.vace_blocks[0].attn1.processor) is not SparseAttnProcessor
    patch.restore()
    assert "blocks.0.attn1.proj_l.weight" in vace.state_dict()


def test_merging_files_of_another_model(saved):
    model = tiny_wan_transformer()
    path = saved({"weight": torch.zeros(3)})
    with pytest.raises(trp.PatchError, match="have nothing for a WanTransformer3DModel"):
        trp.merge_turbodiffusion(path, path, model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("options", [SLA, SAGE])
def test_copies_attend_sparsely_and_can_be_restored(saved, copied, options):
    model = tiny_wan_transformer()
    trp.load_turbodiffusion(saved(turbo_weights(model)), model, **options)
    twin = copied(model)
    assert torch.equal(run(twin), run(model))
    trp.restore(twin)
    assert not any("proj_l" in name for name in twin.state_dict())
    assert is_sparse(model)
    assert not is_sparse(twin)


def with_own_projections(model):
    """As a model that is trained with SLA has them."""
    size = model.config.attention_head_dim
    for number, block in enumerate(model.blocks):
        torch.manual_seed(number)
        block.attn1.proj_l = torch.nn.Linear(size, size)
    return model


def test_a_model_with_projections_of_its_own_is_patched_by_the_preset_and_keeps_them():
    model = with_own_projections(tiny_wan_transformer())
    results = {}
    for quantize in ((), ("attention",)):
        config = trp.PatchConfig(tier="sparse", quantize=quantize, topk=TOPK, blocks=BLOCKS)
        with trp.patch(model, config) as patch:
            results[quantize] = run(model)
            assert "SLA 3/5 blocks" in patch.summary()
    assert model.blocks[0].attn1.proj_l is not None
    assert not is_sparse(model)
    rounding = relative_error(results["attention",], results[()])
    assert 1e-4 < rounding < SPARSE.limits.block


def test_what_diffusers_sets_on_processors_outlives_the_patch(saved):
    """Parallelism that was set before the patch counts in it, and one that was set under it stays."""
    model = tiny_wan_transformer()
    model.blocks[0].attn1.processor._parallel_config = before = object()
    patch = trp.load_turbodiffusion(saved(turbo_weights(model)), model, **SLA)
    first, second = (block.attn1.processor for block in model.blocks)
    assert first._parallel_config is before
    second._parallel_config, second._attention_backend = "parallel", "flash"
    patch.restore()
    processors = [block.attn1.processor for block in model.blocks]
    assert [processor._parallel_config for processor in processors] == [before, "parallel"]
    assert processors[1]._attention_backend == "flash"


def test_a_failure_with_the_second_expert_leaves_both_as_they_were(saved, monkeypatch):
    pipe = tiny_wan_pipeline("wan22")
    models = pipe.transformer, pipe.transformer_2
    before = [{name: tensor.clone() for name, tensor in model.state_dict().items()} for model in models]
    paths = saved(turbo_weights(models[0], seed=21), "high.pth"), saved(turbo_weights(models[1], seed=22), "low.pth")
    replace, calls = turbodiffusion.replace_computation, []

    def failing(journal, model, config):
        calls.append(model)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("halfway")
        replace(journal, model, config)

    monkeypatch.setattr(turbodiffusion, "replace_computation", failing)
    with pytest.raises(torch.OutOfMemoryError):
        trp.load_turbodiffusion(paths, pipe, **SAGE)
    for model, expected in zip(models, before, strict=True):
        assert model.state_dict().keys() == expected.keys()
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in expected.items())
        assert "forward" not in vars(model.blocks[0])


def test_models_that_cannot_be_written_to_are_refused(saved, tmp_path):
    model = tiny_wan_transformer()
    path = saved(turbo_weights(model))
    offloaded = tiny_wan_transformer()
    apply_group_offloading(
        offloaded,
        onload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        offload_to_disk_path=str(tmp_path / "offloaded"),
    )
    fused = tiny_wan_transformer()
    fused.add_adapter(LoraConfig(r=4, target_modules=["to_q"]))
    fused.fuse_lora()
    for refused, reason in ((offloaded, "disk"), (fused, "unfuse_lora")):
        with pytest.raises(trp.PatchError, match=reason):
            trp.load_turbodiffusion(path, refused, **SLA)
        with pytest.raises(trp.PatchError, match=reason):
            trp.merge_turbodiffusion(path, path, refused)
    with pytest.raises(trp.PatchError, match="on the meta device"):
        trp.merge_turbodiffusion(path, path, tiny_wan_transformer().to("meta"))


def test_a_model_that_was_moved_to_meta_gets_its_buffers_back(saved):
    model = tiny_wan_transformer()
    weights = turbo_weights(model)
    model.to("meta")
    trp.load_turbodiffusion(saved(weights), model, **SLA)
    assert relative_error(run(model), literal(weights, model)) < 1e-5


def test_norms_that_autocast_widens(saved):
    """As RMSNorm under it on a GPU: q and k come in fp32, v in bf16."""
    model = tiny_wan_transformer()
    weights = turbo_weights(model)
    trp.load_turbodiffusion(saved(weights), model, **SLA)
    for block in model.blocks:
        for norm in (block.attn1.norm_q, block.attn1.norm_k):
            norm.register_forward_hook(lambda _module, _inputs, output: output.float())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        low = model(**tiny_transformer_inputs(model))[0]
    assert relative_error(low, literal(weights, model)) < 0.5 * relative_error(low, literal(weights, model, sla=None))


def test_a_lora_on_the_projection(saved):
    """It counts, and the patch comes off with it."""
    model = tiny_wan_transformer()
    weights = turbo_weights(model)
    patch = trp.load_turbodiffusion(saved(weights), model, **SLA)
    model.add_adapter(LoraConfig(r=4, target_modules=["proj_l"], init_lora_weights=False))
    with_lora = dict(weights)
    for number, block in enumerate(model.blocks):
        name = f"blocks.{number}.self_attn.attn_op.local_attn.proj_l.weight"
        with_lora[name] = weights[name] + block.attn1.proj_l.get_delta_weight("default").detach()
    assert relative_error(run(model), literal(with_lora, model)) < 1e-5
    assert relative_error(run(model), literal(weights, model)) > 1e-4
    patch.restore()
    assert not any("proj_l" in name for name in model.state_dict())


def test_half_of_a_projection_is_left_out_of_a_merge(saved):
    model = tiny_wan_transformer()
    turbo, base = turbo_weights(model), official_state_dict(tiny_wan_transformer(seed=31))
    del turbo["blocks.0.self_attn.attn_op.local_attn.proj_l.bias"]
    left_out = trp.merge_turbodiffusion(saved(turbo), saved(base, "Wan.pth"), model)
    assert any("blocks.0.….proj_l.bias is missing" in line for line in left_out)
    assert not hasattr(model.blocks[0].attn1, "proj_l")
    assert hasattr(model.blocks[1].attn1, "proj_l")


def test_options_of_sla_mean_nothing_for_dense_weights(saved):
    model = tiny_wan_transformer()
    path = saved(official_state_dict(model))
    for options in ({"topk": 0.5}, {"blocks": (64, 64)}):
        with pytest.raises(ValueError, match="means nothing in this version: the exact tier attends to all keys"):
            trp.load_turbodiffusion(path, model, attention="dense", **options)
