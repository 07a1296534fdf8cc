"""Read a LoRA file under diffusers' names: matrix pairs, and whole differences of other parameters.

    down [r, in], up [out, r], alpha     W += alpha/r · up @ down
    diff, diff_b, diff_m                 added to a weight, a bias, a modulation
    lokr_…, hada_…, alpha                added to a weight: other products of small matrices (lycoris.py)

A module's alpha is a tensor beside its matrices, or in PEFT's configuration (peft_config.py). Without either, alpha is
taken as r. Names may have the prefix of any tool, or none (names.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from ..wording import name_of_dtype
from .lycoris import FACTORS, Product, product_of
from .names import ModelNames, Names, owner_in, without_prefix
from .peft_config import PeftConfig

# PEFT puts the adapter's name into a key, unless it saves the adapter itself: lora_A.default.weight.
_PARTS = {
    part: re.compile(ending)
    for part, ending in {
        "down": r"\.(lora_down|lora\.down|lora_A)(\.(?!weight$|bias$)\w+)?(\.weight)?$",
        "up": r"\.(lora_up|lora\.up|lora_B)(\.(?!weight$|bias$)\w+)?(\.weight)?$",
        "up_bias": r"\.(lora_up|lora_B)(\.\w+)?\.bias$",
        "alpha": r"\.(lora_)?alpha$",
        "weight": r"\.diff$",
        "bias": r"\.diff_b$",
        "modulation": r"\.diff_m$",
        **{part: rf"\.{part}(\.\w+)?$" for parts in FACTORS.values() for part in parts},
    }.items()
}
_DIFFERENCES = ("weight", "bias", "modulation")
# Kinds of files that hold more, or others, than pairs of matrices. A part of such a file alone means nothing.
_OTHER_KINDS = {
    "a DoRA": re.compile(r"\.(dora_scale|lora_magnitude_vector)(\.|$)"),
    "a LoKr or LoHa in Tucker's form": re.compile(r"\.(lokr_t2|hada_t[12])(\.|$)"),
    "an OFT": re.compile(r"\.b?oft_"),
    "a LoCon of three matrices": re.compile(r"\.lora_mid\."),
    "a LoRA in 8 bits with scales": re.compile(
        r"\.(lora_|lokr_|hada_|diff(_[bm])?\b).*(scale_weight|weight_scale|comfy_quant)$"
    ),
}
_SHOWN = 4  # the number of keys that an error lists


class Pair(NamedTuple):
    """W += scale · up @ down, in fp32. down [rank, in], up [out, rank]."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        return len(self.down)

    def product(self) -> torch.Tensor:
        """Return the product [out, in] in fp32."""
        return self.scale * (self.up.float() @ self.down.float())


@dataclass
class Lora:
    """The contents of a LoRA file for one transformer.

    pairs: matrix pairs by diffusers' name of their linear.
    differences: differences by diffusers' name of their parameter, in its shape.
    products: LoKr and LoHa products by diffusers' name of their weight. They are as large as the weight when computed.
    unused: keys that are not used, with the reasons.
    assumed: the number of pairs and products for which no alpha is given anywhere, so that it is taken as their rank.
    has_alpha, has_differences: True if the file has alphas, or differences.
    """

    pairs: dict[str, Pair] = field(default_factory=dict)
    differences: dict[str, torch.Tensor] = field(default_factory=dict)
    products: dict[str, Product] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    assumed: int = 0
    has_alpha: bool = False
    has_differences: bool = False

    @property
    def ranks(self) -> list[int]:
        """All ranks, in order."""
        return sorted({pair.rank for pair in self.pairs.values()})


def read_lora(
    tensors: Mapping[str, torch.Tensor], model: nn.Module, metadata: Mapping[str, str] | None = None, *, names: Names
) -> Lora:
    """Return the contents of a LoRA file for a transformer, which may be patched and have LoRA layers.

    names: those of the model's family.
    metadata: the safetensors file's metadata with PEFT's configuration, or None (`read_tensors`).

    Raises ValueError for a file without a LoRA, a LoRA of another kind such as DoRA, a weight that the file has twice,
    and shapes that do not fit the model. The error lists all such shapes.
    """
    of_model, lora, misfits, config = ModelNames(model, names), Lora(), [], PeftConfig(metadata or {})
    for key in tensors:
        if (kind := _other_kind(key)) is not None:
            raise ValueError(
                f"it is {kind} ({key}), which is not supported; merge it into its model with the tool that trained it, "
                "and load that model"
            )
    grouped = _grouped(tensors, of_model, lora)
    for name, parts in grouped.items():
        _Entry(name, parts, of_model, lora, misfits).add(config)
    lora.unused.update(dict.fromkeys(config.unknown, "unknown setting of PEFT"))
    if not grouped:
        raise ValueError(f"it holds no LoRA, only {_some(list(tensors))}")
    if misfits:
        raise ValueError(f"it does not fit the {type(model).__name__}: {_some(misfits, '; ')}")
    if not lora.pairs and not lora.differences and not lora.products:
        raise ValueError(f"none of its keys fit a {type(model).__name__}: {_some(list(lora.unused))}")
    lora.has_differences = any(set(_DIFFERENCES) & set(parts) for parts in grouped.values())
    return lora


def looks_like_lora(keys) -> bool:
    """True if any of these keys belongs to a LoRA, or to a kind of it that is not supported."""
    return any(_part_of(key) or _other_kind(key) for key in keys)


Parts = dict[str, tuple[str, torch.Tensor]]  # by "down", "up", ...: the key in the file, and its tensor


def _grouped(tensors: Mapping[str, torch.Tensor], names: ModelNames, lora: Lora) -> dict[str, Parts]:
    """Return the parts of each module, under one name for all spellings. Other keys go to ``lora.unused``."""
    grouped: dict[str, Parts] = {}
    first: dict[tuple[str, str] | str, str] = {}  # the key of each part or parameter
    doubled = []
    for key, tensor in tensors.items():
        found = _part_of(key)
        if found is None:
            lora.unused[key] = "unknown kind of key"
            continue
        stem, part = found
        name = names.canonical(without_prefix(stem))
        known = first.setdefault(_parameter(names, name, part) or (name, part), key)
        if known == key:
            grouped.setdefault(name, {})[part] = key, tensor
        else:
            doubled.append(f"{known} and {key}")
    if doubled:
        raise ValueError(f"it has the same weight twice; remove one of the two from the file: {_some(doubled, '; ')}")
    return grouped


def _parameter(names: ModelNames, name: str, part: str) -> str | None:
    """Return the name of the parameter that a difference belongs to, or None for other parts."""
    return names.parameter(name, part) if part in _DIFFERENCES else None


def _part_of(key: str) -> tuple[str, str] | None:
    """Return a key without its ending, and the part that the ending stands for, or None for other keys."""
    found = ((key[: match.start()], part) for part, ending in _PARTS.items() if (match := ending.search(key)))
    return next(found, None)


def _other_kind(key: str) -> str | None:
    """Return the kind of adapter that a key belongs to if it is not a LoRA of pairs, or None."""
    return next((kind for kind, pattern in _OTHER_KINDS.items() if pattern.search(key)), None)


class _Entry:
    """Puts one module's parts of a file into a `Lora`."""

    def __init__(self, name: str, parts: Parts, names: ModelNames, lora: Lora, misfits: list[str]):
        self._name, self._parts, self._names, self._lora, self._misfits = name, parts, names, lora, misfits

    def add(self, config: PeftConfig) -> None:
        if self._names.block_beyond(self._name):
            first, _ = next(iter(self._parts.values()))
            self._misfits.append(f"{first} is for a block that the model lacks; it has {self._names.blocks}")
            return
        kinds = [kind for kind, factors in FACTORS.items() if self._parts.keys() & factors]
        pair = self._pair(config) if not kinds or self._parts.keys() & {"down", "up", "up_bias"} else None
        for kind in kinds:
            self._add_product(kind, config)
        for part in _DIFFERENCES:
            if part in self._parts:
                key, difference = self._parts[part]
                self._add_difference(key, difference, part)
        if "up_bias" in self._parts and pair is not None:
            key, bias = self._parts["up_bias"]
            self._add_difference(key, pair.scale * bias.float(), "bias")

    def _pair(self, config: PeftConfig) -> Pair | None:
        keys = {part: self._parts[part][0] for part in ("down", "up", "alpha", "up_bias") if part in self._parts}
        if not keys:
            return None
        module = self._names.module(self._name)
        if module is None or keys.keys() == {"alpha"}:  # beside a whole difference an alpha means nothing
            reason = self._names.why_absent(self._name) if module is None else "the module has no matrices"
            self._lora.unused.update(dict.fromkeys(keys.values(), reason))
            return None
        if not {"down", "up"} <= keys.keys():
            self._misfits.append(f"{next(iter(keys.values()))} lacks the other matrix of its pair: it is incomplete")
            return None
        (down_key, down), (up_key, up) = self._parts["down"], self._parts["up"]
        target = self._names.modules[module]
        if not self._fits(target, down_key, down, up_key, up):
            return None
        scale = self._scale(config, (without_prefix(_part_of(down_key)[0]), module), len(down))
        # Some tools write a linear's matrices as a convolution's, with trailing dimensions of 1.
        pair = Pair(down.flatten(1), up.flatten(1), scale)
        if isinstance(target, nn.Linear):
            self._lora.pairs[module] = pair
        else:  # a convolution: peft's layer for it differs between versions
            self._add_difference(down_key, pair.product(), "weight")
        return pair

    def _add_product(self, kind: str, config: PeftConfig) -> None:
        """Add the LoKr or LoHa of this module."""
        own = {part: self._parts[part] for part in FACTORS[kind] if part in self._parts}
        parameter = self._names.parameter(self._name, "weight")
        product = product_of(kind, {part: matrix for part, (_, matrix) in own.items()})
        first, *_ = keys = [key for key, _ in own.values()]
        if parameter is None:
            if "alpha" in self._parts and not self._parts.keys() & {"down", "up"}:
                keys.append(self._parts["alpha"][0])
            self._lora.unused.update(dict.fromkeys(keys, self._names.why_absent(self._name)))
            return
        outputs, inputs = _sizes(owner_in(self._names.modules, parameter)[0])
        problem = "lacks a matrix, or has too many" if product is None else product.why_not(outputs, inputs)
        if problem is not None:
            self._misfits.append(f"the {kind} of {first} {problem}")
            return
        names = without_prefix(_part_of(first)[0]), parameter.rpartition(".")[0]
        self._lora.products[parameter] = product._replace(scale=self._scale(config, names, product.rank))

    def _scale(self, config: PeftConfig, names: tuple[str, ...], rank: int | None) -> float:
        """Return the strength of a pair or a product. A product may have no rank.

        names: its module's name in the file and diffusers' name.
        """
        given = self._parts.get("alpha")
        if given is None:
            scale = config.scale(names, rank)
        else:
            alpha = self._alpha(*given)
            scale = 1.0 if rank is None else alpha / rank
        if scale is not None:
            self._lora.has_alpha = True
            return scale
        self._lora.assumed += rank is not None
        return 1.0

    def _alpha(self, key: str, alpha: torch.Tensor) -> float:
        if alpha.numel() == 1 and not alpha.is_complex() and math.isfinite(alpha):
            return float(alpha)
        self._misfits.append(f"{key} is {alpha.tolist() if alpha.numel() < 5 else list(alpha.shape)}, not one number")
        return 1.0

    def _fits(self, target: nn.Module, down_key: str, down: torch.Tensor, up_key: str, up: torch.Tensor) -> bool:
        outputs, inputs = _sizes(target)
        before, rank = len(self._misfits), len(down) if down.dim() else 0
        if down.dim() < 2 or rank == 0 or down[0].numel() != inputs:
            self._misfits.append(f"{down_key} is {list(down.shape)}, the model takes [rank, {inputs}]")
        if up.dim() < 2 or up.shape[0] != outputs or up[0].numel() != rank:
            self._misfits.append(f"{up_key} is {list(up.shape)}, the model takes [{outputs}, {rank or 'rank'}]")
        for key, matrix in ((down_key, down), (up_key, up)):
            self._check_dtype(key, matrix)
        return len(self._misfits) == before

    def _check_dtype(self, key: str, tensor: torch.Tensor) -> None:
        if not tensor.is_floating_point():
            self._misfits.append(f"{key} holds {name_of_dtype(tensor.dtype)}, not floating-point numbers")

    def _add_difference(self, key: str, difference: torch.Tensor, part: str) -> None:
        parameter = self._names.parameter(self._name, part)
        if parameter is None:
            self._lora.unused[key] = self._names.why_absent(self._name)
            return
        module, own = owner_in(self._names.modules, parameter)
        shape = getattr(module, own).shape
        # A convolution over patches may be written as a linear over them.
        if _without_ones(difference.shape) not in (_without_ones(shape), [shape[0], shape[1:].numel()]):
            self._misfits.append(f"{key} is {list(difference.shape)}, the model takes {list(shape)}")
            return
        self._check_dtype(key, difference)
        difference = difference.reshape(shape)
        known = self._lora.differences.get(parameter)
        self._lora.differences[parameter] = difference if known is None else known.float() + difference.float()


def _sizes(module: nn.Module) -> tuple[int, int]:
    """Return the outputs and inputs of a linear, whose weight may be packed, or of another module by its weight."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    outputs, *inputs = module.weight.shape
    return outputs, math.prod(inputs)


def _without_ones(shape: torch.Size) -> list[int]:
    return [size for size in shape if size != 1]


def _some(items: list[str], joint: str = ", ") -> str:
    rest = len(items) - _SHOWN
    return joint.join(items[:_SHOWN]) + (f"{joint}and {rest} more" if rest > 0 else "") + "."
