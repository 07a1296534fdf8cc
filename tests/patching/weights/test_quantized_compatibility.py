"""The rest of diffusers on a model with 8-bit attention and linears: as fast, or through a fallback that is named.

What becomes of its weights is in test_quantized_weights.py.
"""

import copy
import importlib

import accelerate
import pytest
import torch
from diffusers import FirstBlockCacheConfig
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from peft import LoraConfig
from torch import nn

import turbo_rcm_patch as trp
from tests.oracle import assert_no_worse, relative_error
from tests.patching.test_equivalence import model_and_inputs
from tests.tiny_wan import tiny_transformer_inputs, tiny_wan_transformer
from turbo_rcm_patch import kernels
from turbo_rcm_patch.kernels.dispatch import interpreting
from turbo_rcm_patch.patching.weights import convert as quantized_weights
from turbo_rcm_patch.patching.weights.convert import quantized_linears
from turbo_rcm_patch.tiers import QUANTIZED

CPU = torch.device("cpu")
LIMIT = QUANTIZED.limits.step


def quantized(**options):
    return trp.Quantized(**options)


def output_of(model, **overrides):
    with torch.no_grad():
        return model(**{**tiny_transformer_inputs(model), **overrides})[0]


def reasons(patch, sub_layer, step):
    """Return a step's reasons, without the one that says that this is a CPU."""
    row = next(row for row in patch.rows() if (row.sub_layer, row.step) == (sub_layer, step))
    return {reason: count for reason, count in row.reasons.items() if reason != "cpu tensors"}


def make_models(config=None, **options):
    """Patched, and with the weights that it multiplies by, of an attention as it is: what a fallback computes."""
    patched = tiny_wan_transformer(**options)
    patch = trp.patch(patched, config or quantized())
    plain = tiny_wan_transformer(**options)
    for path, module in patched.named_modules():
        if module in quantized_linears(patched):
            plain.get_submodule(path).weight.data = module.quantized().dequantize(module.weight.dtype)
    return patched, plain, patch


def assert_close(patched, plain, **overrides):
    """Within the limit, and with 8 bits all the same."""
    assert 1e-4 < relative_error(output_of(patched, **overrides), output_of(plain, **overrides)) <= LIMIT


# ---------------------------------------------------------------------------------------------------------------------
# Hooks and replaced modules
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        *(
            "attn1",
            "attn1.to_q",
            "attn1.norm_q",
            "attn1.to_out.0",
            "attn2",
            "attn2.to_q",
            "attn2.to_k",
            "attn2.to_out.0",
        ),
        *("ffn", "ffn.net.0", "ffn.net.0.proj", "ffn.net.2", "norm1"),
    ],
)
def test_user_hooks_on_any_module_see_and_change_its_results(path):
    patched, plain, _ = make_models()
    base, seen = output_of(plain), {patched: [], plain: []}
    for model in (patched, plain):

        def negate(module, args, output, calls=seen[model]):
            calls.append(output)
            return -output

        model.blocks[0].get_submodule(path).register_forward_hook(negate)
    ours, theirs = output_of(patched), output_of(plain)
    assert 1e-4 < relative_error(ours, theirs) <= LIMIT
    assert relative_error(ours, theirs) < relative_error(ours, base)
    (ours,), (theirs,) = seen.values()
    assert ours.shape == theirs.shape
    assert relative_error(ours, theirs) <= LIMIT


def test_hooks_on_blocks_see_what_comes_and_goes():
    patched, plain, _ = make_models()
    seen = {patched: [], plain: []}
    for model, tensors in seen.items():
        for block in model.blocks:
            block.register_forward_hook(lambda _, args, output, kept=tensors: kept.extend((args[0], output)))
    output_of(patched), output_of(plain)
    for ours, theirs in zip(*seen.values(), strict=True):
        assert ours.dtype == theirs.dtype
        assert relative_error(ours, theirs) <= LIMIT


@pytest.mark.parametrize("path", ["attn1.to_out.0", "ffn.net.2"])
def test_a_hook_that_sees_the_input_of_a_linear_gets_a_tensor(path):
    """The hook gets a tensor in the model's dtype, not one in 8 bits."""
    patched, plain, patch = make_models()
    seen = {patched: [], plain: []}
    for model, tensors in seen.items():
        model.blocks[1].get_submodule(path).register_forward_pre_hook(
            lambda _, args, kept=tensors: kept.append(args[0])
        )
    assert_close(patched, plain)
    (ours,), (theirs,) = seen.values()
    assert type(ours) is torch.Tensor
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert relative_error(ours, theirs) <= LIMIT
    sub_layer = "self_attention" if path.startswith("attn1") else "feed_forward"
    step = "projection + skip" if path.startswith("attn1") else "linear + skip"
    assert reasons(patch, sub_layer, step) == {"torch hook": 1}


def test_a_replaced_linear_runs():
    patched, plain, patch = make_models()
    for model in (patched, plain):
        model.blocks[0].ffn.net[2] = nn.Linear(48, 128)
        nn.init.constant_(model.blocks[0].ffn.net[2].weight, 0.01)
        nn.init.zeros_(model.blocks[0].ffn.net[2].bias)
    assert_close(patched, plain)
    assert len(quantized_linears(patched)) == 19
    patch.restore()
    assert isinstance(patched.blocks[0].ffn.net[2], nn.Linear)


def test_a_custom_processor_is_kept():
    class Doubled(WanAttnProcessor):
        def __call__(self, *args, **kwargs):
            return 2 * super().__call__(*args, **kwargs)

    patched, plain, patch = make_models()
    for model in (patched, plain):
        model.blocks[1].attn1.set_processor(Doubled())
    assert_close(patched, plain)
    assert reasons(patch, "self_attention", "attention") == {"processor Doubled": 1}


def test_attention_backends_take_the_exact_attention(monkeypatch):
    # set_attention_backend also changes a global default.
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", _AttentionBackendRegistry._active_backend)
    patched, plain, patch = make_models(quantized(quantize=["attention"]))
    patched.set_attention_backend("_native_math")
    assert relative_error(output_of(patched), output_of(plain)) <= 1e-5
    assert reasons(patch, "self_attention", "attention") == {"attention backend _native_math": 2}
    patched.reset_attention_backend()


def test_dropout_in_training_is_drawn():
    patched, _, patch = make_models()
    patched.train()
    patched.blocks[0].attn1.to_out[1].p = 0.5
    assert relative_error(output_of(patched), output_of(patched)) > 1e-3
    assert reasons(patch, "self_attention", "projection + skip") == {"dropout": 1}


# ---------------------------------------------------------------------------------------------------------------------
# LoRA, casting, offloading, caches
# ---------------------------------------------------------------------------------------------------------------------


def add_lora(model):
    torch.manual_seed(5)
    targets = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]
    model.add_adapter(LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=targets), "first")


def test_a_lora_runs_beside_the_8_bit_weights():
    patched, plain, patch = make_models()
    base = output_of(plain)
    for model in (patched, plain):
        add_lora(model)
    assert relative_error(output_of(plain), base) > 2 * LIMIT
    for scale in (1.0, 0.3):
        assert_close(patched, plain, attention_kwargs={"scale": scale})
    for step in ("QKV projection", "projection + skip", "attention"):
        assert reasons(patch, "self_attention", step) == {}
    for model in (patched, plain):
        model.disable_lora()
    assert relative_error(output_of(patched), base) <= LIMIT
    assert reasons(patch, "feed_forward", "linear + skip") == {}


def test_layerwise_casting():
    """Its hooks make the linears modules, whose 8-bit weights it leaves alone."""
    patched, plain, patch = make_models(dtype=torch.bfloat16)
    for model in (patched, plain):
        model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.bfloat16)
    assert_close(patched, plain)
    assert reasons(patch, "feed_forward", "linear + skip") == {"hook layerwise_casting": 2}


def test_a_model_in_fp64():
    patched, plain, patch = make_models()
    for model in (patched, plain):
        model.to(torch.float64)
    ours = output_of(patched)
    assert ours.dtype == torch.float64
    assert relative_error(ours, output_of(plain)) <= 1e-6  # all of it through the modules
    for step in ("QKV projection", "projection + skip", "attention"):
        assert reasons(patch, "self_attention", step) == {"float64 tensors": 2}
    assert reasons(patch, "feed_forward", "linear + skip") == {"float64 tensors": 2}
    patch.restore()
    assert torch.equal(output_of(patched), output_of(tiny_wan_transformer().double()))


def test_model_offload():
    patched, _, patch = make_models()
    expected = output_of(patched)
    accelerate.cpu_offload_with_hook(patched, execution_device=CPU)
    assert torch.equal(output_of(patched), expected)
    assert reasons(patch, "feed_forward", "linear + skip") == {}
    patch.restore()
    assert torch.equal(output_of(patched), output_of(tiny_wan_transformer()))


def test_sequential_offload_names_its_hooks():
    patched, plain, patch = make_models()
    accelerate.cpu_offload(patched, execution_device=CPU)
    assert relative_error(output_of(patched), output_of(plain)) <= 1e-5  # all of it through the modules
    assert reasons(patch, "feed_forward", "linear + skip") == {"hook AlignDevicesHook": 2}
    patch.restore()
    assert torch.equal(output_of(patched), output_of(tiny_wan_transformer()))


def test_first_block_cache():
    patched, plain, patch = make_models(layers=3)
    outputs = []
    for model in (patched, plain):
        model.enable_cache(FirstBlockCacheConfig(threshold=10.0))  # every later step is skipped after its first block
        with model.cache_context("cond"):
            outputs.append([output_of(model, timestep=torch.full((2,), t)) for t in (900.0, 800.0)])
    for ours, theirs in zip(*outputs, strict=True):
        assert 1e-4 < relative_error(ours, theirs) <= LIMIT
    patched.disable_cache()
    patch.restore()
    assert torch.equal(output_of(patched), output_of(tiny_wan_transformer(layers=3)))


def test_fused_projections_after_the_patch():
    patched, plain, patch = make_models()
    patched.fuse_qkv_projections()
    assert_close(patched, plain)
    assert reasons(patch, "self_attention", "QKV projection") == {"fused projections": 2}


def test_a_copy_computes_the_same_on_its_own():
    patched, _, patch = make_models()
    expected = output_of(patched)
    twin = copy.deepcopy(patched)
    patch.restore()
    assert torch.equal(output_of(twin), expected)
    trp.restore(twin)
    assert torch.equal(output_of(twin), output_of(patched))


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["patch, compile", "compile, patch"])
def test_compile_repeated_blocks(order):
    torch._dynamo.reset()
    patched = tiny_wan_transformer(layers=3)
    with trp.patch(patched, "quantized"):
        expected = output_of(patched)
    if order == "compile, patch":
        patched.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
        output_of(patched)
    patch = trp.patch(patched, "quantized")
    if order == "patch, compile":
        patched.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    assert relative_error(output_of(patched), expected) <= 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    patch.restore()
    assert relative_error(output_of(patched), output_of(tiny_wan_transformer(layers=3))) <= 1e-5


@pytest.fixture
def int8_everywhere(monkeypatch):
    """Formats as on sm_80, whose kernels Triton's interpreter computes as a GPU does."""
    if not interpreting():
        pytest.skip("needs Triton's CPU interpreter")
    monkeypatch.setattr(quantized_weights, "capability_of", lambda device: (8, 0))
    for module in (kernels, importlib.import_module(QUANTIZE_QKV)):
        monkeypatch.setattr(module, "default_v_format", lambda *_: torch.float16)


QUANTIZE_QKV = "turbo_rcm_patch.kernels.attention_8bit.quantize_qkv"
OPS = {
    "quantize_qkv",
    "attention_8bit",
    "linear_qkv",
    "linear_8bit",
    "linear_skip",
    "linear_gelu",
    "layer_norm_modulate",
}


def of_kernels_and_reference(model, inputs):
    outputs = []
    for implementation in ("triton", "torch"):
        with torch.no_grad(), trp.patch(model, quantized(implementation=implementation)):
            outputs.append(model(**inputs)[0])
    return outputs


@pytest.mark.parametrize("variant", ["t2v", "i2v", "ti2v", "one_token"])
def test_the_kernels_compute_what_the_reference_does(variant, int8_everywhere):
    """But for values half way between two of int8: any difference δ before moves a share δ / step of them by a step,
    and so grows from one rounding to the next, though not beyond the error that all roundings make."""
    model, inputs = model_and_inputs(variant, CPU, torch.float32)
    with torch.no_grad():
        oracle = model(**inputs)[0]
    ours, theirs = of_kernels_and_reference(model, inputs)
    assert_no_worse(ours.half(), theirs.half(), oracle)  # judged as of a low precision, which 8 bits are
    assert 0 < relative_error(ours, theirs) < relative_error(theirs, oracle)


def test_a_compiled_block_is_of_custom_ops(int8_everywhere):
    torch._dynamo.reset()
    found = set()

    def backend(graph, inputs):
        found.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    model = tiny_wan_transformer()
    trp.patch(model, quantized(implementation="triton"))
    expected = output_of(model)
    model.compile_repeated_blocks(backend=backend, fullgraph=True)
    assert torch.equal(output_of(model), expected)
    graph = " ".join(found)
    assert {op for op in OPS if f"turbo_rcm_patch.{op}" in graph or f"turbo_rcm_patch::{op}" in graph} == OPS


def test_kernels_that_the_interpreter_gets_wrong_are_refused():
    if not interpreting():
        pytest.skip("needs Triton's CPU interpreter")
    model = tiny_wan_transformer()
    with trp.patch(model, quantized(implementation="triton")), pytest.raises(ValueError, match="rounds it wrongly"):
        output_of(model)
