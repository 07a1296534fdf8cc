"""Weights in 8 bits with scales, as ComfyUI, Kijai, LightX2V and musubi-tuner name them: W = values · scale.

    NAME.weight                        [N, K] e4m3, e5m2 or int8
    NAME.scale_weight, .weight_scale   one scale, or one for each row
    NAME.scale_input, .input_scale     a calibrated scale of the input, not used: every row of an input gets its own
    NAME.comfy_quant                   the format, JSON in bytes; safetensors' metadata may have it instead (lazy.py)
    scaled_fp8                         marks a file of ComfyUI's older format

Files with weights in e4m3 and no scales at all are common too: their scale is 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from .lazy import LazyTensor, Tensors

FORMATS = {"float8_e4m3fn": torch.float8_e4m3fn, "int8": torch.int8}  # dtypes whose values can be used as they are
_MARK, _COMFY, _SCALES = "scaled_fp8", "comfy_quant", ("scale_weight", "weight_scale")
PARTS = (*_SCALES, _COMFY, "scale_input", "input_scale")
_ALONE = ("float8_e4m3fn",)  # the dtype that is common without any scale
_EIGHT_BITS = (*FORMATS, "float8_e5m2")
_WIDE = ("float", "float16", "bfloat16", "float32")  # older files have a scale, of 1, beside such weights too
# ComfyUI's names of formats, and the dtype of the values. Options beside them change what the values mean.
_COMFY_FORMATS = {
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e4m3fn_rowwise": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
    "int8_tensorwise": "int8",
}
_HARMLESS = ("format", "per_row", "full_precision_matrix_mult")
_ROTATED = re.compile("convrot|quarot|hadamard")
REMEDY = f"Give a file in one of {', '.join(_COMFY_FORMATS)}, or with weights in bf16, fp16 or fp32."


class Scales:
    """The scales of a file's weights.

    Attributes:
        marks: the keys that say that the file has weights in 8 bits with scales; empty if it says nothing.

    Making one takes these keys out of ``found``. Raises ValueError with one sentence for a format that is not known.
    """

    def __init__(self, source: str, tensors: Tensors, found: dict[str, str]):
        """found: the file's keys by their names without prefixes."""
        self._tensors = tensors
        self._keys: dict[str, str] = {}  # of the scales, by their layers' names
        self.marks: list[str] = []
        formats: dict[str, str] = {}
        for name in list(found):
            layer, _, part = name.rpartition(".")
            if name != _MARK and not (part in PARTS and f"{layer}.weight" in found):
                continue
            key = found.pop(name)
            self.marks.append(key)
            if part in _SCALES:
                self._keys[layer] = key
            elif part == _COMFY:
                formats[layer] = key
        for layer, key in formats.items():
            _check_format(source, key, found[f"{layer}.weight"], tensors)
        for layer, key in self._keys.items():
            _check_scale(source, key, found[f"{layer}.weight"], tensors)
        if self._keys and not formats and _ROTATED.search(Path(source).name.lower()):
            raise ValueError(f"{source} is named as a file of rotated weights, which are not supported. {REMEDY}")

    def apply_to(self, layer: str, tensor: LazyTensor) -> bool:
        """True if a layer's weight has a scale, or is a matrix in 8 bits that should have one or needs none."""
        in_8_bits = len(tensor.shape) == 2 and is_8_bits(tensor)
        return layer in self._keys or (in_8_bits and (bool(self.marks) or tensor.dtype in _ALONE))

    def lacking(self, layer: str, weight: str) -> str | None:
        """Return the key of the scale that a file with scales lacks for a layer, or None. weight: the weight's key."""
        if layer in self._keys or not self.marks:
            return None
        end = next((key.rpartition(".")[2] for key in self._keys.values()), _SCALES[0])
        return f"{weight.removesuffix('weight')}{end}"

    def read(self, layer: str, rows: int) -> torch.Tensor:
        """Return a layer's scale, [rows] fp32. Raises ValueError for values that no scale has."""
        key = self._keys.get(layer)
        scale = torch.ones(1) if key is None else self._tensors[key].load().float().flatten()
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise ValueError(f"{key} has values that are not positive and finite")
        return scale.expand(rows).contiguous()


def has_scales(keys: Iterable[str]) -> bool:
    """True if a file's keys belong to weights in 8 bits with scales: those above, or TurboDiffusion's."""
    return any(key.rpartition(".")[2] in (_MARK, *PARTS, "int8_weight") for key in keys)


def is_8_bits(tensor: LazyTensor) -> bool:
    """True for the values of a weight in 8 bits."""
    return tensor.dtype in _EIGHT_BITS


def _check_format(source: str, key: str, weight: str, tensors: Tensors) -> None:
    """Raise ValueError if a layer's format is not known, has unknown options, or is not that of its weight."""
    try:
        described = json.loads(bytes(tensors[key].load().flatten().tolist()))
        described |= described.pop("params", None) or {}
        format = str(described["format"])
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{source}: {key} names no format; download the file again.") from None
    options = [option for option, value in described.items() if value and option not in _HARMLESS]
    if format not in _COMFY_FORMATS or options:
        name = " with ".join(filter(None, [format, ", ".join(options)]))
        raise ValueError(f"{source} is quantised as {name}, which is not supported ({key} says so). {REMEDY}")
    if tensors[weight].dtype != _COMFY_FORMATS[format]:
        raise ValueError(f"{source}: {key} says {format}, but {weight} is {tensors[weight].dtype}. {REMEDY}")


def _check_scale(source: str, key: str, weight: str, tensors: Tensors) -> None:
    """Raise ValueError for a scale that is neither of the whole weight nor of its rows, or for an unknown dtype."""
    values, scale = tensors[weight], tensors[key]
    if values.dtype not in (*_EIGHT_BITS, *_WIDE) or scale.dtype not in _WIDE:
        raise ValueError(
            f"{source} has {weight} in {values.dtype} beside {key} in {scale.dtype}, which is not supported. {REMEDY}"
        )
    if scale.shape not in ((), (1,), (1, 1), values.shape[:1], (*values.shape[:1], 1)):
        raise ValueError(
            f"{source} has {key} of shape {list(scale.shape)} beside {weight} of shape {list(values.shape)}; supported "
            f"are one scale for a weight, or one for each of its rows. {REMEDY}"
        )
