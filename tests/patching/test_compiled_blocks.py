"""Blocks that torch.compile traces: as few graphs as without the patch, with the same results, in every tier."""

import importlib

import pytest
import torch

import turbo_rcm_patch as trp
from tests.oracle import assert_no_worse, relative_error
from tests.patching.pairs import families, output_of
from tests.patching.turbowan import SLA, is_sparse, run, turbo_weights
from tests.tiny_families import tiny_family_transformer
from tests.tiny_wan import tiny_transformer_inputs, tiny_wan_transformer
from turbo_rcm_patch import kernels
from turbo_rcm_patch.kernels.dispatch import interpreting
from turbo_rcm_patch.patching.weights import quantize_linears as quantized_weights

I2V = {"image_dim": 4, "added_kv_proj_dim": "inner", "in_channels": 36}
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


@pytest.fixture
def compiled():
    """A function that compiles a model's blocks, and a list of the graphs."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    return lambda model: model.compile_repeated_blocks(backend=backend, fullgraph=True), graphs


def test_compiled_before_an_exact_patch(compiled):
    compile_blocks, graphs = compiled
    model = tiny_family_transformer("wan")
    expected = output_of("wan", model)
    compile_blocks(model)
    output_of("wan", model)
    graphs.clear()
    with trp.patch(model):
        assert relative_error(output_of("wan", model), expected) <= 1e-5
        assert len(graphs) == 1
    assert relative_error(output_of("wan", model), expected) <= 1e-5


def test_in_the_block_sparse_tier(compiled):
    (compile_blocks, graphs), name = compiled, "anyflow"
    model = tiny_family_transformer(name)
    trp.patch(model, trp.BlockSparse(quantize=(), min_tokens=0, blocks=(4, 4)))
    expected = output_of(name, model)
    compile_blocks(model)
    assert relative_error(output_of(name, model), expected) <= 1e-5
    assert len(graphs) == 1


def test_in_the_sparse_tier(saved, compiled):
    compile_blocks, graphs = compiled
    model = tiny_wan_transformer()
    patch = trp.load_turbodiffusion(saved(turbo_weights(model)), model, **SLA)
    expected = run(model)
    compile_blocks(model)
    assert relative_error(run(model), expected) <= 1e-5
    assert len(graphs) == 1
    patch.restore()
    assert not is_sparse(model)


@pytest.fixture
def int8_everywhere(monkeypatch):
    """Formats as on sm_80, whose kernels Triton's interpreter computes as a GPU does."""
    if not interpreting():
        pytest.skip("needs Triton's CPU interpreter")
    monkeypatch.setattr(quantized_weights, "capability_of", lambda device: (8, 0))
    for module in (kernels, importlib.import_module(QUANTIZE_QKV)):
        monkeypatch.setattr(module, "default_v_format", lambda *_: torch.float16)


def test_in_the_quantized_tier_a_block_is_of_custom_ops(int8_everywhere, compiled):
    compile_blocks, graphs = compiled
    model = tiny_wan_transformer(layers=1)
    inputs = tiny_transformer_inputs(model, batch=1, frames=1, height=4, width=4, text_tokens=3)
    with torch.no_grad(), trp.patch(model, trp.Quantized(implementation="triton")):
        expected = model(**inputs)[0]
        compile_blocks(model)
        assert torch.equal(model(**inputs)[0], expected)
    (graph,) = graphs
    found = " ".join(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
    assert {op for op in OPS if f"turbo_rcm_patch.{op}" in found or f"turbo_rcm_patch::{op}" in found} == OPS


@pytest.mark.parametrize(("variant", "tokens"), [("i2v", {"image_tokens": 3}), ("ti2v", {}), ("t2v", {"batch": 1})])
def test_the_kernels_of_8_bits_compute_what_the_reference_does(variant, tokens, int8_everywhere):
    """They differ only in values half way between two of int8.

    A difference δ before a rounding moves a share δ / step of the values by a step. So it grows from one rounding to
    the next, but not beyond the error that all roundings make.
    """
    model = tiny_wan_transformer(layers=1, **(I2V if variant == "i2v" else {}))
    inputs = tiny_transformer_inputs(model, frames=1, **tokens)
    if variant == "ti2v":
        inputs["timestep"] = torch.linspace(0, 999, 12).reshape(2, 6)
    outputs = []
    with torch.no_grad():
        oracle = model(**inputs)[0]
        for implementation in ("triton", "torch"):
            with trp.patch(model, trp.Quantized(implementation=implementation)):
                outputs.append(model(**inputs)[0])
    ours, theirs = outputs
    assert_no_worse(ours.half(), theirs.half(), oracle)  # judged as of a low precision, which 8 bits are
    assert 0 < relative_error(ours, theirs) < relative_error(theirs, oracle)


def test_kernels_that_the_interpreter_gets_wrong_are_refused():
    if not interpreting():
        pytest.skip("needs Triton's CPU interpreter")
    model = tiny_wan_transformer()
    with trp.patch(model, trp.Quantized(implementation="triton")), pytest.raises(ValueError, match="rounds it wrongly"):
        run(model)


@pytest.mark.gpu
@families
def test_inductors_graphs_on_a_gpu(name):
    """The kernels stay fused inside them, without a graph break."""
    torch._dynamo.reset()
    patched, plain, oracle = (
        tiny_family_transformer(name, dtype).cuda() for dtype in (torch.bfloat16, torch.bfloat16, torch.float32)
    )
    trp.patch(patched)
    patched.compile_repeated_blocks(fullgraph=True)
    assert_no_worse(*(output_of(name, model, "cuda") for model in (patched, plain, oracle)))
