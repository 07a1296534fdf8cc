"""Load a LoRA onto a transformer and take it off again.

Matrix pairs become PEFT layers. Differences of other parameters are added to those parameters, and so are the products
of LoKr and LoHa, because PEFT's layers would multiply twice at each call. diffusers' own loading ignores differences of
norms, modulation and patch embedding, and rejects some files.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from diffusers import DiffusionPipeline
from diffusers.hooks.group_offloading import ModuleGroup
from torch import nn

from ...checkpoints.lora import Lora, Pair
from ...checkpoints.names import modules_of, owner_in
from ...wording import name_of_dtype, with_article
from ..weights.group_offload import are_on_disk, groups_of, overwrite
from ..weights.quantize_linears import why_not_restorable
from ..weights.read_only import RULE, ReadOnlyWeight

logger = logging.getLogger(__name__)

NO_PEFT = "a LoRA needs peft, which is not installed; install it with: pip install 'turbo_rcm_patch[lora]'"
_PLAIN = (torch.Tensor, nn.Parameter)


def check_loadable(transformer: nn.Module, name: str, lora: Lora) -> None:
    """Raise an error if a LoRA cannot be loaded onto a transformer.

    Raises RuntimeError if projections are fused, because the LoRA would not reach them. For a LoRA with matrix pairs or
    products it also raises RuntimeError if another LoRA is fused: PEFT would take it out of the weights, or restoring
    their old values would bring it back. For one with products it also raises RuntimeError if their weights cannot be
    written. For one with matrix pairs it also raises RuntimeError if:
        another LoRA is switched off, because PEFT would switch this one off too
        a linear is stored in fewer than 16 bits, because PEFT would store the matrices in that dtype, in which it
        cannot multiply
    Raises ImportError if the LoRA has matrix pairs and peft is not installed.
    """
    if has_fused_projections(transformer):
        raise RuntimeError(
            f"{name} has fused projections, which a LoRA does not reach; call unfuse_qkv_projections() and do not fuse "
            "them again."
        )
    if not lora.pairs and not lora.products:
        return
    modules, groups = dict(modules_of(transformer)), groups_of(transformer)
    for path, product in lora.products.items():
        _check_writable(groups, modules, path, product.kind)
    if lora.pairs and importlib.util.find_spec("peft") is None:
        raise ImportError(NO_PEFT)
    for path in lora.pairs:
        weight = modules[path].weight
        if _in_few_bits(weight):
            raise RuntimeError(
                f"{name}.{path} is stored as {name_of_dtype(weight.dtype)}, and PEFT cannot run a LoRA on it; with "
                "layerwise casting load the LoRA first and call enable_layerwise_casting afterwards."
            )
    layers = _lora_layers(transformer)
    fused = _fused(layers)
    if fused:
        raise RuntimeError(
            f"{name} has a fused LoRA, {', '.join(fused)}; call pipe.unload_lora_weights(), which leaves it in the "
            f"weights, or pipe.unfuse_lora(), which takes it out."
        )
    if lora.pairs and any(layer.disable_adapters for layer in layers):
        raise RuntimeError(
            f"{name} has LoRA layers that are switched off; call pipe.enable_lora() or pipe.unload_lora_weights()."
        )


def _check_writable(groups: list[ModuleGroup], modules: Mapping[str, nn.Module], path: str, kind: str) -> None:
    """Raise RuntimeError if a product cannot be added to a weight."""
    parameter = getattr(*owner_in(modules, path))
    if isinstance(parameter, ReadOnlyWeight) and not parameter.is_freed:
        raise RuntimeError(f"the {kind} changes {path}, but {RULE}")
    reason = _why_not_added(groups, parameter)
    if reason is not None:
        raise RuntimeError(
            f"the {kind} cannot be added to {path}: {reason}; load it first, then quantise, offload or cast the model."
        )


class _Written(NamedTuple):
    """A parameter that a difference was added to, with a copy of its old values on the CPU."""

    module: nn.Module
    name: str
    before: torch.Tensor


class LoadedLora:
    """A LoRA that the constructor loads onto one transformer. If loading fails the transformer is unchanged.

    Call `check_loadable` first.

    unused: the entries of the LoRA that are not on the model, by key or parameter, with the reason.
    adapter: the name of the matrices' adapter, or None for a LoRA of differences alone.
    """

    def __init__(self, pipe: DiffusionPipeline, transformer: nn.Module, lora: Lora, scale: float):
        self._pipe, self._transformer, self.unused = pipe, transformer, dict(lora.unused)
        self._written: list[_Written] = []
        self.adapter: str | None = None
        modules, groups = dict(modules_of(transformer)), groups_of(transformer)
        try:
            for parameter, product in lora.products.items():
                device = getattr(*owner_in(modules, parameter)).device
                self._add(modules, groups, parameter, product.dense(device), scale)
            for parameter, difference in lora.differences.items():
                self._add(modules, groups, parameter, difference, scale)
            if lora.pairs:
                self._load_pairs(pipe, lora.pairs, scale)
        except BaseException:
            self.undo()
            raise

    @property
    def differences(self) -> int:
        """The number of parameters that differences were added to."""
        return len(self._written)

    def is_as_loaded(self) -> bool:
        """True if the matrices, if there are any, are still active with the scale they were loaded with."""
        if self.adapter is None:
            return True
        layers = self._layers()
        if not layers:  # unloaded, perhaps after fusing
            return self.adapter in self._pipe.fused_loras
        return all(
            not layer.disable_adapters
            and self.adapter in layer.active_adapters
            and math.isclose(layer.scaling[self.adapter], 1.0)
            for layer in layers
        )

    def replaced_by(self) -> list[str]:
        """Return the adapters that are active without this one, or [] if this one is active or LoRAs are off."""
        layers = self._layers()
        counts = any(
            layer.disable_adapters or self.adapter in (*layer.active_adapters, *layer.merged_adapters)
            for layer in layers
        )
        return _active_adapters(self._transformer) if layers and not counts else []

    def _layers(self) -> list[nn.Module]:
        """Return the LoRA layers with this adapter."""
        every = () if self.adapter is None else _lora_layers(self._transformer)
        return [layer for layer in every if self.adapter in layer.r]

    def check_undoable(self) -> None:
        """Raise RuntimeError if the LoRA cannot be taken off now."""
        if has_fused_projections(self._transformer):
            raise RuntimeError(
                "projections were fused after the LoRA was loaded and contain its differences; call "
                "unfuse_qkv_projections() first, then restore."
            )
        groups = groups_of(self._transformer)
        for written in self._written:
            reason = _why_unreachable(groups, getattr(written.module, written.name))
            if reason is not None:
                raise RuntimeError(f"a parameter cannot be put back: {reason}; undo that first, then restore.")
        written = {id(written.module) for written in self._written}
        fused = _fused(
            layer
            for layer in _lora_layers(self._transformer)
            if self.adapter in layer.merged_adapters or id(layer.get_base_layer()) in written
        )
        if fused:
            names = ", ".join(fused)
            raise RuntimeError(f"the LoRA {names} is fused into the weights; call pipe.unfuse_lora() first.")

    def undo(self) -> None:
        """Take the LoRA off: remove its layers and put the old values of parameters back bit for bit.

        The user may have unloaded its layers already. If they were fused before that, warn that the weights keep them.
        """
        if self.adapter is not None:
            unloaded = self.adapter not in getattr(self._transformer, "peft_config", {})
            if unloaded and self.adapter in self._pipe.fused_loras:
                logger.warning(
                    "the LoRA %r was fused, then unloaded: its matrices stay in the weights; load the model again.",
                    self.adapter,
                )
            _remove_adapter(self._transformer, self.adapter)
            self.adapter = None
        groups = groups_of(self._transformer)
        while self._written:
            module, name, before = self._written.pop()
            overwrite(groups, getattr(module, name), before)

    def _add(
        self,
        modules: Mapping[str, nn.Module],
        groups: list[ModuleGroup],
        path: str,
        difference: torch.Tensor,
        scale: float,
    ) -> None:
        module, name = owner_in(modules, path)
        parameter = getattr(module, name)
        if isinstance(parameter, ReadOnlyWeight) and not parameter.is_freed:
            raise RuntimeError(f"the LoRA has a difference of {path}, but {RULE}")
        reason = _why_not_added(groups, parameter)
        if reason is not None:
            self.unused[path] = reason
            return
        self._written.append(_Written(module, name, parameter.detach().cpu().clone()))
        precise = torch.promote_types(parameter.dtype, torch.float32)
        overwrite(groups, parameter, parameter.detach().to(precise) + scale * difference.to(parameter.device, precise))

    def _load_pairs(self, pipe: DiffusionPipeline, pairs: dict[str, Pair], scale: float) -> None:
        model = self._transformer
        active, taken = _active_adapters(model), {*getattr(model, "peft_config", {}), *pipe.fused_loras}
        name = next(name for i in range(len(taken) + 1) if (name := f"distilled_{i}") not in taken)
        tensors = {}
        for path, pair in pairs.items():
            tensors[f"{path}.lora_A.weight"], tensors[f"{path}.lora_B.weight"] = _with_scale(pair, scale)
        self.adapter = name
        with _state_dict_readable(model):
            model.load_lora_adapter(tensors, prefix=None, adapter_name=name, _pipeline=pipe)
        model.set_adapter([*active, name])  # loading makes a new adapter the only active one


@contextlib.contextmanager
def _state_dict_readable(model: nn.Module) -> Iterator[None]:
    """Give a model whose original weights were freed a state dict of the rest: PEFT's loader reads its names."""
    freed = why_not_restorable(model) is not None
    if freed:
        model.state_dict = lambda: dict(model.named_parameters())
    try:
        yield
    finally:
        if freed:
            del model.state_dict


def _why_not_added(groups: list[ModuleGroup], parameter: torch.Tensor) -> str | None:
    """Return why no difference can be added to a parameter, or None."""
    reason = _why_unreachable(groups, parameter)
    if reason is None and (not parameter.is_floating_point() or parameter.dtype.itemsize < 2):
        return f"the parameter is stored as {name_of_dtype(parameter.dtype)}"
    return reason


def _why_unreachable(groups: list[ModuleGroup], parameter: torch.Tensor) -> str | None:
    """Return why a parameter's values cannot be written, or None."""
    if isinstance(parameter, ReadOnlyWeight):
        return "the values of the parameter were freed" if parameter.is_freed else "its linear runs in 8 bits"
    if type(parameter) not in _PLAIN:
        return f"the parameter is {with_article(type(parameter).__name__)}"
    if parameter.is_meta:
        return "offloading keeps the parameter elsewhere"
    return "group offloading keeps the parameter on disk" if are_on_disk(groups) else None


def _in_few_bits(parameter: torch.Tensor) -> bool:
    """True if the parameter has at most 8 bits a value, for example under layerwise casting."""
    return type(parameter) in _PLAIN and parameter.is_floating_point() and parameter.dtype.itemsize < 2


def _with_scale(pair: Pair, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return down and up with the pair's scale and the user's in their product.

    Each gets about half of the factor, so that fp16 does not underflow. down gets a power of two, which rounds nothing.
    """
    factor = scale * pair.scale
    if factor == 1:
        return pair.down, pair.up
    half = 2.0 ** round(math.log2(abs(factor)) / 2) if factor else 1.0
    return pair.down.float() * half, pair.up.float() * (factor / half)


def has_fused_projections(transformer: nn.Module) -> bool:
    """True if an attention uses copies of its projections' weights, which diffusers' fuse_qkv_projections makes."""
    return any(getattr(module, "fused_projections", False) for module in transformer.modules())


def _lora_layers(model: nn.Module) -> list[nn.Module]:
    """Return PEFT's layers, known by a module in them so that peft need not be installed."""
    return [module for module in model.modules() if "lora_A" in module._modules]


def _fused(layers: Iterable[nn.Module]) -> list[str]:
    """Return the names of the adapters that are fused into any of these layers."""
    return sorted({adapter for layer in layers for adapter in layer.merged_adapters})


def _active_adapters(model: nn.Module) -> list[str]:
    if not getattr(model, "peft_config", None):
        return []
    return next((list(layer.active_adapters) for layer in _lora_layers(model)), [])


def _remove_adapter(model: nn.Module, adapter: str) -> None:
    """Delete an adapter and its layers. Other adapters keep their layers and stay active or inactive."""
    active = [name for name in _active_adapters(model) if name != adapter]
    for layer in _lora_layers(model):  # also for an adapter that was only loaded in part and is not in peft_config
        layer.delete_adapter(adapter)
    getattr(model, "peft_config", {}).pop(adapter, None)
    layers = {id(layer) for layer in _lora_layers(model) if not layer.r}  # no adapter is left on them
    for path, module in list(model.named_modules()):
        if id(module) in layers:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, module.get_base_layer())
    if getattr(model, "peft_config", None):
        model.set_adapter(active)
    else:
        for name in ("peft_config", "_hf_peft_config_loaded"):  # without them the class's defaults say "no adapter"
            vars(model).pop(name, None)
