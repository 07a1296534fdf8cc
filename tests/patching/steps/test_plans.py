"""Plans of blocks: when a model looks for changes, and when it decides anew."""

import copy

import pytest
import torch

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.changes import doubled_processor
from tests.patching.lora.test_inside_projections import add_lora
from tests.patching.pairs import every_family, families, make_pair, output_of, row
from tests.tiny_families import tiny_family_transformer
from tests.tiny_wan import tiny_wan_transformer
from turbo_rcm_patch.kernels.choice.registry import Op
from turbo_rcm_patch.patching import changes
from turbo_rcm_patch.patching.families import family_of, ltx2
from turbo_rcm_patch.patching.families.wan import block as wan_block
from turbo_rcm_patch.patching.families.wan.sub_layers import BlockPlan
from turbo_rcm_patch.patching.steps.plan import state_of
from turbo_rcm_patch.patching.summary import current_plan, device_of_calls


@pytest.fixture
def events(monkeypatch):
    """List events in order: "look" for every snapshot that is compared, "decide", and "run" for every block."""
    events = []

    def traced(owner, name, event):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: events.append(event) or original(*args, **kwargs))

    traced(changes.Snapshot, "holds", "look")
    for of_family, plan in ((wan_block, BlockPlan), (ltx2.forward, ltx2.sub_layers.BlockPlan)):
        traced(of_family, "decide", "decide")
        traced(plan, "run", "run")
    return events


@families
def test_a_block_looks_for_changes_once_in_a_forward(events, name):
    model = tiny_family_transformer(name)
    with trp.patch(model, trp.Exact(cuda_graph="off")):
        output_of(name, model)
        blocks = events.count("run")
        assert events.count("decide") == blocks >= 2
        events.clear()
        output_of(name, model)
        assert events == ["look", "run"] * blocks


@every_family
def test_the_summary_shows_the_plans_that_ran(name):
    model, _, patch = make_pair(name)
    output_of(name, model)
    plans = {block: state_of(block).plans.ran for _, block in family_of(model).every_block(model)}
    assert None not in plans.values()
    assert shown_plans(model) == plans
    changed, _ = next(iter(plans.items()))
    changed.register_buffer("more", torch.zeros(1))
    later = shown_plans(model)
    assert {block for block, plan in later.items() if plan is not plans[block]} == {changed}
    patch.restore()


def shown_plans(model):
    """The plans that the summary shows, by block."""
    device = device_of_calls(model)
    return {
        block: current_plan(model, blocks, block, device)
        for blocks in family_of(model).blocks
        for _, block in blocks.of(model)
    }


def test_a_summary_decides_for_changed_blocks_alone_and_later_calls_keep_their_plans(events):
    model = tiny_wan_transformer()
    attn = model.blocks[0].attn1
    with trp.patch(model, trp.Exact(cuda_graph="off")) as patch:
        output_of("wan", model)
        events.clear()
        assert "processor Doubled" not in patch.summary()
        assert "decide" not in events
        usual, attn.processor = attn.processor, doubled_processor(attn)
        assert row(patch, "self_attention", "attention").reasons["processor Doubled"] == 1
        assert events.count("decide") == 1
        attn.processor = usual
        events.clear()
        output_of("wan", model)
        assert events == ["look", "run"] * len(model.blocks)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("config", [trp.Exact(), trp.Quantized(), trp.BlockSparse(min_tokens=0)])
def test_a_plan_picks_its_kernels_once(config, lora, monkeypatch):
    model = tiny_wan_transformer(layers=1)
    picked, pick = [], Op.pick
    monkeypatch.setattr(Op, "pick", lambda op, spec: picked.append(op.name) or pick(op, spec))
    with trp.patch(model, config):
        if lora:
            add_lora(model)
        output_of("wan", model)
        of_prompts, of_lora = 3, 7 * lora  # the projections of the prompt, and one product of LoRA for each step
        assert picked.count("linear_8bit") == (0 if config == trp.Exact() else of_prompts + of_lora)
        picked.clear()
        output_of("wan", model)
    assert not picked


@torch.no_grad()
def test_a_change_between_two_blocks_counts_at_once():
    model, plain = tiny_wan_transformer(), tiny_wan_transformer()
    with trp.patch(model, trp.Exact(cuda_graph="off")):
        outputs = []
        for each in (plain, model):
            unchanged = output_of("wan", each)
            each.blocks[0].register_forward_hook(lambda *_, each=each: setattr(each.blocks[1].norm1, "eps", 10.0))
            outputs.append(output_of("wan", each))
            assert relative_error(outputs[-1], unchanged) > 1e-3
    assert relative_error(outputs[1], outputs[0]) <= 1e-5


class Parked:
    """Hooks on a block that bring its weights only while it runs, as offloading does."""

    def __init__(self, block):
        self.weights = {parameter: parameter.data for parameter in block.parameters()}
        block.register_forward_pre_hook(lambda *_: self.bring())
        block.register_forward_hook(lambda *_: self.park())
        self.park()

    def bring(self):
        for parameter, data in self.weights.items():
            parameter.data = data

    def park(self):
        for parameter in self.weights:
            parameter.data = torch.empty(0)


def test_weights_that_are_there_only_while_a_block_runs_are_no_change(events):
    model = tiny_wan_transformer()
    expected = output_of("wan", model)
    with trp.patch(model, trp.Exact(cuda_graph="off")):
        for block in model.blocks:
            Parked(block)
        for _ in range(3):
            torch.testing.assert_close(output_of("wan", model), expected)
    assert events.count("decide") == len(model.blocks)


def test_a_copy_of_a_model_looks_at_its_own_blocks(events):
    model = tiny_wan_transformer()
    with trp.patch(model, trp.Exact(cuda_graph="off")):
        output_of("wan", model)
        twin = copy.deepcopy(model)
        output_of("wan", twin)
        events.clear()
        output_of("wan", twin)
        assert events == ["look", "run"] * 2
