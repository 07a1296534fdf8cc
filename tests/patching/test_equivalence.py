"""Every block variant computes what the unpatched block computes: fp32 to 1e-5, bf16 no further from an fp32 oracle."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from diffusers.models.normalization import FP32LayerNorm
from torch.nn.attention import SDPBackend, sdpa_kernel

import turbo_rcm_patch as trp
from tests.oracle import assert_no_worse, relative_error, torch_device
from tests.patching.launches import around_launches
from tests.patching.tape import inputs_for
from tests.tiny_wan import frames_of, moved, tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch.patching.steps import layers
from turbo_rcm_patch.patching.steps.plan import SHARED, Call, active_backend, state_of
from turbo_rcm_patch.patching.steps.residual import HELD

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# name: (model options, input options). Token counts are odd on purpose; i2v has image K/V, ti2v timesteps per token.
VARIANTS = {
    "t2v": ({}, {"batch": 2}),
    "one_token": ({}, {"batch": 1, "frames": 1, "height": 2, "width": 2, "text_tokens": 1}),
    "odd_sizes": ({}, {"batch": 3, "frames": 3, "height": 6, "width": 10}),
    "i2v": ({"image_dim": 4, "added_kv_proj_dim": "inner", "in_channels": 36}, {"batch": 1, "image_tokens": 5}),
    "ti2v": ({}, {"batch": 2, "per_token": True}),
    "no_cross_norm": ({"cross_attn_norm": False}, {"batch": 1}),
    "head_dim_32": ({"head_dim": 32, "heads": 3}, {"batch": 1}),
    "head_dim_12": ({"head_dim": 12}, {"batch": 2}),
}


def model_and_inputs(variant, device, dtype, **overrides):
    model_options, input_options = VARIANTS[variant]
    model = tiny_wan_transformer(dtype=dtype, **{**model_options, **overrides})
    return model.to(device), moved(inputs_for(model, **input_options), device)


def captured_block_inputs(model, inputs):
    """The positional arguments that each block gets in an unpatched forward."""
    captured = []
    hooks = [b.register_forward_pre_hook(lambda _, args: captured.append(args)) for b in model.blocks]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return captured


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_fp32_blocks_match_unpatched(variant, implementation, device):
    model, inputs = model_and_inputs(variant, torch_device(device), torch.float32, layers=1)
    block_inputs = captured_block_inputs(model, inputs)
    with torch.no_grad(), trp.patch(model, trp.Exact(implementation=implementation)):
        for block, args in zip(model.blocks, block_inputs, strict=True):
            expected = type(block).forward(block, *args)
            assert relative_error(block(*args), expected) <= 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attention", ["triton", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_low_precision_blocks_are_no_further_from_the_oracle(variant, attention, dtype):
    model, inputs = model_and_inputs(variant, torch.device("cuda"), dtype, heads=4, ffn_dim=512)
    block_inputs = captured_block_inputs(model, inputs)
    with torch.no_grad(), trp.patch(model, trp.Exact(attention=attention)):
        for block, args in zip(model.blocks, block_inputs, strict=True):
            oracle = oracle_of(block, args)
            assert_no_worse(block(*args), type(block).forward(block, *args), oracle)


@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("left_out", [None, *trp.Exact().fuse])
def test_the_residual_of_a_bf16_block_is_rounded_less_between_its_skips(left_out, on):
    model, inputs = model_and_inputs("t2v", on, torch.bfloat16)
    fuse = [group for group in trp.Exact().fuse if group != left_out]
    args = captured_block_inputs(model, inputs)[0]
    oracle = oracle_of(model.blocks[0], args)
    outputs = {}
    for residual in ("fp16", "same"):
        with trp.patch(model, trp.Exact(residual=residual, fuse=fuse)) as patch:
            name = {"fp16": "float16, divided by 32", "same": "bfloat16"}[residual]
            assert f"residual between a block's skips: {name}" in patch.summary()
            with torch.no_grad():
                outputs[residual] = model.blocks[0](*args)
            outputs[residual, "training"] = model.blocks[0](*args).detach()
    assert relative_error(outputs["fp16"], oracle) < relative_error(outputs["same"], oracle)
    assert outputs["fp16"].dtype == torch.bfloat16
    assert torch.equal(outputs["fp16", "training"], outputs["same", "training"])


@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("hooked", [False, True])
def test_a_large_residual_does_not_overflow(hooked, on):
    """7e4 is more than fp16 holds. Hooked layers leave the skips to passes of their own."""
    model, inputs = model_and_inputs("t2v", on, torch.bfloat16)
    x, *rest = captured_block_inputs(model, inputs)[0]
    x = x.clone()
    x[..., 0] = 7e4
    block = model.blocks[0]
    oracle = oracle_of(block, (x, *rest))
    linears = (block.attn1.to_out[0], block.attn2.to_out[0], block.ffn.net[2]) if hooked else ()
    called = []
    for linear in linears:
        linear.register_forward_hook(lambda linear, *_: called.append(linear))
    with torch.no_grad():
        unpatched = type(block).forward(block, x, *rest)
        called.clear()
        with trp.patch(model):
            assert_no_worse(block(x, *rest), unpatched, oracle)
    assert called == list(linears)


def test_a_norm_of_a_held_residual_is_that_of_the_residual():
    """Rows whose variance is about eps: it is divided as the residual is, and squared."""
    norm = FP32LayerNorm(64, eps=1e-6)
    x = 1e-3 * torch.randn(1, 5, 64) / HELD.scale
    scale, shift = torch.randn(2, 1, 1, 64)
    expected = norm(HELD.scale * x) * (1 + scale) + shift
    call = Call(trp.Exact(), x.device, torch.float32, None, active_backend())
    steps = layers.layer_norm(norm, HELD, call), layers.layer_norm_by_module(norm, HELD, call, "asked for")
    for step in steps:
        assert relative_error(step.run(x, scale, shift), expected) <= 1e-5


def test_forward_mode_derivatives_keep_the_dtype():
    model, inputs = model_and_inputs("t2v", "cpu", torch.bfloat16)
    x, *rest = captured_block_inputs(model, inputs)[0]
    outputs = {}
    for residual in ("fp16", "same"):
        config, plain = trp.Exact(residual=residual), sdpa_kernel(SDPBackend.MATH)
        with trp.patch(model, config), torch.no_grad(), plain, fwAD.dual_level():
            outputs[residual] = fwAD.unpack_dual(model.blocks[0](fwAD.make_dual(x, torch.ones_like(x)), *rest))
    assert torch.equal(outputs["fp16"].tangent, outputs["same"].tangent)


def oracle_of(block, args):
    """The result of an unpatched block in fp32."""
    return type(block).forward(fp32_copy(block), *map(in_fp32, args))


def fp32_copy(block):
    with torch.no_grad():
        return copy.deepcopy(block).float()


def in_fp32(value):
    return tuple(map(in_fp32, value)) if isinstance(value, tuple) else value.float()


@pytest.mark.parametrize("variant", ["t2v", "i2v"])
@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_one_prompt_serves_several_latents(variant, implementation, device):
    model, inputs = model_and_inputs(variant, torch_device(device), torch.float32, layers=1)
    inputs["hidden_states"] = torch.cat([inputs["hidden_states"][:1], 0.5 * inputs["hidden_states"][:1]])
    inputs["timestep"] = torch.tensor([900.0, 500.0], device=inputs["timestep"].device)
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"][:1]
    with torch.no_grad():
        expected = model(**inputs)[0]
        with trp.patch(model, trp.Exact(implementation=implementation)):
            assert relative_error(model(**inputs)[0], expected) <= 1e-5


@pytest.mark.parametrize("variant", ["t2v", "i2v"])
@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_a_context_without_tokens_adds_nothing(variant, implementation, device):
    """An image model is called without an image, or a model with a prompt of no tokens."""
    model, inputs = model_and_inputs(variant, torch_device(device), torch.float32, layers=1)
    if variant == "i2v":
        del inputs["encoder_hidden_states_image"]
    else:
        inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"][:, :0]
    with torch.no_grad():
        expected = model(**inputs)[0]
        with trp.patch(model, trp.Exact(implementation=implementation)):
            assert relative_error(model(**inputs)[0], expected) <= 1e-5
    with trp.patch(model, trp.Exact(implementation=implementation)):
        model(**inputs)[0].square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.blocks.parameters())


modes = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])


@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize(("implementation", "mode"), [("auto", torch.no_grad), ("triton", torch.inference_mode)])
def test_runs_of_equal_timesteps_are_embedded_once(implementation, on, mode):
    """In TI2V-5B from an image the first frame's tokens are at timestep 0."""
    if on == "cpu" and torch.cuda.is_available() and implementation == "triton":
        pytest.skip("the kernels run on the GPU here")
    model, inputs = model_and_inputs("ti2v", on, torch.float32, layers=1)
    timestep = torch.full_like(inputs["timestep"], 700.0)
    timestep[:, :5] = 0.0
    timestep[1, 7:] = 100.0
    inputs["timestep"] = timestep
    shared = lambda: getattr(model.condition_embedder, SHARED)  # noqa: E731
    with mode():
        expected = model(**inputs)[0]
        with trp.patch(model, trp.Exact(implementation=implementation, cuda_graph="off")):
            output = model(**inputs)[0]
            assert output.is_inference() == expected.is_inference()
            assert relative_error(output, expected) <= 1e-5
            assert len(shared().runs.rows) == 5  # of the first sample two runs, of the second three
            assert {state_of(block).plans.latest.stream.gate for block in model.blocks} == {"run"}  # and so read
            inputs["timestep"] = torch.linspace(0, 999, timestep.numel(), device=on).view_as(timestep)
            many = model(**inputs)[0]
            assert shared().runs is None
            inputs["timestep"] = timestep
            model.condition_embedder.time_embedder.register_forward_hook(lambda _, args, output: -output)
            hooked = model(**inputs)[0]
            assert shared().runs is None
        assert relative_error(hooked, model(**inputs)[0]) <= 1e-5
        model.condition_embedder.time_embedder._forward_hooks.clear()
        inputs["timestep"] = torch.linspace(0, 999, timestep.numel(), device=on).view_as(timestep)
        assert relative_error(many, model(**inputs)[0]) <= 1e-5


@pytest.mark.parametrize("on", DEVICES)
def test_timesteps_per_token_of_one_sample_serve_several_latents(on):
    model, inputs = model_and_inputs("ti2v", on, torch.float32)
    inputs["timestep"] = torch.full_like(inputs["timestep"][:1], 900.0)
    inputs["timestep"][:, :5] = 0.0
    with torch.no_grad():
        expected = model(**inputs)[0]
        with trp.patch(model):
            assert relative_error(model(**inputs)[0], expected) <= 1e-5


@modes
@pytest.mark.parametrize("place", ["embedder", "block"])
@pytest.mark.parametrize("writes", [lambda proj: proj.mul_(1.5), lambda proj: proj.view(-1)[7:].mul_(1.5)])
def test_a_hook_that_writes_to_the_modulation_takes_effect(mode, place, writes):
    model, inputs = model_and_inputs("ti2v", "cpu", torch.float32)
    inputs["timestep"] = torch.full_like(inputs["timestep"], 900.0)
    outputs = []
    for patched in (False, True):
        if patched:
            trp.patch(model)
        if place == "embedder":
            write = lambda module, args, output: (writes(output[1]), None)[1]  # noqa: E731
            handle = model.condition_embedder.register_forward_hook(write)
        else:
            handle = model.blocks[0].register_forward_pre_hook(lambda module, args: (writes(args[2]), None)[1])
        with mode():
            outputs.append(model(**inputs)[0])
        handle.remove()
    assert relative_error(outputs[1], outputs[0]) <= 1e-5


@modes
@pytest.mark.parametrize("on", DEVICES)
def test_a_block_with_another_temb_does_not_take_the_models_runs(on, mode):
    model, inputs = model_and_inputs("ti2v", on, torch.float32)
    inputs["timestep"] = torch.full_like(inputs["timestep"], 700.0)
    seen = []
    with mode(), trp.patch(model):

        def double_temb(block, args):
            x, context, temb, rotary = args
            seen.append(type(block).forward(block, x, context, 2 * temb, rotary))
            return x, context, 2 * temb, rotary

        model.blocks[0].register_forward_pre_hook(double_temb)
        model.blocks[0].register_forward_hook(lambda _, args, output: seen.append(output))
        model(**inputs)
    assert relative_error(seen[1], seen[0]) <= 1e-5


@pytest.mark.gpu
def test_linears_in_fp32_follow_pytorchs_tf32_setting():
    model, inputs = model_and_inputs("t2v", "cuda", torch.float32, heads=4, ffn_dim=512)
    args, results = captured_block_inputs(model, inputs)[0], {}
    with torch.no_grad(), trp.patch(model):
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            try:
                results[precision] = model.blocks[0](*args), type(model.blocks[0]).forward(model.blocks[0], *args)
            finally:
                torch.set_float32_matmul_precision("highest")
    ours, theirs = zip(*results.values(), strict=True)
    difference = relative_error(*theirs)
    assert difference > 1e-5
    assert 0.5 < relative_error(*ours) / difference < 2


@pytest.mark.parametrize("variant", ["t2v", "i2v", "ti2v", "wan22"])
def test_pipelines_generate_the_same(variant):
    pipe = tiny_wan_pipeline(variant)
    expected = frames_of(pipe, variant)
    with trp.patch(pipe) as patch:
        assert set(patch.transformers) == ({"transformer", "transformer_2"} if variant == "wan22" else {"transformer"})
        assert relative_error(frames_of(pipe, variant), expected) <= 1e-5
    assert torch.equal(frames_of(pipe, variant), expected)


def test_the_fused_forward_runs(monkeypatch):
    """The equivalence above would hold without a patch too: a wrong fused op must show in the output."""
    model, inputs = model_and_inputs("no_cross_norm", "cpu", torch.float32, layers=1)
    with torch.no_grad():
        expected = model(**inputs)[0]
        for op in ("LINEAR_QKV", "LINEAR_SKIP", "LINEAR_GELU", "LAYER_NORM_MODULATE", "RMS_NORM_ROPE"):
            with monkeypatch.context() as context, trp.patch(model, trp.Exact(implementation="triton")):
                right = getattr(layers, op)
                wrong = [replace(kernel, launch=partial(doubled, kernel.launch)) for kernel in right.kernels]
                context.setattr(layers, op, replace(right, kernels=tuple(wrong)))
                assert relative_error(model(**inputs)[0], expected) > 1e-3, op
        around_launches(monkeypatch, "ATTENTION", lambda launch: lambda *arguments: 2 * launch(*arguments))
        with trp.patch(model, trp.Exact(implementation="triton")):
            assert relative_error(model(**inputs)[0], expected) > 1e-3


def doubled(op, *arguments, **options):
    result = op(*arguments, **options)
    return tuple(2 * part for part in result) if isinstance(result, tuple) else 2 * result


def test_a_bf16_model_in_the_interpreter_is_refused_with_the_reason():
    """Triton's interpreter computes bf16 wrongly: a model's output would be wrong without a word."""
    model = tiny_wan_transformer().to(torch.bfloat16)
    inputs = inputs_for(model)
    with torch.no_grad():
        expected = model(**inputs)[0]
        with (
            trp.patch(model, trp.Exact(implementation="triton")),
            pytest.raises(ValueError, match="bfloat16 in Triton's interpreter, which computes it wrongly"),
        ):
            model(**inputs)
        assert torch.equal(model(**inputs)[0], expected)
