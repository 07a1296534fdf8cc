"""Read a LoRA file under diffusers' names: matrix pairs, and whole differences of other parameters.

    down [r, in], up [out, r], alpha     W += alpha/r · up @ down; without alpha, up @ down
    diff, diff_b, diff_m                 added to a weight, a bias, a modulation

Names may have the prefix of any tool, or none (names.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from .names import ModelNames

_PREFIX = re.compile(
    r"^(model\.diffusion_model\.|diffusion_model\.|base_model\.model\.|transformer\.|model\.|lora_unet_)"
)
_PARTS = {
    "down": (".lora_down.weight", ".lora_A.weight", ".lora_A.default.weight", ".lora.down.weight"),
    "up": (".lora_up.weight", ".lora_B.weight", ".lora_B.default.weight", ".lora.up.weight"),
    "up_bias": (".lora_B.bias", ".lora_B.default.bias"),
    "alpha": (".alpha",),
    "weight": (".diff",),
    "bias": (".diff_b",),
    "modulation": (".diff_m",),
}
_DIFFERENCES = ("weight", "bias", "modulation")
METADATA = "lora_adapter_metadata"  # where diffusers notes the alphas of a file that it saves
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
    unused: keys that are not used, with the reasons.
    has_alpha, has_differences: True if the file has alphas, or differences.
    """

    pairs: dict[str, Pair] = field(default_factory=dict)
    differences: dict[str, torch.Tensor] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    has_alpha: bool = False
    has_differences: bool = False

    @property
    def ranks(self) -> list[int]:
        """All ranks, in order."""
        return sorted({pair.rank for pair in self.pairs.values()})


def read_lora(tensors: Mapping[str, torch.Tensor], model: nn.Module, metadata: Mapping[str, str] | None = None) -> Lora:
    """Return the contents of a LoRA file for a Wan transformer, which may be patched and have LoRA layers.

    metadata: the safetensors file's metadata, or None.

    Raises ValueError if the file has no LoRA, if it has a weight twice with different values, or if shapes do not fit
    the model. The error lists all such shapes. A second copy with equal values is unused.
    """
    names, lora, misfits = ModelNames(model), Lora(), []
    grouped, saved = _grouped(tensors, names, lora), json.loads((metadata or {}).get(METADATA, "{}"))
    for name, parts in grouped.items():
        _Entry(name, parts, names, lora, misfits).add(_alpha_in(saved, name))
    if not grouped:
        raise ValueError(f"it holds no LoRA, only {_some(list(tensors))}")
    if misfits:
        raise ValueError(f"it does not fit the {type(model).__name__}: {_some(misfits, '; ')}")
    if not lora.pairs and not lora.differences:
        raise ValueError(f"none of its keys fit a {type(model).__name__}: {_some(list(lora.unused))}")
    lora.has_alpha = any("alpha" in parts for parts in grouped.values())
    lora.has_differences = any(set(_DIFFERENCES) & set(parts) for parts in grouped.values())
    return lora


def looks_like_lora(keys) -> bool:
    """True if any of these keys belongs to a LoRA."""
    return any(_part_of(key) is not None for key in keys)


Parts = dict[str, tuple[str, torch.Tensor]]  # by "down", "up", ...: the key in the file, and its tensor


def _grouped(tensors: Mapping[str, torch.Tensor], names: ModelNames, lora: Lora) -> dict[str, Parts]:
    """Return the parts of each module, under one name for all spellings. Other keys go to ``lora.unused``."""
    grouped: dict[str, Parts] = {}
    first: dict[tuple[str, str] | str, str] = {}  # the key of each part or parameter
    differing = []
    for key, tensor in tensors.items():
        found = _part_of(key)
        if found is None:
            lora.unused[key] = "DoRA is not supported" if "dora_scale" in key else "unknown kind of key"
            continue
        stem, part = found
        name = names.canonical(_without_prefix(stem))
        known = first.setdefault(_parameter(names, name, part) or (name, part), key)
        if known == key:
            grouped.setdefault(name, {})[part] = key, tensor
        elif _are_same(tensors, known, key):
            lora.unused[key] = f"the same as {known}"
        else:
            differing.append(f"{known} and {key}")
    if differing:
        raise ValueError(f"it has different values for the same weight: {_some(differing, '; ')}")
    return grouped


def _parameter(names: ModelNames, name: str, part: str) -> str | None:
    """Return the name of the parameter that a difference belongs to, or None for other parts."""
    return names.parameter(name, part) if part in _DIFFERENCES else None


def _are_same(tensors: Mapping[str, torch.Tensor], known: str, key: str) -> bool:
    """True if two keys of the same part hold the same values. For matrices, both or neither must have an alpha."""
    (stem, part), (known_stem, _) = _part_of(key), _part_of(known)
    if part in ("down", "up") and (f"{stem}.alpha" in tensors) != (f"{known_stem}.alpha" in tensors):
        return False
    one, other = tensors[known], tensors[key]
    return one.shape == other.shape and torch.equal(one.float(), other.float())


def _part_of(key: str) -> tuple[str, str] | None:
    """Return a key without its ending, and the part that the ending stands for, or None for other keys."""
    for part, suffixes in _PARTS.items():
        for suffix in suffixes:
            if key.endswith(suffix):
                return key.removesuffix(suffix), part
    return None


def _without_prefix(name: str) -> str:
    while (shorter := _PREFIX.sub("", name)) != name:
        name = shorter
    return name


def _alpha_in(saved: Mapping[str, object], name: str) -> float | None:
    """Return a module's alpha from diffusers' metadata, or None."""
    default = saved.get("transformer.lora_alpha")
    patterns = saved.get("transformer.alpha_pattern") or {}
    return next((alpha for end, alpha in patterns.items() if re.search(rf"(^|\.){end.lstrip('^')}$", name)), default)


class _Entry:
    """Puts one module's parts of a file into a `Lora`."""

    def __init__(self, name: str, parts: Parts, names: ModelNames, lora: Lora, misfits: list[str]):
        self._name, self._parts, self._names, self._lora, self._misfits = name, parts, names, lora, misfits

    def add(self, default_alpha: float | None) -> None:
        if self._names.block_beyond(self._name):
            self._misfits.append(
                f"{self._first_key()} is for a block that the model lacks; it has {self._names.blocks}"
            )
            return
        pair = self._pair(default_alpha)
        for part in _DIFFERENCES:
            if part in self._parts:
                key, difference = self._parts[part]
                self._add_difference(key, difference, part)
        if "up_bias" in self._parts and pair is not None:
            key, bias = self._parts["up_bias"]
            self._add_difference(key, pair.scale * bias.float(), "bias")

    def _first_key(self) -> str:
        return next(iter(self._parts.values()))[0]

    def _pair(self, default_alpha: float | None) -> Pair | None:
        given = [self._parts[part][0] for part in ("down", "up", "alpha", "up_bias") if part in self._parts]
        if not given:
            return None
        module = self._names.module(self._name)
        whole = "down" in self._parts and "up" in self._parts
        reason = self._names.why_absent(self._name) if module is None else "the other matrix of its pair is missing"
        if module is None or not whole:
            self._lora.unused.update(dict.fromkeys(given, reason))
            return None
        (down_key, down), (up_key, up) = self._parts["down"], self._parts["up"]
        alpha = float(self._parts["alpha"][1]) if "alpha" in self._parts else default_alpha
        target = self._names.modules[module]
        if not self._fits(target, down_key, down, up_key, up):
            return None
        # Some tools write a linear's matrices as a convolution's, with trailing dimensions of 1.
        pair = Pair(down.flatten(1), up.flatten(1), 1.0 if alpha is None else alpha / len(down))
        if isinstance(target, nn.Linear):
            self._lora.pairs[module] = pair
        else:  # a convolution: peft's layer for it differs between versions
            self._add_difference(down_key, pair.product(), "weight")
        return pair

    def _fits(self, target: nn.Module, down_key: str, down: torch.Tensor, up_key: str, up: torch.Tensor) -> bool:
        if isinstance(target, nn.Linear):
            inputs, outputs = target.in_features, target.out_features
        else:
            outputs, inputs = len(target.weight), target.weight[0].numel()
        before = len(self._misfits)
        if down.dim() < 2 or down[0].numel() != inputs:
            self._misfits.append(f"{down_key} is {list(down.shape)}, the model takes [rank, {inputs}]")
        if up.dim() < 2 or up[0].numel() != len(down) or len(up) != outputs:
            self._misfits.append(f"{up_key} is {list(up.shape)}, the model takes [{outputs}, {len(down)}]")
        return len(self._misfits) == before

    def _add_difference(self, key: str, difference: torch.Tensor, part: str) -> None:
        parameter = self._names.parameter(self._name, part)
        if parameter is None:
            self._lora.unused[key] = self._names.why_absent(self._name)
            return
        module, own = self._names.owner(parameter)
        shape = getattr(module, own).shape
        # A convolution over patches may be written as a linear over them.
        if _without_ones(difference.shape) not in (_without_ones(shape), [shape[0], shape[1:].numel()]):
            self._misfits.append(f"{key} is {list(difference.shape)}, the model takes {list(shape)}")
            return
        difference = difference.reshape(shape)
        known = self._lora.differences.get(parameter)
        self._lora.differences[parameter] = difference if known is None else known.float() + difference.float()


def _without_ones(shape: torch.Size) -> list[int]:
    return [size for size in shape if size != 1]


def _some(items: list[str], joint: str = ", ") -> str:
    rest = len(items) - _SHOWN
    return joint.join(items[:_SHOWN]) + (f"{joint}and {rest} more" if rest > 0 else "") + "."
