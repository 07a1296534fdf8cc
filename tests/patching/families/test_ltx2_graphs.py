"""LTX-2 as a CUDA graph: a replay gives both streams of an eager forward now. Calls without a graph have a reason."""

import pytest
import torch
from peft import LoraConfig

import turbo_rcm_patch as trp
from tests.patching.tape import AUTO, assert_eager, assert_same, graphs_of, note, patched_pair, replays, warm
from tests.tiny_families import AUDIO_TOKENS, BATCH, FRAMES, HEIGHT, WIDTH, tiny_family_inputs, tiny_family_transformer
from tests.tiny_wan import moved
from turbo_rcm_patch.patching.families import CASES
from turbo_rcm_patch.patching.families.ltx2 import graph

HIDES_SOME = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]])


def make_models(family="ltx2", config=AUTO):
    """The same model twice, patched with graphs and without."""
    return patched_pair([tiny_family_transformer(family, layers=1) for _ in range(2)], config)


def inputs_for(family, model, **more):
    coords = {
        "video_coords": model.rope.prepare_video_coords(BATCH, FRAMES, HEIGHT // 2, WIDTH // 2, model.device),
        "audio_coords": model.audio_rope.prepare_audio_coords(BATCH, AUDIO_TOKENS, model.device),
    }
    return {**tiny_family_inputs(family, model), **coords, **more}


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("ltx2", AUTO),
        ("ltx2", trp.Quantized()),
        ("ltx2", trp.Sparse(blocks=(8, 8))),
        ("ltx2, a timestep per token", AUTO),
        ("ltx2.3", AUTO),
    ],
)
def test_steps_with_new_inputs_are_replayed(tape, family, config):
    pair = make_models(family, config)
    inputs, held = inputs_for(family, pair[0]), []
    for step in range(4):
        inputs["hidden_states"] = torch.randn_like(inputs["hidden_states"])
        inputs["audio_hidden_states"] = torch.randn_like(inputs["audio_hidden_states"])
        inputs |= {name: 0.7 * inputs[name] for name in ("timestep", "audio_timestep", "sigma")}
        held.append(assert_same(pair, inputs))
        assert replays(pair[0]) == max(0, step)
    assert not torch.equal(held[-1][1], held[-2][1])  # outputs may be kept
    assert "1 kept in 3 MiB; 3 calls replayed" in note(pair[0])
    assert note(pair[0]) in "\n".join(trp.patching.families.LTX2.notes(pair[0]))


def test_other_arguments_have_graphs_of_their_own(tape):
    pair = make_models()
    inputs = inputs_for("ltx2", pair[0])
    inputs["sigma"] = 0.5 * inputs["sigma"]  # is read with use_cross_timestep
    kinds = [{}, {"isolate_modalities": True}, {"use_cross_timestep": True}, {"encoder_attention_mask": HIDES_SOME}]
    for more in kinds:
        warm(pair, {**inputs, **more})
    assert graphs_of(pair[0]).kept == len(kinds)
    outputs = [assert_same(pair, {**inputs, **more})[0] for more in kinds]
    assert not any(torch.equal(outputs[0], other) for other in outputs[1:])
    hides_nothing = {"encoder_attention_mask": torch.ones_like(HIDES_SOME)}
    before = replays(pair[0])
    assert torch.equal(assert_same(pair, {**inputs, **hides_nothing})[0], outputs[0])
    assert replays(pair[0]) == before + 1


def test_a_result_may_be_asked_for_by_name(tape):
    pair = make_models()
    inputs = inputs_for("ltx2", pair[0])
    warm(pair, inputs)
    with torch.no_grad():
        named = pair[0](**{**inputs, "return_dict": True})
    video, audio = assert_same(pair, inputs)
    assert torch.equal(named.sample, video)
    assert torch.equal(named.audio_sample, audio)
    assert replays(pair[0]) == 4


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"attention_kwargs": {}}, "attention_kwargs"),
        ({"spatio_temporal_guidance_blocks": [0]}, "perturbed attention"),
        ({"video_coords": None}, "no coordinates"),
    ],
)
def test_calls_that_a_graph_cannot_have(tape, more, reason):
    pair = make_models("ltx2.3")
    inputs = inputs_for("ltx2.3", pair[0])
    warm(pair, inputs)
    assert_eager(pair, {**inputs, **more}, reason)
    assert graphs_of(pair[0]).eager[reason] == 1


def test_changes_are_seen(tape):
    pair = make_models()
    inputs = inputs_for("ltx2", pair[0])
    for change in (
        lambda model: model.transformer_blocks[0].audio_ff.net[2].weight.data.mul_(1.5),
        lambda model: model.transformer_blocks[0].video_to_audio_attn.to_q.register_forward_hook(lambda *a: -a[2]),
    ):
        warm(pair, inputs)
        before = assert_same(pair, inputs)
        for model in pair:
            change(model)
        assert not torch.equal(assert_same(pair, inputs)[1], before[1])
    assert "torch hook" in note(pair[0])


def test_a_lora_is_followed(tape):
    pair = make_models()
    inputs = inputs_for("ltx2", pair[0])
    warm(pair, inputs)
    plain = assert_same(pair, inputs)
    for model in pair:
        torch.manual_seed(5)
        model.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "audio_ff.net.2"]), "l")
    before = replays(pair[0])
    warm(pair, inputs)
    adapted = assert_same(pair, inputs)
    assert replays(pair[0]) > before
    for model in pair:
        model.set_adapters("l", 0.3)
    weaker = assert_same(pair, inputs)
    assert not any(torch.equal(x[1], y[1]) for x, y in ((plain, adapted), (adapted, weaker), (plain, weaker)))


@pytest.mark.parametrize(
    ("size", "config", "taken"),
    [
        ((512, 768), trp.Exact(), True),
        ((512, 768), trp.Quantized(), True),
        ((1024, 1792), trp.Exact(), False),
        ((1024, 1792), trp.Sparse(), False),
    ],
)
def test_videos_whose_kernels_take_longer_than_their_launches(size, config, taken):
    with torch.device("meta"):
        model = CASES["ltx2-19b"].transformer_class(**{**CASES["ltx2-19b"].transformer, "num_layers": 1})
        latents = torch.empty(1, 16 * size[0] // 32 * size[1] // 32, 128)
    assert (graph.flops_per_block(model, latents, config) <= graph.MOST_FLOPS_PER_BLOCK) == taken


def test_a_large_call_runs_without(tape, monkeypatch):
    pair = make_models()
    inputs = inputs_for("ltx2", pair[0])
    monkeypatch.setattr(graph, "MOST_FLOPS_PER_BLOCK", 1.0)
    for _ in range(3):
        assert_same(pair, inputs)
    assert graphs_of(pair[0]).eager == {"too large to gain": 3}


def test_memory_comes_back(tape):
    model = tiny_family_transformer("ltx2", layers=1)
    patch = trp.patch(model, AUTO)
    inputs = inputs_for("ltx2", model)
    with torch.no_grad():
        for _ in range(2):
            model(**inputs)
    assert patch.graph_count == 1
    patch.restore()
    assert "forward" not in vars(model)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [trp.Exact(cuda_graph="on"), trp.Quantized(cuda_graph="on")])
def test_on_a_gpu(config):
    """A step of a pipeline is replayed, and gives what it gives without a graph."""
    pair = patched_pair([tiny_family_transformer("ltx2.3", torch.bfloat16).to("cuda") for _ in range(2)], config)
    inputs = moved(inputs_for("ltx2.3", pair[0]), "cuda")
    for _ in range(4):
        assert_same(pair, inputs)
    assert replays(pair[0]) == 3
