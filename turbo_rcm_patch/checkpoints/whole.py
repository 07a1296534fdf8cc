"""A whole transformer's weights in the names of any tool, fitted to a model: rCM's, TurboDiffusion's, ComfyUI's.

    blocks.N.self_attn.q.weight, ...       the authors' names or diffusers', perhaps under a prefix such as "net."
    NAME.int8_weight, NAME.scale           a weight in 8 bits: int8 · scale[i // 128, j // 128]
    NAME.weight, NAME.scale_weight, ...    a weight in 8 bits with a scale, as ComfyUI and others have it (scaled.py)
    blocks.N.….proj_l.{weight, bias}       of the linear branch of SLA; diffusers' model has no such parameter

patch_embedding.weight may be a linear's over patches, [C, c·t·h·w]. Every tensor is read by itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from accelerate import init_empty_weights
from torch import nn

from ..wording import counted
from .lazy import LazyTensor, Tensors
from .names import PROJ_L, Names, modules_of, without_prefix
from .scaled import FORMATS, PARTS, REMEDY, Scales, is_8_bits

QUANTIZED_BLOCK = 128
_NO_WEIGHTS = ("_extra_state", "freqs")  # ends of names: buffers that are computed


class Weight(NamedTuple):
    """A model's parameter in a file.

    keys: its names there. load: reads it, in the parameter's shape; values in 8 bits are multiplied by their scale.
    format: the 8-bit dtype of a matrix with a scale for each row, or None.
    load_8_bits: reads such a matrix: its values [N, K] and their scale [N] fp32.
    """

    keys: tuple[str, ...]
    load: Callable[[], torch.Tensor]
    format: torch.dtype | None = None
    load_8_bits: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None


class WholeModel:
    """A file's tensors for a model, complete and in the model's shapes.

    Attributes:
        weights: by diffusers' names of the parameters, in the model's order.
        proj_l: SLA's projections {"weight": [D, D], "bias": [D]} by diffusers' paths of the self-attentions
            ("blocks.0.attn1"); empty if the file has none.
        quantized: the parameters that the file has in 8 bits.

    Making one raises ValueError with all names that are missing, unexpected or of another shape, as the file spells
    them. A model of another size and a quantised format that is not known raise ValueError with one sentence.
    """

    def __init__(self, source: str | Path, tensors: Tensors, model: nn.Module, names: Names, *, partial: bool = False):
        """names: those of the model's family. partial: True if the file and the model may each lack parts of the other.
        ``unfit`` then lists the parts.

        Quantised weights of unknown formats raise ValueError even so: their values mean nothing without their scales.
        So do weights with scales: what two such files differ by is mostly rounding.
        """
        self.source, self.quantized = str(source), []
        self._tensors, self._names, self._problems = tensors, names, _Problems()
        self._prefix = _prefix_of(next(iter(tensors)))
        self._found: dict[str, str] = {}  # the keys of tensors that nothing was made of yet, by their names
        for name in tensors:
            bare = without_prefix(name)
            if bare.endswith(_NO_WEIGHTS) or (names.ignored is not None and names.ignored.match(bare)):
                continue
            if self._found.setdefault(bare, name) != name:
                self._problems.unexpected.append(name)  # a second one that differs in its prefix alone
        every = set(self._found)
        self._scales = Scales(self.source, tensors, self._found)
        if partial and self._scales.marks:
            raise ValueError(
                f"{self.source} has {self._scales.marks[0]}: it holds weights in 8 bits, and a merge would add their "
                "rounding to the model. Give the file with weights in bf16, fp16 or fp32."
            )
        parameters = parameters_of(model)
        self._has_diffusers_names = any(
            name in self._found and names.official_parameter(name) != name for name in parameters
        )
        found = ((name, self._weight(name, tuple(parameter.shape))) for name, parameter in parameters.items())
        self.weights = {name: weight for name, weight in found if weight is not None}
        self.proj_l = self._take_proj_l(model)
        self._check(model, every, partial)

    def _check(self, model: nn.Module, every: Set[str], partial: bool) -> None:
        """Raise ValueError for what does not fit the model. every: all names in the file."""
        problems = self._problems
        problems.unexpected += self._found.values()
        reason = problems.misshapen[0] if 2 * len(problems.misshapen) > len(parameters_of(model)) else None
        if reason is None and not partial:
            reason = _other_depth(model, self._names, every)
        if reason is not None:
            raise ValueError(
                f"{self.source} holds a model of another size than this {type(model).__name__}: {reason}. Give a file "
                "of the model's size, the folder of a model in several files, or load the model of the file's."
            )
        _refuse_companions(self.source, self._found, every, frozenset(map(without_prefix, problems.missing)))
        if problems.integers:
            key = problems.integers[0]
            raise ValueError(f"{self.source}: {key} holds integers, but the file has no scales for them. {REMEDY}")
        self.unfit = problems.lines()
        if self.unfit and not partial:
            lines = "; ".join(self.unfit)
            raise ValueError(f"{self.source} does not fit the {type(model).__name__}; give a file that does. {lines}.")

    def _weight(self, name: str, shape: tuple[int, ...]) -> Weight | None:
        found, official = self._found, self._names.official_parameter(name)
        for candidate in dict.fromkeys((name, official)):
            module = candidate.removesuffix(".weight")
            if candidate in found:
                key = found.pop(candidate)
                if self._scales.apply_to(module, self._tensors[key]):
                    return self._scaled(name, key, module, shape)
                return self._plain(key, shape)
            if f"{module}.int8_weight" in found:
                self.quantized.append(name)
                values, scale = f"{module}.int8_weight", f"{module}.scale"
                return self._in_blocks(found.pop(values), found.pop(scale, self._prefix + scale), shape)
        self._problems.missing.append(self._prefix + (name if self._has_diffusers_names else official))
        return None

    def _plain(self, key: str, shape: tuple[int, ...]) -> Weight | None:
        tensor = self._tensors[key]
        if not tensor.floating:  # packed values have another shape too
            self._problems.integers.append(key)
            return None
        if not self._fits(key, shape):
            return None
        return Weight((key,), lambda: tensor.load().reshape(shape))

    def _scaled(self, name: str, key: str, module: str, shape: tuple[int, ...]) -> Weight | None:
        """Return a weight with a scale. name: the parameter's. key: the weight's. module: the layer's, in the file."""
        if not self._fits(key, shape):
            return None
        lacking = self._scales.lacking(module, key)
        if lacking is not None:
            self._problems.missing.append(lacking)
            return None
        try:
            scale = self._scales.read(module, shape[0])
        except ValueError as error:
            self._problems.misshapen.append(str(error))
            return None
        tensor = self._tensors[key]
        if is_8_bits(tensor):
            self.quantized.append(name)
        by_row = scale.reshape(-1, *[1] * (len(shape) - 1))
        format = FORMATS.get(tensor.dtype) if len(shape) == 2 else None
        return Weight(
            (key,), lambda: tensor.load().reshape(shape).float() * by_row, format, lambda: (tensor.load(), scale)
        )

    def _in_blocks(self, key: str, scale_key: str, shape: tuple[int, ...]) -> Weight | None:
        """Return a weight with a scale for each block. key, scale_key: of its values and of their scales."""
        values, scale = self._tensors[key], self._tensors.get(scale_key)
        right = self._problems.is_right(key, values, shape, "int8")
        if scale is None:
            self._problems.missing.append(scale_key)
            return None
        blocks = tuple(-(-size // QUANTIZED_BLOCK) for size in shape)
        if not self._problems.is_right(scale_key, scale, blocks, "float") or not right:
            return None
        return Weight((key, scale_key), lambda: dequantize_blocks(values.load(), scale.load()))

    def _fits(self, key: str, shape: tuple[int, ...]) -> bool:
        """True if a tensor has a parameter's shape, or a linear's over patches; if not, a note is added."""
        given = self._tensors[key].shape
        over_patches = len(shape) == 5 and given == (shape[0], math.prod(shape[1:]))
        if given == shape or over_patches:
            return True
        self._problems.misshapen.append(f"{key} is {list(given)}, not {list(shape)}")
        return False

    def _take_proj_l(self, model: nn.Module) -> dict[str, dict[str, LazyTensor]]:
        """Return SLA's projections, and count them as used."""
        names, problems, found = self._names, self._problems, self._found
        head_dim, blocks = model.config.get("attention_head_dim"), len(getattr(model, names.blocks))
        projections: dict[str, dict[str, LazyTensor]] = {}
        given = {match.groups(): found.pop(name) for name in list(found) if (match := names.proj_l.match(name))}
        for (block, _, part), key in given.items():
            expected = (head_dim,) * (2 if part == "weight" else 1)
            if int(block.rpartition(".")[2]) >= blocks:
                problems.unexpected.append(key)
            elif problems.is_right(key, self._tensors[key], expected, "float"):
                projections.setdefault(block, {})[part] = self._tensors[key]
        problems.missing += _lacking_proj_l(given, [f"{names.blocks}.{number}" for number in range(blocks)])
        return {f"{block}.{names.self_attentions[0]}": parts for block, parts in projections.items() if len(parts) == 2}


def dequantize_blocks(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``int8 · scale[i // 128, j // 128]`` in fp32, [N, K], the weight of TurboDiffusion's int8 linears.

    values [N, K], scale [⌈N/128⌉, ⌈K/128⌉].
    """
    rows, columns = values.shape
    by_row = scale.float().repeat_interleave(QUANTIZED_BLOCK, 0)[:rows]
    return values.float() * by_row.repeat_interleave(QUANTIZED_BLOCK, 1)[:, :columns]


class _Problems:
    """The problems of a file, with names as the file spells them."""

    def __init__(self):
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.misshapen: list[str] = []
        self.integers: list[str] = []  # without scales

    def is_right(self, key: str, tensor: LazyTensor, shape: tuple[int, ...], dtype: str) -> bool:
        """True if a tensor is as expected; if not, a note is added. dtype: "float" stands for any float dtype."""
        if tensor.shape != shape:
            self.misshapen.append(f"{key} is {list(tensor.shape)}, not {list(shape)}")
        elif tensor.dtype != dtype and not (dtype == "float" and tensor.floating):
            self.misshapen.append(f"{key} is {tensor.dtype}, not {dtype}")
        else:
            return True
        return False

    def lines(self) -> list[str]:
        return [
            *(f"{name} is missing" for name in self.missing),
            *(f"{name} is unexpected" for name in self.unexpected),
            *self.misshapen,
        ]


def _other_depth(model: nn.Module, names: Names, every: Set[str]) -> str | None:
    """Return how many blocks a file has by all its names, and the model, or None if they have as many."""
    numbered = re.compile(rf"{names.blocks}\.(\d+)\.")
    numbers = (numbered.match(name) for name in every if not names.proj_l.match(name))
    count, own = 1 + max((int(found[1]) for found in numbers if found), default=-1), len(getattr(model, names.blocks))
    return None if count == own else f"it has {counted(count, 'block')}, the model {own}"


def refuse_without(source: str | Path, tensors: Tensors, title: str, weight: Sequence[str]) -> NoReturn:
    """Raise ValueError for a file without a weight that every model of a family has.

    If the file has it in a quantised format that is not known, the error says so. title: the models' name. weight: the
    weight's names, the authors' first.
    """
    _refuse_companions(str(source), {without_prefix(key): key for key in tensors}, frozenset(), frozenset(weight))
    raise ValueError(
        f"{source} holds no {title} transformer: it has no {' or '.join(weight)}. Give a file with a whole one."
    )


def _refuse_companions(source: str, unknown: Mapping[str, str], every: Set[str], missing: Set[str]) -> None:
    """Raise ValueError if an unknown tensor is beside a weight, such as the scale of fp8 values, or in its place.

    unknown: the keys of tensors that nothing was made of, by their names. every: all names in the file. missing: the
    names of parameters that it lacks.
    """
    for name, key in unknown.items():
        parts = name.split(".")
        if parts[-1] in ("weight", "bias"):
            continue  # of a module that the model does not have
        weights = [".".join([*parts[:count], "weight"]) for count in range(1, len(parts))]
        beside = next((f"beside {weight}" for weight in weights if weight in every), None)
        if parts[-1] not in PARTS:  # beside those the error is that their weight is missing
            beside = beside or next((f"in place of {weight}" for weight in weights if weight in missing), None)
        if beside is not None:
            raise ValueError(
                f"{source} has {key} {beside}: its weights are quantised in a format that is not known here. Give the "
                "file with weights in bf16, fp16 or fp32."
            )


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that diffusers' model has, by name."""
    return {
        f"{path}.{name}".lstrip("."): parameter
        for path, module in modules_of(model)
        for name, parameter in module._parameters.items()
        if parameter is not None and path.rpartition(".")[2] != PROJ_L
    }


def _prefix_of(name: str) -> str:
    """Return the prefix that a tool put before a name, or "" if it put a part into the name."""
    bare = without_prefix(name)
    return name.removesuffix(bare) if name.endswith(bare) else ""


def _lacking_proj_l(given: dict[tuple[str, str, str], str], blocks: list[str]) -> list[str]:
    """Return the keys of projections that a file lacks, spelled like its other ones, or [] for a file without any.

    given: the file's keys by the three parts of their names. blocks: the blocks' names.
    """
    if not given:
        return []
    (parts, key), *_ = given.items()
    prefix, path = key.removesuffix("".join(parts)), parts[1]
    every = [f"{prefix}{block}{path}{part}" for block in blocks for part in ("weight", "bias")]
    return [key for key in every if key not in given.values()]


def cast(weight: Weight, like: torch.Tensor) -> torch.Tensor:
    """Return a weight in its parameter's dtype and on its device, or on the CPU for a meta parameter."""
    return weight.load().to(device=device_of(like), dtype=like.dtype)


def device_of(parameter: nn.Parameter) -> torch.device:
    """Return a parameter's device, or the CPU for one on the meta device."""
    return torch.device("cpu") if parameter.is_meta else parameter.device


def fill_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers that no file holds, such as RoPE tables, to the device. Make the ones on meta from the config."""
    with init_empty_weights():
        fresh = type(model).from_config(model.config)
    for path, module in fresh.named_modules():
        buffers = model.get_submodule(path)._buffers
        for name, buffer in module._buffers.items():
            if buffer is not None:
                buffers[name] = (buffer if buffers[name].is_meta else buffers[name]).to(device)
