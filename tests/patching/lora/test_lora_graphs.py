"""Graphs of models with LoRAs: which calls are replayed, and that removed adapters are freed."""

import copy

import pytest
import torch

import turbo_rcm_patch as trp
from tests.lora_files import lightning
from tests.oracle import relative_error
from tests.patching.lora.test_inside_projections import ALL, add_lora
from tests.patching.tape import AUTO, assert_replayed, assert_same, inputs_for, make_models, replays, run, warm
from tests.tiny_wan import tiny_wan_pipeline

SCALES = [round(0.1 + 0.17 * i, 2) for i in range(10)]


def with_lora(targets=ALL, config=AUTO):
    """A warm pair with a LoRA, and its inputs."""
    pair = make_models(config=config, layers=1)
    for model in pair:
        add_lora(model, targets=targets)
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    return pair, inputs


def only_first_left(model):
    model.set_adapters(["first"])
    model.delete_adapters("second")


@pytest.mark.parametrize("remove", [lambda model: model.delete_adapters("second"), only_first_left])
def test_an_adapter_is_deleted(tape, remove):
    pair = make_models(layers=1)
    for model in pair:
        add_lora(model)
        add_lora(model, "second", seed=9)
        model.set_adapters(["first", "second"])
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    before = run(pair[0], inputs)
    for model in pair:
        remove(model)
    warm(pair, inputs)
    assert_replayed(pair, inputs)
    assert relative_error(run(pair[0], inputs), before) > 0.01


def test_all_are_unloaded(tape):
    pair, inputs = with_lora()
    for model in pair:
        model.unload_lora()
    warm(pair, inputs)


def test_a_distilled_lora_is_taken_off_under_the_patch(tape, tmp_path):
    pipes = tiny_wan_pipeline(), tiny_wan_pipeline()
    path = str(lightning(pipes[0].transformer, rank=4).save(tmp_path / "lightning.safetensors"))
    for pipe, mode in zip(pipes, ("auto", "off"), strict=True):
        trp.patch(pipe, trp.Exact(cuda_graph=mode))
    pair = [pipe.transformer for pipe in pipes]
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    before = run(pair[0], inputs)
    handles = [trp.use_distilled(pipe, path, recipe="lightning") for pipe in pipes]
    warm(pair, inputs)
    assert relative_error(run(pair[0], inputs), before) > 0.01
    for handle in handles:
        handle.restore()
    warm(pair, inputs)
    assert torch.equal(run(pair[0], inputs), before)


def test_ten_scales_in_a_row_are_replayed(tape):
    pair, inputs = with_lora()
    outputs = []
    for scale in SCALES:
        for model in pair:
            model.set_adapters(["first"], [scale])
        assert_replayed(pair, inputs)
        outputs.append(run(pair[0], inputs))
    assert all(relative_error(output, outputs[0]) > 0.01 for output in outputs[1:])


@pytest.mark.parametrize(
    ("targets", "config"),
    [
        (["to_q", "condition_embedder.time_proj"], AUTO),
        (["to_q", "proj_out"], AUTO),
        (ALL, trp.Exact(cuda_graph="auto", fuse=("self_attention", "cross_attention"))),
    ],
)
def test_scales_of_layers_that_are_called_make_new_graphs(tape, targets, config):
    """A graph has them as numbers."""
    pair, inputs = with_lora(targets, config)
    last = run(pair[0], inputs)
    for scale in SCALES[:4]:
        for model in pair:
            model.set_adapters(["first"], [scale])
        assert_same(pair, inputs)
        assert relative_error(run(pair[0], inputs), last) > 1e-3
        last = run(pair[0], inputs)
        assert_replayed(pair, inputs)
    for scale in SCALES:  # without a call between two changes
        for model in pair:
            model.set_adapters(["first"], [scale])
        assert_same(pair, inputs)


def test_a_copy_has_scales_of_its_own(tape):
    pair, inputs = with_lora()
    twins = [copy.deepcopy(model) for model in pair]
    warm(twins, inputs)
    for twin in twins:
        twin.set_adapters(["first"], [0.2])
    assert_replayed(twins, inputs)
    assert_replayed(pair, inputs)
    assert replays(pair[0]) > 0
