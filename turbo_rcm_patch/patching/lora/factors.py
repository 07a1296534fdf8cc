"""The product of low rank of LoRA adapters, as tensors that are prepared for the kernels.

    down   the A of all adapters, one below the other        read once, however many there are
    up     their scale · B, side by side                     in fp32, and rounded once

They are written anew, in place, when a matrix, a bias or a scale of an adapter has changed. Only a write through a
tensor's ``.data`` is not seen, as PyTorch does not count it; whoever knows of one calls `Product.forget`. Beside 8-bit
weights down has 8 bits as well, which errs as those do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ...kernels import RANK_STEP, LowRank, QuantizedWeight, quantize_weight
from ..weights.convert import is_quantized, quantized_weight


class Adapter(NamedTuple):
    """One adapter of a LoRA layer, and its modules A and B. Their matrices and its scale are read anew at each use, as
    they may be replaced, and from the modules' dictionaries, which is fast."""

    layer: nn.Module
    name: str
    first: nn.Linear
    second: nn.Linear

    @property
    def down(self) -> torch.Tensor:
        return self.first._parameters["weight"]

    @property
    def up(self) -> torch.Tensor:
        return self.second._parameters["weight"]

    @property
    def bias(self) -> torch.Tensor | None:
        return self.second._parameters["bias"]

    @property
    def scale(self) -> float | torch.Tensor:
        return self.layer.scaling[self.name]


def rank_of(adapters: Sequence[Sequence[Adapter]]) -> int:
    """The rank that all linears of one input get: the largest sum of any one's adapters, filled up to whole steps."""
    largest = max(sum(adapter.down.shape[0] for adapter in of_linear) for of_linear in adapters)
    return -(-max(largest, 1) // RANK_STEP) * RANK_STEP


class Product:
    """What the active adapters of some linears of one input add, prepared when it is first asked for.

    adapters: of each linear, perhaps none. dtype: of the inputs, and of the factors beside weights that have it.
    """

    def __init__(
        self,
        linears: Sequence[nn.Linear],
        adapters: Sequence[Sequence[Adapter]],
        device: torch.device,
        dtype: torch.dtype,
    ):
        self._linears, self.adapters, self._device, self._dtype = linears, adapters, device, dtype
        self._wide = torch.promote_types(dtype, torch.float32)
        self._rank = rank_of(adapters)
        self._prepared: dict[str, torch.Tensor] = {}
        self._seen: list[object] = []
        self._read: list[object] = []  # kept, so that nothing else can pass for one of them, nor for its memory

    @property
    def is_current(self) -> bool:
        """Whether no adapter was deleted, moved to another device, or given a rank for which there is no room."""
        each = [adapter for adapters in self.adapters for adapter in adapters]
        there = all(one.name in one.layer.scaling and one.down.device == self._device for one in each)
        return there and rank_of(self.adapters) == self._rank

    def forget(self) -> None:
        """Prepare anew at the next use, in the same memory."""
        self._seen, self._read = [], []

    def release_if_moved(self) -> None:
        """Give all memory back where the matrices have left the device that they were prepared on."""
        if any(adapter.down.device != self._device for adapters in self.adapters for adapter in adapters):
            self._prepared = {}
            self.forget()

    def low_rank(self) -> LowRank:
        """The factors as of now."""
        self.bring_up_to_date()
        parts = self._prepared
        if "scale" not in parts:
            return LowRank(parts["down"], parts["up"])
        return LowRank(QuantizedWeight(parts["down"], parts["scale"]), parts["up"], parts["norm"])

    def biases(self) -> list[torch.Tensor | None]:
        """Of every linear, with those of its adapters."""
        if not any(adapter.bias is not None for adapters in self.adapters for adapter in adapters):
            return [linear.bias for linear in self._linears]
        self.bring_up_to_date()
        return [self._prepared.get(f"bias {i}", linear.bias) for i, linear in enumerate(self._linears)]

    def bring_up_to_date(self) -> list[int]:
        """Prepare anew where a matrix, a bias or a scale changed; returns where the prepared tensors lie."""
        read = list(self._dependencies())
        seen = [_state(value) for value in read]
        if seen != self._seen:
            # Ordinary tensors, which may be written to with and without inference mode.
            with torch.inference_mode(False), torch.no_grad():
                self._write(dict(self._compute()))
            self._seen, self._read = seen, [read, [value.detach() for value in filter(_is_tensor, read)]]
        return [tensor.data_ptr() for tensor in self._prepared.values()]

    def _dependencies(self) -> Iterator[torch.Tensor | float]:
        for linear, adapters in zip(self._linears, self.adapters, strict=True):
            for adapter in adapters:
                yield from (adapter.down, adapter.up, adapter.scale)
                if adapter.bias is not None:
                    yield from filter(_is_tensor, (adapter.bias, linear.bias))
            if is_quantized(linear):
                yield quantized_weight(linear).scale

    def _write(self, tensors: dict[str, torch.Tensor]) -> None:
        """Into the memory of those prepared before, where CUDA graphs find them."""
        before = self._prepared
        if [t.shape for t in before.values()] != [t.shape for t in tensors.values()]:
            self._prepared = tensors
            return
        for name, tensor in tensors.items():
            before[name].copy_(tensor)

    def _compute(self) -> Iterator[tuple[str, torch.Tensor]]:
        down, ups = self._down(), [self._up(*each) for each in self._each()]
        if is_quantized(self._linears[0]):
            weights = [quantized_weight(linear) for linear in self._linears]
            low = quantize_weight(down, weights[0].format)
            yield from (("down", low.values), ("scale", low.scale), ("norm", _bound(low, ups)))
            # In units of the weights' rows. The interpreter multiplies bf16 wrongly.
            up = torch.cat([up / weight.scale[:, None] for up, weight in zip(ups, weights, strict=True)])
            yield "up", up.to(torch.float32 if up.device.type == "cpu" else torch.bfloat16)
        else:
            yield from (("down", down.to(self._dtype)), ("up", torch.cat(ups).to(self._dtype)))
        for i, (linear, adapters) in enumerate(self._each()):
            added = [adapter.scale * adapter.bias.to(self._wide) for adapter in adapters if adapter.bias is not None]
            if added:
                own = [] if linear.bias is None else [linear.bias.to(self._wide)]
                yield f"bias {i}", sum([*own, *added]).to(self._dtype)

    def _each(self) -> Iterator[tuple[nn.Linear, Sequence[Adapter]]]:
        return zip(self._linears, self.adapters, strict=True)

    def _down(self) -> torch.Tensor:
        """[G·R, K]: of each linear its adapters' A, and zeros."""
        K = self._linears[0].in_features
        down = torch.zeros(len(self._linears), self._rank, K, dtype=self._wide, device=self._device)
        for part, adapters in zip(down, self.adapters, strict=True):
            first = 0
            for adapter in adapters:
                rows = adapter.down.shape[0]
                part[first : first + rows] = adapter.down
                first += rows
        return down.flatten(0, 1)

    def _up(self, linear: nn.Linear, adapters: Sequence[Adapter]) -> torch.Tensor:
        """[N, R]: of a linear its adapters' scaled B, and zeros."""
        up = torch.zeros(linear.out_features, self._rank, dtype=self._wide, device=self._device)
        first = 0
        for adapter in adapters:
            columns = adapter.up.shape[1]
            up[:, first : first + columns] = adapter.up.to(self._wide) * adapter.scale
            first += columns
        return up


def _bound(down: QuantizedWeight, ups: Sequence[torch.Tensor]) -> torch.Tensor:
    """No row of a product of down and one of ups has a larger L2 norm: ‖u down‖ ≤ ‖u‖ ‖down‖, of Frobenius."""
    largest = torch.stack([up.norm(dim=1).amax() for up in ups]).amax()
    return (largest * down.dequantize().norm()).float()


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _state(value: torch.Tensor | float) -> object:
    """What differs when a tensor was replaced or written to, or a number is another one."""
    if not _is_tensor(value):
        return value
    version = object() if value.is_inference() else value._version  # of such nobody counts what is written
    return id(value), value.data_ptr(), version
