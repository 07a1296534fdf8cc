"""Models whose weights are stored in 8 bits, so that nobody quantises twice: written and loaded tensor by tensor.

A folder holds the transformer's config.json, as diffusers writes it, and one safetensors file with all its tensors: a
linear in 8 bits as NAME.weight (e4m3 or int8), NAME.weight_scale and NAME.weight_norm, everything else as it was. A
pipeline's transformers have a folder each.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn

from ..config import PatchConfig, resolve_config
from ..kernels.quantized import FP8, INT8, QuantizedWeight
from ..tiers import QUANTIZED
from .apply import Patch, PatchError, apply_patch, check_patchable, transformers_of
from .families import FAMILIES, SUPPORTED, family_of
from .journal import Journal
from .quantized_linear import convert
from .quantized_weights import convertible_linears, format_of, put_in_8_bits
from .tensor_files import Kind, read_header, write_tensors

FILE, VERSION = "weights-8bit.safetensors", "1"
COMPONENTS = ("transformer", "transformer_2")
_WEIGHT, _SCALE, _NORM = ".weight", ".weight_scale", ".weight_norm"


# ---------------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------------


def convert_folder(
    source: Path,
    target: Path,
    *,
    capability: tuple[int, int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    keep: Sequence[str] = (),
    device: torch.device | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Store the transformers of a diffusers folder in 8 bits, holding one tensor at a time.

    Args:
        source: the folder of a transformer or of a pipeline, with safetensors files.
        target: a folder that does not exist yet, or is empty. It appears when all is written.
        capability: of the GPUs that will run it, which decides the formats; None: sm_89 or newer.
        dtype: of everything else, and what the linears are rounded to before; what diffusers keeps in fp32 stays so.
        keep: as PatchConfig.keep.
        device: where to quantise; the CPU if None.
        report: called with a line for each transformer.

    Raises ValueError, before anything is written, for a folder that holds no such model.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not empty; give a new folder.")
    jobs = [(path, name, _Source(path, keep)) for name, path in component_folders(source).items()]
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for path, name, model in jobs:
            folder = partial / name
            folder.mkdir(parents=True)
            shutil.copyfile(path / "config.json", folder / "config.json")
            kinds = model.kinds(capability, dtype)
            tensors = model.tensors(capability, dtype, device or torch.device("cpu"))
            write_tensors(folder / FILE, kinds, tensors, {"format": "turbo_rcm_patch", "version": VERSION})
            size = sum(kind.nbytes for kind in kinds.values())
            report(f"{path}: {len(model.linears)} linears in 8 bits, {size / 2**30:.2f} GiB in all")
        if target.exists():
            target.rmdir()
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def component_folders(folder: Path) -> dict[str, Path]:
    """The folders of transformers by their names in a pipeline; "" for the folder of one alone."""
    if (folder / "config.json").is_file():
        return {"": folder}
    found = {name: folder / name for name in COMPONENTS if (folder / name / "config.json").is_file()}
    if not found:
        raise ValueError(f"{folder} holds no transformer: neither a config.json nor {' or '.join(COMPONENTS)}.")
    return found


class _Source:
    """A transformer in diffusers' files."""

    def __init__(self, folder: Path, keep: Sequence[str]):
        self._files = _tensors_of(folder)
        model = empty_model(folder)
        family = family_of(model)
        config = PatchConfig(tier=QUANTIZED, keep=keep)
        self.linears = convertible_linears(model, family.every_block(model), config)
        self._fp32 = set(getattr(model, "_keep_in_fp32_modules", None) or ())
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        given = {name: kind.shape for name, (_, kind) in self._files.items()}
        _raise_if(f"{folder} does not fit its config.json", _differences(expected, given))

    def kinds(self, capability: tuple[int, int] | None, dtype: torch.dtype) -> dict[str, Kind]:
        """What will be written."""
        kinds = {}
        for name, (_, kind) in self._files.items():
            path = self._linear(name)
            if path is None:
                kinds[name] = Kind(self._stored(name, kind.dtype, dtype), kind.shape)
            else:
                format = format_of(path, capability)
                parts = (format, kind.shape), (torch.float32, kind.shape[:1]), (torch.float32, ())
                kinds |= {path + end: Kind(*part) for end, part in zip((_WEIGHT, _SCALE, _NORM), parts, strict=True)}
        return kinds

    def tensors(
        self, capability: tuple[int, int] | None, dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors in the order of `kinds`."""
        for name, (file, kind) in self._files.items():
            with safe_open(file, framework="pt") as opened:
                tensor = opened.get_tensor(name)
            tensor, path = tensor.to(self._stored(name, kind.dtype, dtype)), self._linear(name)
            if path is None:
                yield name, tensor
            else:
                weight = convert(tensor.to(device), format_of(path, capability), device)
                yield from zip((path + end for end in (_WEIGHT, _SCALE, _NORM)), weight, strict=True)

    def _linear(self, name: str) -> str | None:
        path = name.removesuffix(_WEIGHT)
        return path if name.endswith(_WEIGHT) and path in self.linears else None

    def _stored(self, name: str, own: torch.dtype, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if self._fp32 & set(name.split(".")) else dtype


def _tensors_of(folder: Path) -> dict[str, tuple[Path, Kind]]:
    """All tensors of diffusers' safetensors files in a folder, by name, with the file that holds each."""
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        files = ["diffusion_pytorch_model.safetensors"]
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise ValueError(f"{folder} has no {', '.join(missing)}; download the model's safetensors files.")
    return {name: (folder / f, kind) for f in files for name, kind in read_header(folder / f)[0].items()}


def empty_model(folder: Path) -> nn.Module:
    """The transformer of a config.json, with its parameters on the meta device."""
    config = read_config(folder)
    classes = {family.transformer_class.__name__: family.transformer_class for family in FAMILIES}
    if config.get("_class_name") not in classes:
        raise ValueError(f"{folder} holds a {config.get('_class_name')}; supported: {SUPPORTED}.")
    with init_empty_weights():
        return classes[config["_class_name"]].from_config(config)


def read_config(folder: Path) -> dict:
    """A folder's config.json. Raises ValueError where there is none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {folder / 'config.json'}: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'config.json'} holds no JSON object.")
    return config


# ---------------------------------------------------------------------------------------------------------------------
# Loading
# ---------------------------------------------------------------------------------------------------------------------


def load_converted(
    folder: str | Path,
    target: object,
    config: PatchConfig | str = "quantized",
    *,
    device: torch.device | str | None = None,
) -> Patch:
    """Patch a pipeline's transformers, or one transformer, with weights that were stored in 8 bits.

    Every parameter comes from the folder, one at a time; what the transformer held before is let go. Built under
    ``accelerate.init_empty_weights()`` it holds nothing twice. There are no originals to `restore` or to save.

    Args:
        folder: what ``turbo-rcm convert`` wrote.
        target: as for `patch`.
        config: a PatchConfig of the quantized tier, or a preset of it; `restorable` and `keep` do not count.
        device: where the weights go; None: where the transformer is, the CPU for one on the meta device.

    Raises:
        PatchError: the folder is of another version or model, or tensors are missing, unexpected or of another shape,
            all of which are listed; the model is as it was. Also as `patch`.
        ValueError, TypeError: for a config that is none of the quantized tier.
    """
    config = resolve_config(config)
    if config.tier != QUANTIZED:
        raise ValueError(f"weights in 8 bits are of the quantized tier; the config is of the {config.tier.name} one.")
    config = dataclasses.replace(config, restorable=False, keep=())
    models = transformers_of(target)
    check_patchable(models)
    try:
        folders = _folders_for(Path(folder), models)
        stored = {name: _Stored(folders[name], model) for name, model in models.items()}
    except ValueError as error:
        raise PatchError(f"cannot load: {error}") from None

    def load(journal: Journal, name: str, model: nn.Module) -> None:
        where = torch.device(device) if device is not None else _device_of(model)
        stored[name].load(journal, model, where)

    return apply_patch(target, config, load)


def _folders_for(folder: Path, models: Mapping[str, nn.Module]) -> dict[str, Path]:
    folders = component_folders(folder)
    if len(models) == 1 and len(folders) == 1:
        return dict.fromkeys(models, *folders.values())
    if set(models) != set(folders):
        given, wanted = " and ".join(folders), " and ".join(models)
        raise ValueError(
            f"{folder} holds {given or 'one transformer'}, the model has {wanted}; give one of its folders."
        )
    return folders


def _device_of(model: nn.Module) -> torch.device:
    device = next(model.parameters()).device
    return torch.device("cpu") if device.type == "meta" else device


class _Stored:
    """A folder's weights for a model; made, they fit it. Raises ValueError with all that does not fit."""

    def __init__(self, folder: Path, model: nn.Module):
        self._file = folder / FILE
        if not self._file.is_file():
            raise ValueError(f"{folder} has no {FILE}; write it with turbo-rcm convert.")
        self._kinds, metadata = read_header(self._file)
        version = metadata.get("version")
        if version != VERSION:
            raise ValueError(
                f"{self._file} is of format version {version}, this version reads {VERSION}; convert anew."
            )
        family = family_of(model)
        if family is None:
            raise ValueError(f"a {type(model).__name__} is not supported: {SUPPORTED}.")
        _raise_if(f"{folder} is of another model", _config_differences(read_config(folder), model))
        every = convertible_linears(model, family.every_block(model), PatchConfig(tier=QUANTIZED))
        in_8_bits = {name for name, kind in self._kinds.items() if kind.dtype in (FP8, INT8)}
        self._linears = {path: every[path] for path in every if path + _WEIGHT in in_8_bits}
        _raise_if(f"{self._file} does not fit the model", self._differences(model, in_8_bits))

    def _differences(self, model: nn.Module, in_8_bits: set[str]) -> list[str]:
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        for path in self._linears:
            expected |= {path + _SCALE: expected[path + _WEIGHT][:1], path + _NORM: ()}
        wrong = [
            f"{name} is in 8 bits" for name in sorted(in_8_bits) if name.removesuffix(_WEIGHT) not in self._linears
        ]
        given = {name: kind.shape for name, kind in self._kinds.items() if name not in in_8_bits or name in expected}
        return _differences(expected, given) + wrong

    def load(self, journal: Journal, model: nn.Module, device: torch.device) -> None:
        """Put all tensors in their places, one after the other."""
        dtype = self._kinds["patch_embedding.weight"].dtype
        with safe_open(self._file, framework="pt", device=str(device)) as file:
            for name, kind in self._kinds.items():
                linear = self._linears.get(name.removesuffix(_WEIGHT))
                if linear is not None:
                    # Stands for the weight that there is not, in the dtype of the others.
                    freed = nn.Parameter(torch.empty(kind.shape, dtype=dtype, device="meta"))
                    journal.set_parameter(linear, "weight", freed)
                    path = name.removesuffix(_WEIGHT)
                    weight = (file.get_tensor(path + end) for end in (_WEIGHT, _SCALE, _NORM))
                    put_in_8_bits(journal, linear, QuantizedWeight(*weight))
                elif not name.endswith((_SCALE, _NORM)):
                    module, own = _owner(model, name)
                    value = nn.Parameter(file.get_tensor(name), module._parameters[own].requires_grad)
                    journal.set_parameter(module, own, value)
        _fill_buffers(model, device)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, own = name.rpartition(".")
    return model.get_submodule(path), own


def _fill_buffers(model: nn.Module, device: torch.device) -> None:
    """Bring buffers that no file holds, such as RoPE tables, to the device; those on meta as the config gives them."""
    with init_empty_weights():
        fresh = type(model).from_config(model.config)
    for path, module in fresh.named_modules():
        buffers = model.get_submodule(path)._buffers
        for name, buffer in module._buffers.items():
            if buffer is not None:
                buffers[name] = (buffer if buffers[name].is_meta else buffers[name]).to(device)


def _config_differences(stored: dict, model: nn.Module) -> list[str]:
    """Where a config.json is not the model's; what either leaves out has the default."""
    full, own = (_with_defaults(config, type(model)) for config in (stored, model.config))
    lines = [f"{key} is {full[key]}, the model's {own[key]}" for key in own if full[key] != own[key]]
    if stored.get("_class_name") != type(model).__name__:
        lines.insert(0, f"it is a {stored.get('_class_name')}, the model a {type(model).__name__}")
    return lines


def _with_defaults(config: Mapping[str, object], cls: type) -> dict[str, object]:
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    filled = {parameter.name: config.get(parameter.name, parameter.default) for parameter in parameters}
    return json.loads(json.dumps(filled))  # tuples are lists in files


def _differences(expected: Mapping[str, tuple], given: Mapping[str, tuple]) -> list[str]:
    missing = [f"{name} is missing" for name in expected if name not in given]
    unexpected = [f"{name} is unexpected" for name in given if name not in expected]
    shapes = [
        f"{name} is {list(given[name])}, not {list(expected[name])}"
        for name in expected
        if name in given and given[name] != expected[name]
    ]
    return missing + unexpected + shapes


def _raise_if(what: str, differences: Sequence[str]) -> None:
    if differences:
        raise ValueError(f"{what}: {'; '.join(differences)}.")
