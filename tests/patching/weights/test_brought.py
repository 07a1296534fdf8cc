"""Layers under offloading and device maps run the kernels and the arithmetic of a model that rests on its device."""

import contextlib

import accelerate
import pytest
import torch

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.quantized_models import CPU, FREED, add_lora
from tests.tiny_families import tiny_family_inputs, tiny_family_transformer
from tests.tiny_wan import moved, output_of, tiny_wan_transformer
from turbo_rcm_patch.patching.journal import Journal
from turbo_rcm_patch.patching.weights.brought import between_hooks
from turbo_rcm_patch.patching.weights.linear_8bit import PARTS
from turbo_rcm_patch.patching.weights.quantize_linears import convert_weights
from turbo_rcm_patch.tiers import QUANTIZED

PLACES = {
    "leaf-level offloading": lambda model: model.enable_group_offload(CPU, CPU, offload_type="leaf_level"),
    "sequential offloading": lambda model: accelerate.cpu_offload(model, execution_device=CPU),
    "a device map": lambda model: accelerate.dispatch_model(model, device_map={"": "cpu"}, force_hooks=True),
}
places = pytest.mark.parametrize("place", PLACES)


@places
@pytest.mark.parametrize(
    ("tier", "dtype"),
    [
        ("quantized", torch.float32),
        ("quantized", torch.bfloat16),
        ("block_sparse", torch.float32),
        (trp.Quantized(quantize=("attention",)), torch.bfloat16),
    ],
)
def test_results_are_those_of_a_model_that_rests(tier, dtype, place):
    model, plain = tiny_wan_transformer(dtype=dtype, layers=1), tiny_wan_transformer(dtype=dtype, layers=1)
    unpatched = output_of(plain)
    patch = trp.patch(model, tier)
    expected = output_of(model)
    resting = [(row.kernel, row.reasons) for row in patch.rows()]
    PLACES[place](model)
    for _ in range(2):
        assert torch.equal(output_of(model), expected)
    if tier == "quantized":
        assert [(row.kernel, row.reasons) for row in patch.rows()] == resting
    patch.restore()
    assert torch.equal(output_of(model), unpatched)


@pytest.mark.parametrize(
    ("name", "place"), [*zip(["vace", "chronoedit", "anyflow, a timestep per frame"], PLACES, strict=True)]
)
def test_families_under_offloading(name, place):
    outputs = []
    for around in (lambda model: None, PLACES[place]):
        model = tiny_family_transformer(name, layers=2)
        trp.patch(model, "quantized")
        around(model)
        with torch.no_grad():
            outputs.append(model(**tiny_family_inputs(name, model))[0])
    assert torch.equal(*outputs)


@places
def test_a_users_hook_beside_the_one_that_brings_weights_is_called(place):
    model, plain = tiny_wan_transformer(layers=1), tiny_wan_transformer(layers=1)
    patch = trp.patch(model, "quantized")
    PLACES[place](model)
    for each in (model, plain):
        for path in ("attn1.to_q", "attn1.norm_k", "norm2", "ffn.net.2"):
            each.blocks[0].get_submodule(path).register_forward_hook(lambda module, inputs, output: -output)
    base = output_of(tiny_wan_transformer(layers=1))
    assert relative_error(output_of(model), output_of(plain)) <= QUANTIZED.limits.step
    assert relative_error(output_of(plain), base) > QUANTIZED.limits.step
    assert place == "a device map" or "hook" in patch.summary()


@places
def test_a_lora_under_offloading(place):
    model, plain = tiny_wan_transformer(), tiny_wan_transformer()
    patch = trp.patch(model, "quantized")
    for each in (model, plain):
        add_lora(each)
    PLACES[place](model)
    assert relative_error(output_of(model), output_of(plain)) <= QUANTIZED.limits.step
    # docs/tiers.md says so. This map has a hook on the model alone.
    assert ("LoRA layer: hook" in patch.summary()) == (place != "a device map")


@places
def test_offloading_of_freed_weights(place):
    """accelerate reads a state_dict, which has the originals. docs/tiers.md says what to take instead."""
    model = tiny_wan_transformer(layers=1)
    trp.patch(model, FREED)
    expected = output_of(model)
    refused = pytest.raises(RuntimeError, match=r"to_q\.weight: the values .* take trp\.fit or diffusers' group off")
    with contextlib.nullcontext() if place == "leaf-level offloading" else refused:
        PLACES[place](model)
    assert torch.equal(output_of(model), expected)


def two_linears():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))


@pytest.mark.parametrize("fails_at", ["the first", "the second", "the kernel"])
def test_an_error_takes_the_weights_back(fails_at):
    model = two_linears()
    accelerate.cpu_offload(model, execution_device=CPU)

    def failing(bring=lambda *_: None):
        def run(*arguments):
            bring(*arguments)
            raise MemoryError("none left")

        return run

    if fails_at != "the kernel":
        hook = model[fails_at == "the second"]._hf_hook
        hook.pre_forward = failing(hook.pre_forward)
    with pytest.raises(MemoryError):
        between_hooks(failing() if fails_at == "the kernel" else print, model, CPU)()
    assert all(parameter.is_meta for parameter in model.parameters())


def test_weights_that_hooks_leave_elsewhere_go_back():
    """accelerate's hook does not know the parts of a linear in 8 bits. "cpu:0" is a device like "cpu", but not it."""
    model = two_linears()
    convert_weights(Journal(), {"0": model[0], "1": model[1]}, rows_known=())
    accelerate.cpu_offload(model, execution_device=CPU)
    parts = [linear._parameters[name] for linear in model for name in PARTS]
    resting = [part.data_ptr() for part in parts]

    def run():
        assert not {part.data_ptr() for part in parts} & set(resting)

    between_hooks(run, model, torch.device("cpu", 0))()
    assert [part.data_ptr() for part in parts] == resting


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["leaves", "leaves, stream", "sequential"])
@pytest.mark.parametrize("tier", ["quantized", "block_sparse"])
def test_results_on_a_gpu_are_those_of_a_model_that_rests_there(tier, place):
    gpu = torch.device("cuda")
    model = tiny_wan_transformer(dtype=torch.bfloat16)
    trp.patch(model, tier)
    inputs = moved(tiny_family_inputs("wan", model), gpu)
    with torch.no_grad():
        expected = model.to(gpu)(**inputs)[0]
        model.to("cpu")
        if place == "sequential":
            accelerate.cpu_offload(model, execution_device=gpu)
        else:
            model.enable_group_offload(gpu, CPU, offload_type="leaf_level", use_stream="stream" in place)
        for _ in range(3):  # with a stream the second call learns the order, and the third brings layers ahead
            assert torch.equal(model(**inputs)[0], expected)
