"""Weights of a transformer's linears in 8 bits: choose and convert them, and answer the patch's questions about them.

The 8-bit weight takes the place of the original in the memory of the model's device (linear_8bit.py); the
originals stay on the CPU, or are freed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ...config import PatchConfig
from ...keep_list import keeps_weights
from ...kernels.quantized import FP8, FP8_CAPABILITY, INT8, QuantizedWeight
from ...plain import hook_on, is_lora_layer, is_sharded
from ...wording import counted
from ..errors import PatchError
from ..journal import Journal, bind
from .brought import are_brought
from .linear_8bit import VALUES, QuantizedLinear, convert, fastest, linears_are_replaced

# diffusers' names of linears whose input is rounded when the largest value of each row is known: in the kernel of a
# norm or in a separate pass.
ROWS_KNOWN = ("to_q", "to_k", "to_v", "add_k_proj", "add_v_proj", "net.0.proj")
# The fused projection of diffusers' fuse_qkv_projections, and the projections that it replaces.
_FUSED = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_kv": ("to_k", "to_v"),
    "to_added_kv": ("add_k_proj", "add_v_proj"),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class LinearAt(NamedTuple):
    """A linear that may be converted.

    block_path: the path of its block. name: its path in the block. sub_layer: its name in ``PatchConfig.fuse``.
    """

    block_path: str
    block: nn.Module
    name: str
    sub_layer: str


def format_for(capability: tuple[int, int] | None, *, rows_known: bool) -> torch.dtype:
    """Return the 8-bit format of a linear. capability: the GPU's compute capability, or None if unknown.

    rows_known: True if the largest value of each row of its input is known.

    Prefer int8: its error is a third of e4m3's. It needs each input row's largest value. The results of an attention or
    a GELU are scaled by a bound instead, and only e4m3 stays accurate then.
    """
    return FP8 if has_format(FP8, capability) and not rows_known else INT8


def has_format(format: torch.dtype, capability: tuple[int, int] | None) -> bool:
    """True if GPUs of a compute capability multiply in an 8-bit format. capability: None if it is unknown."""
    return format == INT8 or capability is None or capability >= FP8_CAPABILITY


def convertible_linears(
    transformer: nn.Module, linears: Iterable[LinearAt], config: PatchConfig
) -> dict[str, nn.Linear]:
    """Return the linears that a configuration converts, by their paths; within PEFT layers, the base layers.

    Raises PatchError for a linear without a weight.
    """
    if not config.in_8_bits("linears"):
        return {}
    found: dict[nn.Module | None, str] = {}
    for path, block, name, sub_layer in linears:
        if sub_layer in config.fuse:
            found.setdefault(_linear_in(block, name), f"{path}.{name}")
    for linear, path in found.items():
        if type(linear) is nn.Linear and getattr(linear, "weight", None) is None:
            raise PatchError(f"cannot patch: {path} has no weight; load the model's weights first.")
    shared = shared_parameters(transformer)
    return {
        path: linear
        for linear, path in found.items()
        if _is_plain(linear) and id(linear.weight) not in shared and not keeps_weights(path, config.keep)
    }


def shared_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that several modules have: tied weights stay as they are."""
    counts = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    return {parameter for parameter, count in counts.items() if count > 1}


def _linear_in(block: nn.Module, name: str) -> nn.Module | None:
    sub_layer, _, inner = name.partition(".")
    part = getattr(block, sub_layer)
    if any(inner in parts and hasattr(part, whole) for whole, parts in _FUSED.items()):
        return None  # another linear runs in its place
    try:
        module = part.get_submodule(inner)
    except AttributeError:
        return None
    while hasattr(module, "base_layer"):
        if type(module).__name__ == "ParamWrapper":  # PEFT's target_parameters change the weight in every call
            return None
        module = module.base_layer
    return module


def _is_plain(linear: nn.Module | None) -> bool:
    """True for an nn.Linear whose weight is an ordinary parameter."""
    return type(linear) is nn.Linear and type(linear.weight) is nn.Parameter and linear.weight.dtype in DTYPES


# ---------------------------------------------------------------------------------------------------------------------
# Conversion, and the way back
# ---------------------------------------------------------------------------------------------------------------------


def convert_weights(journal: Journal, linears: dict[str, nn.Linear], rows_known: tuple[str, ...]) -> None:
    """Put the weights of linears in 8 bits, one after the other; the originals go to the CPU.

    rows_known: how a linear's path ends if the largest value of each row of its input is known.

    Raises ValueError, before anything is changed, where weights are on the meta device.
    """
    missing = [path for path, linear in linears.items() if linear.weight.is_meta]
    if missing:
        raise ValueError(f"{missing[0]}.weight is on the meta device; load its values first, or use load_converted.")
    for path, linear in linears.items():
        device = linear.weight.device
        format = format_for(capability_of(device), rows_known=path.endswith(rows_known))
        put_in_8_bits(journal, linear, convert(linear.weight, format, device))


def refuse_written_weights(journal: Journal, transformer: nn.Module) -> None:
    """Let the methods of a transformer that would write to weights in 8 bits refuse before they write anything."""
    for method in (load_state_dict, add_adapter, fuse_lora, unfuse_lora):
        journal.set(transformer, method.__name__, bind(method, transformer))


def load_state_dict(self: nn.Module, state_dict: Mapping[str, torch.Tensor], *arguments: object, **options: object):
    """Load as torch.nn.Module.load_state_dict does. Raises RuntimeError for a weight in 8 bits."""
    for path, module in self.named_modules():
        if is_quantized(module) and f"{path}.weight" in state_dict:
            raise module.refusal(f"{path}.weight")
    return type(self).load_state_dict(self, state_dict, *arguments, **options)


def add_adapter(self: nn.Module, adapter_config: object, *arguments: object, **options: object) -> None:
    """Add an adapter as diffusers' add_adapter does. Raises RuntimeError for target_parameters in 8 bits.

    PEFT would leave them out, with a warning at most.
    """
    targets = getattr(adapter_config, "target_parameters", None) or ()
    for path, module in self.named_modules():
        if is_quantized(module) and any(f".{path}.weight".endswith(f".{target}") for target in targets):
            raise module.refusal(f"{path}.weight")
    type(self).add_adapter(self, adapter_config, *arguments, **options)


def fuse_lora(self: nn.Module, *arguments: object, **options: object) -> None:
    """Fuse as diffusers' fuse_lora does. Raises RuntimeError for a LoRA on a linear in 8 bits."""
    for path, layer in _lora_layers_in_8_bits(self):
        raise layer.base_layer.refusal(f"{path}.weight")
    type(self).fuse_lora(self, *arguments, **options)


def unfuse_lora(self: nn.Module, *arguments: object, **options: object) -> None:
    """Unfuse as diffusers' unfuse_lora does. Raises RuntimeError for a LoRA that was fused before the patch.

    PEFT would forget that the LoRA is fused before the weight refuses.
    """
    for path, layer in _lora_layers_in_8_bits(self):
        if layer.merged:
            raise layer.base_layer.refusal(f"{path}.weight")
    type(self).unfuse_lora(self, *arguments, **options)


def _lora_layers_in_8_bits(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    modules = ((path, module) for path, module in model.named_modules() if is_lora_layer(module))
    return ((path, layer) for path, layer in modules if is_quantized(layer.base_layer))


def put_in_8_bits(journal: Journal, linear: nn.Linear, weight: QuantizedWeight) -> None:
    """Let a linear run with this weight, on its device; the original goes to the CPU."""
    journal.on_undo(QuantizedLinear.end, linear)
    QuantizedLinear.begin(linear, weight)


def free_originals(transformer: nn.Module) -> None:
    """Let go of the originals, for good."""
    for linear in quantized_linears(transformer):
        linear.free_original()


def why_not_restorable(transformer: nn.Module) -> str | None:
    """Return the reason, as a sentence, why the original weights cannot be restored, or None."""
    linears = quantized_linears(transformer)
    if linears and is_sharded(transformer):
        return "its 8-bit weights are sharded, and fully_shard cannot be undone; load the model again instead."
    count = sum(linear.is_freed for linear in linears)
    if count == 0:
        return None
    return (
        f"the original weights of {count} linears were freed (restorable=False, or loaded from 8 bits); load the model "
        "again instead."
    )


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return a GPU's compute capability, or None without a GPU. For the CPU use the GPU that a model may go to."""
    device = fastest(device)
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


# ---------------------------------------------------------------------------------------------------------------------
# Questions of the rest of the patch
# ---------------------------------------------------------------------------------------------------------------------


def is_quantized(module: nn.Module) -> bool:
    """True if a module is a linear in 8 bits."""
    return isinstance(module, QuantizedLinear)


def quantized_linears(transformer: nn.Module) -> list[QuantizedLinear]:
    """Return all linears in 8 bits."""
    return [module for module in transformer.modules() if isinstance(module, QuantizedLinear)]


def bias_bound(bias: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of a linear's bias, 0-d fp32, at each call anew, because the bias may change."""
    return torch.linalg.vector_norm(bias.detach(), torch.inf, dtype=torch.float32)


def why_not_read(linear: QuantizedLinear, device: torch.device) -> str | None:
    """Return the reason why a kernel may not read a linear's 8-bit weight for inputs on this device, or None."""
    if linears_are_replaced():
        return "replaced forward of its class"
    if are_brought(linear):
        return None
    tensors = (linear._parameters[VALUES], linear.bias)
    elsewhere = next((t for t in tensors if t is not None and t.device != device), None)
    return hook_on(linear) or (None if elsewhere is None else f"weight on {elsewhere.device}")


def weights_note(transformer: nn.Module) -> str | None:
    """Return a line on the weights' memory and where the originals are, or None without linears in 8 bits."""
    linears = quantized_linears(transformer)
    if not linears:
        return None
    held = sum(linear._parameters[name].nbytes for linear in linears for name in linear.parts)
    original = sum(linear.original.numel() * linear.weight_dtype.itemsize for linear in linears)
    devices = ", ".join(sorted({str(linear._parameters[VALUES].device) for linear in linears}))
    kept = "freed" if all(linear.is_freed for linear in linears) else "kept on the CPU (restorable=False frees them)"
    return (
        f"weights of {len(linears)} linears in 8 bits: {_in_mib(held)} on {devices}; the originals, "
        f"{_in_mib(original)}, are {kept}"
    )


def from_file_note(unchanged: int, errors: Sequence[float]) -> str | None:
    """Return a line on weights from an 8-bit file, or None if there are none.

    unchanged: the number of linears with the file's own values. errors: what our 8 bits add to the others' weights.
    """
    parts = [f"{counted(unchanged, 'linear')} with the file's own 8-bit values"] if unchanged else []
    if errors:
        mean, largest = sum(errors) / len(errors), max(errors)
        parts.append(
            f"converted from the file's own 8 bits, which adds a relative error of {mean:.2g} (at most {largest:.2g}) "
            f"to the weights of {len(errors)} linears"
        )
    return "; ".join(parts) or None


def _in_mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
