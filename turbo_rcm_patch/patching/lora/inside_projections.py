"""PEFT's LoRA layers inside a projection: what all active adapters of some linears of one input add to them,
``Σ scale · (x Aᵀ) Bᵀ``, runs as one product of low rank (kernels/linear/low_rank.py, prepared in factors.py).

What does not follow from A, B, biases and scales alone (DoRA and its like, dropout in training, hooks) is left to the
layers themselves, as is all under autograd and torch.compile.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels import LowRank, QuantizedWeight, reference
from ...plain import hook_on, is_lora_layer, linear_of, why_not_plain
from ..weights.convert import is_quantized
from .factors import Adapter, Product, rank_of

LIVE = frozenset({"scaling"})  # attributes of LoRA layers that are read at each use


def why_not_inside(layer: nn.Module) -> str | None:
    """Why what a LoRA layer adds does not follow from its matrices and scales, in a few words; None when it does."""
    if layer.merged or layer.disable_adapters:
        return "to be merged or unmerged"
    reason = hook_on(layer)
    for name in _active(layer):
        variant, dropout = getattr(layer, "lora_variant", {}).get(name), layer.lora_dropout[name]
        reason = reason or (None if variant is None else type(variant).__name__)
        reason = reason or next(filter(None, (why_not_plain(m, nn.Linear) for m in _matrices(layer, name))), None)
        reason = reason or ("bias of a lora_A" if _matrices(layer, name)[0].bias is not None else None)
        reason = reason or hook_on(dropout) or ("dropout" if dropout.training and type(dropout) is nn.Dropout else None)
    return reason or ("fan_in_fan_out" if layer.fan_in_fan_out else None)


def _active(layer: nn.Module) -> list[str]:
    """The adapters that a LoRA layer applies."""
    return [name for name in layer.active_adapters if name in layer.lora_A]


def _matrices(layer: nn.Module, name: str) -> tuple[nn.Linear, nn.Linear]:
    return layer.lora_A[name], layer.lora_B[name]


def _adapters(module: nn.Module) -> list[Adapter]:
    """Those that a LoRA layer applies; none of another module."""
    if not is_lora_layer(module):
        return []
    return [Adapter(module, name, *_matrices(module, name)) for name in _active(module)]


class Linears:
    """Linears of one input, read past the LoRA layers around them, and what those add.

    linears: the modules whose weights are read. reason: why LoRA layers must be called instead, if so: then the linears
    are those layers.
    """

    def __init__(self, linears: Sequence[nn.Module], reason: str | None = None, product: Product | None = None):
        self.linears, self.reason, self._product = list(linears), reason, product

    @property
    def first(self) -> nn.Module:
        return self.linears[0]

    @property
    def are_quantized(self) -> bool:
        return all(map(is_quantized, self.linears))

    @property
    def are_alike(self) -> bool:
        """Whether all have one shape, and all a bias or none."""
        own = [()] * len(self.linears) if self._product is None else self._product.adapters
        each = zip(self.linears, own, strict=True)
        return len({(one.out_features, one.in_features, _has_bias(one, adapters)) for one, adapters in each}) == 1

    @property
    def has_lora(self) -> bool:
        return self._product is not None

    def named(self, kernel: str) -> str:
        """A kernel's name for the summary."""
        return f"{kernel} + LoRA" if self.has_lora else kernel

    def biases(self) -> list[torch.Tensor | None]:
        """Of every linear, with those of its LoRA layer."""
        return [linear.bias for linear in self.linears] if self._product is None else self._product.biases()

    def low_rank(self) -> LowRank | None:
        """Of all linears, as of now; None without LoRA."""
        return None if self._product is None else self._product.low_rank()

    def low_ranks(self) -> list[LowRank | None]:
        """Of each linear."""
        whole, count = self.low_rank(), len(self.linears)
        if whole is None:
            return [None] * count
        down, up, norm = whole
        ups = up.split([linear.out_features for linear in self.linears])
        if not isinstance(down, QuantizedWeight):
            return [LowRank(*factors, norm) for factors in zip(down.chunk(count), ups, strict=True)]
        downs = map(QuantizedWeight, down.values.chunk(count), down.scale.chunk(count))
        return [LowRank(*factors, norm) for factors in zip(downs, ups, strict=True)]

    def each(self, x: torch.Tensor) -> list[torch.Tensor]:
        """``x Wᵀ + b`` and what LoRA adds to it, of x [..., K] in the weights' dtype, by PyTorch: of every linear."""
        return list(map(_by_torch, itertools.repeat(x), self.linears, self.biases(), self.low_ranks()))

    def only(self, x: torch.Tensor) -> torch.Tensor:
        """`each` of a lone linear."""
        return self.each(x)[0]


def _by_torch(x: torch.Tensor, linear: nn.Linear, bias: torch.Tensor | None, low_rank: LowRank | None) -> torch.Tensor:
    low, up = (None, None) if low_rank is None else (F.linear(x, low_rank.down), low_rank.up)
    return reference.linear(x, linear.weight, bias, low, up)


class Products:
    """The products of low rank of one transformer that its plans hold: each is prepared once, whatever the call."""

    def __init__(self):
        self._known: WeakValueDictionary[tuple, Product] = WeakValueDictionary()

    def read(
        self, modules: Sequence[nn.Module], device: torch.device, dtype: torch.dtype, differentiated: bool
    ) -> Linears:
        """The linears in these modules of one input, for inputs of this device and dtype."""
        inner = [linear_of(module) for module in modules]
        layers = [module for module in inner if is_lora_layer(module)]
        if not layers:
            return Linears(inner)
        reason = "in autograd" if differentiated else "under torch.compile" if torch.compiler.is_compiling() else None
        reason = reason or next(filter(None, map(why_not_inside, layers)), None)
        linears = [module.base_layer if is_lora_layer(module) else module for module in inner]
        if reason is None and not all(isinstance(linear, nn.Linear) for linear in linears):
            reason = "around no linear"
        if reason is None and len({is_quantized(linear) for linear in linears}) > 1:
            reason = "unequal projections"
        adapters = list(map(_adapters, inner))
        reason = reason or _why_elsewhere(adapters, device)
        if reason is not None:
            return Linears(inner, f"LoRA layer: {reason}")
        return Linears(linears, product=self._product(linears, adapters, device, dtype))

    def bring_up_to_date(self) -> tuple[int, ...]:
        """Let every product be that of its matrices as they are now; returns where they lie, which a replay reads."""
        return tuple(sorted(at for product in self._current() for at in product.bring_up_to_date()))

    def forget(self) -> None:
        """Prepare all anew at the next use: matrices may have been written to unseen."""
        for product in list(self._known.values()):
            product.forget()

    def release_moved(self) -> None:
        """Give the memory of those back whose matrices have left their device, as when a model is offloaded."""
        for product in list(self._known.values()):
            product.release_if_moved()

    def scales_not_read(self, layers: Iterable[nn.Module]) -> dict[nn.Module, dict[str, float | torch.Tensor]]:
        """The scales of those LoRA layers that no product stands for: calling them computes with numbers."""
        read = {one.layer for product in self._current() for adapters in product.adapters for one in adapters}
        return {layer: dict(layer.scaling) for layer in layers if layer not in read}

    def _current(self) -> list[Product]:
        """Those of the layers as they are: until it is called again, a block's plan holds those of before a change."""
        return [product for product in list(self._known.values()) if product.is_current]

    def _product(self, linears, adapters, device: torch.device, dtype: torch.dtype) -> Product:
        key = tuple(map(id, linears)), tuple(map(_ids, adapters)), rank_of(adapters), device, dtype
        product = self._known.get(key)
        if product is None:
            product = self._known[key] = Product(linears, adapters, device, dtype)
        return product

    def __reduce__(self) -> tuple:
        """Copied and pickled empty: these are of the modules that were copied from."""
        return Products, ()


def _why_elsewhere(adapters: Sequence[Sequence[Adapter]], device: torch.device) -> str | None:
    tensors = [t for of_linear in adapters for adapter in of_linear for t in (adapter.down, adapter.up)]
    elsewhere = next((t for t in tensors if t.device != device), None)
    return None if elsewhere is None else f"matrix on {elsewhere.device}"


def _ids(adapters: Sequence[Adapter]) -> tuple:
    return tuple((id(adapter.layer), adapter.name, id(adapter.first), id(adapter.second)) for adapter in adapters)


def _has_bias(linear: nn.Module, adapters: Sequence[Adapter]) -> bool:
    return linear.bias is not None or any(adapter.bias is not None for adapter in adapters)
