"""The search for what must leave 8 bits: it finds planted outliers, and verify passes with what it finds."""

import json
import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from tests.patching.weights.test_group_offload import groups_of, offload  # noqa: F401
from tests.tiny_wan import rcm_pipeline, tiny_call, tiny_wan_pipeline
from turbo_rcm_patch.bench import keep_out as module
from turbo_rcm_patch.bench.keep_out import find_keep_out
from turbo_rcm_patch.bench.report import keep_out_table, verification_table
from turbo_rcm_patch.bench.verify import check_outputs, verify
from turbo_rcm_patch.config import Quantized
from turbo_rcm_patch.patching import PatchError, patch
from turbo_rcm_patch.patching.weights.quantize_linears import quantized_linears
from turbo_rcm_patch.tiers import QUANTIZED, Tier

CONFIG = Quantized(vae=False)
CALL = tiny_call(guidance_scale=1.0, num_inference_steps=2)
ONE_STEP = CALL | {"num_inference_steps": 1}


def gelu_channel(model):
    """Make one channel of a GELU a thousand times as large: e4m3 has few bits left for the others."""
    up, down = model.blocks[0].ffn.net[0].proj, model.blocks[0].ffn.net[2]
    up.weight[5] *= 1000
    up.bias[5] *= 1000
    down.weight[:, 5] /= 1000


def key_channel(model):
    """Make one channel of the keys a hundred times as large, and of the queries as much smaller."""
    attn = model.blocks[0].attn1
    attn.norm_k.weight[5] *= 100
    attn.norm_q.weight[5] /= 100


def residual(model):
    """Let the last block's self-attention add 1e5 to one channel, beside which int8 loses the norm's others.

    The cross-attention's queries read only those, its scores are sharp, and its term depends on them.
    """
    block, channel = model.blocks[-1], 5
    C = len(block.norm2.weight)
    for parameter in (model.condition_embedder.time_proj.weight, model.condition_embedder.time_proj.bias):
        for row in (2, 4):  # the gate of the self-attention and the scale of the feed-forward are the block's own
            parameter.view(6, C, -1)[row, channel] = 0
    block.scale_shift_table[0, 2, channel] = 1
    block.attn1.to_out[0].bias[channel] = 1e5
    block.scale_shift_table[0, 4, channel] = -1
    block.norm2.bias.zero_()
    block.attn2.to_q.weight *= 1e5 / C**0.5
    block.attn2.to_q.weight[:, channel] = 0
    block.attn2.norm_q.weight *= 15
    block.attn2.to_v.bias.zero_()
    block.attn2.to_out[0].bias.zero_()


PLANTED = {
    gelu_channel: "blocks.0.ffn.net.2",
    key_channel: "blocks.0.attn1.processor",
    residual: "blocks.1.attn2.to_q",
}
# A GELU's scale is a bound, which grows with the channels of its input.
SIZES = {gelu_channel: {"heads": 8, "head_dim": 128, "layers": 1}, key_channel: {}, residual: {"heads": 4}}


def pipeline(*plants, variant="t2v", dtype=torch.float32, **sizes):
    pipe = rcm_pipeline(variant, dtype, **sizes)
    with torch.no_grad():
        for plant in plants:
            plant(pipe.transformer)
    return pipe


def test_a_planted_outlier_fails_without_the_list_and_the_list_names_it_alone():
    """test_verify_families.py plants one in a GELU."""
    pipe = pipeline(key_channel, dtype=torch.bfloat16)
    assert not verify(pipe, ONE_STEP, config=CONFIG).ok
    found = find_keep_out(pipe, ONE_STEP, config=CONFIG)
    assert found.ok
    assert found.names == (PLANTED[key_channel],)
    verification = verify(pipe, ONE_STEP, config=replace(CONFIG, keep=found.names))
    assert verification.ok, verification_table(verification)


def test_several_at_once_in_a_file(tmp_path):
    pipe = pipeline(key_channel, residual, heads=4)
    before = {name: tensor.clone() for name, tensor in pipe.transformer.state_dict().items()}
    found = find_keep_out(pipe, CALL, config=CONFIG)
    assert set(found.names) == {PLANTED[key_channel], PLANTED[residual]}
    assert [step.step for step in found.steps] == [1, 2]
    assert all(step.with_list < step.in_8_bits and step.with_list <= step.allowed for step in found.steps)
    for part in found.parts:
        assert part.alone.error > part.alone.allowed
        linear = None if part.name.endswith("processor") else pipe.transformer.get_submodule(part.name)
        saved = 0 if linear is None else 3 * linear.weight.numel() - 4 * len(linear.weight) - 4
        assert (part.nbytes, part.milliseconds) == (saved, None)

    path = tmp_path / "keep.json"
    path.write_text(json.dumps(found.to_dict()))
    config = Quantized(keep=path)
    assert config.keep == found.names
    with patch(pipe, config) as applied:
        assert len(quantized_linears(pipe.transformer)) == 20 - 1
        assert "named in keep" in applied.summary()
    assert config.keep.sizes == {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 64, "ffn_dim": 48}
    # The model is as it was.
    assert not quantized_linears(pipe.transformer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in pipe.transformer.state_dict().items())
    for submodule in pipe.transformer.modules():
        assert not submodule._forward_hooks
        assert not submodule._forward_pre_hooks
        assert "forward" not in vars(submodule)


@pytest.mark.parametrize(("count", "measured"), [(4, [1, 2, 3, 4]), (5, [1, 5])])
def test_all_of_a_few_steps_are_measured_and_of_more_the_first_and_the_last(count, measured):
    pipe = tiny_wan_pipeline(layers=1)  # rCM takes up to 4 steps
    found = find_keep_out(pipe, CALL | {"num_inference_steps": count}, config=CONFIG)
    assert [step.step for step in found.steps] == measured


def test_a_search_that_fails_leaves_the_model_as_it_was(monkeypatch):
    pipe, checks = pipeline(key_channel), []

    def fail_at_last(*args):
        checks.append(args)
        if len(checks) == 15:  # parts of both kinds have left 8 bits
            raise KeyboardInterrupt
        return check_outputs(*args)

    monkeypatch.setattr(module, "check_outputs", fail_at_last)
    with pytest.raises(KeyboardInterrupt):
        find_keep_out(pipe, ONE_STEP, config=CONFIG)
    assert not quantized_linears(pipe.transformer)
    assert not any(submodule._forward_hooks for submodule in pipe.transformer.modules())
    monkeypatch.undo()
    assert find_keep_out(pipe, ONE_STEP, config=CONFIG).names == (PLANTED[key_channel],)


@pytest.mark.parametrize("offload", ["blocks"], indirect=True)
def test_weights_that_stream_are_searched_and_stream_again(offload):  # noqa: F811
    pipe, plain = pipeline(key_channel), pipeline(key_channel)
    expected = find_keep_out(plain, ONE_STEP, config=CONFIG)
    offload(pipe.transformer)
    found = find_keep_out(pipe, ONE_STEP, config=CONFIG)
    assert found.parts == expected.parts
    assert found.steps == expected.steps
    for group in filter(lambda group: group.stream, groups_of(pipe.transformer)):  # they move the present weights
        assert set(group.cpu_param_dict) == {t for m in group.modules for t in (*m.parameters(), *m.buffers())}
    assert verify(pipe, ONE_STEP, config=replace(CONFIG, keep=found.names)).ok


def test_a_linear_comes_back_with_the_parameters_that_group_offloading_knows():
    pipe = pipeline()
    linear = pipe.transformer.blocks[0].ffn.net[2]
    with patch(pipe, CONFIG):
        before = dict(linear.named_parameters())
        part = module._Linear(linear)
        part.leave()
        part.come_back()
        after = dict(linear.named_parameters())
        assert before.keys() == after.keys()
        assert all(before[name] is after[name] for name in before)


def test_a_model_without_outliers_needs_no_list():
    found = find_keep_out(pipeline(layers=1), ONE_STEP, config=CONFIG)
    assert found.ok
    assert found.names == ()
    assert keep_out_table(found).splitlines()[0] == "nothing has to leave 8 bits"


@pytest.mark.gpu
@pytest.mark.parametrize("plant", PLANTED)
def test_planted_outliers_on_a_gpu_with_what_they_cost(plant):
    pipe = pipeline(plant, dtype=torch.bfloat16, **SIZES[plant]).to("cuda")
    assert not verify(pipe, ONE_STEP, config=CONFIG).ok
    found = find_keep_out(pipe, ONE_STEP, config=CONFIG)
    assert found.ok, keep_out_table(found)
    assert found.names == (PLANTED[plant],), keep_out_table(found)
    assert verify(pipe, ONE_STEP, config=replace(CONFIG, keep=found.names)).ok
    assert all(math.isfinite(part.milliseconds) for part in found.parts)  # other tests use the GPU meanwhile
    assert keep_out_table(found).splitlines()[0].endswith("ms")


def test_a_list_grows_from_the_one_that_is_given():
    pipe, given = pipeline(key_channel, layers=1), "blocks.0.ffn.*"
    found = find_keep_out(pipe, ONE_STEP, config=replace(CONFIG, keep=[given]))
    assert set(found.names) == {PLANTED[key_channel], "blocks.0.ffn.net.0.proj", "blocks.0.ffn.net.2"}
    with pytest.raises(PatchError, match=r"keep='blocks\.7' fits no module"):
        find_keep_out(pipe, ONE_STEP, config=replace(CONFIG, keep=["blocks.7"]))


def test_both_experts_share_the_names():
    pipe = pipeline(variant="wan22", layers=1)
    with torch.no_grad():
        key_channel(pipe.transformer_2)
    call = tiny_call("wan22", guidance_scale=1.0, num_inference_steps=3)
    found = find_keep_out(pipe, call, config=CONFIG)
    assert found.names == (PLANTED[key_channel],)
    assert found.parts[0].alone.where == "transformer_2.blocks.0"
    steps = [(step.transformer, step.step) for step in found.steps]
    assert steps == [("transformer", 1), ("transformer", 2), ("transformer_2", 3)]
    assert verify(pipe, call, config=replace(CONFIG, keep=found.names)).ok


def with_limits(**limits):
    """Return a configuration with other limits than the quantized tier's."""

    @dataclass(frozen=True, kw_only=True)
    class Other(Quantized):
        tier: ClassVar[Tier] = replace(QUANTIZED, limits=replace(QUANTIZED.limits, **limits))

    return Other(vae=False)


def test_parts_leave_until_the_step_keeps_its_limit_and_none_that_need_not():
    pipe = pipeline(layers=1)
    plain = find_keep_out(pipe, ONE_STEP, config=CONFIG)
    limit = 0.7 * max(step.in_8_bits for step in plain.steps)
    config = with_limits(step=limit)
    found = find_keep_out(pipe, ONE_STEP, config=config)
    assert found.ok
    assert 0 < len(found.names) < 11
    assert all(step.with_list <= step.allowed == limit for step in found.steps)
    for name in found.names:  # without any one of them the step is above its limit
        fewer = replace(CONFIG, keep=[other for other in found.names if other != name])
        errors = find_keep_out(pipe, ONE_STEP, config=fewer).steps
        assert max(step.with_list for step in errors) > limit


class Part:
    """A part that only tells where it is."""

    in_8_bits = True

    def leave(self):
        assert self.in_8_bits
        self.in_8_bits = False

    def come_back(self):
        assert not self.in_8_bits
        self.in_8_bits = True


@pytest.mark.parametrize(
    ("enough", "expected"),
    [({"small"}, {"small"}), ({"small", "large"}, {"small", "large"}), ({"middle"}, {"middle"}), ({"none"}, set())],
)
def test_parts_that_left_in_vain_come_back(enough, expected):
    """The limit is kept once all of ``enough`` have left. Alone, other parts err more, so these leave first."""
    parts = {name: [Part(), Part()] for name in ("small", "large", "middle")}
    search = module._Search(None, QUANTIZED.limits, parts)
    errors = {"small": 2, "large": 9, "middle": 5}
    search._alone = {name: module.Judged("", 1, module.BLOCK, error, 1) for name, error in errors.items()}
    search._settle(list(parts), lambda: module.Judged("", 1, module.BLOCK, 0 if enough <= set(search.left) else 2, 1))
    assert set(search.left) == expected
    assert {name for name, members in parts.items() if not any(m.in_8_bits for m in members)} == expected
    assert bool(search._unmet) == (not expected)


def test_what_no_list_can_fix_is_said():
    pipe = pipeline(dtype=torch.bfloat16)
    found = find_keep_out(pipe, ONE_STEP, config=with_limits(factor=0.0, block=1e-9))
    assert not found.ok
    assert found.names == ()
    assert {(judged.where, judged.step) for judged in found.unmet} == {
        (f"transformer.blocks.{block}", 1) for block in (0, 1)
    }
    assert "is over the allowed 1.000e-09 whatever leaves 8 bits" in keep_out_table(found)


def test_numbers_that_are_none_are_above_every_limit():
    pipe = pipeline(layers=1)
    with torch.no_grad():
        pipe.transformer.blocks[0].ffn.net[2].bias[3] = math.nan
    found = find_keep_out(pipe, ONE_STEP, config=CONFIG)
    assert not found.ok
    assert all(judged.ratio == math.inf for judged in found.unmet)
    assert found.unmet
