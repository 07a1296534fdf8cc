"""A linear that runs in 8 bits: what nn.Linear becomes, in place, and can become again.

    linear.weight               EightBitWeight: reads and writes the original, and converts it anew
    linear._parameters          no weight: nothing that moves, shards or offloads parameters finds one to move
    linear._buffers             values, scale and norm of the 8-bit weight, overwritten in place when it changes
    state_dict, load_state_dict the original, under its old name
    linear(x)                   multiplies by the 8-bit weight, or by a Parameter that somebody set in its place

What is written to ``linear.weight`` by any means, loaded, or written to the original, which somebody may hold from
before, or to a tensor that `state_dict` returned is converted anew: the latter two when the model is called, or this
linear (weights_written.py). Not seen of these are writes to such a tensor through its ``.data``, as NumPy arrays and by
fused optimizers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from types import MethodType
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import nn

from ... import kernels
from ...kernels import QuantizedWeight, quantize_weight
from ...plain import is_autocast, is_transformed
from ..journal import slot_below_hooks
from .original_parameter import OriginalParameter
from .read_only import FREED, EightBitWeight

VALUES, SCALE, NORM = BUFFERS = ("weight_8bit", "weight_scale", "weight_norm")  # the parts of a QuantizedWeight
WRITTEN = frozenset({"version"})  # attributes that follow what originals hold: calls run the same with any
# All of this process, copies too. A list on a part of a model would take the other parts along where that is copied.
_KNOWN: WeakSet[nn.Linear] = WeakSet()
_LOCK = threading.RLock()
AT_ONCE = 2**20  # values that are converted at a time: in fp32, and three times over, 12 MiB


def _alone(function: Callable) -> Callable:
    """Decorator: no other thread switches a linear to another weight, or looks at those of all models, meanwhile."""

    @functools.wraps(function)
    def run(*arguments: object) -> object:
        with _LOCK:
            return function(*arguments)

    return run


class QuantizedLinear(nn.Linear):
    """An nn.Linear whose weight is in 8 bits on the model's device, and whose original is on the CPU or freed.

    Made by `begin` from an nn.Linear, which `end` brings back.
    """

    @staticmethod
    @_alone
    def begin(linear: nn.Linear, weight: QuantizedWeight) -> None:
        """Let a linear run with this weight, on its device; the original goes to the CPU."""
        original = linear._parameters["weight"]
        dtype = original.dtype
        if not original.is_meta:
            original = _on_cpu(original)
        slots = _forward_slots(linear)
        linear._parameters["weight"] = None
        linear._buffers.update(zip(BUFFERS, weight, strict=True))
        linear._non_persistent_buffers_set.update(BUFFERS)
        _remember(linear, EightBitWeight(original, weight.values.device, dtype, linear))
        linear.version = _version(original)  # of the original, when it was converted
        linear.__class__ = QuantizedLinear
        for slot in slots:
            setattr(*slot, MethodType(QuantizedLinear.forward, linear))
        _make_known(linear)
        _count_data(original)

    @staticmethod
    @_alone
    def end(linear: nn.Linear) -> None:
        """The original in the place of the 8-bit weight, on the device and in the dtype that the model has now; a
        Parameter that somebody set in its place stays theirs. Nothing for a linear that was not begun."""
        if not isinstance(linear, QuantizedLinear):
            return
        slots, weight = _forward_slots(linear), linear.eight_bit
        for name in BUFFERS:
            del linear._buffers[name]
        linear._non_persistent_buffers_set.difference_update(BUFFERS)
        del linear.eight_bit, linear.version
        linear.__class__ = nn.Linear
        for slot in slots:
            setattr(*slot, MethodType(nn.Linear.forward, linear))
        _count_data_no_more(weight.original)
        if linear._parameters["weight"] is None:
            _bring_back(linear, weight)

    @staticmethod
    def forget(copied: QuantizedLinear) -> None:
        """Make a copy, which nobody else knows, an nn.Linear with a weight of its own."""
        weight = nn.Parameter(copied.eight_bit.detach().clone(), requires_grad=False)
        for name in BUFFERS:
            del copied._buffers[name]
        del copied.eight_bit, copied.version
        copied.__class__ = nn.Linear
        copied._parameters["weight"] = weight

    @property
    def weight(self) -> torch.Tensor:
        """What stands for the original, or what somebody set in its place."""
        replaced = self._parameters["weight"]
        return self.eight_bit if replaced is None else replaced

    @property
    def is_replaced(self) -> bool:
        """Whether somebody set another weight since, with which the linear then runs as it is."""
        return self._parameters["weight"] is not None

    def quantized(self) -> QuantizedWeight:
        """The 8-bit weight, on the device that it was moved to."""
        if not torch.compiler.is_compiling():
            self.bring_up_to_date()
        buffers = self._buffers
        return QuantizedWeight(buffers[VALUES], buffers[SCALE], buffers[NORM])

    @property
    def is_outdated(self) -> bool:
        """Whether the original was written to, or a tensor that shares its memory and count of writes."""
        return self.version is not None and self.eight_bit.original._version != self.version

    def bring_up_to_date(self) -> None:
        """Convert anew where it is outdated."""
        if self.is_outdated:
            self.convert_anew()

    @_alone
    def convert_all_tied(self) -> None:
        """Convert anew all linears that have this original."""
        for linear in _known():
            if linear.eight_bit.original is self.eight_bit.original:
                linear.convert_anew()

    def convert_anew(self) -> None:
        """After a write to the original: into the memory of the present 8-bit weight, where CUDA graphs find it."""
        original, values = self.eight_bit.original, self._buffers[VALUES]
        version = _version(original)  # before what another thread may write meanwhile
        converted = convert(original, values.dtype, values.device)
        for buffer, tensor in zip((self._buffers[name] for name in BUFFERS), converted, strict=True):
            with torch.no_grad(), torch.inference_mode(buffer.is_inference()):  # where alone those can be written to
                buffer.copy_(tensor)
            # A write to `weight` comes here below autograd, which then counts none.
            if not buffer.is_inference():
                torch.autograd.graph.increment_version(buffer)
        self.version = version

    @_alone
    def free_original(self) -> None:
        """Let go of the original's values, for good."""
        original = self.eight_bit.original
        self.eight_bit.original = nn.Parameter(torch.empty_like(original, device="meta"), original.requires_grad)
        _count_data_no_more(original)
        self.version = _version(self.eight_bit.original)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As nn.Linear's; the 8-bit weight comes to the input where offloading let it rest elsewhere.

        On a GPU the input is rounded to 8 bits too, but for autograd, function transforms and autocast.
        """
        if not isinstance(self, QuantizedLinear) or self.is_replaced:  # a hook kept this method beyond `end`
            return F.linear(input, self.weight, self.bias)
        # Only copies to a GPU are in order with what runs there.
        weight = QuantizedWeight(*(t.to(input.device, non_blocking=input.is_cuda) for t in self.quantized()))
        if self._takes(input) and _has_kernels(weight.format, input, self.bias):
            rows = kernels.quantize_rows(input, weight.format)
            return kernels.linear_8bit(rows, weight, self.bias, dtype=input.dtype)
        return F.linear(input, weight.dequantize(self.eight_bit.dtype), self.bias)

    def _takes(self, input: torch.Tensor) -> bool:
        """Whether nn.Linear takes this input without error, and no transform of it or of its dtype is under way."""
        fits = input.shape[-1:] == (self.in_features,) and input.dtype == self.eight_bit.dtype
        return fits and not is_autocast(input.device) and not is_transformed()

    def _apply(self, fn: Callable, recurse: bool = True) -> QuantizedLinear:
        """As nn.Module's, which moves and casts: the 8-bit weight is moved only, and the original is not even that."""
        tensors = {name: self._buffers[name] for name in BUFFERS}
        try:
            self._buffers.update(dict.fromkeys(BUFFERS))  # None is left alone
            super()._apply(fn, recurse)
        finally:
            self._buffers.update(tensors)
        becomes = fn(torch.empty(0, dtype=self.eight_bit.dtype, device=tensors[VALUES].device))
        self._buffers.update({name: tensor.to(becomes.device) for name, tensor in tensors.items()})
        _remember(self, self.eight_bit.moved(becomes.device, becomes.dtype))
        return self

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        if not self.is_replaced:
            if self.eight_bit.freed:
                raise RuntimeError(f"{prefix}weight: {FREED}")
            if self.eight_bit.original.dtype != self.eight_bit.dtype:  # a cast copy would not hand writes on
                self.eight_bit.original.data = self.eight_bit.original.data.to(self.eight_bit.dtype)
                self.convert_all_tied()
            destination[f"{prefix}weight"] = self.eight_bit if keep_vars else self.eight_bit.original.detach()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, local_metadata: dict, *rest: object) -> None:
        """Into the original, or where that was freed into one for as long as converting it takes. With ``assign=True``
        what is loaded becomes the original."""
        if self.is_replaced:
            return super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        place = self._parameters["weight"] = _room_for(self.eight_bit) if self.eight_bit.freed else self.eight_bit
        try:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        finally:
            loaded, self._parameters["weight"] = self._parameters["weight"], None
        if loaded is not place or (self.eight_bit.freed and loaded._version > 0):
            self._adopt(loaded)

    @_alone
    def _adopt(self, original: nn.Parameter) -> None:
        freed, before = self.eight_bit.freed, self.eight_bit.original
        self.eight_bit.original = original = _on_cpu(original)
        _count_data_no_more(before)
        _count_data(original)
        _remember(self, self.eight_bit.moved(self.eight_bit.device, original.dtype))
        self.convert_anew()
        if freed:
            self.free_original()

    def named_buffers(self, *arguments: object, **options: object) -> Iterator[tuple[str, torch.Tensor]]:
        """Without the 8-bit weight, when a linear itself is asked; a model or a block lists it.

        Offloading by layers asks, and accelerate's keeps buffers on the GPU for good: `forward` brings the 8-bit weight
        there only while it runs.
        """
        every = super().named_buffers(*arguments, **options)
        return ((name, buffer) for name, buffer in every if name.rpartition(".")[2] not in BUFFERS)

    def __reduce_ex__(self, protocol: int) -> tuple:
        """With the values as bytes: plain pickle does not bring back a tensor in e4m3."""
        self.bring_up_to_date()
        make, arguments, state, *_ = super().__reduce_ex__(protocol)
        state = dict(state)
        buffers = dict(state.pop("_buffers"))
        values = buffers.pop(VALUES)
        return _with_buffers, (make, arguments, buffers, values.view(torch.uint8), values.dtype), state

    def __setstate__(self, state: dict) -> None:
        """Of a copy, whose original counts writes anew."""
        weight = state["eight_bit"]
        if not weight.freed:
            weight.original = _on_cpu(weight.original)
        super().__setstate__({**state, "version": _version(weight.original)})


def _with_buffers(make: Callable, arguments: tuple, buffers: dict, values: torch.Tensor, format) -> QuantizedLinear:
    linear = make(*arguments)
    vars(linear)["_buffers"] = {**buffers, VALUES: values.view(format)}
    _make_known(linear)
    return linear


@_alone
def bring_all_up_to_date() -> int:
    """Convert anew what was written to through a `state_dict` or a parameter from before the patch, in all models of
    this process; returns how many weights that were."""
    outdated = [linear for linear in _known() if linear.is_outdated]
    for linear in outdated:
        linear.convert_anew()
    return len(outdated)


@_alone
def _known() -> list[QuantizedLinear]:
    """All of this process that are in 8 bits; one that is being copied has no weight yet."""
    return [linear for linear in _KNOWN if isinstance(linear, QuantizedLinear) and "eight_bit" in vars(linear)]


@_alone
def _make_known(linear: nn.Linear) -> None:
    _KNOWN.add(linear)


def _count_data(original: nn.Parameter) -> None:
    if type(original) is nn.Parameter:
        original.__class__ = OriginalParameter


def _count_data_no_more(original: nn.Parameter) -> None:
    """Unless another linear in 8 bits, of this or of another model, still has this original."""
    if type(original) is OriginalParameter and all(each.eight_bit.original is not original for each in _known()):
        original.__class__ = nn.Parameter


def _forward_slots(linear: nn.Linear) -> list[tuple[object, str]]:
    """The objects and their attributes where hooks, or such as were removed, hold the forward of a linear's class."""
    forward = MethodType(type(linear).forward, linear)
    own = [(linear, name) for name in ("forward", "_old_forward") if vars(linear).get(name) == forward]
    below = slot_below_hooks(linear)
    return own if below is None else [*own, below]


def _remember(linear: nn.Linear, weight: EightBitWeight) -> None:
    vars(linear)["eight_bit"] = weight  # as an attribute: nn.Module would make it a parameter


def _bring_back(linear: nn.Linear, weight: EightBitWeight) -> None:
    original = weight.original
    if weight.device.type == "meta":  # as nn.Module.to, which makes other parameters of those that it moves there
        original = nn.Parameter(original.to(weight.device, weight.dtype), original.requires_grad)
    elif not original.is_meta and (original.device, original.dtype) != (weight.device, weight.dtype):
        original.data = original.data.to(weight.device, weight.dtype)
    linear._parameters["weight"] = original
    hook = vars(linear).get("_hf_hook")
    if hasattr(hook, "original_devices"):  # accelerate's offloading then takes the weight too, and must put it back
        hook.original_devices.setdefault("weight", weight.device)


def _has_kernels(format: torch.dtype, *tensors: torch.Tensor | None) -> bool:
    """Whether kernels take these in a format of 8 bits: on a GPU that knows it, where no derivative is wanted, which
    rounding has none of."""
    device = tensors[0].device
    return device.type == "cuda" and kernels.why_not_triton(*tensors, has_gradient=False, formats=(format,)) is None


@torch.inference_mode(False)
def _room_for(weight: EightBitWeight) -> nn.Parameter:
    """On the CPU, with the version 0 until something is written to it."""
    return nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype), weight.original.requires_grad)


@torch.inference_mode(False)
def _on_cpu(original: nn.Parameter) -> nn.Parameter:
    """Itself, moved; a copy of an inference tensor, because nobody counts what is written to those."""
    if original.is_inference():
        return nn.Parameter(original.detach().to("cpu", copy=True), original.requires_grad)
    if original.device.type != "cpu":  # else nothing is written, which linears with the same original would count
        original.data = original.data.cpu()
    return original


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


@torch.no_grad()
def convert(weight: torch.Tensor, format: torch.dtype, device: torch.device) -> QuantizedWeight:
    """A weight [N, K] in 8 bits on a device, some rows at a time."""
    where, norms = fastest(device), []
    values = torch.empty(weight.shape, dtype=format, device=where)
    scale = torch.empty(len(weight), dtype=torch.float32, device=where)
    for part in _parts(weight):
        values[part], scale[part], norm = quantize_weight(weight[part].to(where), format)
        norms.append(norm)
    return QuantizedWeight(values.to(device), scale.to(device), torch.stack(norms).amax().to(device))


@torch.no_grad()
def error_of(weight: QuantizedWeight, original: torch.Tensor) -> float:
    """The relative L2 error of a weight in 8 bits, some rows at a time."""
    error = size = torch.zeros((), dtype=torch.float64)
    for part in _parts(original):
        exact = original[part].to(weight.values.device, torch.float32)
        rounded = QuantizedWeight(weight.values[part], weight.scale[part]).dequantize()
        error, size = (total + x.square().sum().cpu() for total, x in ((error, rounded - exact), (size, exact)))
    return float((error / size.clamp(min=torch.finfo(torch.float32).tiny)).sqrt())


def _parts(weight: torch.Tensor) -> Iterator[slice]:
    """Its rows, so many at a time that they are AT_ONCE values."""
    rows = max(1, AT_ONCE // weight.shape[1])
    return (slice(first, first + rows) for first in range(0, len(weight), rows))


def fastest(device: torch.device) -> torch.device:
    """Where to convert what is on a device: a GPU, if there is one, converts what is on the CPU."""
    return torch.device("cuda") if device.type == "cpu" and torch.cuda.is_available() else device
