"""Quantized models under diffusers' group offloading, enabled before the patch or after it."""

import contextlib

import pytest
import torch
from diffusers.hooks import group_offloading
from diffusers.hooks.group_offloading import GroupOffloadingConfig, GroupOffloadingType, ModuleGroup

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.quantized_models import CONFIG, CPU, ERROR, FREED
from tests.tiny_wan import output_of, tiny_wan_transformer
from turbo_rcm_patch.patching.weights.quantize_linears import quantized_linears

KINDS = {"blocks": ("block_level", 1), "leaves": ("leaf_level", None)}


class Backend:
    """A stand-in for a GPU's streams."""

    def __init__(self, device):
        pass

    def stream(self, stream):
        return contextlib.nullcontext()

    def current_stream(self):
        return self

    def synchronize(self):
        pass


@pytest.fixture(params=KINDS)
def offload(request, monkeypatch):
    """diffusers' offloading with streams, from the CPU to the CPU. Pinned tensors are copies, as on a GPU."""
    monkeypatch.setattr(group_offloading, "TorchDeviceBackend", Backend)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: False)
    kind, blocks = KINDS[request.param]
    config = GroupOffloadingConfig(
        onload_device=CPU,
        offload_device=CPU,
        offload_type=GroupOffloadingType(kind),
        num_blocks_per_group=blocks,
        non_blocking=True,
        record_stream=False,
        low_cpu_mem_usage=False,
        stream=Backend(CPU),
    )
    return lambda model: group_offloading._apply_group_offloading(model, config)


def groups_of(model):
    registries = [module._diffusers_hook for module in model.modules() if hasattr(module, "_diffusers_hook")]
    return [hook.group for registry in registries if (hook := registry.get_hook("group_offloading"))]


@pytest.fixture
def loaded(monkeypatch):
    """The groups that were brought and not taken back."""
    groups = set()
    bring, take = ModuleGroup.onload_, ModuleGroup.offload_
    monkeypatch.setattr(ModuleGroup, "onload_", lambda group: (groups.add(group), bring(group))[1])
    monkeypatch.setattr(ModuleGroup, "offload_", lambda group: (groups.discard(group), take(group))[1])
    return groups


@pytest.mark.parametrize("first", ["patch", "offload"])
def test_streams(offload, first, loaded):
    """Groups come ahead from the second call on, in the order of the first: no other leaves one behind."""
    model, plain = tiny_wan_transformer(), tiny_wan_transformer()
    expected = output_of(plain)
    if first == "offload":
        offload(model)
        assert torch.equal(output_of(model), expected)
    patch = trp.patch(model, CONFIG)
    if first == "patch":
        offload(model)
    for _ in range(3):
        assert 1e-3 < relative_error(output_of(model), expected) <= ERROR
        assert not loaded
    patch.restore()
    for _ in range(3):
        assert torch.equal(output_of(model), expected)
        assert not loaded
    with trp.patch(model, CONFIG):
        assert 1e-3 < relative_error(output_of(model), expected) <= ERROR
    assert torch.equal(output_of(model), expected)


def test_groups_let_go_of_freed_originals(offload):
    model = tiny_wan_transformer()
    offload(model)
    originals = [block.attn1.to_q.weight for block in model.blocks]
    trp.patch(model, FREED)
    assert not any(original in group.cpu_param_dict for group in groups_of(model) for original in originals)
    output_of(model)


def test_a_failed_patch_leaves_groups_as_they_were(offload, monkeypatch):
    model = tiny_wan_transformer()
    expected = output_of(model)
    offload(model)
    monkeypatch.setattr("turbo_rcm_patch.patching.apply.update_groups", failing_once(trp.patching.apply.update_groups))
    with pytest.raises(MemoryError):
        trp.patch(model, CONFIG)
    assert not quantized_linears(model)
    assert torch.equal(output_of(model), expected)


def failing_once(update):
    calls = []

    def replacement(model):
        calls.append(model)
        update(model)
        if len(calls) == 1:
            raise MemoryError("nothing left to pin")

    return replacement


def test_weights_on_disk_cannot_be_replaced(tmp_path):
    model = tiny_wan_transformer()
    expected = output_of(model)
    options = {"onload_device": CPU, "offload_type": "block_level", "num_blocks_per_group": 1}
    model.enable_group_offload(offload_to_disk_path=str(tmp_path), **options)
    with pytest.raises(trp.PatchError, match="cannot patch transformer: group offloading keeps its weights on disk"):
        trp.patch(model, CONFIG)
    assert torch.equal(output_of(model), expected)
    with trp.patch(model):
        assert relative_error(output_of(model), expected) <= 1e-5


def test_originals_cannot_come_to_disk(tmp_path):
    model = tiny_wan_transformer()
    patch = trp.patch(model, CONFIG)
    expected = output_of(model)
    options = {"onload_device": CPU, "offload_type": "block_level", "num_blocks_per_group": 1}
    model.enable_group_offload(offload_to_disk_path=str(tmp_path), **options)
    assert torch.equal(output_of(model), expected)
    with pytest.raises(trp.PatchError, match="cannot restore transformer: group offloading keeps its weights on disk"):
        patch.restore()
    assert patch.active
    assert torch.equal(output_of(model), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", ["patch", "offload"])
def test_streams_of_a_gpu(first, kind):
    level, blocks = KINDS[kind]
    options = {"offload_type": level, "num_blocks_per_group": blocks, "use_stream": True}
    model, expected = tiny_wan_transformer(), output_of(tiny_wan_transformer().cuda(), "cuda").cpu()
    if first == "offload":
        model.enable_group_offload(torch.device("cuda"), **options)
        assert relative_error(output_of(model, "cuda").cpu(), expected) <= 1e-5
    patch = trp.patch(model, CONFIG)
    if first == "patch":
        model.enable_group_offload(torch.device("cuda"), **options)
    for _ in range(3):
        assert 1e-3 < relative_error(output_of(model, "cuda").cpu(), expected) <= ERROR
    patch.restore()
    for _ in range(3):
        assert relative_error(output_of(model, "cuda").cpu(), expected) <= 1e-5
    assert not any(parameter.is_cuda for parameter in model.blocks.parameters())
