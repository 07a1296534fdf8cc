"""The quantized tier on a real GPU: errors, launches, CUDA graphs, torch.compile and autograd."""

import sys
from collections import Counter
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.tape import assert_replayed, cuda_inputs, graphs_of, make_models, replays, run, warm
from tests.patching.test_equivalence import captured_block_inputs, fp32_copy, model_and_inputs, oracle_of
from tests.patching.weights.test_quantized_summary import JOIN, expected_launches, launched
from tests.tiny_wan import frames_of, tiny_call, tiny_wan_pipeline
from turbo_rcm_patch.bench.report import verification_table
from turbo_rcm_patch.bench.verify import verify
from turbo_rcm_patch.kernels.launch import Launch, launch_kernel
from turbo_rcm_patch.patching import use_rcm
from turbo_rcm_patch.patching.weights.quantize_linears import quantized_linears
from turbo_rcm_patch.tiers import QUANTIZED

pytestmark = pytest.mark.gpu

GPU = "cuda"
LIMITS = QUANTIZED.limits
SIZES = {"heads": 4, "ffn_dim": 512}
# name: (variant of test_equivalence, the model's options)
BLOCKS = {
    "t2v": ("t2v", {}),
    "head_dim 128": ("t2v", {"head_dim": 128}),
    "one token": ("one_token", {}),
    "odd sizes": ("odd_sizes", {}),
    "an image": ("i2v", {}),
    "a timestep per token": ("ti2v", {}),
    "head_dim 32": ("head_dim_32", {}),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in BLOCKS), ("t2v", torch.float16), ("t2v", torch.float32)]
)
def test_every_block_is_within_the_tiers_limit(name, dtype):
    variant, options = BLOCKS[name]
    model, inputs = model_and_inputs(variant, GPU, dtype, **{**SIZES, **options})
    block_inputs = captured_block_inputs(model, inputs)
    oracles = [oracle_of(*pair) for pair in zip(model.blocks, block_inputs, strict=True)]
    with torch.no_grad(), trp.patch(model, "quantized"):
        for block, args, oracle in zip(model.blocks, block_inputs, oracles, strict=True):
            ours = block(*args)
            assert ours.dtype == dtype
            assert 1e-3 < relative_error(ours, oracle) <= LIMITS.block


@pytest.mark.parametrize(
    "options", [{}, {"quantize": ["attention"]}, {"quantize": ["linears"]}, {"fuse": ["feed_forward"]}]
)
def test_the_kernels_err_as_the_reference_does(options):
    """Values half way between two of 8 bits are rounded differently. They are few, and add a tenth of the error."""
    model, inputs = model_and_inputs("odd_sizes", GPU, torch.float32, **SIZES)
    errors = {}
    with torch.no_grad():
        oracle = model(**inputs)[0]
        for implementation in ("auto", "torch"):
            with trp.patch(model, trp.Quantized(implementation=implementation, **options)):
                errors[implementation] = relative_error(model(**inputs)[0], oracle)
    assert errors["auto"] == pytest.approx(errors["torch"], rel=0.1)


@pytest.fixture
def launches(monkeypatch):
    found = []

    def watched(kernel, grid, *arguments, **options):
        found.append(Launch(kernel, grid, arguments, options))
        launch_kernel(kernel, grid, *arguments, **options)

    for name, module in list(sys.modules.items()):
        if name.startswith("turbo_rcm_patch.kernels.") and getattr(module, "launch_kernel", None) is launch_kernel:
            monkeypatch.setattr(module, "launch_kernel", watched)
    return found


@pytest.mark.parametrize("frames", [3, 21])
def test_what_is_launched_is_what_the_summary_says(launches, frames):
    """A call has few tokens, or as many as the kernels for sm_90 need."""
    size = {"frames": frames, "height": 4, "width": 6} if frames == 3 else {"frames": 21, "height": 60, "width": 56}
    model, _ = model_and_inputs("t2v", GPU, torch.bfloat16, **SIZES, rope_max_seq_len=64)
    inputs = cuda_inputs(model, batch=1, **size)
    patch = trp.patch(model, trp.Quantized(cuda_graph="off", attention="triton", linears="triton"))
    run(model, inputs)  # compiles
    launches.clear()
    run(model, inputs)
    found, expected = Counter(map(launched, launches)), expected_launches(patch.rows())
    found.pop(JOIN, None)
    assert found == expected


# CUDA graphs


def graphed_pair(**options):
    pair = make_models(config=trp.Quantized(cuda_graph="on"), dtype=torch.bfloat16, **{**SIZES, **options})
    return [model.cuda() for model in pair]


def test_a_replayed_model_computes_the_same():
    pair = graphed_pair()
    warm(pair, cuda_inputs(pair[0]))
    for seed in (11, 13):
        assert_replayed(pair, cuda_inputs(pair[0], seed=seed))
    assert graphs_of(pair[0]).kept == 1


WRITES = {
    "a bias": lambda model: model.blocks[0].ffn.net[0].proj.bias.data.add_(1.0),
    "a norm": lambda model: model.blocks[0].attn1.norm_q.weight.data.mul_(-1.5),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_parameter_that_is_changed_in_place_takes_effect_in_the_next_replay(write):
    pair = graphed_pair()
    inputs = cuda_inputs(pair[0])
    warm(pair, inputs)
    before, addresses = run(pair[0], inputs), addresses_of(pair[0])
    for model in pair:
        WRITES[write](model)
    assert_replayed(pair, inputs)
    assert not torch.equal(run(pair[0], inputs), before)
    assert addresses_of(pair[0]) == addresses


def addresses_of(model):
    return [tensor.data_ptr() for linear in quantized_linears(model) for tensor in linear.quantized()]


def test_restore_after_replays_brings_the_model_back():
    pair = graphed_pair()
    inputs = cuda_inputs(pair[0])
    warm(pair, inputs)
    plain = model_and_inputs("t2v", GPU, torch.bfloat16, layers=1, **SIZES)[0]
    trp.restore(pair[0])
    assert torch.equal(run(pair[0], inputs), run(plain, inputs))


def test_a_graph_for_each_kind_of_step():
    pipe = tiny_wan_pipeline("t2v", torch.bfloat16).to(GPU)
    generate = partial(frames_of, pipe, num_inference_steps=6, guidance_scale=4.0)
    with trp.patch(pipe, trp.Quantized(exact_steps=(1, 1), cuda_graph="off")):
        expected = generate()
    with trp.patch(pipe, trp.Quantized(exact_steps=(1, 1), cuda_graph="on")):
        for _ in range(3):
            assert torch.equal(generate(), expected)
        assert graphs_of(pipe.transformer).kept == 2
        assert replays(pipe.transformer) == 3 * 6 * 2 - 2
    with trp.patch(pipe, trp.Quantized(cuda_graph="on")):
        assert not torch.equal(generate(), expected)


# What surrounds it


def test_compile_repeated_blocks():
    """Blocks compile without a graph break. Ops that inductor fuses are rounded less often."""
    torch._dynamo.reset()
    model, inputs = model_and_inputs("t2v", GPU, torch.bfloat16, **SIZES)
    oracle = fp32_copy(model)
    with torch.no_grad():
        expected = oracle(**{k: v.float() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()})[0]
        with trp.patch(model, "quantized"):
            model.compile_repeated_blocks(fullgraph=True)
            assert 1e-3 < relative_error(model(**inputs)[0], expected) <= LIMITS.step
            for block in model.blocks:
                block._compiled_call_impl = None


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_model_compiled_as_a_whole(mode):
    """The model is one graph, and with reduce-overhead a CUDA graph."""
    torch._dynamo.reset()
    counters.clear()
    model, inputs = model_and_inputs("t2v", GPU, torch.bfloat16, **SIZES)
    trp.patch(model, "quantized")
    with torch.no_grad():
        expected = model(**inputs)[0]
        model.compile(mode=mode, fullgraph=True)
        for _ in range(3):  # reduce-overhead records in the second call
            assert relative_error(model(**inputs)[0].clone(), expected) <= LIMITS.step
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_gradients_are_those_of_the_dequantised_weights():
    patched, inputs = model_and_inputs("t2v", GPU, torch.float32, **SIZES)
    plain, _ = model_and_inputs("t2v", GPU, torch.float32, **SIZES)
    trp.patch(patched, "quantized")
    for path, module in patched.named_modules():
        if module in quantized_linears(patched):
            plain.get_submodule(path).weight.data = module.quantized().dequantize()
    results = []
    for model in (patched, plain):
        x = inputs["hidden_states"].clone().requires_grad_()
        output = model(**{**inputs, "hidden_states": x})[0]
        output.square().mean().backward()
        results.append((output.detach(), x.grad))
    for ours, theirs in zip(*results, strict=True):
        assert theirs.abs().max() > 0
        assert relative_error(ours, theirs) <= 1e-4  # cuBLAS sums in another order


def test_autocast():
    model, inputs = model_and_inputs("t2v", GPU, torch.float32, **SIZES)
    with torch.no_grad():
        expected = model(**inputs)[0]
        with trp.patch(model, "quantized"), torch.autocast("cuda", torch.bfloat16):
            assert relative_error(model(**inputs)[0], expected) <= LIMITS.step


@pytest.mark.parametrize("variant", ["t2v", "i2v", "ti2v"])
def test_verify(variant):
    pipe = tiny_wan_pipeline(variant, torch.bfloat16, **SIZES).to(GPU)
    use_rcm(pipe)
    call = tiny_call(variant, guidance_scale=1.0, num_inference_steps=2)
    verification = verify(pipe, call, config="quantized")
    assert verification.ok, verification_table(verification)
    assert "e4m3" in verification.patch_summary or "int8" in verification.patch_summary


def test_offloading_by_layers_computes_what_the_modules_do():
    pipe, plain = (tiny_wan_pipeline("t2v", torch.bfloat16) for _ in range(2))
    with trp.patch(pipe, "quantized") as patch:
        pipe.enable_sequential_cpu_offload()
        plain.to(GPU)
        # Guidance multiplies the difference of two steps by five, and there are two steps.
        assert relative_error(frames_of(pipe), frames_of(plain)) <= 2 * LIMITS.step
        assert "hook AlignDevicesHook" in patch.summary()
