"""Graphs on a real GPU: the same tests, and those that need a GPU."""

import multiprocessing
import weakref
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest
import torch
from peft import LoraConfig

import turbo_rcm_patch as trp
from tests.patching.changes import WEIGHTS, WRITES
from tests.patching.tape import (
    AUTO,
    VARIANTS,
    assert_replayed,
    assert_same,
    cuda_inputs,
    graphs_of,
    inputs_for,
    make_models,
    note,
    replays,
    run,
    warm,
)
from tests.patching.test_graph_runs import CALLS, gates, shared, with_runs
from tests.tiny_wan import frames_of, moved, tiny_wan_pipeline, tiny_wan_transformer


def cuda_pair(options=None, **more):
    pair = make_models(options, dtype=torch.bfloat16, heads=4, **more)
    return [model.cuda() for model in pair]


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["auto", "triton", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gpu_steps_prompts_and_sizes(variant, attention):
    options, call = VARIANTS[variant]
    pair = cuda_pair(options)
    for model, mode in zip(pair, ("auto", "off"), strict=True):
        trp.restore(model)
        trp.patch(model, trp.Exact(attention=attention, cuda_graph=mode))
    calls = [cuda_inputs(pair[0], seed=seed, **call, **size) for size in ({}, {"height": 10}) for seed in (7, 11)]
    held = []
    for _ in range(4):
        for inputs in calls:
            inputs["hidden_states"] = torch.randn_like(inputs["hidden_states"])
            inputs["timestep"] = inputs["timestep"] * 0.7
            held.append((run(pair[0], inputs), run(pair[1], inputs)))
    for ours, theirs in held:
        assert torch.equal(ours, theirs)
    assert graphs_of(pair[0]).kept == 2
    assert replays(pair[0]) == len(held) - 2
    assert "2 kept in " in note(pair[0])
    assert "2 kept in 0 MiB" not in note(pair[0])


IN_TIERS = {"exact": AUTO, "quantized": trp.Quantized(cuda_graph="auto")}


@pytest.mark.gpu
@pytest.mark.parametrize("tier", IN_TIERS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CALLS)
def test_gpu_other_values_and_lengths_of_runs_replay_the_same_graph(name, mode, tier):
    pair = cuda_pair(layers=2, ffn_dim=512, config=IN_TIERS[tier])
    inputs, held = inputs_for(pair[0], batch=len(CALLS[name][0])), []
    with mode():
        for samples in CALLS[name] * 2:
            inputs["hidden_states"] = torch.randn_like(inputs["hidden_states"])
            call = moved(with_runs(inputs, *samples), "cuda")
            held.append([model(**call)[0] for model in pair])
        for ours, theirs in held:
            assert not theirs.isnan().any()
            assert torch.equal(ours, theirs)
    assert (graphs_of(pair[0]).kept, replays(pair[0])) == (1, len(held) - 1), note(pair[0])
    assert gates(pair[0]) == {"run"}


@pytest.mark.gpu
def test_gpu_numbers_of_runs_take_turns():
    """Their graphs share a pool."""
    pair = cuda_pair(layers=2)
    inputs = inputs_for(pair[0], batch=1)
    runs = [[(700, 18)], [(0, 6), (700, 12)], [(0, 6), (300, 6), (700, 6)], [(value, 1) for value in range(18)]]
    calls = [moved(with_runs(inputs, samples), "cuda") for samples in runs]
    for _ in range(3):
        for call in calls:
            assert_same(pair, call)
    assert (graphs_of(pair[0]).kept, replays(pair[0])) == (4, 2 * 4), note(pair[0])


@pytest.mark.gpu
def test_gpu_runs_keep_none_of_a_graphs_memory():
    pair = cuda_pair()
    inputs = moved(with_runs(inputs_for(pair[0], batch=1), [(0, 6), (700, 12)]), "cuda")
    warm(pair, inputs)
    pool = graphs_of(pair[0])._recorder._pool
    assert pool_bytes(pool) > 0
    assert shared(pair[0]).runs is shared(pair[0]).timestep_runs is None
    graphs_of(pair[0]).clear()
    assert pool_bytes(pool) == 0
    warm(pair, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("write", ["in place", "through data", "in new storage"])
def test_gpu_weights_changed_between_calls_take_effect(write):
    pair = cuda_pair(VARIANTS["i2v"][0])
    inputs = cuda_inputs(pair[0])
    for name in WEIGHTS:
        before = run(pair[1], inputs)
        warm(pair, inputs)
        with torch.no_grad():
            for model in pair:
                WRITES[write]({**dict(model.named_parameters()), **dict(model.named_buffers())}[name])
        assert_same(pair, inputs)
        assert not torch.equal(run(pair[1], inputs), before), name


@pytest.mark.gpu
def test_gpu_lora_between_the_calls():
    pair = cuda_pair()
    inputs = cuda_inputs(pair[0])
    for _ in range(2):
        warm(pair, inputs)
        for model in pair:
            torch.manual_seed(5)
            model.add_adapter(LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=["to_q", "to_k"]))
        for scale in (1.0, 0.3):
            for model in pair:
                model.set_adapters(["default"], [scale])
            warm(pair, inputs)
            assert_replayed(pair, inputs)
        for model in pair:
            model.fuse_lora()
            model.unload_lora()


@pytest.mark.gpu
def test_gpu_restore_gives_the_memory_back():
    pair = cuda_pair()
    inputs = cuda_inputs(pair[0])
    plain = run(tiny_wan_transformer(layers=1, dtype=torch.bfloat16, heads=4).cuda(), inputs)
    for _ in range(2):
        warm(pair, inputs)
        pool = graphs_of(pair[0])._recorder._pool
        assert pool_bytes(pool) > 0
        trp.restore(pair[0])
        assert pool_bytes(pool) == 0
        assert torch.equal(run(pair[0], inputs), plain)
        trp.patch(pair[0], AUTO)


def pool_bytes(pool):
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool))


@pytest.mark.gpu
def test_gpu_streams_take_turns():
    pair = cuda_pair()
    inputs = cuda_inputs(pair[0])
    warm(pair, inputs)
    streams, held = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for i in range(20):
        with torch.cuda.stream(streams[i % 2]):
            moved = {**inputs, "hidden_states": inputs["hidden_states"] * (1 + i)}
            held.append((moved, run(pair[0], moved)))
    torch.cuda.synchronize()
    for moved, ours in held:
        assert torch.equal(ours, run(pair[1], moved))


@pytest.mark.gpu
def test_gpu_random_numbers_are_those_without_graphs():
    drawn = []
    for model in cuda_pair():
        inputs = cuda_inputs(model)
        torch.cuda.manual_seed(3)
        for _ in range(4):
            run(model, inputs)
            drawn.append(torch.randn(5, device="cuda"))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(drawn[:4], drawn[4:], strict=True))


@pytest.mark.gpu
def test_gpu_a_failed_capture_runs_eagerly():
    """Breaks a capture in a process of its own, because PyTorch before 2.13 does not recover from it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        process.submit(break_a_capture).result()


def break_a_capture():
    attention = torch.nn.functional.scaled_dot_product_attention

    def waiting(q, *args, **kwargs):
        q.sum().item()
        return attention(q, *args, **kwargs)

    pair = cuda_pair(config=trp.Exact(attention="sdpa", cuda_graph="auto"))
    inputs = cuda_inputs(pair[0])
    stream = torch.cuda.current_stream()
    torch.nn.functional.scaled_dot_product_attention = waiting
    for _ in range(4):
        assert_same(pair, inputs)
    assert "none now: recording failed (" in note(pair[0])
    assert torch.cuda.current_stream() == stream


@pytest.mark.gpu
def test_gpu_a_dropped_models_graph_breaks_no_capture():
    """Captures in a process of its own, because PyTorch before 2.13 does not recover from a broken capture."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        process.submit(capture_beside_garbage).result()


def capture_beside_garbage():
    attention = torch.nn.functional.scaled_dot_product_attention

    def allocating(*args, **kwargs):
        if torch.cuda.is_current_stream_capturing():
            make_python_collect()
        return attention(*args, **kwargs)

    dropped, pair = cuda_pair(), cuda_pair(config=trp.Exact(attention="sdpa", cuda_graph="auto"))
    inputs = cuda_inputs(pair[0])
    torch.nn.functional.scaled_dot_product_attention = allocating
    assert_same(pair, inputs)
    warm(dropped, inputs)
    graph = weakref.ref(graphs_of(dropped[0]))
    dropped[0].cycle = [dropped[0]]
    del dropped
    warm(pair, inputs)
    assert graph() is not None
    make_python_collect()
    assert graph() is None


def make_python_collect():
    """Make so many objects that Python looks for garbage among the old ones too."""
    assert [[] for _ in range(3 * 10**6)]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["t2v", "ti2v", "ti2v_i2v", "wan22"])
def test_gpu_pipelines_with_guidance_generate_the_same(variant):
    pipe = tiny_wan_pipeline(variant, torch.bfloat16).to("cuda")
    generate = partial(frames_of, pipe, variant, num_inference_steps=4, guidance_scale=4.0)
    with trp.patch(pipe, trp.Exact(cuda_graph="off")):
        expected = generate()
    with trp.patch(pipe, AUTO) as patch:
        for _ in range(2):
            assert torch.equal(generate(), expected)
        assert all(replays(model) > 2 for model in patch.transformers.values())
        pipe.enable_model_cpu_offload()
        assert torch.equal(generate(), expected)
