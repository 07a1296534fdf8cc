"""Plans of blocks: when a model looks for changes, and when it decides anew."""

import copy

import pytest
import torch

import turbo_rcm_patch as trp
from tests.patching.lora.test_inside_projections import add_lora
from tests.patching.pairs import families, output_of
from tests.tiny_families import tiny_family_transformer
from tests.tiny_wan import tiny_wan_transformer
from turbo_rcm_patch.kernels.choice.registry import Op
from turbo_rcm_patch.patching import changes
from turbo_rcm_patch.patching.families import ltx2
from turbo_rcm_patch.patching.families.wan import block as wan_block
from turbo_rcm_patch.patching.families.wan.sub_layers import BlockPlan


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
def test_a_forward_looks_for_changes_once_before_its_first_block(events, name):
    model = tiny_family_transformer(name)
    with trp.patch(model, trp.Exact(cuda_graph="off")):
        output_of(name, model)
        blocks = events.count("run")
        assert events.count("decide") == blocks >= 2
        events.clear()
        output_of(name, model)
        assert events == ["look"] * blocks + ["run"] * blocks


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


def block_call(model):
    x = torch.randn(1, 6, 128, generator=torch.Generator().manual_seed(4))
    rotary = torch.ones(1, 6, 1, 64), torch.zeros(1, 6, 1, 64)
    return lambda block: block(x, torch.ones(1, 3, 128), torch.ones(1, 6, 128), rotary)


@torch.no_grad()
def test_a_block_that_is_called_alone_looks_at_itself(events):
    model, plain = tiny_wan_transformer(), tiny_wan_transformer()
    call = block_call(model)
    with trp.patch(model):
        for block in model.blocks:
            call(block)
        output_of("wan", model)
        events.clear()
        for i in range(3):
            call(model.blocks[i % 2])
        assert events == ["look", "run"] * 3
        for m in (model, plain):
            m.blocks[1].norm1.eps = 10.0
        torch.testing.assert_close(call(model.blocks[1]), call(plain.blocks[1]))


@torch.no_grad()
def test_changes_after_a_forward_that_failed_count(events):
    model, plain = tiny_wan_transformer(), tiny_wan_transformer()
    with trp.patch(model, trp.Exact(cuda_graph="off")):
        expected = output_of("wan", model)
        handle = model.blocks[0].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            output_of("wan", model)
        handle.remove()
        for m in (model, plain):
            m.blocks[1].norm1.eps = 10.0
        ours = output_of("wan", model)
        assert not torch.equal(ours, expected)
        torch.testing.assert_close(ours, output_of("wan", plain))


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
        assert events == ["look"] * 2 + ["run"] * 2
