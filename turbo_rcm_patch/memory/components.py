"""The bytes of a pipeline's models, on the GPU and on the host, as the patch stores them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..config import Exact, PatchConfig
from ..kernels import RANK_STEP
from ..kernels.quantized import FP8
from ..patching.families import family_of
from ..patching.weights.quantize_linears import convertible_linears, quantized_linears
from ..plain import is_lora_layer

SCALE_BYTES = 4  # of a row's scale and of the norm, in fp32
STEPS = 4  # of a generation, to weigh what crosses the bus


@dataclass(frozen=True)
class Component:
    """A model of a pipeline, in bytes.

    Attributes:
        name: its name in the pipeline.
        weights: all its weights and buffers.
        blocks: those of its blocks, which can stream to the GPU one after the other. 0: it cannot stream.
        largest: the largest of its blocks.
        table: its token embeddings. They stay on the host if the blocks stream, because a prompt reads few rows.
        originals: weights before 8 bits, which the host keeps for `restore()`.
        passes: how often a generation runs its blocks.
        in_8_bits: True if linears have their weights in 8 bits.
    """

    name: str
    weights: int
    blocks: int = 0
    largest: int = 0
    table: int = 0
    originals: int = 0
    passes: int = 1
    in_8_bits: bool = False

    @property
    def outside(self) -> int:
        """The weights that stay on the GPU if the blocks stream."""
        return self.weights - self.blocks - self.table


def components_of(models: Mapping[str, nn.Module], config: PatchConfig) -> list[Component]:
    """Return the bytes of each of a pipeline's models."""
    return [component_of(name, model, config) for name, model in models.items()]


def components_both_ways(models: Mapping[str, nn.Module], config: PatchConfig) -> list[Component]:
    """Return the bytes of models that run unpatched and patched in turns.

    On the GPU the unpatched weights count. The host keeps these while the patched model runs in 8 bits.
    """
    patched = components_of(models, config)
    return [
        replace(one, originals=other.originals)
        for one, other in zip(components_of(models, Exact()), patched, strict=True)
    ]


def component_of(name: str, model: nn.Module, config: PatchConfig) -> Component:
    """Return the bytes of a model, whose weights may be on the meta device.

    config: the configuration that the transformers have, or will have.
    """
    sizes, originals, in_8_bits = _sizes(model, config)
    weights = _total(model, sizes)
    blocks = blocks_of(model)
    table = embeddings_of(model)
    return Component(
        name,
        weights,
        blocks=sum(_total(block, sizes) for block in blocks),
        largest=max((_total(block, sizes) for block in blocks), default=0),
        table=0 if table is None or not blocks else _total(table, sizes),
        originals=originals,
        passes=1 if family_of(model) is None else STEPS,
        in_8_bits=in_8_bits,
    )


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model that can stream: those beside each other that hold most of its weights."""
    holder = holder_of_blocks(model)
    if holder is None:
        return []
    return [block for child in holder.children() if isinstance(child, nn.ModuleList) for block in child]


def holder_of_blocks(model: nn.Module) -> nn.Module | None:
    """Return the module whose lists of blocks hold more than half of a model's weights. None: there is no such module.

    A model that runs by other methods than forward, such as a VAE, has none: diffusers brings blocks in forward alone.
    """
    if not hasattr(model, "forward") or hasattr(model, "decode"):
        return None
    whole = _count(model)
    for module in model.modules():
        lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
        if sum(map(_count, lists)) > whole / 2:
            return module
    return None


def embeddings_of(model: nn.Module) -> nn.Embedding | None:
    """Return a text encoder's token embeddings, or None."""
    get = getattr(model, "get_input_embeddings", None)
    found = get() if callable(get) and hasattr(model, "shared") else None
    return found if isinstance(found, nn.Embedding) else None


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _total(module: nn.Module, sizes: Mapping[int, int]) -> int:
    tensors: Iterable[torch.Tensor] = (*module.parameters(), *module.buffers())
    return sum(sizes[id(tensor)] for tensor in tensors)


def _lora_matrices(model: nn.Module) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the matrices of all LoRAs with their ranks."""
    for layer in filter(is_lora_layer, model.modules()):
        for name, first in layer.lora_A.items():
            for matrix in (first.weight, layer.lora_B[name].weight):
                yield matrix, first.weight.shape[0]


def _sizes(model: nn.Module, config: PatchConfig) -> tuple[dict[int, int], int, bool]:
    """Return the bytes of each tensor by its id, as the patch stores it, and those of the originals on the host.

    The last result is True if any linears are or will be in 8 bits.
    """
    sizes = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    done = quantized_linears(model)
    originals = sum(linear.original.nbytes for linear in done if not linear.is_freed)
    family = family_of(model)
    if family is None:
        return sizes, originals, bool(done)
    for matrix, rank in _lora_matrices(model):
        sizes[id(matrix)] += matrix.nbytes // rank * (-(-rank // RANK_STEP) * RANK_STEP)  # the patch's own copy
    if done:
        return sizes, originals, True
    linears = convertible_linears(model, family.linears(model), config).values()
    for linear in linears:
        originals += linear.weight.nbytes if config.restorable else 0
        sizes[id(linear.weight)] = linear.weight.numel() * FP8.itemsize + SCALE_BYTES * (linear.out_features + 1)
    return sizes, originals, bool(linears)
