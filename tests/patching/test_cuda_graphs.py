"""Graphs: a replay gives the result of an eager forward now. Calls without a graph have a reason."""

import gc
import sys
import threading
from functools import partial

import accelerate
import pytest
import torch
from diffusers import FirstBlockCacheConfig, WanTransformer3DModel
from torch.overrides import TorchFunctionMode

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.tape import (
    AUTO,
    TAPES,
    VARIANTS,
    TapeRecorder,
    assert_eager,
    assert_replayed,
    assert_same,
    graphs_of,
    inputs_for,
    make_models,
    note,
    replays,
    run,
    warm,
)
from tests.tiny_wan import frames_of, tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch.patching import cuda_graphs as graphs
from turbo_rcm_patch.patching.families.wan import graph as wan_graph


def test_steps_with_new_inputs_are_replayed(models):
    pair, options = models
    inputs = inputs_for(pair[0], **options)
    for step in range(5):
        inputs["hidden_states"] = torch.randn_like(inputs["hidden_states"])
        inputs["timestep"] = inputs["timestep"] * 0.7
        assert_same(pair, inputs)
        assert replays(pair[0]) == max(0, step)
    assert note(pair[0]) == ("CUDA graphs (auto): 1 kept in 3 MiB; 4 calls replayed; run without: not recorded yet (1)")


def test_new_shapes_and_dtypes_get_graphs_of_their_own(models):
    pair, options = models
    for _ in range(2):
        for more in ({}, {"batch": 1}, {"height": 6}):
            assert_same(pair, inputs_for(pair[0], **options, **more))
    assert graphs_of(pair[0]).kept == 3
    assert replays(pair[0]) == 3
    for model in pair:
        model.double()
    warm(pair, inputs_for(pair[0], **options))
    assert graphs_of(pair[0]).kept == 1


def test_the_number_of_graphs_is_bounded(tape, monkeypatch):
    monkeypatch.setattr(graphs, "KINDS_KEPT", 3)
    pair = make_models()
    calls = [inputs_for(pair[0], width=4 + 2 * i) for i in range(graphs.KINDS_KEPT + 2)]
    for inputs in calls:
        warm(pair, inputs)
    assert graphs_of(pair[0]).kept == graphs.KINDS_KEPT
    gc.collect()
    assert len(TAPES) == graphs.KINDS_KEPT
    assert_replayed(pair, calls[2])
    warm(pair, calls[0])  # evicts the one not used for longest, which is no longer calls[2]
    assert_replayed(pair, calls[2])


def test_image_or_none_and_strides_are_told_apart(tape):
    pair = make_models(VARIANTS["i2v"][0])
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    latents = inputs["hidden_states"]
    inputs["hidden_states"] = latents.transpose(3, 4).contiguous().transpose(3, 4)
    assert_same(pair, inputs)
    inputs["timestep"] = torch.tensor([500.0]).expand(2)
    warm(pair, inputs)
    inputs["timestep"] = inputs["timestep"] + torch.tensor([0.0, 100.0])
    assert_same(pair, inputs)


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("then", [torch.inference_mode, torch.no_grad])
def test_inference_mode_and_no_grad_share_a_graph(tape, first, then):
    pair = make_models()
    inputs = inputs_for(pair[0])
    expected = run(pair[1], inputs)
    with first():
        for _ in range(2):
            pair[0](**inputs)
    with then():
        inputs = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        output = pair[0](**inputs)[0]
    assert replays(pair[0]) == 2
    assert output.is_inference() == (then is torch.inference_mode)
    assert torch.equal(output, expected)


def test_the_output_comes_as_it_is_asked_for(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    for _ in range(2):
        for return_dict in (True, False):
            inputs["return_dict"] = return_dict
            ours, theirs = run(pair[0], inputs), run(pair[1], inputs)
            assert torch.equal(ours, theirs)
            with torch.no_grad():
                assert type(pair[0](**inputs)) is type(pair[1](**inputs))


@pytest.mark.parametrize("variant", ["i2v", "ti2v", "ti2v_i2v", "wan22"])
def test_pipelines_with_guidance_generate_the_same(tape, variant):
    pipe = tiny_wan_pipeline(variant)
    generate = partial(frames_of, pipe, variant, num_inference_steps=4, guidance_scale=4.0)
    with trp.patch(pipe, trp.Exact(cuda_graph="off")):
        expected = generate()
    with trp.patch(pipe, AUTO) as patch:
        for _ in range(2):
            assert torch.equal(generate(), expected)
        for model in patch.transformers.values():
            assert graphs_of(model).kept == 1
            assert replays(model) > 2
        assert patch.graph_memory == len(patch.transformers) * TapeRecorder.reserved_bytes
        assert patch.graph_count == len(patch.transformers)
    assert patch.graph_memory == patch.graph_count == 0


def test_threads_with_and_without_graphs_and_a_summary(tape):
    model, plain = make_models()
    calls = [inputs_for(model, width=4 + 2 * i) for i in range(graphs.KINDS_KEPT + 1)]
    expected, wrong = [run(plain, inputs) for inputs in calls], []

    def work(**more):
        try:
            for i in range(20):
                ours = run(model, {**calls[i % len(calls)], **more})
                wrong.extend([] if torch.equal(ours, expected[i % len(calls)]) else [i])
                note(model)
        except Exception as error:
            wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work, kwargs={"attention_kwargs": kwargs}) for kwargs in (None, {}, {})]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


def with_autocast(model, inputs):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return model(**inputs)[0]


class PassingMode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def under_a_mode(model, inputs):
    with torch.no_grad(), PassingMode():
        return model(**inputs)[0]


def with_attention_kwargs(model, inputs):
    with torch.no_grad():
        return model(**inputs, attention_kwargs={"scale": 1.0})[0]


class Subclass(torch.Tensor):
    pass


def with_a_subclass(model, inputs):
    inputs = {**inputs, "hidden_states": inputs["hidden_states"].as_subclass(Subclass)}
    return run(model, inputs).as_subclass(torch.Tensor)


EAGER_CALLS = {
    "autograd": lambda model, inputs: model(**inputs)[0],
    "autocast": with_autocast,
    "torch mode": under_a_mode,
    "attention_kwargs": with_attention_kwargs,
    "inputs of another class": with_a_subclass,
}


@pytest.mark.parametrize("reason", EAGER_CALLS)
def test_calls_that_run_eagerly(tape, reason):
    pair = make_models()
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    before = replays(pair[0])
    ours, theirs = (EAGER_CALLS[reason](model, inputs) for model in pair)
    assert torch.equal(ours, theirs)
    assert replays(pair[0]) == before
    assert f"{reason} (1)" in note(pair[0])
    assert_replayed(pair, inputs)


def test_under_a_default_device_calls_are_replayed(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    with torch.device("cpu"):
        warm(pair, inputs)
        assert_replayed(pair, inputs)
    assert_replayed(pair, inputs)
    assert graphs_of(pair[0]).kept == 2  # what a program builds on a default device may lie elsewhere without
    assert "torch mode" not in note(pair[0])


def test_function_transforms_run_eagerly(tape):
    transformed = lambda x: x + float(graphs.why_not_recorded([torch.zeros(1)]) is None)  # noqa: E731
    with torch.no_grad():
        assert graphs.why_not_recorded([torch.zeros(1)]) is None
        assert torch.equal(torch.vmap(transformed)(torch.zeros(2)), torch.zeros(2))
        assert torch.equal(torch.func.jvp(transformed, (torch.zeros(2),), (torch.ones(2),))[0], torch.zeros(2))
        assert torch.equal(torch.jit.trace(transformed, torch.ones(2))(torch.zeros(2)), torch.zeros(2))


class Slots:
    __slots__ = ()

    def __call__(self, attn, hidden_states, *args):
        return hidden_states


def test_a_processor_without_attributes_runs_eagerly(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    for model in pair:
        model.blocks[0].attn1.processor = Slots()
    assert_eager(pair, inputs, "processor Slots")
    assert_eager(pair, inputs, "processor Slots")


def test_latents_of_another_rank_get_the_models_own_error(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    inputs["hidden_states"] = inputs["hidden_states"][:, :, 0]
    messages = []
    for model in pair:
        with pytest.raises(ValueError, match="unpack") as caught:
            run(model, inputs)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_large_calls_run_eagerly_unless_asked(tape, monkeypatch):
    pair = make_models()
    inputs = inputs_for(pair[0])
    most = wan_graph.flops_per_block(pair[0], inputs["hidden_states"], AUTO)
    monkeypatch.setattr(wan_graph, "MOST_FLOPS_PER_BLOCK", most)
    warm(pair, inputs)
    assert_eager(pair, inputs_for(pair[0], width=8), "too large to gain")
    trp.restore(pair[0])
    trp.patch(pair[0], trp.Exact(cuda_graph="on"))
    warm(pair, inputs_for(pair[0], width=8))


SIZES = {"1.3B": (1536, 12, 8960), "14B": (5120, 40, 13824)}
QUANTIZED, SPARSE = trp.Quantized(), trp.Sparse(topk=0.1)


@pytest.mark.parametrize(
    ("model", "frames", "height", "width", "config", "taken"),
    [
        ("1.3B", 5, 60, 104, AUTO, True),  # 17 frames 832×480
        ("1.3B", 9, 60, 104, AUTO, False),  # 33 frames
        ("1.3B", 9, 60, 104, QUANTIZED, True),
        ("1.3B", 21, 60, 104, QUANTIZED, False),  # 81 frames
        ("1.3B", 21, 60, 104, SPARSE, True),
        ("14B", 1, 60, 104, AUTO, True),  # one frame
        ("14B", 21, 90, 160, SPARSE, False),  # 81 frames 1280×720
    ],
)
def test_the_limit_at_real_sizes(model, frames, height, width, config, taken):
    dim, heads, ffn = SIZES[model]
    with torch.device("meta"):
        model = WanTransformer3DModel(
            num_attention_heads=heads, attention_head_dim=dim // heads, ffn_dim=ffn, num_layers=1
        )
        latents = torch.empty(1, 16, frames, height, width)
    tokens = frames * height * width // 4
    flops = wan_graph.flops_per_block(model, latents, config)
    linears = sum(m.weight.numel() for m in model.blocks.modules() if isinstance(m, torch.nn.Linear)) - 2 * dim * dim
    exact = 2 * tokens * linears, 4 * tokens * tokens * dim
    kept = {AUTO: (1, 1), QUANTIZED: (0.5, 0.5), SPARSE: (0.5, 0.05)}[config]
    assert flops == pytest.approx(sum(part * share for part, share in zip(exact, kept, strict=True)))
    assert (flops <= wan_graph.MOST_FLOPS_PER_BLOCK) == taken


def test_first_block_cache_runs_eagerly(tape):
    model, plain = tiny_wan_transformer(layers=3), tiny_wan_transformer(layers=3)
    patch = trp.patch(model, AUTO)
    inputs = inputs_for(model)
    for _ in range(3):
        run(model, inputs)
    for m in (model, plain):
        m.enable_cache(FirstBlockCacheConfig(threshold=10.0))
    outputs = []
    for m in (model, plain):
        with m.cache_context("cond"):
            outputs.append([run(m, {**inputs, "timestep": torch.full((2,), t)}) for t in (900.0, 800.0)])
    for ours, theirs in zip(*outputs, strict=True):
        assert relative_error(ours, theirs) <= 1e-5
    assert "none now: hook fbc_leader_block_hook" in patch.summary()
    model.disable_cache()
    before = replays(model)
    for _ in range(3):
        run(model, inputs)
    assert replays(model) == before + 2
    patch.restore()


def test_compiled_blocks_run_eagerly(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    expected = run(pair[1], inputs)
    pair[0].compile_repeated_blocks()
    before = replays(pair[0])
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(run(pair[0], inputs), expected)
    assert replays(pair[0]) == before
    assert "none now: torch.compile" in note(pair[0])


def test_a_compiled_model_traces_its_own_forward(tape):
    torch._dynamo.reset()
    pair = make_models(layers=1)
    inputs = inputs_for(pair[0])
    expected = run(pair[1], inputs)
    compiled = torch.compile(pair[0], backend="eager", fullgraph=True)
    assert torch.equal(run(compiled, inputs), expected)
    assert replays(pair[0]) == 0


def test_a_model_offloaded_before_the_patch(tape):
    model = tiny_wan_transformer()
    inputs = inputs_for(model)
    expected = run(model, inputs)
    accelerate.cpu_offload_with_hook(model, execution_device=torch.device("cpu"))
    with trp.patch(model, AUTO) as patch:
        for _ in range(3):
            assert relative_error(run(model, inputs), expected) <= 1e-5
        assert "none now: the model had a hook when it was patched" in patch.summary()
    assert torch.equal(run(model, inputs), expected)


def test_off_and_cpu():
    model = tiny_wan_transformer()
    inputs = inputs_for(model)
    with trp.patch(model, AUTO) as patch:
        run(model, inputs)
        assert "CUDA graphs (auto): none now: cpu tensors; 0 calls replayed" in patch.summary()
    with trp.patch(model, trp.Exact(cuda_graph="off")) as patch:
        assert "forward" not in model.__dict__
        assert "CUDA graphs (off): none now: cuda_graph='off'" in patch.summary()
    with pytest.raises(ValueError, match="cuda_graph='always' is unknown; accepted are auto, on, off"):
        trp.Exact(cuda_graph="always")
