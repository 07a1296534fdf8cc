"""Weights of linears in 8 bits: which are converted, where both they and the originals live, and the way back.

The 8-bit weight takes the place of the original in the memory of the model's device. It is held in buffers of the
linear that are in no state_dict, so that it goes with the model, and the originals stay on the CPU or are freed:

    linear.weight               EightBitWeight: reads and writes the original, and converts it anew
    linear._parameters          no weight: nothing that moves, shards or offloads parameters finds one to move
    linear._buffers             values, scale and norm of the 8-bit weight, overwritten in place when it changes
    state_dict, load_state_dict the original, under its old name
    linear(x)                   multiplies by the 8-bit weight, and by a Parameter that somebody sets in its place

What is written to ``linear.weight`` by any means, loaded, or written to a tensor that `state_dict` returned is
converted anew. Only a write through ``.data`` of such a tensor is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import nn

from ..config import PatchConfig
from ..kernels.quantized import FP8, FP8_CAPABILITY, INT8, QuantizedWeight, quantize_weight
from ..plain import function_bound_to, hook_on
from .copying import reduce_ex
from .eight_bit_weight import FREED, EightBitWeight
from .journal import Journal, bind

# The linears of a block that are converted, by the sub-layer that they belong to. Those of the text's keys and values
# see few tokens. Embeddings, modulation, norms and the head are none of a block's.
LINEARS = {
    "self_attention": ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0"),
    "cross_attention": ("attn2.to_q", "attn2.to_out.0"),
    "feed_forward": ("ffn.net.0.proj", "ffn.net.2"),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BUFFERS = ("weight_8bit", "weight_scale", "weight_norm")  # values, scale and norm of a QuantizedWeight
VERSION = "_turbo_rcm_patch_weight_version"  # of the original, when it was converted
ROWS = 1024  # converted at a time, in fp32

Blocks = Iterator[tuple[str, nn.Module]]  # with their paths in the transformer


def format_of(path: str, capability: tuple[int, int] | None) -> torch.dtype:
    """The 8-bit format of the linear at a path, for a GPU of this compute capability; None: not known yet."""
    return INT8 if capability is not None and capability < FP8_CAPABILITY else FP8


def convertible_linears(transformer: nn.Module, blocks: Blocks, config: PatchConfig) -> dict[str, nn.Linear]:
    """The linears of these blocks that a configuration converts, by their paths; within PEFT layers, the base layers.

    Raises ValueError for a name in ``config.keep`` that fits no module.
    """
    if "linears" not in config.quantize:
        return {}
    names = [name for group in config.fuse for name in LINEARS[group]]
    found = {f"{path}.{name}": _linear_in(block, name) for path, block in blocks for name in names}
    for pattern in config.keep:
        if not any(fnmatchcase(path, pattern) for path, _ in transformer.named_modules()):
            raise ValueError(f"keep={pattern!r} fits no module of the {type(transformer).__name__}.")
    kept = {path for path in found for pattern in config.keep if fnmatchcase(path, pattern)}
    return {path: linear for path, linear in found.items() if path not in kept and _is_plain(linear)}


def _linear_in(block: nn.Module, name: str) -> nn.Module | None:
    parent, _, child = name.rpartition(".")
    try:
        holder = block.get_submodule(parent)
        module = holder.get_submodule(child)
    except AttributeError:
        return None
    if getattr(holder, "fused_projections", False) and child in ("to_q", "to_k", "to_v"):
        return None  # another linear runs in their place
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


def _is_plain(linear: nn.Module | None) -> bool:
    return type(linear) is nn.Linear and type(linear.weight) is nn.Parameter and linear.weight.dtype in DTYPES


# ---------------------------------------------------------------------------------------------------------------------
# Conversion, and the way back
# ---------------------------------------------------------------------------------------------------------------------


def convert_weights(journal: Journal, linears: dict[str, nn.Linear]) -> None:
    """Put the weights of linears in 8 bits, one after the other; the originals go to the CPU.

    Raises ValueError, before anything is changed, where weights are on the meta device.
    """
    missing = [path for path, linear in linears.items() if linear.weight.is_meta]
    if missing:
        raise ValueError(f"{missing[0]}.weight is on the meta device; load its values first, or use load_converted.")
    for path, linear in linears.items():
        device = linear.weight.device
        converted = _converted(linear.weight.detach(), format_of(path, _capability(device)), device)
        put_in_8_bits(journal, linear, converted)


def put_in_8_bits(journal: Journal, linear: nn.Linear, weight: QuantizedWeight) -> None:
    """Let a linear run with this weight, on its device; the original goes to the CPU."""
    original = linear._parameters["weight"]
    dtype, changed = original.dtype, bind(_convert_anew, linear)
    journal.on_undo(_give_back, linear)
    if not original.is_meta:
        original.data = original.data.cpu()
    _store(linear, weight)
    _remember_version(linear, original)
    linear._parameters["weight"] = None
    vars(linear)["weight"] = EightBitWeight(original, weight.values.device, dtype, changed)
    for name, function in _BOUND.items():
        journal.set(linear, name, bind(function, linear))


def free_originals(transformer: nn.Module) -> None:
    """Let go of the originals, for good."""
    for linear in quantized_linears(transformer):
        _free(linear)


def _free(linear: nn.Linear) -> None:
    weight = vars(linear)["weight"]
    weight.original = nn.Parameter(torch.empty_like(weight.original, device="meta"), weight.original.requires_grad)
    _remember_version(linear, weight.original)


def why_not_restorable(transformer: nn.Module) -> str | None:
    """Why the original weights cannot be brought back, as a sentence; None when they can."""
    count = sum(vars(linear)["weight"].freed for linear in quantized_linears(transformer))
    if count == 0:
        return None
    return (
        f"the original weights of {count} linears were freed (restorable=False, or loaded from 8 bits); load the model "
        "again instead."
    )


def _give_back(linear: nn.Linear) -> None:
    """The original in the place of the 8-bit weight, where the model is now and in its dtype; a Parameter that somebody
    set in its place stays theirs."""
    for name in BUFFERS:
        linear._buffers.pop(name, None)
        linear._non_persistent_buffers_set.discard(name)
    vars(linear).pop(VERSION, None)
    weight = vars(linear).pop("weight", None)
    if weight is None or linear._parameters["weight"] is not None:
        return
    original = weight.original
    if not original.is_meta:
        original.data = original.data.to(weight.device, weight.dtype)
    linear._parameters["weight"] = original
    hook = vars(linear).get("_hf_hook")
    if hasattr(hook, "original_devices"):  # accelerate's offloading then takes the weight too, and must put it back
        hook.original_devices.setdefault("weight", weight.device)


def forget_8_bits(linear: nn.Linear) -> None:
    """Make a linear that shares nothing with the one it is a copy of one with a plain weight."""
    weight = vars(linear).pop("weight")
    linear._parameters["weight"] = nn.Parameter(weight.detach().clone(), requires_grad=False)
    vars(linear).pop(VERSION)
    for name in BUFFERS:
        del linear._buffers[name]


def _capability(device: torch.device) -> tuple[int, int] | None:
    """Of a weight's GPU; of a weight on the CPU, of the GPU that it may go to."""
    device = _fastest(device)
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _fastest(device: torch.device) -> torch.device:
    """Where to convert what is on a device: a GPU, if there is one, converts what is on the CPU."""
    return torch.device("cuda") if device.type == "cpu" and torch.cuda.is_available() else device


@torch.no_grad()
def _converted(weight: torch.Tensor, format: torch.dtype, device: torch.device) -> QuantizedWeight:
    """A weight [N, K] in 8 bits on a device, some rows at a time."""
    where = _fastest(device)
    parts = [quantize_weight(rows.to(where), format) for rows in weight.split(ROWS)]
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(format)
    scale, norm = torch.cat([part.scale for part in parts]), torch.stack([part.norm for part in parts]).amax()
    return QuantizedWeight(values.to(device), scale.to(device), norm.to(device))


def _store(linear: nn.Linear, weight: QuantizedWeight) -> None:
    """Into the buffers that are there, so that CUDA graphs find them where they were; else as new ones."""
    for name, tensor in zip(BUFFERS, weight, strict=True):
        known = linear._buffers.get(name)
        if known is None:
            linear._buffers[name] = tensor
            linear._non_persistent_buffers_set.add(name)
        else:
            known.copy_(tensor)


def _convert_anew(linear: nn.Linear) -> None:
    """After a write to the original."""
    original, values = vars(linear)["weight"].original, linear._buffers[BUFFERS[0]]
    with torch.no_grad():
        _store(linear, _converted(original.detach(), values.dtype, values.device))
    _remember_version(linear, original)


def _remember_version(linear: nn.Linear, original: nn.Parameter) -> None:
    vars(linear)[VERSION] = _version(original)


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


# ---------------------------------------------------------------------------------------------------------------------
# What the rest of the patch asks
# ---------------------------------------------------------------------------------------------------------------------


def is_quantized(module: nn.Module) -> bool:
    """Whether a module is a linear in 8 bits."""
    return VERSION in vars(module)


def quantized_linears(transformer: nn.Module) -> Iterator[nn.Linear]:
    """All linears in 8 bits."""
    return filter(is_quantized, transformer.modules())


def quantized_weight(linear: nn.Linear) -> QuantizedWeight:
    """The 8-bit weight of a linear in 8 bits, on the device that it was moved to."""
    if not torch.compiler.is_compiling():
        original = vars(linear)["weight"].original
        if _version(original) != vars(linear)[VERSION]:
            _convert_anew(linear)  # a tensor of a state_dict was written to: it shares the original's memory
    return QuantizedWeight(*map(linear._buffers.__getitem__, BUFFERS))


def refresh(transformer: nn.Module) -> None:
    """Bring all 8-bit weights up to date, before a CUDA graph reads them."""
    for linear in quantized_linears(transformer):
        quantized_weight(linear)


def bias_bound(linear: nn.Linear) -> torch.Tensor | None:
    """The largest magnitude of a linear's bias, 0-d fp32; None without one. Computed at each call: it may be written
    to."""
    if linear.bias is None:
        return None
    return torch.linalg.vector_norm(linear.bias.detach(), torch.inf, dtype=torch.float32)


def why_not_read(linear: nn.Linear, device: torch.device) -> str | None:
    """Why a kernel may not read the 8-bit weight of a linear in 8 bits for inputs on this device, in a few words."""
    if linear._parameters["weight"] is not None:
        return "weight replaced after the patch"
    reason = hook_on(linear, own_forward(linear))
    tensors = (linear._buffers[BUFFERS[0]], linear.bias)
    elsewhere = next((t for t in tensors if t is not None and t.device != device), None)
    return reason or (None if elsewhere is None else f"weight on {elsewhere.device}")


def own_forward(linear: nn.Linear) -> object | None:
    """The forward on a linear if this file put it there, for `hook_on` and its like; else None."""
    forward = vars(linear).get("forward")
    return forward if function_bound_to(linear, forward) is _forward else None


def weights_note(transformer: nn.Module) -> str | None:
    """A line for the summary: what the weights take, and where the originals are. None without linears in 8 bits."""
    linears = list(quantized_linears(transformer))
    if not linears:
        return None
    weights = [vars(linear)["weight"] for linear in linears]
    held = sum(buffer.nbytes for linear in linears for buffer in _buffers_of(linear))
    original = sum(weight.numel() * weight.dtype.itemsize for weight in weights)
    devices = ", ".join(sorted({str(weight.device) for weight in weights}))
    kept = "freed" if all(weight.freed for weight in weights) else "kept on the CPU (restorable=False frees them)"
    return (
        f"weights of {len(linears)} linears in 8 bits: {held / 2**20:.0f} MiB on {devices}; the originals, "
        f"{original / 2**20:.0f} MiB, are {kept}"
    )


def _buffers_of(linear: nn.Linear) -> list[torch.Tensor]:
    return [linear._buffers[name] for name in BUFFERS]


# ---------------------------------------------------------------------------------------------------------------------
# What is bound on a linear
# ---------------------------------------------------------------------------------------------------------------------


def _forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """nn.Linear.forward with the 8-bit weight, which comes to the input where offloading let it rest elsewhere."""
    replaced = self._parameters["weight"]
    if replaced is not None:
        return F.linear(x, replaced, self.bias)
    values, scale, norm = quantized_weight(self)
    here = QuantizedWeight(*(t.to(x.device, non_blocking=True) for t in (values, scale, norm)))
    return F.linear(x, here.dequantize(x.dtype), self.bias)


def _apply(self: nn.Linear, fn, recurse: bool = True) -> nn.Linear:
    """nn.Module._apply, which moves and casts a module: the 8-bit weight is moved only, and the original is not."""
    tensors = _buffers_of(self)
    try:
        self._buffers.update(dict.fromkeys(BUFFERS))  # with None it leaves them alone
        type(self)._apply(self, fn, recurse)
    finally:
        self._buffers.update(zip(BUFFERS, tensors, strict=True))
    weight = vars(self)["weight"]
    becomes = fn(torch.empty(0, dtype=weight.dtype, device=tensors[0].device))
    self._buffers.update({name: tensor.to(becomes.device) for name, tensor in zip(BUFFERS, tensors, strict=True)})
    vars(self)["weight"] = weight.moved(becomes.device, becomes.dtype)
    return self


def _save_to_state_dict(self: nn.Linear, destination: dict, prefix: str, keep_vars: bool) -> None:
    """nn.Module._save_to_state_dict, with the original. Raises RuntimeError where that was freed."""
    if self._parameters["weight"] is None:
        weight = vars(self)["weight"]
        if weight.freed:
            raise RuntimeError(f"{prefix}weight: {FREED}")
        original = weight.original.to(dtype=weight.dtype)
        destination[f"{prefix}weight"] = original if keep_vars else original.detach()
    type(self)._save_to_state_dict(self, destination, prefix, keep_vars)


def _load_from_state_dict(self: nn.Linear, state_dict: dict, prefix: str, metadata: dict, *rest: object) -> None:
    """nn.Module._load_from_state_dict, into the original. Where a Parameter is to be assigned, that is the original."""
    if self._parameters["weight"] is not None:
        return type(self)._load_from_state_dict(self, state_dict, prefix, metadata, *rest)
    weight = self._parameters["weight"] = vars(self)["weight"]
    try:
        type(self)._load_from_state_dict(self, state_dict, prefix, metadata, *rest)
    finally:
        loaded, self._parameters["weight"] = self._parameters["weight"], None
        vars(self)["weight"] = weight
    if loaded is not weight:
        _adopt(self, loaded)


def _adopt(linear: nn.Linear, original: nn.Parameter) -> None:
    """Take another Parameter for the original, and convert it; where the old one was freed, free this one too."""
    weight = vars(linear)["weight"]
    freed = weight.freed
    original.data = original.data.cpu()
    weight.original = original
    vars(linear)["weight"] = weight.moved(weight.device, original.dtype)
    _convert_anew(linear)
    if freed:
        _free(linear)


def _named_buffers(self: nn.Linear, *arguments: object, **options: object) -> Iterator[tuple[str, torch.Tensor]]:
    """nn.Module.named_buffers without the 8-bit weight.

    accelerate's sequential offloading asks a linear for its tensors and keeps buffers on the GPU for good. `forward`
    brings an 8-bit weight there for as long as it runs. Of the model, or of a block, all are listed.
    """
    every = type(self).named_buffers(self, *arguments, **options)
    return ((name, buffer) for name, buffer in every if name.rpartition(".")[2] not in BUFFERS)


def _reduce_ex(self: nn.Linear, protocol: int) -> tuple:
    """`reduce_ex`, with the values as bytes: plain pickle does not bring back a tensor in e4m3."""
    make, arguments, state = reduce_ex(self, protocol)
    buffers = dict(state.pop("_buffers"))
    values = buffers.pop(BUFFERS[0])
    return _from_bytes, (make, arguments, values.view(torch.uint8), values.dtype, buffers), state


def _from_bytes(make, arguments: tuple, values: torch.Tensor, format: torch.dtype, buffers: dict) -> nn.Linear:
    linear = make(*arguments)
    vars(linear)["_buffers"] = {BUFFERS[0]: values.view(format), **buffers}
    return linear


_BOUND = {
    "__reduce_ex__": _reduce_ex,
    "forward": _forward,
    "_apply": _apply,
    "_save_to_state_dict": _save_to_state_dict,
    "_load_from_state_dict": _load_from_state_dict,
    "named_buffers": _named_buffers,
}
