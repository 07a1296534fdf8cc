"""Offloading by diffusers and accelerate on a patched model of every family, with every kind of call."""

import accelerate
import pytest
import torch

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.pairs import assert_same_output, make_pair, output_of, row, variants
from tests.tiny_wan import tiny_call, tiny_wan_pipeline

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
