"""Offloading moves 8-bit weights like any parameters, and a GPU holds only the ones that it needs."""

import gc

import accelerate
import pytest
import torch

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.quantized_models import CONFIG
from tests.tiny_wan import output_of, tiny_wan_transformer
from turbo_rcm_patch.patching.weights.linear_8bit import PARTS, QuantizedLinear
from turbo_rcm_patch.patching.weights.quantize_linears import quantized_linears

BLOCKS = 8
LARGE = {"heads": 16, "head_dim": 128, "ffn_dim": 8192, "layers": BLOCKS, "dtype": torch.bfloat16}  # 64 MiB a block
KINDS = {
    "blocks": {"offload_type": "block_level", "num_blocks_per_group": 1, "use_stream": False},
    "blocks, stream": {"offload_type": "block_level", "num_blocks_per_group": 1, "use_stream": True},
    "leaves": {"offload_type": "leaf_level", "use_stream": False},
    "leaves, stream": {"offload_type": "leaf_level", "use_stream": True},
}


def bytes_in_8_bits(module):
    return sum(linear._parameters[name].nbytes for linear in quantized_linears(module) for name in PARTS)


def bytes_on_gpu(model):
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.is_cuda)


def allocated():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


@pytest.fixture
def on_card(monkeypatch):
    """Bytes of 8-bit weights that are on the GPU, each time that a linear gives its weight to a kernel."""
    found, quantized = [], QuantizedLinear.quantized

    def watched(linear):
        model = found[0]
        found.append(sum(part.nbytes for each in model for part in each if part.is_cuda))
        return quantized(linear)

    def watch(model):
        found[:] = [[[linear._parameters[name] for name in PARTS] for linear in quantized_linears(model)]]
        monkeypatch.setattr(QuantizedLinear, "quantized", watched)
        return found

    return watch


def resident():
    """Return the output of a quantized model on the GPU, and the memory that a call takes beside the weights."""
    model = tiny_wan_transformer(**LARGE)
    trp.patch(model, CONFIG)
    model.cuda()
    output_of(model, "cuda").cpu()
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    return output_of(model, "cuda").cpu(), torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
@pytest.mark.parametrize("first", ["patch", "offload"])
@pytest.mark.parametrize("kind", KINDS)
def test_group_offload_holds_two_blocks_at_most(kind, first, on_card):
    expected, activations = resident()
    empty = allocated()
    model = tiny_wan_transformer(**LARGE)
    if first == "offload":
        model.enable_group_offload(torch.device("cuda"), torch.device("cpu"), **KINDS[kind])
    trp.patch(model, CONFIG)
    if first == "patch":
        model.enable_group_offload(torch.device("cuda"), torch.device("cpu"), **KINDS[kind])
    block = bytes_in_8_bits(model.blocks[0])
    assert block > 2**25
    # The rest of the model (embeddings and the head) is a group of its own.
    others = sum(p.nbytes for p in model.parameters()) - bytes_in_8_bits(model)
    found = on_card(model)
    for _ in range(3):  # with streams the second call learns the order, and the third brings blocks ahead
        torch.cuda.reset_peak_memory_stats()
        assert relative_error(output_of(model, "cuda").cpu(), expected) <= 1e-3
        # A stream copies the next block while the last one's memory waits for its event.
        assert torch.cuda.max_memory_allocated() - empty - activations - others <= 3 * block
        assert allocated() - empty - others <= 2.1 * block
    assert 0 < max(found[1:]) <= 2 * block


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [False, True])
def test_accelerate_leaves_nothing_on_the_gpu(whole):
    expected, activations = resident()
    empty = allocated()
    model = tiny_wan_transformer(**LARGE)
    trp.patch(model, CONFIG)
    every = sum(p.nbytes for p in model.parameters())
    part = bytes_in_8_bits(model.blocks[0]) + every - bytes_in_8_bits(model)
    hook = None
    if whole:
        hook = accelerate.cpu_offload_with_hook(model, execution_device=torch.device("cuda"))[1]
    else:
        accelerate.cpu_offload(model, execution_device=torch.device("cuda"))
    torch.cuda.reset_peak_memory_stats()
    assert relative_error(output_of(model, "cuda").cpu(), expected) <= 1e-3
    assert torch.cuda.max_memory_allocated() - empty - activations <= (1.1 * every if whole else part)
    if whole:
        hook.offload()
    assert allocated() - empty <= 2**25 + 2**22  # cuBLAS keeps a workspace of 32 MiB
    assert bytes_on_gpu(model) == 0


@pytest.mark.parametrize("first", ["patch", "offload"])
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_a_group_moves_every_8_bit_tensor(kind, first):
    """A group moves the parameters of its modules, which shows without a GPU."""
    model = tiny_wan_transformer()
    cpu = torch.device("cpu")
    options = {"offload_type": kind, "num_blocks_per_group": 1 if kind == "block_level" else None}
    if first == "offload":
        model.enable_group_offload(cpu, cpu, **options)
    trp.patch(model, CONFIG)
    if first == "patch":
        model.enable_group_offload(cpu, cpu, **options)
    registries = [module._diffusers_hook for module in model.modules() if hasattr(module, "_diffusers_hook")]
    groups = [hook.group for each in registries if (hook := each.get_hook("group_offloading"))]
    moved = {id(p) for group in groups for module in group.modules for p in module.parameters()}
    assert quantized_linears(model)
    assert all(id(linear._parameters[name]) in moved for linear in quantized_linears(model) for name in PARTS)
