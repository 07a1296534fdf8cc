"""PEFT's LoRA layers inside a projection: all adapters of linears with the same input run as one low-rank product.

The product is ``Σ scale · (x Aᵀ) Bᵀ`` (kernels/linear/low_rank.py). factors.py prepares its matrices. The LoRA layers
are called instead under autograd, under torch.compile, and if their result depends on more than A, B, biases and
scales. DoRA and similar variants, dropout in training and hooks are such cases.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels import LowRank, Quantized, QuantizedWeight, reference
from ...kernels.linear.gemm_portable import NO_PAIR, SecondPair
from ...kernels.linear.linear import project_down
from ...plain import hook_on, is_lora_layer, linear_of, why_not_plain
from ..weights.quantize_linears import is_quantized
from .factors import Adapter, Product, rank_of

LIVE = frozenset({"scaling"})  # attributes of LoRA layers that every use reads again


def why_not_inside(layer: nn.Module) -> str | None:
    """Return why a LoRA layer's result depends on more than its matrices, biases and scales, or None."""
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
    """Return the names of the adapters that a LoRA layer applies."""
    return [name for name in layer.active_adapters if name in layer.lora_A]


def _matrices(layer: nn.Module, name: str) -> tuple[nn.Linear, nn.Linear]:
    return layer.lora_A[name], layer.lora_B[name]


def _adapters(module: nn.Module) -> list[Adapter]:
    """Return the adapters that a LoRA layer applies. Another module has none."""
    if not is_lora_layer(module):
        return []
    return [Adapter(module, name, *_matrices(module, name)) for name in _active(module)]


class Linears:
    """Linears with the same input, without the LoRA layers around them, and the product of those layers.

    Attributes:
        linears, first: the modules whose weights are read, and the first of them.
        reason: why LoRA layers must be called, or None. If they must, ``linears`` holds those layers.
    """

    def __init__(self, linears: Sequence[nn.Module], reason: str | None = None, product: Product | None = None):
        self.linears, self.reason, self._product = list(linears), reason, product
        self.first = self.linears[0]

    @property
    def are_quantized(self) -> bool:
        return all(map(is_quantized, self.linears))

    @property
    def are_alike(self) -> bool:
        """True if all have the same shape, and all or none have a bias."""
        own = [()] * len(self.linears) if self._product is None else self._product.adapters
        each = zip(self.linears, own, strict=True)
        return len({(one.out_features, one.in_features, _has_bias(one, adapters)) for one, adapters in each}) == 1

    @property
    def has_lora(self) -> bool:
        return self._product is not None

    def named(self, kernel: str) -> str:
        """Return a kernel's name for the summary."""
        return f"{kernel} + LoRA" if self.has_lora else kernel

    @property
    def second_product(self) -> dict[str, object]:
        """Return the fields of a LinearSpec for what LoRA adds; none without LoRA."""
        return {} if self._product is None else {"low": self._product.dtype, "rank": self._product.rank}

    def biases(self) -> list[torch.Tensor | None]:
        """Return the bias of every linear, including its LoRA layer's biases."""
        return [linear.bias for linear in self.linears] if self._product is None else self._product.biases()

    def low_rank(self) -> LowRank | None:
        """Return the present factors of all linears, or None without LoRA."""
        return None if self._product is None else self._product.low_rank()

    def second_pair(self, x: torch.Tensor | Quantized, launch: Callable | None = None) -> SecondPair:
        """Return what LoRA adds to a product of x, as the kernels take it. launch: as in `project_down`."""
        return NO_PAIR if self._product is None else project_down(x, self._product.low_rank(), launch)

    def low_ranks(self) -> list[LowRank | None]:
        """Return the present factors of each linear, or None for each without LoRA."""
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
        """Return ``x Wᵀ + b`` plus the LoRA product for every linear, computed by PyTorch.

        x: [..., K] in the weights' dtype.
        """
        return list(map(_by_torch, itertools.repeat(x), self.linears, self.biases(), self.low_ranks()))

    def only(self, x: torch.Tensor) -> torch.Tensor:
        """Return `each` for the only linear."""
        return self.each(x)[0]


def _by_torch(x: torch.Tensor, linear: nn.Linear, bias: torch.Tensor | None, low_rank: LowRank | None) -> torch.Tensor:
    low, up = (None, None) if low_rank is None else (F.linear(x, low_rank.down), low_rank.up)
    return reference.linear(x, linear.weight, bias, low, up)


class Products:
    """The low-rank products that the plans of one transformer hold. All kinds of calls share a product."""

    def __init__(self):
        self._known: WeakValueDictionary[tuple, Product] = WeakValueDictionary()

    def read(
        self, modules: Sequence[nn.Module], device: torch.device, dtype: torch.dtype, differentiated: bool
    ) -> Linears:
        """Return the linears in modules with the same input, for inputs of this device and dtype.

        differentiated: True if derivatives are needed.
        """
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
        """Prepare every product for its present matrices. Return the addresses of the prepared tensors."""
        return tuple(sorted(at for product in self._current() for at in product.bring_up_to_date()))

    def forget(self) -> None:
        """Prepare all products again at the next use, after writes to matrices that PyTorch does not count."""
        for product in list(self._known.values()):
            product.forget()

    def release_moved(self) -> None:
        """Give back the memory of products whose matrices left their device, for example by offloading."""
        for product in list(self._known.values()):
            product.release_if_moved()

    def scales_not_read(self, layers: Iterable[nn.Module]) -> dict[nn.Module, dict[str, float | torch.Tensor]]:
        """Return the scales of the LoRA layers that are called, because no product replaces them.

        CUDA graphs record such scales as numbers.
        """
        read = {one.layer for product in self._current() for adapters in product.adapters for one in adapters}
        return {layer: dict(layer.scaling) for layer in layers if layer not in read}

    def _current(self) -> list[Product]:
        """Return the products of the present layers. A block's plan holds older ones until the block runs again."""
        return [product for product in list(self._known.values()) if product.is_current]

    def _product(self, linears, adapters, device: torch.device, dtype: torch.dtype) -> Product:
        key = tuple(map(id, linears)), tuple(map(_ids, adapters)), rank_of(adapters), device, dtype
        product = self._known.get(key)
        if product is None:
            product = self._known[key] = Product(linears, adapters, device, dtype)
        return product

    def __reduce__(self) -> tuple:
        """Copy and pickle as empty: products belong to the copied modules."""
        return Products, ()


def _why_elsewhere(adapters: Sequence[Sequence[Adapter]], device: torch.device) -> str | None:
    tensors = [t for on_linear in adapters for adapter in on_linear for t in (adapter.down, adapter.up)]
    elsewhere = next((t for t in tensors if t.device != device), None)
    return None if elsewhere is None else f"matrix on {elsewhere.device}"


def _ids(adapters: Sequence[Adapter]) -> tuple:
    return tuple((id(adapter.layer), adapter.name, id(adapter.first), id(adapter.second)) for adapter in adapters)


def _has_bias(linear: nn.Module, adapters: Sequence[Adapter]) -> bool:
    return linear.bias is not None or any(adapter.bias is not None for adapter in adapters)
