"""LoRA, training, casting, caches, quantisation and torch.compile on a patched model of every family: fused, or through
a fallback that the summary names."""

import copy

import pytest
import torch
from diffusers import FirstBlockCacheConfig
from peft import LoraConfig

import turbo_rcm_patch as trp
from tests.oracle import assert_no_worse, relative_error
from tests.patching.pairs import assert_same_output, every_family, families, make_pair, output_of, row, variants
from tests.tiny_families import tiny_family_inputs, tiny_family_transformer

LORA_TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]
WITH_LORA = [
    ("self_attention", "QKV projection"),
    ("self_attention", "projection + skip"),
    ("cross_attention", "projection + skip"),
    ("feed_forward", "linear + GELU"),
    ("feed_forward", "linear + skip"),
]


def add_lora(model, adapter, seed):
    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=LORA_TARGETS)
    model.add_adapter(config, adapter_name=adapter)


@pytest.mark.parametrize("when", ["before", "after"])
@families
def test_lora(name, when):
    patched, plain = tiny_family_transformer(name), tiny_family_transformer(name)
    base = output_of(name, plain)
    if when == "before":
        add_lora(patched, "first", 5)
    patch = trp.patch(patched)
    if when == "after":
        output_of(name, patched)
        add_lora(patched, "first", 5)
    add_lora(plain, "first", 5)
    assert relative_error(output_of(name, plain), base) > 0.1
    assert_same_output(name, patched, plain)
    for step in WITH_LORA:
        assert "PyTorch linear + LoRA" in row(patch, *step).kernel
        assert row(patch, *step).reasons == {"cpu tensors": len(patched.blocks)}

    assert_same_output(name, patched, plain, attention_kwargs={"scale": 0.3})
    for model in (patched, plain):
        add_lora(model, "second", 9)
        model.set_adapters(["first", "second"], [0.5, 0.7])
    assert_same_output(name, patched, plain)
    for model in (patched, plain):
        model.disable_lora()
    assert relative_error(output_of(name, patched), base) <= 1e-5
    for model in (patched, plain):
        model.enable_lora()
        model.fuse_lora()
    assert_same_output(name, patched, plain)
    assert not any("LoRA" in row(patch, *step).kernel for step in WITH_LORA)
    for model in (patched, plain):
        model.unfuse_lora()
    assert "PyTorch linear + LoRA" in row(patch, "feed_forward", "linear + skip").kernel
    assert_same_output(name, patched, plain)
    for model in (patched, plain):
        model.fuse_lora()
        model.unload_lora()
    assert row(patch, "feed_forward", "linear + skip").reasons == {"cpu tensors": len(patched.blocks)}
    assert_same_output(name, patched, plain)
    patch.restore()
    assert_same_output(name, patched, plain)


@every_family
def test_lora_fused_and_unloaded_between_two_generations_is_not_missed(name):
    """Fusing writes the base weights through .data, which no version counter sees."""
    patched, plain, _ = make_pair(name)
    before = output_of(name, patched)
    for model in (patched, plain):
        add_lora(model, "first", 5)
        model.fuse_lora()
        model.unload_lora()
    assert_same_output(name, patched, plain)
    assert relative_error(output_of(name, patched), before) > 0.1


@pytest.mark.parametrize("checkpointing", [False, True])
@variants
def test_training_gradients(name, checkpointing):
    if name.startswith("anyflow far"):
        pytest.skip("flex attention has no backward on the CPU")
    plain = tiny_family_transformer(name).train()
    patched = copy.deepcopy(plain)
    trp.patch(patched)
    results = []
    for model in (patched, plain):
        if checkpointing:
            model.enable_gradient_checkpointing()
        inputs = tiny_family_inputs(name, model)
        leaves = {name: inputs[name].requires_grad_() for name in ("hidden_states", "encoder_hidden_states")}
        output_of(name, model)  # constants kept by a generation must not reach the graph
        model(**inputs)[0].square().mean().backward()
        results.append({**leaves, **dict(model.named_parameters())})
    expected = {path: tensor.grad for path, tensor in results[1].items() if tensor.grad is not None}
    largest = max(gradient.norm() for gradient in expected.values())
    for path in results[1]:
        gradient = results[0][path].grad
        if path not in expected:
            assert gradient is None, path
        else:  # one that cancels to almost nothing, such as a key bias's, is as exact as larger ones
            allowed = 1e-5 * max(expected[path].norm(), 0.01 * largest)
            assert (gradient - expected[path]).norm() <= allowed, path


@variants
def test_autocast_runs_diffusers_code(name):
    patched, plain, _ = make_pair(name)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(output_of(name, patched), output_of(name, plain))


@every_family
def test_layerwise_casting(name):
    patched, plain, patch = make_pair(name, dtype=torch.bfloat16)
    for model in (patched, plain):
        model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    oracle = output_of(name, tiny_family_transformer(name))
    assert_no_worse(output_of(name, patched), output_of(name, plain), oracle)
    assert row(patch, "feed_forward", "linear + skip").reasons == {"hook layerwise_casting": len(patched.blocks)}


@pytest.mark.parametrize("name", ["wan", "vace"])  # diffusers knows the blocks of no others
def test_first_block_cache(name):
    patched, plain, patch = make_pair(name, layers=3)
    outputs = []
    for model in (patched, plain):
        model.enable_cache(FirstBlockCacheConfig(threshold=10.0))  # every later step is skipped after its first block
        with model.cache_context("cond"):
            outputs.append([output_of(name, model, timestep=torch.full((2,), t)) for t in (900.0, 800.0)])
    for ours, theirs in zip(*outputs, strict=True):
        assert relative_error(ours, theirs) <= 1e-5
    assert row(patch, "feed_forward", "linear + skip").reasons == {"cpu tensors": 3}
    patched.disable_cache()
    patch.restore()


# As few graphs serve all blocks as without the patch: of VACE's control blocks only the first has an input projection.
GRAPHS = {"wan": 1, "vace": 3, "skyreels, causal": 1, "animate": 1}


@pytest.mark.parametrize(("name", "order"), [("wan", "compile, patch"), *((name, "patch, compile") for name in GRAPHS)])
def test_compile_repeated_blocks(name, order):
    torch._dynamo.reset()
    patched = tiny_family_transformer(name, layers=3)
    expected = output_of(name, patched)
    if order == "compile, patch":
        patched.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
        output_of(name, patched)
    patch = trp.patch(patched)
    if order == "patch, compile":
        patched.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    assert relative_error(output_of(name, patched), expected) <= 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == GRAPHS[name]
    patch.restore()
    assert relative_error(output_of(name, patched), expected) <= 1e-5


@pytest.mark.gpu
@families
def test_compile_repeated_blocks_on_a_gpu(name):
    """The kernels stay fused inside inductor's graphs, without a graph break."""
    torch._dynamo.reset()
    patched, plain, oracle = (
        tiny_family_transformer(name, dtype).cuda() for dtype in (torch.bfloat16, torch.bfloat16, torch.float32)
    )
    trp.patch(patched)
    patched.compile_repeated_blocks(fullgraph=True)
    assert_no_worse(*(output_of(name, model, "cuda") for model in (patched, plain, oracle)))


@every_family
def test_quantised_linears(name):
    quantization = pytest.importorskip("torchao.quantization")
    patched, plain, patch = make_pair(name, dtype=torch.bfloat16)
    for model in (patched, plain):
        quantization.quantize_(
            model.blocks, quantization.Int8WeightOnlyConfig(), filter_fn=lambda m, _: isinstance(m, torch.nn.Linear)
        )
    oracle = output_of(name, tiny_family_transformer(name))
    assert_no_worse(output_of(name, patched), output_of(name, plain), oracle)
    (reason,) = row(patch, "feed_forward", "linear + skip").reasons
    assert reason.endswith(" weight")
