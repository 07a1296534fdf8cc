"""A LoRA on a transformer: its pairs as PEFT layers, the rest as differences written into parameters; and the way back.

diffusers' own loading leaves out differences of norms, modulation and patch embedding, and stops at some files.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from diffusers import DiffusionPipeline
from torch import nn

from ...checkpoints.lora import Lora, Pair
from ...checkpoints.names import ModelNames
from ..weights.convert import why_not_restorable
from ..weights.group_offload import is_on_disk, write_through
from ..weights.read_only import EightBitWeight

logger = logging.getLogger(__name__)

NO_PEFT = "a LoRA needs peft, which is not installed; install it with: pip install 'turbo_rcm_patch[lora]'"
_PLAIN = (torch.Tensor, nn.Parameter)


def check_peft() -> None:
    """Raise ImportError where LoRA layers cannot be made."""
    if importlib.util.find_spec("peft") is None:
        raise ImportError(NO_PEFT)


def check_loadable(transformer: nn.Module, name: str, lora: Lora) -> None:
    """Raise where a LoRA cannot go onto a transformer: RuntimeError for fused projections, which it would not reach;
    and for its matrices ImportError without peft, RuntimeError beside a LoRA that is fused (PEFT would take it out of
    the weights) or switched off (this one would be, too), and for linears in fewer than 16 bits (PEFT would make the
    matrices so, and cannot multiply them)."""
    if has_fused_projections(transformer):
        raise RuntimeError(
            f"{name} runs by fused projections, which a LoRA would not reach; call unfuse_qkv_projections(), and leave "
            "them so."
        )
    if not lora.pairs:
        return
    check_peft()
    modules = ModelNames(transformer).modules
    for path in lora.pairs:
        weight = modules[path].weight
        if _in_few_bits(weight):
            raise RuntimeError(
                f"{name}.{path} is stored as {_name_of(weight.dtype)}, where PEFT cannot run a LoRA; with layerwise "
                "casting load the LoRA first, and call enable_layerwise_casting after it."
            )
    layers = _lora_layers(transformer)
    fused = sorted({adapter for layer in layers for adapter in layer.merged_adapters})
    if fused:
        raise RuntimeError(
            f"{name} has a fused LoRA, {', '.join(fused)}; call pipe.unload_lora_weights(), which leaves it in the "
            f"weights, or pipe.unfuse_lora() first."
        )
    if any(layer.disable_adapters for layer in layers):
        raise RuntimeError(
            f"{name} has LoRA layers that are switched off; call pipe.enable_lora() or pipe.unload_lora_weights()"
        )


class _Written(NamedTuple):
    """A parameter that a difference was added to, and what it held before, on the CPU."""

    module: nn.Module
    name: str
    before: torch.Tensor

    def put_back(self, transformer: nn.Module) -> None:
        parameter = getattr(self.module, self.name)
        with torch.no_grad():
            parameter.copy_(self.before)
        write_through(transformer, parameter)


class LoadedLora:
    """A LoRA on one transformer. Made, it is loaded; when that fails the transformer is as it was.

    unused: what of it is not on the model, by key or by parameter, and why.
    """

    def __init__(self, pipe: DiffusionPipeline, transformer: nn.Module, lora: Lora, scale: float):
        self._pipe, self._transformer, self.unused = pipe, transformer, dict(lora.unused)
        self._written: list[_Written] = []
        self._adapter: str | None = None
        names = ModelNames(transformer)
        try:
            for parameter, difference in lora.differences.items():
                self._add(names, parameter, difference, scale)
            if lora.pairs:
                self._load_pairs(pipe, lora.pairs, scale)
        except BaseException:
            self.undo()
            raise

    @property
    def differences(self) -> int:
        """How many parameters differences were added to."""
        return len(self._written)

    def is_as_loaded(self) -> bool:
        """Whether the matrices, if there are any, still count as they were loaded."""
        if self._adapter is None:
            return True
        layers = [layer for layer in _lora_layers(self._transformer) if self._adapter in layer.r]
        if not layers:  # unloaded, perhaps after fusing
            return self._adapter in self._pipe.fused_loras
        return all(
            not layer.disable_adapters
            and self._adapter in layer.active_adapters
            and math.isclose(layer.scaling[self._adapter], 1.0)
            for layer in layers
        )

    def is_left_out(self) -> bool:
        """Whether projections were fused since, which leave out matrices that are not fused into the weights."""
        if self._adapter is None or not has_fused_projections(self._transformer):
            return False
        layers = _lora_layers(self._transformer)
        return any(self._adapter in layer.r and self._adapter not in layer.merged_adapters for layer in layers)

    def check_undoable(self) -> None:
        """Raise RuntimeError where the LoRA cannot be taken off again."""
        if has_fused_projections(self._transformer):
            raise RuntimeError(
                "projections were fused after the LoRA was loaded, and hold its differences; call "
                "unfuse_qkv_projections() first, then restore."
            )
        for written in self._written:
            reason = _why_unreachable(self._transformer, getattr(written.module, written.name))
            if reason is not None:
                raise RuntimeError(f"a parameter cannot be put back: {reason}; undo that first, then restore.")
        if self._adapter is not None and any(
            self._adapter in layer.merged_adapters for layer in _lora_layers(self._transformer)
        ):
            raise RuntimeError(f"the LoRA {self._adapter!r} is fused into the weights; call pipe.unfuse_lora() first.")

    def undo(self) -> None:
        """Take the LoRA off: no layer of it is left, and parameters hold bitwise what they held before.

        Layers that the user unloaded are gone already; where they were fused before, a warning says what stays.
        """
        if self._adapter is not None:
            unloaded = self._adapter not in getattr(self._transformer, "peft_config", {})
            if unloaded and self._adapter in self._pipe.fused_loras:
                logger.warning(
                    "the LoRA %r was fused, then unloaded: its matrices stay in the weights; load the model again.",
                    self._adapter,
                )
            _remove_adapter(self._transformer, self._adapter)
            self._adapter = None
        while self._written:
            self._written.pop().put_back(self._transformer)

    def _add(self, names: ModelNames, path: str, difference: torch.Tensor, scale: float) -> None:
        module, name = names.owner(path)
        parameter = getattr(module, name)
        reason = _why_not_added(self._transformer, parameter)
        if reason is not None:
            self.unused[path] = reason
            return
        self._written.append(_Written(module, name, parameter.detach().cpu().clone()))
        precise = torch.promote_types(parameter.dtype, torch.float32)
        with torch.no_grad():
            parameter.copy_(parameter.to(precise) + scale * difference.to(parameter.device, precise))
        write_through(self._transformer, parameter)

    def _load_pairs(self, pipe: DiffusionPipeline, pairs: dict[str, Pair], scale: float) -> None:
        check_peft()
        model = self._transformer
        active, taken = _active_adapters(model), {*getattr(model, "peft_config", {}), *pipe.fused_loras}
        name = next(name for i in range(len(taken) + 1) if (name := f"distilled_{i}") not in taken)
        tensors = {}
        for path, pair in pairs.items():
            tensors[f"{path}.lora_A.weight"], tensors[f"{path}.lora_B.weight"] = _with_scale(pair, scale)
        self._adapter = name
        with _state_dict_readable(model):
            model.load_lora_adapter(tensors, prefix=None, adapter_name=name, _pipeline=pipe)
        model.set_adapter([*active, name])  # loading makes a new adapter the only active one


@contextlib.contextmanager
def _state_dict_readable(model: nn.Module) -> Iterator[None]:
    """Where weights were freed, give loaders, who look for the names of LoRA layers, a state dict of what is left."""
    freed = why_not_restorable(model) is not None
    if freed:
        model.state_dict = lambda: dict(model.named_parameters())
    try:
        yield
    finally:
        if freed:
            del model.state_dict


def _why_not_added(transformer: nn.Module, parameter: torch.Tensor) -> str | None:
    """Why no difference can be added to a parameter, in a few words; None when it can."""
    reason = _why_unreachable(transformer, parameter)
    if reason is None and (not parameter.is_floating_point() or parameter.dtype.itemsize < 2):
        return f"the parameter is stored as {_name_of(parameter.dtype)}"
    return reason


def _why_unreachable(transformer: nn.Module, parameter: torch.Tensor) -> str | None:
    """Why a parameter's values cannot be written, in a few words; None when they can."""
    if isinstance(parameter, EightBitWeight):
        return "the values of the parameter were freed" if parameter.freed else None
    if type(parameter) not in _PLAIN:
        return f"the parameter is a {type(parameter).__name__}"
    if parameter.is_meta:
        return "offloading keeps the parameter elsewhere"
    return "group offloading keeps the parameter on disk" if is_on_disk(transformer) else None


def _in_few_bits(parameter: torch.Tensor) -> bool:
    """Whether it has 8 bits a value, or fewer, as under layerwise casting."""
    return type(parameter) in _PLAIN and parameter.is_floating_point() and parameter.dtype.itemsize < 2


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _with_scale(pair: Pair, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """down and up whose product has the pair's scale and the user's; about half of it is in each, so that fp16 does not
    underflow, and powers of two round nothing."""
    factor = scale * pair.scale
    if factor == 1:
        return pair.down, pair.up
    half = 2.0 ** round(math.log2(abs(factor)) / 2) if factor else 1.0
    return pair.down.float() * half, pair.up.float() * (factor / half)


def has_fused_projections(transformer: nn.Module) -> bool:
    """Whether an attention runs by copies of its projections' weights, as after diffusers' fuse_qkv_projections."""
    return any(getattr(module, "fused_projections", False) for module in transformer.modules())


def _lora_layers(model: nn.Module) -> list[nn.Module]:
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def _active_adapters(model: nn.Module) -> list[str]:
    if not getattr(model, "peft_config", None):
        return []
    return next((list(layer.active_adapters) for layer in _lora_layers(model)), [])


def _remove_adapter(model: nn.Module, adapter: str) -> None:
    """Delete an adapter and its layers; those of others stay, and active as they are."""
    active = [name for name in _active_adapters(model) if name != adapter]
    for layer in _lora_layers(model):  # also of an adapter that was loaded halfway, and that model does not know
        layer.delete_adapter(adapter)
    getattr(model, "peft_config", {}).pop(adapter, None)
    layers = {id(layer) for layer in _lora_layers(model) if not layer.r}  # by adapter: none is left
    for path, module in list(model.named_modules()):
        if id(module) in layers:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, module.get_base_layer())
    if getattr(model, "peft_config", None):
        model.set_adapter(active)
    else:
        for name in ("peft_config", "_hf_peft_config_loaded"):  # the class says that there is none
            vars(model).pop(name, None)
