"""The quantized tier as a patch: its errors, its options, the way back, and what computes with other tensors."""

import copy
from itertools import cycle

import pytest
import torch

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.launches import around_launches
from tests.patching.pairs import attributes_of, output_of
from tests.patching.test_equivalence import VARIANTS, captured_block_inputs, fp32_copy, model_and_inputs, oracle_of
from tests.tiny_families import DENSE, FAMILIES, tiny_family_inputs, tiny_family_transformer
from tests.tiny_wan import frames_of, moved, tiny_transformer_inputs, tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch import kernels
from turbo_rcm_patch.patching.steps import in_8_bits
from turbo_rcm_patch.patching.weights.quantize_linears import quantized_linears
from turbo_rcm_patch.tiers import QUANTIZED

DTYPES = [torch.float32, torch.bfloat16]
LIMITS = QUANTIZED.limits
ATTENTION_ALONE, LINEARS_ALONE = ("attention",), ("linears",)


def rows_of(patch, step, sub_layer="self_attention"):
    return [row for row in patch.rows() if (row.sub_layer, row.step) == (sub_layer, step)]


@pytest.fixture
def ran(monkeypatch):
    """The attention ops that ran, in order. Cross-attention counts as "attention" too."""
    names = []

    def watch(name):
        def around(launch):
            return lambda *arguments: names.append(name) or launch(*arguments)

        around_launches(monkeypatch, name.upper(), around)

    for name in ("quantize_qkv", "attention_8bit", "attention"):
        watch(name)
    return names


# Errors


@pytest.mark.parametrize(("variant", "dtype"), [*zip(VARIANTS, cycle(DTYPES))])
def test_every_block_is_within_the_tiers_limit(variant, dtype):
    model, inputs = model_and_inputs(variant, "cpu", dtype)
    block_inputs = captured_block_inputs(model, inputs)
    oracles = [oracle_of(*pair) for pair in zip(model.blocks, block_inputs, strict=True)]
    with torch.no_grad(), trp.patch(model, "quantized"):
        for block, args, oracle in zip(model.blocks, block_inputs, oracles, strict=True):
            unpatched = type(block).forward(fp32_copy(block).to(dtype), *args)
            ours = block(*args)
            assert ours.dtype == dtype
            assert relative_error(ours, oracle) <= LIMITS.allowed(relative_error(unpatched, oracle), dtype)
            assert relative_error(ours, oracle) > 1e-3  # 8 bits, and no other way


@pytest.mark.parametrize(("name", "dtype"), [*zip(FAMILIES, cycle(DTYPES))])
def test_every_family_is_within_the_limit_of_a_step(name, dtype):
    layers = 2 if name == "vace" else 1
    model, oracle = tiny_family_transformer(name, dtype, layers=layers), tiny_family_transformer(name, layers=layers)
    oracle.load_state_dict(model.state_dict())
    expected, unpatched = output_of(name, oracle), output_of(name, model)
    with trp.patch(model, "quantized") as patch:
        allowed = LIMITS.allowed(relative_error(unpatched, expected), dtype, "step")
        assert 1e-3 < relative_error(output_of(name, model), expected) <= allowed
        in_8_bits = name not in DENSE
        step, sub_layer = "QK-norm + RoPE + 8 bits", "self_attention"
        if name.startswith("ltx2"):
            step, sub_layer = "QKV to 8 bits", "video self_attention"
        assert bool(rows_of(patch, step, sub_layer)) == in_8_bits
    assert torch.equal(output_of(name, model), unpatched)


@pytest.mark.parametrize("variant", ["t2v", "i2v", "ti2v", "wan22"])
def test_pipelines(variant):
    pipe = tiny_wan_pipeline(variant)
    expected = frames_of(pipe, variant)
    with trp.patch(pipe, "quantized"):
        # Guidance adds five times the difference of two steps; this is the limit of one.
        assert 1e-3 < relative_error(frames_of(pipe, variant), expected) <= LIMITS.step
    assert torch.equal(frames_of(pipe, variant), expected)


def test_rows_of_zeros():
    """A prompt that is padded with zeros, and hidden states that are all 0."""
    model, inputs = model_and_inputs("t2v", "cpu", torch.bfloat16)
    inputs["hidden_states"] = torch.zeros_like(inputs["hidden_states"])
    inputs["encoder_hidden_states"][:, 3:] = 0
    with torch.no_grad():
        expected = model(**inputs)[0]
        with trp.patch(model, "quantized"):
            assert relative_error(model(**inputs)[0], expected) <= LIMITS.step


@pytest.mark.parametrize(
    "op", ["quantize_qkv", "attention_8bit", "linear_qkv", "linear_8bit", "linear_skip", "linear_gelu_quantized"]
)
def test_the_ops_in_8_bits_are_what_runs(op, monkeypatch):
    model, inputs = model_and_inputs("t2v", "cpu", torch.float32)
    with torch.no_grad():
        with trp.patch(model, "quantized"):
            expected = model(**inputs)[0]
        module = in_8_bits if op.startswith("linear") else kernels
        around_launches(monkeypatch, op.upper(), lambda launch: lambda *arguments: _wrong(launch(*arguments)), module)
        with trp.patch(model, "quantized"):
            assert relative_error(model(**inputs)[0], expected) > 1e-3


def _wrong(result):
    """Return a result with its channels reversed, or with its last scale doubled if it is in 8 bits."""
    if isinstance(result, kernels.Quantized):
        return result._replace(scale=2 * result.scale)
    if isinstance(result, tuple) and result[0].dtype.itemsize == 1:
        return *result[:-1], 2 * result[-1]
    return tuple(part.flip(-1) for part in result) if isinstance(result, tuple) else result.flip(-1)


# Options


@pytest.mark.parametrize("variant", ["head_dim_32", "head_dim_12"])
def test_head_dims_without_a_kernel_take_the_exact_attention(variant, ran):
    model, inputs = model_and_inputs(variant, "cpu", torch.float32)
    with torch.no_grad(), trp.patch(model, "quantized") as patch:
        model(**inputs)
        (row,) = rows_of(patch, "attention")
        assert set(ran) == {"attention"}
        assert row.reasons == {variant.replace("_dim_", "_dim "): 2}
        assert "SDPA" in row.kernel
        assert quantized_linears(model)


@pytest.mark.parametrize(("parts", "linears"), [(ATTENTION_ALONE, 0), (LINEARS_ALONE, 20), ((), 0)])
def test_attention_and_linears_apart(parts, linears, ran):
    model, inputs = model_and_inputs("t2v", "cpu", torch.float32)
    with torch.no_grad():
        expected = model(**inputs)[0]
        with trp.patch(model, trp.Quantized(quantize=parts)) as patch:
            error = relative_error(model(**inputs)[0], expected)
            assert len(quantized_linears(model)) == linears
            in_8_bits = "attention" in parts
            assert ran.count("attention_8bit") == ran.count("quantize_qkv") == (2 if in_8_bits else 0)
            assert ran.count("attention") == (2 if in_8_bits else 4)
            (row,) = rows_of(patch, "attention")
            assert row.reasons == {"cpu tensors" if in_8_bits else "not in quantize": 2}
            assert ("linears in 8 bits" in patch.summary()) == bool(linears)
    assert (1e-4 < error <= LIMITS.step) if parts else error <= 1e-5


@pytest.mark.parametrize("left_out", trp.Exact().fuse)
def test_groups_that_are_not_fused_are_not_quantised(left_out):
    model, inputs = model_and_inputs("t2v", "cpu", torch.float32)
    groups = [group for group in trp.Exact().fuse if group != left_out]
    with torch.no_grad():
        expected = model(**inputs)[0]
        with trp.patch(model, trp.Quantized(fuse=groups)) as patch:
            assert 1e-4 < relative_error(model(**inputs)[0], expected) <= LIMITS.step
            rows = patch.rows()
            assert all(set(row.reasons) == {"not in fuse"} for row in rows if row.sub_layer == left_out)
            assert not any("not in fuse" in row.reasons for row in rows if row.sub_layer != left_out)
        with trp.patch(model, trp.Quantized(fuse=())):
            assert torch.equal(model(**inputs)[0], expected)


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_attention_names_the_kernel_of_what_is_exact(attention, ran):
    model, inputs = model_and_inputs("t2v", "cpu", torch.float32)
    with torch.no_grad(), trp.patch(model, trp.Quantized(attention=attention)) as patch:
        model(**inputs)
        assert (ran.count("attention_8bit"), ran.count("attention")) == (2, 2)
        reason = "cpu tensors" if attention == "auto" else "attention='sdpa'"
        assert rows_of(patch, "attention", "cross_attention")[0].reasons == {reason: 2}
        assert rows_of(patch, "attention")[0].reasons == {"cpu tensors": 2}


# Patching and restoring


@pytest.mark.parametrize(
    ("name", "dtype"), [*(("wan", dtype) for dtype in DTYPES), ("vace", torch.bfloat16), ("animate", torch.float32)]
)
def test_restore_leaves_nothing_and_outputs_are_bitwise_the_same(name, dtype):
    model = tiny_family_transformer(name, dtype)
    attributes, state, expected = attributes_of(model), model.state_dict(), output_of(name, model)
    parameters = dict(model.named_parameters())
    for preset in ("quantized", "exact", "quantized"):
        patch = trp.patch(model, preset)
        output_of(name, model)
        patch.restore()
        assert attributes_of(model) == attributes
        assert {path: id(p) for path, p in model.named_parameters()} == {path: id(p) for path, p in parameters.items()}
        assert all(torch.equal(value, state[path]) for path, value in model.state_dict().items())
        assert torch.equal(output_of(name, model), expected)


@pytest.mark.parametrize("preset", ["exact", "quantized"])
def test_a_second_transformer_that_cannot_be_patched_leaves_the_first_alone(preset):
    pipe = tiny_wan_pipeline("wan22")
    attributes = attributes_of(pipe.transformer)
    trp.patch(pipe.transformer_2, preset)
    with pytest.raises(trp.PatchError, match="transformer_2 is patched already"):
        trp.patch(pipe, "quantized")
    assert attributes_of(pipe.transformer) == attributes


def test_a_name_to_keep_that_the_second_transformer_lacks_leaves_both_as_they_were():
    pipe = tiny_wan_pipeline("wan22")
    pipe.transformer_2 = tiny_wan_transformer(layers=1)
    models = (pipe.transformer, pipe.transformer_2)
    before = [attributes_of(model) for model in models]
    with pytest.raises(ValueError, match=r"keep='blocks\.1\.\*' fits no module of the WanTransformer3DModel"):
        trp.patch(pipe, trp.Quantized(keep=["blocks.1.*"]))
    assert [attributes_of(model) for model in models] == before
    assert not any(quantized_linears(model) for model in models)


# Autograd, transforms, autocast


def with_weights_as_multiplied(model):
    """Return a copy of a model with another patched model's 8-bit weights, dequantised."""
    twin = copy.deepcopy(model)
    trp.patch(model, "quantized")
    for path, module in model.named_modules():
        if module in quantized_linears(model):
            twin.get_submodule(path).weight.data = module.quantized().dequantize()
    return twin


@pytest.mark.parametrize("name", ["wan", "vace", "animate"])
def test_gradients_are_those_of_the_dequantised_weights(name):
    patched = tiny_family_transformer(name).requires_grad_(False)
    plain = with_weights_as_multiplied(patched)
    results = []
    for model in (patched, plain):
        inputs = tiny_family_inputs(name, model)
        leaves = [inputs[key].requires_grad_() for key in ("hidden_states", "encoder_hidden_states")]
        output = model(**inputs)[0]
        output.square().mean().backward()
        results.append([output.detach(), *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*results, strict=True):
        assert theirs.abs().max() > 0
        assert relative_error(ours, theirs) <= 1e-5


def test_parameters_that_are_left_are_trained():
    patched = tiny_wan_transformer()
    plain = with_weights_as_multiplied(patched)
    for model in (patched, plain):
        model(**tiny_transformer_inputs(model))[0].square().mean().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    trained = {name: parameter for name, parameter in patched.named_parameters() if parameter.requires_grad}
    assert {"blocks.0.ffn.net.2.bias", "blocks.0.attn1.norm_q.weight", "patch_embedding.weight"} <= set(trained)
    for name, parameter in trained.items():
        assert relative_error(parameter.grad, expected[name]) <= 1e-5, name


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_autocast_runs_diffusers_code_with_the_dequantised_weights(mode):
    patched = tiny_wan_transformer()
    plain = with_weights_as_multiplied(patched)
    with mode(), torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (model(**tiny_transformer_inputs(model))[0] for model in (patched, plain))
    assert torch.equal(ours, theirs)


def test_meta_tensors():
    model = tiny_wan_transformer()
    with torch.no_grad(), trp.patch(model, "quantized"):
        model.to("meta")
        inputs = moved(tiny_transformer_inputs(model), "meta")
        assert model(**inputs)[0].shape == inputs["hidden_states"].shape
