"""Offloading by diffusers and accelerate on a patched model of every family, with every kind of call."""

from functools import partial

import accelerate
import pytest
import torch
from diffusers import ModelMixin

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.pairs import assert_same_output, blocks_of, make_pair, output_of, row
from tests.tiny_families import EACH_MODEL
from tests.tiny_wan import frames_of, moved, tiny_transformer_inputs, tiny_wan_pipeline, tiny_wan_transformer

CPU = torch.device("cpu")
OUT = ("feed_forward", "linear + skip")


# (how to offload, why a step is not fused then)
OFFLOADS = [
    (partial(ModelMixin.enable_group_offload, onload_device=CPU, num_blocks_per_group=1), "cpu tensors"),
    (partial(ModelMixin.enable_group_offload, onload_device=CPU, offload_type="leaf_level"), "hook group_offloading"),
    (partial(accelerate.cpu_offload, execution_device=CPU), "hook AlignDevicesHook"),
    (partial(accelerate.cpu_offload_with_hook, execution_device=CPU), "cpu tensors"),
]
PAIRS = [
    (name, *OFFLOADS[(index + more) % 4])
    for index, name in enumerate(EACH_MODEL)
    for more in (0, 1)
    # Wan-Animate-2 makes tensors on the device of a weight, which this one takes away.
    if not (name.startswith("animate 2") and (index + more) % 4 == 2)
]


@pytest.mark.parametrize(("name", "offload", "reason"), PAIRS)
def test_every_family_and_kind_of_call(name, offload, reason):
    """Wan itself is in change_table.py."""
    patched, plain, patch = make_pair(name)
    offload(patched)
    assert_same_output(name, patched, plain)
    assert row(patch, *OUT).reasons == {reason: len(blocks_of(patched))}
    patch.restore()
    assert torch.equal(output_of(name, patched), output_of(name, plain))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "offload", ["enable_model_cpu_offload", "enable_group_offload", "enable_sequential_cpu_offload"]
)
def test_offload_on_a_gpu(offload):
    patched, plain = tiny_wan_pipeline(), tiny_wan_pipeline()
    options = {"onload_device": torch.device("cuda"), "offload_type": "leaf_level"} if "group" in offload else {}
    patch = trp.patch(patched)
    getattr(patched, offload)(**options)
    plain.to("cuda")
    assert relative_error(frames_of(patched), frames_of(plain)) <= 1e-4
    assert "cuda" in str(patch.summary()) or "sm_" in patch.summary()
    patch.restore()
    assert relative_error(frames_of(patched), frames_of(plain)) <= 1e-4


def test_the_summary_shows_the_last_call_while_weights_are_away():
    """A block's weights are on the meta device between calls, and no module in it has a hook."""
    model = tiny_wan_transformer(layers=1)
    offload = accelerate.hooks.AlignDevicesHook(execution_device=CPU, offload=True, place_submodules=True)
    patch = trp.patch(model)
    resident = row(patch, *OUT)
    accelerate.hooks.add_hook_to_module(model.blocks[0], offload)
    assert {parameter.device.type for parameter in model.blocks[0].parameters()} == {"meta"}
    assert "not called yet" in patch.summary()
    with torch.no_grad():
        model(**tiny_transformer_inputs(model))
    assert row(patch, *OUT) == resident
    assert "the table shows the last call" in patch.summary()


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["exact", "quantized"])
def test_the_summary_with_block_level_offloading_is_the_resident_one(tier):
    model = tiny_wan_transformer(layers=2).to("cuda", torch.bfloat16)
    patch = trp.patch(model, tier)
    inputs = moved(tiny_transformer_inputs(model), "cuda")
    with torch.no_grad():
        model(**inputs)
        resident = row(patch, *OUT)
        model.enable_group_offload(torch.device("cuda"), num_blocks_per_group=1, use_stream=True)
        model(**inputs)
    assert {parameter.device.type for parameter in model.blocks[0].parameters()} == {"cpu"}
    assert row(patch, *OUT) == resident
