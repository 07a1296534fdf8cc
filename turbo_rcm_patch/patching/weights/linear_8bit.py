"""A linear that runs in 8 bits. An nn.Linear becomes one in place, and can become an nn.Linear again.

    linear._parameters   weight_8bit [N, K], weight_scale [N], weight_norm [1], moved, sharded and offloaded like others
    linear.weight        the original on the CPU, which can be read only (read_only.py)
    state_dict           the original, under its old name
    linear(x)            multiplies by the 8-bit weight

Nobody may change the weight while it is patched: what Python can notice raises RuntimeError with the rule to restore
first. docs/tiers.md lists what is not noticed, such as writes to the memory of the original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType

import torch
import torch.nn.functional as F
from torch import nn

from ... import kernels
from ...kernels import QuantizedWeight, quantize_weight
from ...kernels.choice.registry import spec_of
from ...kernels.rows.quantize_rows import QUANTIZE_ROWS
from ...plain import is_autocast, is_original, is_transformed
from ..journal import slot_below_hooks
from .read_only import FREED, RULE, ReadOnlyWeight

VALUES, SCALE, NORM = PARTS = ("weight_8bit", "weight_scale", "weight_norm")  # the parts of a QuantizedWeight
CAST = (
    "an 8-bit weight or its scale has another dtype than the patch gave it. If fully_shard cast it, call that without "
    "MixedPrecisionPolicy(param_dtype=...): 8-bit weights are gathered as they are. If a function such as "
    "vector_to_parameters wrote to it, call restore() first, change the weights, then patch again."
)
AT_ONCE = 2**20  # values converted at a time, which take three fp32 copies, 12 MiB


class QuantizedLinear(nn.Linear):
    """An nn.Linear whose weight is in 8 bits on the model's device, and whose original is on the CPU or freed.

    `begin` makes it from an nn.Linear, and `end` brings that back.

    Attributes:
        original: the original nn.Parameter on the CPU, or on the meta device if its values were freed.
        weight_dtype: the dtype that the weight has for the model.
        parts: the names of the parameters that hold the 8-bit weight.
    """

    parts = PARTS

    @classmethod
    def begin(cls, linear: nn.Linear, weight: QuantizedWeight) -> None:
        """Let a linear run with this weight, on its device; the original goes to the CPU."""
        original, slots = linear._parameters["weight"], _forward_slots(linear)
        # Set these through vars(): nn.Module would make the original a parameter.
        vars(linear).update(original=_on_cpu(original), weight_dtype=original.dtype)
        linear._parameters["weight"] = None
        parts = (weight.values, weight.scale, None if weight.norm is None else weight.norm.reshape(1))
        given = [_parameter(part) for part in parts if part is not None]
        linear._parameters.update(zip(cls.parts, given, strict=True))
        linear.__class__ = cls
        for slot in slots:
            setattr(*slot, MethodType(cls.forward, linear))

    @staticmethod
    def end(linear: nn.Linear) -> None:
        """Put the original back, on the device and in the dtype that the model has now.

        A Parameter that stands in its place stays. Do nothing for a linear that was not begun.
        """
        if not isinstance(linear, QuantizedLinear):
            return
        slots, device = _forward_slots(linear), linear.device
        original, dtype = vars(linear).pop("original"), vars(linear).pop("weight_dtype")
        for name in linear.parts:
            linear._parameters.pop(name, None)
        linear.__class__ = nn.Linear
        for slot in slots:
            setattr(*slot, MethodType(nn.Linear.forward, linear))
        if linear._parameters.get("weight") is None:
            _bring_back(linear, original, device, dtype)

    @staticmethod
    def forget(copied: QuantizedLinear) -> None:
        """Turn a fresh copy into an nn.Linear with its own weight, which holds the original values."""
        weight = nn.Parameter(copied.weight.clone(), requires_grad=False)
        for name in copied.parts:
            del copied._parameters[name]
        del copied.original, copied.weight_dtype
        copied.__class__ = nn.Linear
        copied._parameters["weight"] = weight

    @property
    def weight(self) -> ReadOnlyWeight:
        """The original weight [N, K] to read, on the 8-bit weight's device, in the model's dtype."""
        return ReadOnlyWeight(self.original, self.device, self.weight_dtype)

    @property
    def device(self) -> torch.device:
        """The device of the 8-bit weight, or of the original if the 8-bit weight was deleted."""
        values = self._parameters.get(VALUES)
        return (self.original if values is None else values).device

    @property
    def is_freed(self) -> bool:
        """True if the original's values were freed."""
        return self.original.is_meta

    def free_original(self) -> None:
        """Let go of the original's values, for good."""
        gone = torch.empty_like(self.original, device="meta")
        vars(self)["original"] = nn.Parameter(gone, self.original.requires_grad)

    def quantized(self) -> QuantizedWeight:
        """Return the 8-bit weight, on the device where it is.

        Raises RuntimeError if the weight was replaced, or if its parts have other dtypes now.
        """
        parameters = self._parameters
        if parameters.get("weight") is not None:
            raise self.refusal("weight")
        weight = QuantizedWeight(parameters[VALUES], parameters[SCALE], parameters[NORM])
        if weight.format.itemsize > 1 or weight.scale.dtype != torch.float32:
            raise RuntimeError(CAST)
        return weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute what nn.Linear does, with the 8-bit weight, which comes to the input's device.

        On a GPU the input is rounded to 8 bits too, except under autograd, function transforms and autocast. A forward
        that replaces nn.Linear's runs instead, and reads the original weight.
        """
        if not isinstance(self, QuantizedLinear):  # a hook kept this method beyond `end`
            return F.linear(input, self.weight, self.bias)
        if linears_are_replaced():
            return nn.Linear.forward(self, input)
        # Only copies to a GPU are in order with what runs there.
        weight = QuantizedWeight(*(t.to(input.device, non_blocking=input.is_cuda) for t in self.quantized()))
        if self._takes(input) and _has_kernels(weight.format, input, self.bias):
            rows = kernels.quantize_rows(input, weight.format)
            return kernels.linear_8bit(rows, weight, self.bias, dtype=input.dtype)
        return F.linear(input, weight.dequantize(self.weight_dtype), self.bias)

    def refusal(self, name: str) -> RuntimeError:
        """Return the error to raise when the parameter of this name would be changed."""
        return RuntimeError(f"{name}: {FREED if self.is_freed else RULE}")

    def _takes(self, input: torch.Tensor) -> bool:
        """True if nn.Linear takes this input without error and no transform of it or its dtype is under way."""
        fits = input.shape[-1:] == (self.in_features,) and input.dtype == self.weight_dtype
        return fits and not is_autocast(input.device) and not is_transformed()

    def _apply(self, fn: Callable, recurse: bool = True) -> QuantizedLinear:
        """Move and cast like nn.Module's, but move the 8-bit weight without casting, and leave the original alone."""
        parts = {name: self._parameters[name] for name in self.parts}
        try:
            self._parameters.update(dict.fromkeys(parts))  # None is left alone
            super()._apply(fn, recurse)
        finally:
            self._parameters.update(parts)
        becomes = fn(torch.empty(0, dtype=self.weight_dtype, device=parts[VALUES].device))
        vars(self)["weight_dtype"] = becomes.dtype
        for name, part in parts.items():
            if "meta" in (part.device.type, becomes.device.type):
                self._parameters[name] = _parameter(torch.empty_like(part, device=becomes.device))
            elif part.device != becomes.device:
                part.data = part.data.to(becomes.device)
        return self

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        if self.is_freed:
            raise RuntimeError(f"{prefix}weight: {FREED}")
        weight = self.original.detach().to(self.weight_dtype)
        destination[f"{prefix}weight"] = self.weight if keep_vars else weight
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest: object) -> None:
        if f"{prefix}weight" in state_dict:
            raise self.refusal(f"{prefix}weight")
        parts = {name: self._parameters.pop(name) for name in self.parts}  # no key is missing for them
        try:
            super()._load_from_state_dict(state_dict, prefix, *rest)
        finally:
            self._parameters.update(parts)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuse parameters that a linear in 8 bits does not have, such as pruning's, and parts set to None."""
        if name not in (*self.parts, "bias") or (name in self.parts and param is None):
            self._parameters.setdefault("weight", None)  # which weight_norm has deleted by now
            raise self.refusal(name)
        super().register_parameter(name, param)

    def __delattr__(self, name: str) -> None:
        """Refuse to delete the weight or the bias, as parametrizations do, or a part of the 8-bit weight."""
        if name in ("weight", "bias", *self.parts):
            raise self.refusal(name)
        super().__delattr__(name)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator:
        """Leave the 8-bit weight out for accelerate's hook on this linear.

        Sequential offloading looks parameters up in a state_dict, which has the original instead. `forward` brings
        the 8-bit weight to the GPU while it runs.
        """
        every = super().named_parameters(prefix, recurse, remove_duplicate)
        if "_old_forward" not in vars(self):
            return every
        return ((name, parameter) for name, parameter in every if name.rpartition(".")[2] not in self.parts)

    def __reduce_ex__(self, protocol: int) -> tuple:
        """Give the values as bytes: plain pickle does not bring back a tensor in e4m3."""
        make, arguments, state, *_ = super().__reduce_ex__(protocol)
        state = dict(state)
        parameters = dict(state.pop("_parameters"))
        values = parameters.pop(VALUES).detach()
        return _with_parameters, (make, arguments, parameters, values.view(torch.uint8), values.dtype), state


def linears_are_replaced() -> bool:
    """True if someone replaced the forward of nn.Linear."""
    return not is_original(nn.Linear.forward, nn.Linear)


def _with_parameters(make: Callable, arguments: tuple, parameters: dict, values: torch.Tensor, format) -> nn.Linear:
    linear = make(*arguments)
    vars(linear)["_parameters"] = {**parameters, VALUES: _parameter(values.view(format))}
    return linear


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _forward_slots(linear: nn.Linear) -> list[tuple[object, str]]:
    """Return the objects and attributes where present or removed hooks hold the forward of a linear's class."""
    forward = MethodType(type(linear).forward, linear)
    own = [(linear, name) for name in ("forward", "_old_forward") if vars(linear).get(name) == forward]
    below = slot_below_hooks(linear)
    return own if below is None else [*own, below]


@torch.inference_mode(False)
def _on_cpu(original: nn.Parameter) -> nn.Parameter:
    """Return the parameter itself, moved. Return a copy of an inference tensor, which cannot be moved in place."""
    if original.is_inference():
        return nn.Parameter(original.detach().to("cpu", copy=True), original.requires_grad)
    if not original.is_meta:
        original.data = original.data.cpu()
    return original


def _bring_back(linear: nn.Linear, original: nn.Parameter, device: torch.device, dtype: torch.dtype) -> None:
    if device.type == "meta":  # nn.Module.to replaces the parameters that it moves to meta
        original = nn.Parameter(original.to(device, dtype), original.requires_grad)
    elif not original.is_meta:
        original.data = original.data.to(device, dtype)
    linear._parameters["weight"] = original
    hook = vars(linear).get("_hf_hook")
    if hasattr(hook, "original_devices"):  # accelerate's offloading then takes the weight too, and must put it back
        hook.original_devices.setdefault("weight", device)


def _has_kernels(format: torch.dtype, *tensors: torch.Tensor | None) -> bool:
    """True if our kernels multiply these in an 8-bit format: on a GPU that has it, without a derivative."""
    return QUANTIZE_ROWS.why_not_fused(spec_of("auto", *tensors, result=format)) is None


@torch.inference_mode(False)
@torch.no_grad()
def convert(weight: torch.Tensor, format: torch.dtype, device: torch.device) -> QuantizedWeight:
    """Return a weight [N, K] in 8 bits on a device; it is converted some rows at a time."""
    where, norms = fastest(device), []
    values = torch.empty(weight.shape, dtype=format, device=where)
    scale = torch.empty(len(weight), dtype=torch.float32, device=where)
    for part in rows_at_once(weight):
        values[part], scale[part], norm = quantize_weight(weight[part].to(where), format)
        norms.append(norm)
    return QuantizedWeight(values.to(device), scale.to(device), torch.stack(norms).amax().to(device))


@torch.inference_mode(False)
@torch.no_grad()
def from_values(values: torch.Tensor, scale: torch.Tensor, device: torch.device) -> QuantizedWeight:
    """Return the weight of 8-bit values [N, K] and a scale [N], fp32, copied to a device. Its norm is computed here."""
    where = fastest(device)
    values, scale = values.to(where, copy=True), scale.to(where, copy=True)
    norms = [(values[part].float().norm(dim=-1) * scale[part]).amax() for part in rows_at_once(values)]
    return QuantizedWeight(values.to(device), scale.to(device), torch.stack(norms).amax().to(device))


@torch.no_grad()
def error_of(weight: QuantizedWeight, original: torch.Tensor) -> float:
    """Return the relative L2 error of a weight in 8 bits; it is summed some rows at a time."""
    error = size = torch.zeros((), dtype=torch.float64)
    for part in rows_at_once(original):
        exact = original[part].to(weight.values.device, torch.float32)
        rounded = QuantizedWeight(weight.values[part], weight.scale[part]).dequantize()
        error, size = (total + x.square().sum().cpu() for total, x in ((error, rounded - exact), (size, exact)))
    return float((error / size.clamp(min=torch.finfo(torch.float32).tiny)).sqrt())


def rows_at_once(weight: torch.Tensor) -> Iterator[slice]:
    """Yield slices of a weight's rows, each of about AT_ONCE values."""
    rows = max(1, AT_ONCE // weight.shape[1])
    return (slice(first, first + rows) for first in range(0, len(weight), rows))


def fastest(device: torch.device) -> torch.device:
    """Return the device that converts weights on a device. A GPU, if there is one, converts weights on the CPU."""
    return torch.device("cuda") if device.type == "cpu" and torch.cuda.is_available() else device
