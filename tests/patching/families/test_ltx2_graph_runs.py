"""LTX-2's graphs of calls with a timestep per token: runs are found ahead of a call, and embedded in it."""

import copy
import threading

import pytest
import torch

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.families.test_ltx2_graphs import inputs_for, make_models
from tests.patching.families.test_ltx2_runs import ALIKE, FIRST_FRAME, MANY, TOKENS, UNLIKE, gates, in_runs
from tests.patching.pairs import in_one_tensor
from tests.patching.tape import (
    AUTO,
    TapeRecorder,
    assert_eager,
    assert_replayed,
    assert_same,
    graphs_of,
    note,
    patched_pair,
    replays,
    warm,
)
from tests.tiny_families import BATCH, tiny_family_transformer
from tests.tiny_wan import moved
from turbo_rcm_patch.patching.families.ltx2 import EMBEDDERS, graph
from turbo_rcm_patch.patching.families.token_runs import TimestepRuns, with_runs_ahead
from turbo_rcm_patch.patching.steps.plan import SHARED
from turbo_rcm_patch.tiers import EXACT

FIVE = {"unlike": UNLIKE, "other lengths": in_runs([(5, 1), (7, 1), (5, 1), (9, 15)], [(9, 2), (1, 16)])}
CALLS = {
    "one run": [ALIKE, 0.5 * ALIKE, torch.full_like(ALIKE, 5.0)],
    "a first frame": [FIRST_FRAME, 0.5 * FIRST_FRAME, in_runs([(5, 1), (300, 17)], [(0, 17), (900, 1)])],
    "unlike samples": [UNLIKE, *FIVE.values()],
}


def shared(model):
    return vars(model)[SHARED]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("family", ["ltx2", "ltx2.3"])
@pytest.mark.parametrize("name", CALLS)
def test_other_values_and_lengths_of_runs_replay_the_same_graph(tape, name, family, mode):
    pair = make_models(family)
    for crossed in (False, True):
        inputs = inputs_for(family, pair[0], use_cross_timestep=crossed)
        before = replays(pair[0])
        with mode():
            for step, timestep in enumerate(CALLS[name] * 2):
                inputs["hidden_states"] = torch.randn_like(inputs["hidden_states"])
                assert_same(pair, {**inputs, "timestep": timestep.clone()})
                assert replays(pair[0]) == before + step
        for model in pair:
            assert gates(model) == {("run", "sample" if crossed else "run", "sample")}
    assert graphs_of(pair[0]).kept == 2


def test_a_graph_computes_what_diffusers_does(tape):
    pair, plain = make_models(), tiny_family_transformer("ltx2", layers=1)
    for timestep in (FIRST_FRAME, UNLIKE):
        inputs = inputs_for("ltx2", plain, timestep=timestep)
        warm(pair, inputs)
        with torch.no_grad():
            ours, theirs = (in_one_tensor("ltx2", model(**inputs)) for model in (pair[0], plain))
        assert relative_error(ours, theirs) <= EXACT.limits.fp32


@pytest.mark.parametrize("config", [trp.Quantized(), trp.Sparse(blocks=(8, 8)), trp.BlockSparse(min_tokens=0)])
def test_the_other_tiers(tape, config):
    pair = make_models("ltx2", config)
    warm(pair, inputs_for("ltx2", pair[0], timestep=FIRST_FRAME))
    assert gates(pair[0]) == {("run", "run", "sample")}


def test_another_number_of_runs_has_a_graph_of_its_own(tape):
    pair = make_models()
    calls = [inputs_for("ltx2", pair[0], timestep=timestep) for timestep in (ALIKE, UNLIKE, MANY)]
    for call, varies in zip(calls, ("run", "run", "token"), strict=True):
        warm(pair, call)
        assert gates(pair[0]) == {(varies, varies, "sample")}
    for call in calls * 2:
        assert_replayed(pair, call)
    assert_replayed(pair, {**calls[-1], "timestep": 0.5 * MANY})
    assert graphs_of(pair[0]).kept == 3


def test_runs_are_looked_for_once_in_a_replay(tape, monkeypatch):
    pair, seen, unique = make_models(), [], torch.unique_consecutive
    by_token, by_sample = inputs_for("ltx2", pair[0], timestep=FIRST_FRAME), inputs_for("ltx2", pair[0])
    for inputs in (by_token, by_sample):
        warm(pair, inputs)
    monkeypatch.setattr(
        torch, "unique_consecutive", lambda x, **options: seen.append(x.numel()) or unique(x, **options)
    )
    with torch.no_grad():
        pair[0](**by_token)
        assert seen == [BATCH * TOKENS]
        pair[0](**by_sample)
        assert seen == [BATCH * TOKENS]


def test_timesteps_in_other_layouts(tape):
    pair = make_models()
    for timestep in (FIRST_FRAME, FIRST_FRAME.T.contiguous().T, FIRST_FRAME[:1].expand(2, -1)):
        warm(pair, inputs_for("ltx2", pair[0], timestep=timestep))
        assert gates(pair[0]) == {("run", "run", "sample")}
    assert graphs_of(pair[0]).kept == 1


def test_sigmas_per_token_have_no_graph(tape):
    """With use_cross_timestep they are the timesteps of the attention to the sound."""
    pair = make_models()
    inputs = inputs_for("ltx2", pair[0], timestep=FIRST_FRAME, use_cross_timestep=True, audio_sigma=UNLIKE)
    assert_eager(pair, inputs, "sigmas per token")
    assert gates(pair[0]) == {("run", "run", "sample")}


@pytest.mark.parametrize("broken", [False, True])
def test_no_runs_are_left_of_a_recording(tape, monkeypatch, broken):
    """They would keep a graph's memory."""
    pair = make_models()
    inputs = inputs_for("ltx2", pair[0], timestep=FIRST_FRAME)
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


@pytest.mark.parametrize("path", EMBEDDERS)
def test_a_hook_runs_every_call(tape, path):
    pair = make_models()
    inputs = inputs_for("ltx2", pair[0], timestep=FIRST_FRAME)
    warm(pair, inputs)
    handles = [model.get_submodule(f"{path}.linear").register_forward_hook(lambda *args: -args[2]) for model in pair]
    assert_eager(pair, inputs, "torch hook")
    for handle in handles:
        handle.remove()
    warm(pair, inputs)
    assert gates(pair[0]) == {("run", "run", "sample")}


@pytest.mark.parametrize("path", [path for path in EMBEDDERS if path != "time_embed"])
def test_another_embedder_embeds_every_token(tape, path):
    """Only the patch's embed runs."""
    models = [tiny_family_transformer("ltx2", layers=1) for _ in range(2)]
    others = [copy.deepcopy(model.get_submodule(path)) for model in models]
    pair = patched_pair(models, AUTO)
    for model, other in zip(pair, others, strict=True):
        setattr(model, path, other)
    warm(pair, inputs_for("ltx2", pair[0], timestep=FIRST_FRAME))


def test_a_model_whose_first_embedder_is_another_finds_no_runs_ahead(tape):
    pair = make_models()
    inputs = inputs_for("ltx2", pair[0], timestep=FIRST_FRAME)
    plain = tiny_family_transformer("ltx2", layers=1)
    for model in pair:
        model.time_embed = plain.time_embed
    for _ in range(3):
        with torch.no_grad():
            ours, theirs = (in_one_tensor("ltx2", model(**inputs)) for model in (pair[0], plain))
        assert relative_error(ours, theirs) <= EXACT.limits.fp32
    assert replays(pair[0]) == 2


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_the_runs_of_another_forward_are_not_taken(in_a_thread):
    """Another thread may train the model while this one records."""
    model = tiny_family_transformer("ltx2", layers=1)
    trp.patch(model, AUTO)
    inputs = inputs_for("ltx2", model, timestep=UNLIKE)
    with torch.no_grad():
        expected = in_one_tensor("ltx2", model(**inputs))
    ahead, outputs = TimestepRuns(ALIKE, torch.tensor([700.0]), torch.tensor([BATCH * TOKENS])), []
    call = lambda: outputs.append(in_one_tensor("ltx2", model(**inputs)))  # noqa: E731  with gradients
    with with_runs_ahead(shared(model), ahead):
        assert copy.copy(shared(model)).timestep_runs is None  # copies are of another forward
        if in_a_thread:
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
        else:
            with torch.no_grad():
                call()
    assert relative_error(outputs[0].detach(), expected) <= EXACT.limits.fp32
    assert gates(model) == {("token", "token", "sample") if in_a_thread else ("run", "run", "sample")}


def test_several_gpus_make_no_graphs_of_timesteps_per_token(monkeypatch):
    model = tiny_family_transformer("ltx2", layers=1)
    trp.patch(model, AUTO)
    monkeypatch.setattr(graph, "ranks_of", lambda _: 2)
    for timestep, reason in ((FIRST_FRAME, "timesteps per token on several GPUs"), (torch.ones(BATCH), None)):
        arguments = inputs_for("ltx2", model, timestep=timestep)
        inputs = tuple(map(arguments.get, graph.TENSORS))
        assert graph._with_runs(model, inputs) == (inputs, reason)


@pytest.mark.gpu
@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize("config", [trp.Exact(cuda_graph="on"), trp.Quantized(cuda_graph="on")])
def test_on_a_gpu(config, crossed):
    """Steps from an image are replayed, with lengths of runs of their own, and give what they give without a graph."""
    pair = patched_pair([tiny_family_transformer("ltx2.3", torch.bfloat16).to("cuda") for _ in range(2)], config)
    calls = [
        moved(inputs_for("ltx2.3", pair[0], timestep=timestep, use_cross_timestep=crossed), "cuda")
        for timestep in CALLS["a first frame"]
    ]
    for step, call in enumerate(calls * 2):
        assert_same(pair, call)
        assert replays(pair[0]) == step
        assert shared(pair[0]).runs is shared(pair[0]).timestep_runs is None
    for model in pair:
        assert gates(model) == {("run", "sample" if crossed else "run", "sample")}


@pytest.mark.gpu
def test_on_a_gpu_numbers_of_runs_take_turns():
    """Their graphs share a pool."""
    config = trp.Exact(cuda_graph="on")
    pair = patched_pair([tiny_family_transformer("ltx2", torch.bfloat16).to("cuda") for _ in range(2)], config)
    timesteps = ALIKE, FIRST_FRAME, UNLIKE, MANY
    calls = [moved(inputs_for("ltx2", pair[0], timestep=timestep), "cuda") for timestep in timesteps]
    for _ in range(3):
        for call in calls:
            assert_same(pair, call)
    assert (graphs_of(pair[0]).kept, replays(pair[0])) == (4, 2 * 4), note(pair[0])
