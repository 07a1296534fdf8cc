"""Tensors that share allocations keep their values, and waste little."""

import pytest
import torch
from torch import nn

from tests.tiny_wan import tiny_wan_transformer
from turbo_rcm_patch.memory import pinned
from turbo_rcm_patch.memory.pinned import pin


def storages(tensors):
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}


def test_values_stay_and_a_tensor_is_moved_once(monkeypatch):
    monkeypatch.setattr(pinned, "SLAB", 1 << 16)
    model = tiny_wan_transformer(dtype=torch.bfloat16)
    model.blocks[0].register_buffer("scale", torch.tensor(3.0))
    model.blocks[0].register_buffer("bytes", torch.arange(7, dtype=torch.int8))
    tensors = [*model.parameters(), *model.buffers(), *model.parameters()]
    before = {id(tensor): tensor.detach().clone() for tensor in tensors}
    pin(tensors, pinned=False)
    for tensor in tensors:
        assert tensor.dtype == before[id(tensor)].dtype
        assert torch.equal(tensor, before[id(tensor)])
    assert len(storages(tensors)) < len(before) / 4
    assert sum(storages(tensors).values()) <= 1.15 * sum(tensor.nbytes for tensor in before.values())


def test_weights_of_a_real_size_waste_less_than_a_tenth(monkeypatch):
    """Those of ten of Wan 14B's blocks in 8 bits, at a thousandth of the size."""
    monkeypatch.setattr(pinned, "SLAB", (1 << 29) // 1024)
    sizes = 10 * [*[26_214_400] * 8, *[70_778_880] * 2]
    tensors = [torch.full((size // 1024,), index, dtype=torch.int8) for index, size in enumerate(sizes)]
    pin(tensors, pinned=False)
    assert all((tensor == index).all() for index, tensor in enumerate(tensors))
    taken = sum(1 << (size - 1).bit_length() for size in storages(tensors).values())  # PyTorch rounds up
    assert taken <= 1.1 * sum(tensor.nbytes for tensor in tensors)


def test_the_memory_is_the_hosts_with_another_default_device():
    tensor = torch.arange(3.0)
    with torch.device("meta"):
        pin([tensor], pinned=False)
    assert tensor.tolist() == [0, 1, 2]


def test_others_stay_where_they_are():
    class Packed(nn.Parameter):
        pass

    transposed, packed = torch.ones(3, 4).T, Packed(torch.ones(5))
    empty = torch.empty(0)
    before = [tensor.data_ptr() for tensor in (transposed, packed, empty)]
    pin([transposed, packed, empty], pinned=False)
    assert [tensor.data_ptr() for tensor in (transposed, packed, empty)] == before


@pytest.mark.gpu
def test_pinned_memory_is_what_is_asked_for():
    tensors = [nn.Parameter(torch.full((5120, 5120), index, dtype=torch.int8), False) for index in range(30)]
    whole = sum(tensor.nbytes for tensor in tensors)

    def pinned_bytes():
        return torch.cuda.host_memory_stats()["allocated_bytes.current"]

    before = pinned_bytes()
    one_by_one = [tensor.pin_memory() for tensor in tensors]
    assert pinned_bytes() - before >= 1.2 * whole  # what `pin` is for
    del one_by_one
    before = pinned_bytes()
    pin(tensors)
    taken = pinned_bytes() - before
    assert all(tensor.is_pinned() and (tensor == index).all() for index, tensor in enumerate(tensors))
    assert all(tensor.pin_memory().data_ptr() == tensor.data_ptr() for tensor in tensors)  # diffusers copies nothing
    assert taken <= 1.1 * whole
