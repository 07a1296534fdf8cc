"""Offloading by diffusers and accelerate on a patched model of every family, with every kind of call."""

import accelerate
import pytest
import torch

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.pairs import assert_same_output, make_pair, output_of, row, variants
from tests.tiny_wan import tiny_call, tiny_transformer_inputs, tiny_wan_pipeline, tiny_wan_transformer

CPU = torch.device("cpu")
OUT = ("feed_forward", "linear + skip")


@pytest.mark.parametrize(
    "options", [{"offload_type": "block_level", "num_blocks_per_group": 1}, {"offload_type": "leaf_level"}]
)
@variants
def test_group_offload(name, options):
    patched, plain, patch = make_pair(name)
    patched.enable_group_offload(onload_device=CPU, offload_device=CPU, **options)
    assert_same_output(name, patched, plain)
    reason = "hook group_offloading" if options["offload_type"] == "leaf_level" else "cpu tensors"
    assert row(patch, *OUT).reasons == {reason: len(patched.blocks)}
    patch.restore()
    assert torch.equal(output_of(name, patched), output_of(name, plain))


@pytest.mark.parametrize(
    ("offload", "reason"),
    [(accelerate.cpu_offload, "hook AlignDevicesHook"), (accelerate.cpu_offload_with_hook, "cpu tensors")],
)
@variants
def test_offload_by_accelerate(name, offload, reason):
    """Layer by layer, and the whole model."""
    patched, plain, patch = make_pair(name)
    offload(patched, execution_device=CPU)
    assert_same_output(name, patched, plain)
    assert row(patch, *OUT).reasons == {reason: len(patched.blocks)}
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
    generate = lambda pipe: pipe(**tiny_call(generator=torch.Generator().manual_seed(3))).frames  # noqa: E731
    assert relative_error(generate(patched), generate(plain)) <= 1e-4
    assert "cuda" in str(patch.summary()) or "sm_" in patch.summary()
    patch.restore()
    assert relative_error(generate(patched), generate(plain)) <= 1e-4


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
    inputs = {
        name: value.to("cuda") if torch.is_tensor(value) else value
        for name, value in tiny_transformer_inputs(model).items()
    }
    with torch.no_grad():
        model(**inputs)
        resident = row(patch, *OUT)
        model.enable_group_offload(torch.device("cuda"), num_blocks_per_group=1, use_stream=True)
        model(**inputs)
    assert {parameter.device.type for parameter in model.blocks[0].parameters()} == {"cpu"}
    assert row(patch, *OUT) == resident
