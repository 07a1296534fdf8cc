"""Every block variant computes what the unpatched block computes: fp32 to 1e-5, bf16 no further from an fp32 oracle."""

import copy

import pytest
import torch

import turbo_rcm_patch as trp
from tests.oracle import assert_no_worse, relative_error, torch_device
from tests.tiny_wan import tiny_call, tiny_transformer_inputs, tiny_wan_pipeline, tiny_wan_transformer

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
    input_options = dict(input_options)
    per_token = input_options.pop("per_token", False)
    model = tiny_wan_transformer(dtype=dtype, **{**model_options, **overrides})
    inputs = tiny_transformer_inputs(model, **input_options)
    if per_token:
        batch, _, frames, height, width = inputs["hidden_states"].shape
        tokens = frames * height * width // 4
        inputs["timestep"] = torch.linspace(0, 999, batch * tokens).reshape(batch, tokens)
    move = lambda value: value.to(device) if isinstance(value, torch.Tensor) else value  # noqa: E731
    return model.to(device), {name: move(value) for name, value in inputs.items()}


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
    model, inputs = model_and_inputs(variant, torch_device(device), torch.float32)
    block_inputs = captured_block_inputs(model, inputs)
    with torch.no_grad(), trp.patch(model, trp.PatchConfig(implementation=implementation)):
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
    with torch.no_grad(), trp.patch(model, trp.PatchConfig(attention=attention)):
        for block, args in zip(model.blocks, block_inputs, strict=True):
            oracle = type(block).forward(fp32_copy(block), *(in_fp32(arg) for arg in args))
            assert_no_worse(block(*args), type(block).forward(block, *args), oracle)


def fp32_copy(block):
    with torch.no_grad():
        return copy.deepcopy(block).float()


def in_fp32(value):
    return tuple(map(in_fp32, value)) if isinstance(value, tuple) else value.float()


@pytest.mark.parametrize("group", trp.PatchConfig().fuse)
def test_groups_can_be_left_out(group):
    model, inputs = model_and_inputs("t2v", "cpu", torch.float32)
    with torch.no_grad():
        expected = model(**inputs)[0]
        with trp.patch(model, trp.PatchConfig(fuse=[group])) as patch:
            assert relative_error(model(**inputs)[0], expected) <= 1e-5
            fused = [line for line in patch.summary().splitlines() if " 2/2" in line and "constants" not in line]
    assert fused
    assert all(group in line for line in fused)


@pytest.mark.parametrize("variant", ["t2v", "i2v", "ti2v", "wan22"])
def test_pipelines_generate_the_same(variant):
    pipe = tiny_wan_pipeline(variant)
    generate = lambda: pipe(**tiny_call(variant, generator=torch.Generator().manual_seed(3))).frames  # noqa: E731
    expected = generate()
    with trp.patch(pipe) as patch:
        assert set(patch.transformers) == ({"transformer", "transformer_2"} if variant == "wan22" else {"transformer"})
        assert relative_error(generate(), expected) <= 1e-5
    assert torch.equal(generate(), expected)


def test_the_fused_forward_runs(monkeypatch):
    """The equivalence above would hold without a patch too: a wrong fused op must show in the output."""
    model, inputs = model_and_inputs("t2v", "cpu", torch.float32)
    with torch.no_grad():
        expected = model(**inputs)[0]
        with trp.patch(model):
            for op in ("linear_qkv", "linear_skip", "linear_gelu", "layer_norm_modulate", "rms_norm_rope", "attention"):
                with monkeypatch.context() as context:
                    right = getattr(trp.patching.wan.layers.kernels, op)
                    wrong = lambda *args, op=right, **kwargs: negated(op(*args, **kwargs))  # noqa: E731
                    context.setattr(trp.patching.wan.layers.kernels, op, wrong)
                    assert relative_error(model(**inputs)[0], expected) > 1e-3, op


def negated(result):
    return tuple(-part for part in result) if isinstance(result, tuple) else -result
