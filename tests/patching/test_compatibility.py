"""The rest of diffusers keeps working on a patched model: fused, or through a fallback that the summary names."""

import copy
import functools

import accelerate
import pytest
import torch
from diffusers import FirstBlockCacheConfig
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from diffusers.models.attention_dispatch import _AttentionBackendRegistry, attention_backend
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from peft import LoraConfig
from torch import nn

import turbo_rcm_patch as trp
from tests.oracle import assert_no_worse, relative_error
from tests.tiny_wan import tiny_call, tiny_transformer_inputs, tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch import kernels
from turbo_rcm_patch.patching import layers, plan
from turbo_rcm_patch.patching.families.wan import block

CPU = torch.device("cpu")
LORA_TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]


def output_of(model, **overrides):
    with torch.no_grad():
        return model(**{**tiny_transformer_inputs(model), **overrides})[0]


def gpu_output_of(model):
    inputs = tiny_transformer_inputs(model)
    with torch.no_grad():
        return model(**{k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()})[0]


def assert_same_output(patched, plain, **overrides):
    assert relative_error(output_of(patched, **overrides), output_of(plain, **overrides)) <= 1e-5


def row(patch, sub_layer, step):
    """The summary's line of one fused step."""
    return next(line for line in patch.summary().splitlines() if sub_layer in line and step in line)


def add_lora(model, name, seed):
    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=LORA_TARGETS)
    model.add_adapter(config, adapter_name=name)


@pytest.mark.parametrize("when", ["before", "after"])
def test_lora(when):
    patched, plain = tiny_wan_transformer(), tiny_wan_transformer()
    base = output_of(plain)
    if when == "before":
        add_lora(patched, "first", 5)
    patch = trp.patch(patched)
    if when == "after":
        output_of(patched)
        add_lora(patched, "first", 5)
    add_lora(plain, "first", 5)
    assert relative_error(output_of(plain), base) > 0.1
    assert_same_output(patched, plain)
    for step in ("QKV projection", "projection + skip", "linear + GELU", "linear + skip"):
        assert "PyTorch linear + LoRA" in row(patch, "", step)
        assert "cpu tensors (2)" in row(patch, "", step)

    assert_same_output(patched, plain, attention_kwargs={"scale": 0.3})
    for model in (patched, plain):
        add_lora(model, "second", 9)
        model.set_adapters(["first", "second"], [0.5, 0.7])
    assert_same_output(patched, plain)
    for model in (patched, plain):
        model.disable_lora()
    assert relative_error(output_of(patched), base) <= 1e-5
    for model in (patched, plain):
        model.enable_lora()
        model.fuse_lora()
    assert_same_output(patched, plain)
    for step in ("QKV projection", "projection + skip", "linear + GELU", "linear + skip"):
        assert "LoRA" not in row(patch, "", step)
    for model in (patched, plain):
        model.unfuse_lora()
    assert "PyTorch linear + LoRA" in row(patch, "feed_forward", "linear + skip")
    assert_same_output(patched, plain)
    for model in (patched, plain):
        model.fuse_lora()
        model.unload_lora()
    assert "cpu tensors (2)" in row(patch, "feed_forward", "linear + skip")
    assert_same_output(patched, plain)
    patch.restore()
    assert_same_output(patched, plain)


def test_lora_fused_and_unloaded_between_two_generations_is_not_missed():
    """Fusing writes the base weights through .data, which no version counter sees."""
    patched, plain = tiny_wan_transformer(), tiny_wan_transformer()
    trp.patch(patched)
    before = output_of(patched)
    for model in (patched, plain):
        add_lora(model, "first", 5)
        model.fuse_lora()
        model.unload_lora()
    assert_same_output(patched, plain)
    assert relative_error(output_of(patched), before) > 0.1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_gradients(checkpointing):
    plain = tiny_wan_transformer().train()
    patched = copy.deepcopy(plain)
    trp.patch(patched)
    results = []
    for model in (patched, plain):
        if checkpointing:
            model.enable_gradient_checkpointing()
        inputs = tiny_transformer_inputs(model)
        leaves = {name: inputs[name].requires_grad_() for name in ("hidden_states", "encoder_hidden_states")}
        output_of(model)  # constants kept by a generation must not reach the graph
        model(**inputs)[0].square().mean().backward()
        results.append({**leaves, **dict(model.named_parameters())})
    for name, tensor in results[1].items():
        if tensor.grad is None:
            assert results[0][name].grad is None, name
        else:
            assert relative_error(results[0][name].grad, tensor.grad) <= 1e-5, name


def test_group_offload():
    for options in ({"offload_type": "block_level", "num_blocks_per_group": 1}, {"offload_type": "leaf_level"}):
        patched, plain = tiny_wan_transformer(), tiny_wan_transformer()
        patch = trp.patch(patched)
        patched.enable_group_offload(onload_device=CPU, offload_device=CPU, **options)
        assert_same_output(patched, plain)
        leaf = options["offload_type"] == "leaf_level"
        assert ("hook group_offloading (2)" in row(patch, "self_attention", "projection + skip")) == leaf
        patch.restore()
        assert torch.equal(output_of(patched), output_of(plain))


def test_sequential_offload():
    patched, plain = tiny_wan_transformer(), tiny_wan_transformer()
    patch = trp.patch(patched)
    accelerate.cpu_offload(patched, execution_device=CPU)
    assert_same_output(patched, plain)
    assert "hook AlignDevicesHook (2)" in row(patch, "self_attention", "projection + skip")
    patch.restore()
    assert torch.equal(output_of(patched), output_of(plain))


def test_model_offload():
    patched, plain = tiny_wan_transformer(), tiny_wan_transformer()
    with trp.patch(patched) as patch:
        accelerate.cpu_offload_with_hook(patched, execution_device=CPU)
        assert_same_output(patched, plain)
        assert "cpu tensors (2)" in row(patch, "feed_forward", "linear + skip")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "offload", ["enable_model_cpu_offload", "enable_group_offload", "enable_sequential_cpu_offload"]
)
def test_offload_on_a_gpu(offload):
    patched, plain = tiny_wan_pipeline(), tiny_wan_pipeline()
    options = {"onload_device": torch.device("cuda"), "offload_type": "leaf_level"} if "group" in offload else {}
    patch = trp.patch(patched)
    getattr(patched, offload)(**options)
    plain.to("cuda")
    generate = lambda pipe: pipe(**tiny_call(generator=torch.Generator().manual_seed(3))).frames  # noqa: E731
    assert relative_error(generate(patched), generate(plain)) <= 1e-4
    assert "cuda" in str(patch.summary()) or "sm_" in patch.summary()
    patch.restore()
    assert relative_error(generate(patched), generate(plain)) <= 1e-4


def test_layerwise_casting():
    patched, plain = (tiny_wan_transformer(dtype=torch.bfloat16) for _ in range(2))
    patch = trp.patch(patched)
    for model in (patched, plain):
        model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    oracle = output_of(tiny_wan_transformer())
    assert_no_worse(output_of(patched), output_of(plain), oracle)
    assert "hook layerwise_casting (2)" in row(patch, "feed_forward", "linear + skip")


def test_first_block_cache():
    patched, plain = tiny_wan_transformer(layers=3), tiny_wan_transformer(layers=3)
    patch = trp.patch(patched)
    outputs = []
    for model in (patched, plain):
        model.enable_cache(FirstBlockCacheConfig(threshold=10.0))  # every later step is skipped after its first block
        with model.cache_context("cond"):
            outputs.append([output_of(model, timestep=torch.full((2,), t)) for t in (900.0, 800.0)])
    for ours, theirs in zip(*outputs, strict=True):
        assert relative_error(ours, theirs) <= 1e-5
    assert "cpu tensors (3)" in row(patch, "feed_forward", "linear + skip")
    patched.disable_cache()
    patch.restore()


@pytest.mark.parametrize("order", ["patch, compile", "compile, patch"])
def test_compile_repeated_blocks(order):
    torch._dynamo.reset()
    patched, plain = tiny_wan_transformer(layers=3), tiny_wan_transformer(layers=3)
    expected = output_of(plain)
    if order == "compile, patch":
        patched.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
        output_of(patched)
    patch = trp.patch(patched)
    if order == "patch, compile":
        patched.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    assert relative_error(output_of(patched), expected) <= 1e-5
    # One graph serves all blocks, as without the patch.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    patch.restore()
    assert relative_error(output_of(patched), expected) <= 1e-5


@pytest.mark.gpu
def test_compile_repeated_blocks_on_a_gpu():
    """The kernels stay fused inside inductor's graphs, without a graph break."""
    torch._dynamo.reset()
    patched, plain, oracle = (
        tiny_wan_transformer(dtype=dtype).cuda() for dtype in (torch.bfloat16, torch.bfloat16, torch.float32)
    )
    trp.patch(patched)
    patched.compile_repeated_blocks(fullgraph=True)
    outputs = [gpu_output_of(model) for model in (patched, plain, oracle)]
    assert_no_worse(*outputs)


def test_quantised_linears():
    quantization = pytest.importorskip("torchao.quantization")
    patched, plain = (tiny_wan_transformer(dtype=torch.bfloat16) for _ in range(2))
    patch = trp.patch(patched)
    for model in (patched, plain):
        quantization.quantize_(
            model.blocks, quantization.Int8WeightOnlyConfig(), filter_fn=lambda m, _: isinstance(m, torch.nn.Linear)
        )
    oracle = output_of(tiny_wan_transformer())
    assert_no_worse(output_of(patched), output_of(plain), oracle)
    assert "weight (2)" in row(patch, "feed_forward", "linear + skip")


def test_attention_backends(monkeypatch):
    # set_attention_backend also changes a global default, which reset_attention_backend leaves changed.
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", _AttentionBackendRegistry._active_backend)
    patched, plain = tiny_wan_transformer(), tiny_wan_transformer()
    patch = trp.patch(patched)
    patched.set_attention_backend("_native_math")
    assert_same_output(patched, plain)
    assert "attention backend _native_math (2)" in row(patch, "self_attention", " attention ")
    patched.reset_attention_backend()
    with attention_backend("native"):
        assert "cpu tensors (2)" in row(patch, "self_attention", " attention ")
        assert_same_output(patched, plain)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "PyTorch's is faster"),
        ({"attention": "triton"}, None),
        ({"implementation": "triton"}, None),
        ({"attention": "sdpa"}, "attention='sdpa'"),
    ],
)
@pytest.mark.parametrize("derivative", [None, "backward"])
def test_sdpa_where_it_is_faster_or_asked_for(monkeypatch, config, reason, derivative):
    asked = []
    faster = lambda *_, **circumstances: asked.append(circumstances) or "PyTorch's is faster"  # noqa: E731
    monkeypatch.setattr(kernels, "why_sdpa", faster)
    gpu, attn = torch.device("cuda"), tiny_wan_transformer().blocks[0].attn1
    monkeypatch.setattr(kernels, "why_not_triton_on", lambda *_: None)
    monkeypatch.setattr(kernels, "attention_kernel_name", lambda implementation, *_, **__: implementation)
    config_of_patch = trp.PatchConfig(**config)
    call = plan.Call(config_of_patch, gpu, torch.bfloat16, 1, 5, 1, 7, "sample", derivative, plan.active_backend())
    step = layers.attention(attn, call)
    assert step.reason == reason
    assert step.kernel == ("torch" if reason else config.get("implementation", "auto"))
    expected = [{"with_backward": derivative is not None}]
    assert asked == (expected if config == {} else [])


def test_a_custom_processor_is_kept():
    class Doubled(WanAttnProcessor):
        def __call__(self, *args, **kwargs):
            return 2 * super().__call__(*args, **kwargs)

    patched, plain = tiny_wan_transformer(), tiny_wan_transformer()
    patch = trp.patch(patched)
    for model in (patched, plain):
        model.blocks[1].attn1.set_processor(Doubled())
    assert_same_output(patched, plain)
    assert "processor Doubled (1)" in row(patch, "self_attention", "projection + skip")


@pytest.mark.parametrize(
    "path",
    ["attn1", "attn1.to_q", "attn1.norm_q", "attn1.to_out.0", "attn2.to_k", "ffn", "ffn.net.0", "ffn.net.2", "norm1"],
)
def test_user_hooks_on_any_module_run(path):
    patched, plain = tiny_wan_transformer(), tiny_wan_transformer()
    trp.patch(patched)
    for model in (patched, plain):
        model.blocks[0].get_submodule(path).register_forward_hook(lambda module, args, output: -output)
    assert_same_output(patched, plain)


def test_a_feed_forward_subclass_is_called():
    class Doubled(FeedForward):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    patched, plain = tiny_wan_transformer(), tiny_wan_transformer()
    patch = trp.patch(patched)
    for model in (patched, plain):
        model.blocks[0].ffn.__class__ = Doubled
    assert_same_output(patched, plain)
    assert "Doubled layer (1)" in row(patch, "feed_forward", "linear + skip")


CLASSES = {
    "linear": nn.Linear,
    "norm": FP32LayerNorm,
    "QK-norm": nn.RMSNorm,
    "attention": WanAttention,
    "feed-forward": FeedForward,
    "activation": GELU,
    "dropout": nn.Dropout,
}


def longer(method):
    return lambda self, *args, **kwargs: 1.2 * method(self, *args, **kwargs)


def longer_under_its_name(method):
    return functools.wraps(method)(longer(method))


def longer_in_its_module(method):
    replaced = longer(method)
    replaced.__module__ = method.__module__
    return replaced


def longer_below_a_decorator(method):
    return torch.no_grad()(longer_under_its_name(method))


class Longer:
    """A method that is no function, under the other's name."""

    def __init__(self, method):
        functools.update_wrapper(self, method)

    def __get__(self, instance, owner):
        return self if instance is None else functools.partial(longer(self.__wrapped__), instance)


REPLACED = [longer, longer_in_its_module, longer_under_its_name, longer_below_a_decorator]


@pytest.mark.parametrize("replaced", [*REPLACED, Longer])
@pytest.mark.parametrize("name", CLASSES)
def test_a_forward_that_a_program_replaces_on_a_class_runs(monkeypatch, name, replaced):
    patched, plain = tiny_wan_transformer(), tiny_wan_transformer()
    patch = trp.patch(patched)
    base = output_of(plain)
    monkeypatch.setattr(CLASSES[name], "forward", replaced(CLASSES[name].forward))
    assert relative_error(output_of(plain), base) > 1e-3
    assert_same_output(patched, plain)
    assert "replaced forward of its class" in patch.summary()


@pytest.mark.parametrize("replaced", REPLACED)
def test_a_processor_whose_class_a_program_changes_runs(monkeypatch, replaced):
    patched, plain = tiny_wan_transformer(), tiny_wan_transformer()
    patch = trp.patch(patched)
    base = output_of(plain)
    monkeypatch.setattr(WanAttnProcessor, "__call__", replaced(WanAttnProcessor.__call__))
    assert relative_error(output_of(plain), base) > 1e-3
    assert_same_output(patched, plain)
    assert "WanAttnProcessor changed" in patch.summary()


@pytest.mark.parametrize("name", CLASSES)
def test_a_decorator_of_torch_on_a_class_changes_nothing(monkeypatch, name):
    patched = tiny_wan_transformer()
    patch = trp.patch(patched)
    before = patch.summary()
    monkeypatch.setattr(CLASSES[name], "forward", torch.no_grad()(CLASSES[name].forward))
    assert patch.summary() == before


def test_fused_qkv_projections():
    patched, plain = tiny_wan_transformer(), tiny_wan_transformer()
    patch = trp.patch(patched)
    patched.fuse_qkv_projections()
    assert_same_output(patched, plain)
    assert "fused projections (2)" in row(patch, "self_attention", "QKV projection")
    patched.unfuse_qkv_projections()
    assert_same_output(patched, plain)
    assert "cpu tensors (2)" in row(patch, "self_attention", "QKV projection")


QKV_CHANGES = {
    "hook": (lambda attn: attn.to_k.register_forward_hook(lambda module, args, output: -output), "torch hook (1)"),
    "no bias on one": (lambda attn: setattr(attn.to_v, "bias", None), "unequal projections (1)"),
    "no bias": (
        lambda attn: [setattr(linear, "bias", None) for linear in (attn.to_q, attn.to_k, attn.to_v)],
        "cpu tensors (2)",
    ),
}


@pytest.mark.parametrize("name", QKV_CHANGES)
def test_changed_qkv_projections(name):
    change, expected = QKV_CHANGES[name]
    patched, plain = tiny_wan_transformer(), tiny_wan_transformer()
    patch = trp.patch(patched)
    base = output_of(plain)
    for model in (patched, plain):
        change(model.blocks[1].attn1)
    assert relative_error(output_of(plain), base) > 1e-4
    assert_same_output(patched, plain)
    assert expected in row(patch, "self_attention", "QKV projection")


def test_qkv_of_one_op_are_those_of_the_modules(monkeypatch):
    model = tiny_wan_transformer()
    with trp.patch(model):
        ours = output_of(model)
        by_modules = lambda attn, call: plan.Step(lambda x: layers._qkv_of_modules(attn, x), "modules", "asked")  # noqa: E731
        monkeypatch.setattr(block, "qkv_projection", by_modules)
        model.blocks[0].attn1.changed = model.blocks[1].attn1.changed = True
        assert torch.equal(ours, output_of(model))


def test_dropout_in_training_is_drawn():
    model = tiny_wan_transformer().train()
    model.blocks[0].attn1.to_out[1].p = 0.5
    with trp.patch(model) as patch:
        assert relative_error(output_of(model), output_of(model)) > 1e-3
        assert "dropout (1)" in row(patch, "self_attention", "projection + skip")
