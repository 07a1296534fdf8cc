"""FSDP2 (fully_shard) over two processes takes the 8-bit weights of a patched transformer like any parameters."""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.ranks import RANKS, in_cpu_ranks, in_gpu_ranks, shard
from tests.tiny_wan import moved, tiny_transformer_inputs, tiny_wan_transformer
from turbo_rcm_patch.patching.weights.linear_8bit import VALUES
from turbo_rcm_patch.patching.weights.quantize_linears import is_quantized

OF_INT8_RAISES = "fully_shard of torch 2.11 raises for int8 parameters" if torch.__version__.startswith("2.11.") else ""


def model_and_inputs(device="cpu"):
    """Return a model and its inputs, in bf16 with some parts in fp32, as diffusers loads it.

    fully_shard takes one dtype only, if parameters want gradients.
    """
    model = tiny_wan_transformer(dtype=torch.bfloat16).to(device).requires_grad_(False)
    inputs = tiny_transformer_inputs(model)
    return model, moved(inputs, device)


def values_8bit(model):
    """The 8-bit parameters of a model, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if name.endswith(VALUES)}


@torch.no_grad()
def outputs(model, inputs):
    """Return the outputs of two calls. The second uses the plans that the first made."""
    return [model(**inputs)[0].cpu() for _ in range(2)]


# What each rank runs, in a process of its own


def on_device(device, rank):
    if device == "cuda":
        torch.cuda.set_device(rank)
    mesh = init_device_mesh(device, (RANKS,))
    return {"sharded": sharded(mesh), "cast": cast_when_gathered(mesh)}


def sharded(mesh):
    """Return a sharded model's outputs, its own part of the 8-bit values, and the refusal of restore()."""
    model, inputs = model_and_inputs(mesh.device_type)
    patch = trp.patch(model, "quantized")
    shard(model, mesh)
    results = {"outputs": outputs(model, inputs)}
    local = {name: values.to_local() for name, values in values_8bit(model).items()}
    results["held"] = {name: (values.dtype, values.numel()) for name, values in local.items()}
    with pytest.raises(trp.PatchError) as refusal:
        patch.restore()
    results |= {"refusal": str(refusal.value), "active": patch.active, "afterwards": outputs(model, inputs)}
    return results | {"linears": sum(map(is_quantized, model.modules()))}


def cast_when_gathered(mesh):
    """The errors of models whose parameters fully_shard casts, by dtype."""
    errors = {}
    for dtype in (torch.bfloat16, torch.float32):
        model, inputs = model_and_inputs(mesh.device_type)
        trp.patch(model, "quantized")
        shard(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        with pytest.raises(RuntimeError) as error:
            outputs(model, inputs)
        errors[dtype] = str(error.value)
    return errors


# Checks of the ranks' results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    if OF_INT8_RAISES:
        pytest.skip(OF_INT8_RAISES)
    return in_cpu_ranks(partial(on_device, "cpu"), tmp_path_factory.mktemp("ranks"))


def assert_computes_the_same(ranks, device="cpu"):
    model, inputs = model_and_inputs(device)
    trp.patch(model, "quantized")
    expected = outputs(model, inputs)[0]
    for results in ranks:
        for output in results["sharded"]["outputs"] + results["sharded"]["afterwards"]:
            assert relative_error(output, expected) <= 1e-6


def test_a_sharded_model_computes_the_same(ranks):
    assert_computes_the_same(ranks)


def test_each_rank_holds_half_of_the_8_bit_values(ranks):
    model, _ = model_and_inputs()
    trp.patch(model, "quantized")
    whole = {name: (values.dtype, values.numel() // RANKS) for name, values in values_8bit(model).items()}
    assert len(whole) == 20
    assert all(results["sharded"]["held"] == whole for results in ranks)


def test_restore_refuses_before_anything_changes(ranks):
    for results in ranks:
        after = results["sharded"]
        assert "8-bit weights are sharded, and fully_shard cannot be undone; load the model again" in after["refusal"]
        assert after["active"]
        assert after["linears"] == 20


def test_a_cast_of_the_8_bit_weights_is_refused_with_the_remedy(ranks):
    for results in ranks:
        for message in results["cast"].values():
            assert "without MixedPrecisionPolicy(param_dtype=...)" in message


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")
@pytest.mark.skipif(bool(OF_INT8_RAISES), reason=OF_INT8_RAISES)
def test_two_gpus_compute_the_same_as_one(tmp_path):
    assert_computes_the_same(in_gpu_ranks(partial(on_device, "cuda"), tmp_path), "cuda")
