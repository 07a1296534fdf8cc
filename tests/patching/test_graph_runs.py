"""Graphs of calls with timesteps per token: runs of equal timesteps are found ahead of a call, and embedded in it.

In TI2V-5B all tokens share a timestep, or those of a given first frame have another one.
"""

import copy

import pytest
import torch
from peft import LoraConfig

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.tape import (
    AUTO,
    TapeRecorder,
    assert_eager,
    assert_replayed,
    assert_same,
    graphs_of,
    inputs_for,
    make_models,
    note,
    patched_pair,
    replays,
    run,
    warm,
)
from tests.tiny_wan import tiny_wan_transformer
from turbo_rcm_patch.kernels import MAX_RUNS
from turbo_rcm_patch.patching import cuda_graphs as graphs
from turbo_rcm_patch.patching.families import token_runs
from turbo_rcm_patch.patching.families.token_runs import TimestepRuns, with_runs_ahead
from turbo_rcm_patch.patching.families.wan import graph as wan_graph
from turbo_rcm_patch.patching.steps.plan import SHARED, state_of

TOKENS = 18


def with_runs(inputs, *samples):
    """The inputs with timesteps per token. samples: for each, the values and lengths of its runs."""
    rows = [torch.cat([torch.full((length,), float(value)) for value, length in runs]) for runs in samples]
    return {**inputs, "timestep": torch.stack(rows)}


def in_runs(count, tokens=TOKENS):
    """Timesteps [1, tokens] in so many runs."""
    return 900.0 - (torch.arange(tokens) * count // tokens)[None].float()


def gates(model):
    """How the gates of the last call that ran in Python varied."""
    return {state_of(block).plans.latest.stream.gate for block in model.blocks}


def shared(model):
    return vars(model)[SHARED]


CALLS = {
    "one run": [[[(700, 18)]], [[(500, 18)]], [[(300, 18)]]],
    "a first frame": [[[(0, 6), (700, 12)]], [[(0, 6), (500, 12)]], [[(5, 1), (300, 17)]]],
    "two samples": [
        [[(0, 6), (700, 12)], [(0, 6), (700, 12)]],
        [[(0, 9), (500, 9)], [(100, 3), (400, 15)]],
        [[(0, 18)], [(1, 4), (2, 4), (3, 10)]],
    ],
    "a run of two samples": [[[(700, 18)], [(700, 18)]], [[(500, 18)], [(500, 18)]], [[(300, 18)], [(300, 18)]]],
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CALLS)
def test_other_values_and_lengths_of_runs_replay_the_same_graph(tape, name, mode):
    pair = make_models(layers=2)
    inputs = inputs_for(pair[0], batch=len(CALLS[name][0]))
    with mode():
        for step, samples in enumerate(CALLS[name] * 2):
            inputs["hidden_states"] = torch.randn_like(inputs["hidden_states"])
            assert_same(pair, with_runs(inputs, *samples))
            assert replays(pair[0]) == step
    assert graphs_of(pair[0]).kept == 1
    assert gates(pair[0]) == {"run"}


def test_a_graph_computes_what_diffusers_does(tape):
    pair = make_models(layers=2)
    inputs = with_runs(inputs_for(pair[0], batch=1), [(0, 6), (700, 12)])
    warm(pair, inputs)
    assert relative_error(run(pair[0], inputs), run(tiny_wan_transformer(), inputs)) <= 1e-5


def test_another_number_of_runs_has_a_graph_of_its_own(tape):
    pair = make_models()
    inputs = inputs_for(pair[0], batch=1)
    calls = [with_runs(inputs, runs) for runs in ([(700, 18)], [(0, 6), (700, 12)])]
    for call in calls:
        warm(pair, call)
    for call in calls * 2:
        assert_replayed(pair, call)
    assert graphs_of(pair[0]).kept == 2


def test_too_many_runs_have_a_graph_with_a_row_for_every_token(tape):
    pair = make_models()
    inputs = inputs_for(pair[0], batch=1, frames=3, height=8, width=8)
    few, many = ({**inputs, "timestep": in_runs(count, 48)} for count in (MAX_RUNS, MAX_RUNS + 1))
    for timestep, gate in ((few, "run"), (many, "token")):
        warm(pair, timestep)
        assert gates(pair[0]) == {gate}
    for call in (few, many, few, {**inputs, "timestep": in_runs(48, 48)}):
        assert_replayed(pair, call)
    assert graphs_of(pair[0]).kept == 2


def test_timesteps_in_other_layouts(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    timestep = with_runs(inputs, [(0, 6), (700, 12)])["timestep"]
    for other in (timestep.expand(2, -1), timestep.repeat(2, 2)[:, 18:], timestep.T.repeat(1, 2).T):
        warm(pair, {**inputs, "timestep": other})
        assert gates(pair[0]) == {"run"}
    assert graphs_of(pair[0]).kept == 1
    warm(pair, {**inputs, "timestep": timestep})  # of one sample for both latents: every token has a row
    assert gates(pair[0]) == {"token"}


@pytest.mark.parametrize("broken", [False, True])
def test_no_runs_are_left_of_a_recording(tape, monkeypatch, broken):
    """They would keep a graph's memory."""
    pair = make_models()
    inputs = with_runs(inputs_for(pair[0], batch=1), [(0, 6), (700, 12)])
    record = TapeRecorder.record

    def failing(self, function, inputs):
        record(self, function, inputs)
        raise RuntimeError("an op waits for the GPU")

    if broken:
        monkeypatch.setattr(TapeRecorder, "record", failing)
    for _ in range(2):
        assert_same(pair, inputs)
        assert shared(pair[0]).runs is None
        assert shared(pair[0]).timestep_runs is None
    assert ("recording failed" in note(pair[0])) == broken


def test_an_error_in_the_forward_leaves_no_runs(tape):
    pair = make_models()
    inputs = with_runs(inputs_for(pair[0], batch=1), [(0, 6), (700, 12)])
    wrong = {**inputs, "encoder_hidden_states": inputs["encoder_hidden_states"][..., :5]}
    with pytest.raises(RuntimeError, match="shapes"):
        run(pair[0], wrong)
    assert shared(pair[0]).timestep_runs is None
    warm(pair, inputs)


def test_a_hook_runs_every_call(tape):
    pair = make_models()
    inputs = with_runs(inputs_for(pair[0], batch=1), [(0, 6), (700, 12)])
    warm(pair, inputs)
    hook = lambda _, args, output: -output  # noqa: E731
    handles = [model.condition_embedder.time_embedder.register_forward_hook(hook) for model in pair]
    assert_eager(pair, inputs, "torch hook")
    assert gates(pair[0]) == {"token"}
    for handle in handles:
        handle.remove()
    warm(pair, inputs)
    assert gates(pair[0]) == {"run"}


def test_another_embedder_embeds_every_token(tape):
    """Only the patch's embeds runs."""
    models = [tiny_wan_transformer(layers=1) for _ in range(2)]
    others = [copy.deepcopy(model.condition_embedder) for model in models]
    pair = patched_pair(models, AUTO)
    inputs = with_runs(inputs_for(pair[0], batch=1), [(0, 6), (700, 12)])
    for model, other in zip(pair, others, strict=True):
        model.condition_embedder = other
    warm(pair, inputs)
    assert gates(pair[0]) == {"token"}
    assert_replayed(pair, with_runs(inputs, [(700, 18)]))  # by the same graph


def test_a_lora_counts_in_both(tape):
    pair = make_models()
    inputs = with_runs(inputs_for(pair[0], batch=1), [(0, 6), (700, 12)])
    warm(pair, inputs)
    for model in pair:
        torch.manual_seed(5)
        model.add_adapter(LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=["to_q", "to_k"]))
    for scale in (1.0, 0.3):
        for model in pair:
            model.set_adapters(["default"], [scale])
        warm(pair, inputs)
        assert_replayed(pair, with_runs(inputs, [(0, 3), (500, 15)]))
    assert gates(pair[0]) == {"run"}


def test_a_shallow_copy_runs_eagerly(tape):
    pair = make_models()
    inputs = with_runs(inputs_for(pair[0], batch=1), [(0, 6), (700, 12)])
    warm(pair, inputs)
    before = replays(pair[0])
    copied = copy.copy(pair[0])
    assert torch.equal(run(copied, inputs), run(pair[1], inputs))
    assert replays(pair[0]) == before
    assert "a shallow copy of the model (1)" in note(pair[0])


def test_the_runs_of_another_forward_are_not_taken(tape, monkeypatch):
    """Another thread may run the model while this one records."""
    model, _ = make_models()
    inputs = with_runs(inputs_for(model, batch=1), [(0, 6), (700, 12)])
    expected = run(model, inputs)
    timestep = torch.full((1, TOKENS), 5.0)
    others = TimestepRuns(timestep, torch.tensor([5.0]), torch.tensor([TOKENS]))
    monkeypatch.setattr(token_runs, "why_not_recorded", lambda _: "capture under way")
    monkeypatch.setattr(graphs, "why_not_recorded", lambda _: "capture under way")
    with with_runs_ahead(shared(model), others), torch.no_grad():
        output = type(model).forward(model, **inputs)[0]
    assert relative_error(output, expected) <= 1e-5
    assert gates(model) == {"token"}


def test_a_call_that_is_not_recorded_finds_its_own_runs(tape):
    """A hook on this GPU may have written to the timesteps since, so that all GPUs run the call without a graph."""
    pair = make_models()
    inputs = with_runs(inputs_for(pair[0], batch=1), [(0, 6), (700, 12)])
    ahead = TimestepRuns(inputs["timestep"], torch.tensor([0.0, 700.0]), torch.tensor([6, 12]))
    expected = run(pair[1], with_runs(inputs, [(5, 6), (705, 12)]))
    pair[0].condition_embedder.register_forward_pre_hook(lambda _, args: (args[0].add_(5), None)[1])
    with with_runs_ahead(shared(pair[0]), ahead), torch.no_grad():
        assert copy.copy(shared(pair[0])).timestep_runs is None  # copies are of another forward
        assert torch.equal(type(pair[0]).forward(pair[0], **inputs)[0], expected)


def test_without_other_gpus_runs_do_not_raise_the_limit(tape, monkeypatch):
    pair = make_models()
    inputs = with_runs(inputs_for(pair[0], batch=1), [(0, 6), (700, 12)])
    most = wan_graph.flops_per_block(pair[0], inputs["hidden_states"], AUTO)
    monkeypatch.setattr(wan_graph, "MOST_FLOPS_PER_BLOCK", most)
    warm(pair, inputs)
    monkeypatch.setattr(wan_graph, "MOST_FLOPS_PER_BLOCK", 0.9 * most)
    assert_eager(pair, inputs, "too large to gain")
    for model, mode in zip(pair, ("on", "off"), strict=True):
        trp.restore(model)
        trp.patch(model, trp.Exact(cuda_graph=mode))
    warm(pair, inputs)
