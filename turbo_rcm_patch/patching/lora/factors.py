"""The low-rank product of LoRA adapters, as tensors that are prepared for the kernels.

    down   the A of all adapters, stacked                    read once for any number of adapters
    up     scale · B of all adapters, side by side           computed in fp32 and rounded once

When a matrix, a bias or a scale of an adapter changes, the tensors are computed again and written in place. PyTorch
does not count writes through a tensor's ``.data``. Code that makes such a write calls `Product.forget`. If the linear's
weight has 8 bits, down has 8 bits too, with the same relative error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ...kernels import RANK_STEP, LowRank, QuantizedWeight, quantize_weight
from ..weights.quantize_linears import is_quantized


class Adapter(NamedTuple):
    """One adapter of a LoRA layer, with its modules A and B.

    Its matrices and scale may be replaced, so every use reads them again, from the modules' dictionaries for speed.
    """

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
    """Return the rank of the product: the largest sum of ranks on one linear, rounded up to a multiple of RANK_STEP."""
    largest = max(sum(adapter.down.shape[0] for adapter in on_linear) for on_linear in adapters)
    return -(-max(largest, 1) // RANK_STEP) * RANK_STEP


class Product:
    """The sum that the active adapters add to linears with the same input. It is prepared at the first use.

    Args:
        linears: the linears inside the LoRA layers.
        adapters: the active adapters of each linear, possibly none.
        device: the device of the inputs.
        dtype: the dtype of the inputs, and of the factors unless the weights have 8 bits.
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
        self.rank = rank_of(adapters)  # the columns of up, and of down's result for each linear
        self._prepared: dict[str, torch.Tensor] = {}
        self._seen: list[object] = []
        self._read: list[object] = []  # kept alive, so that no other tensor gets the same id or address

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of up, and of down's result."""
        if not is_quantized(self._linears[0]):
            return self._dtype
        # The interpreter multiplies bf16 wrongly.
        return torch.float32 if self._device.type == "cpu" else torch.bfloat16

    @property
    def is_current(self) -> bool:
        """True if no adapter was deleted, moved to another device, or given a rank that does not fit."""
        each = [adapter for adapters in self.adapters for adapter in adapters]
        there = all(one.name in one.layer.scaling and one.down.device == self._device for one in each)
        return there and rank_of(self.adapters) == self.rank

    def forget(self) -> None:
        """Prepare the tensors again at the next use, in the same memory."""
        self._seen, self._read = [], []

    def release_if_moved(self) -> None:
        """Give all memory back if a matrix has left the device of the inputs."""
        if any(adapter.down.device != self._device for adapters in self.adapters for adapter in adapters):
            self._prepared = {}
            self.forget()

    def low_rank(self) -> LowRank:
        """Return the factors for the present matrices and scales."""
        self.bring_up_to_date()
        parts = self._prepared
        if "scale" not in parts:
            return LowRank(parts["down"], parts["up"])
        return LowRank(QuantizedWeight(parts["down"], parts["scale"]), parts["up"], parts["norm"])

    def biases(self) -> list[torch.Tensor | None]:
        """Return the bias of every linear, including its adapters' biases."""
        if not any(adapter.bias is not None for adapters in self.adapters for adapter in adapters):
            return [linear.bias for linear in self._linears]
        self.bring_up_to_date()
        return [self._prepared.get(f"bias {i}", linear.bias) for i, linear in enumerate(self._linears)]

    def bring_up_to_date(self) -> list[int]:
        """Prepare the tensors again if a matrix, a bias or a scale changed. Return the addresses of the tensors."""
        read = self._dependencies()
        seen = list(map(_state, read))
        if seen != self._seen:
            # Tensors made outside inference mode, which may be written to inside and outside it.
            with torch.inference_mode(False), torch.no_grad():
                self._write(dict(self._compute()))
            self._seen, self._read = seen, [read, [v.detach() for v in read if isinstance(v, torch.Tensor)]]
        return [tensor.data_ptr() for tensor in self._prepared.values()]

    def _dependencies(self) -> list[torch.Tensor | float]:
        """Return the tensors and numbers that the prepared tensors are computed from."""
        read = []
        for linear, adapters in self._each():
            for layer, name, first, second in adapters:  # not by properties: this runs in every projection
                bias = second._parameters["bias"]
                read += (first._parameters["weight"], second._parameters["weight"], layer.scaling[name])
                if bias is not None:
                    read += (bias,) if linear.bias is None else (bias, linear.bias)
            if is_quantized(linear):
                read.append(linear.quantized().scale)
        return read

    def _write(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write into the memory of the tensors prepared before, because CUDA graphs read it."""
        before = self._prepared
        if [t.shape for t in before.values()] != [t.shape for t in tensors.values()]:
            self._prepared = tensors
            return
        for name, tensor in tensors.items():
            before[name].copy_(tensor)

    def _compute(self) -> Iterator[tuple[str, torch.Tensor]]:
        down, ups = self._down(), [self._up(*each) for each in self._each()]
        if is_quantized(self._linears[0]):
            weights = [linear.quantized() for linear in self._linears]
            low = quantize_weight(down, weights[0].format)
            yield from (("down", low.values), ("scale", low.scale), ("norm", _bound(low, ups)))
            # In units of the weights' row scales. On the CPU fp32: the interpreter multiplies bf16 wrongly.
            up = torch.cat([up / weight.scale[:, None] for up, weight in zip(ups, weights, strict=True)])
            yield "up", up.to(self.dtype)
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
        """Return [G·R, K]: for each of G linears its adapters' A, padded with zeros to rank R."""
        K = self._linears[0].in_features
        down = torch.zeros(len(self._linears), self.rank, K, dtype=self._wide, device=self._device)
        for part, adapters in zip(down, self.adapters, strict=True):
            first = 0
            for adapter in adapters:
                rows = adapter.down.shape[0]
                part[first : first + rows] = adapter.down
                first += rows
        return down.flatten(0, 1)

    def _up(self, linear: nn.Linear, adapters: Sequence[Adapter]) -> torch.Tensor:
        """Return [N, R]: the scaled B of one linear's adapters, padded with zeros."""
        up = torch.zeros(linear.out_features, self.rank, dtype=self._wide, device=self._device)
        first = 0
        for adapter in adapters:
            columns = adapter.up.shape[1]
            up[:, first : first + columns] = adapter.up.to(self._wide) * adapter.scale
            first += columns
        return up


def _bound(down: QuantizedWeight, ups: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return an upper bound of the L2 norm of every row of ``up @ down``: ‖u down‖ ≤ ‖u‖ ‖down‖ (Frobenius norm)."""
    largest = torch.stack([up.norm(dim=1).amax() for up in ups]).amax()
    return (largest * down.dequantize().norm()).float()


def _state(value: torch.Tensor | float) -> object:
    """Return a value that differs once a tensor was replaced or written to, or a number changed."""
    if not isinstance(value, torch.Tensor):
        return value
    version = object() if value.is_inference() else value._version  # inference tensors count no writes
    return id(value), value.data_ptr(), version
