"""Load models with weights that were stored in 8 bits, tensor by tensor. So weights are quantised only once.

store.py writes the folder. It holds diffusers' config.json of the transformer, and one safetensors file with all its
tensors. A linear in 8 bits is NAME.weight (e4m3 or int8), NAME.weight_scale and NAME.weight_norm. All other tensors,
including SLA's projections, are unchanged. Each transformer of a pipeline has its own folder.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn

from ...checkpoints.files import COMPONENTS, Source, is_published
from ...checkpoints.lazy import open_tensors
from ...checkpoints.names import owner_in
from ...checkpoints.whole import device_of, fill_buffers
from ...config import Exact, PatchConfig, Quantized, Sparse, resolve_config
from ...keep_list import keeps_weights
from ...kernels.quantized import FP8, INT8, QuantizedWeight
from ...wording import with_article
from ..apply import Patch, PatchError, apply_patch, check_patchable, transformers_of
from ..families import SUPPORTED, family_named, family_of
from ..journal import Journal
from ..steps.sparse_linear import (
    add_projections,
    by_attention,
    is_projection,
    use_processors,
    used_projections,
    why_other_tier,
)
from .quantize_linears import convertible_linears, put_in_8_bits
from .tensor_files import read_header
from .turbodiffusion import load_turbodiffusion

FILE, VERSION = "weights-8bit.safetensors", "1"
WEIGHT, SCALE, NORM = ".weight", ".weight_scale", ".weight_norm"


def load_converted(
    folder: Source | Sequence[Source],
    target: object,
    config: PatchConfig | str = "quantized",
    *,
    device: torch.device | str | None = None,
) -> Patch:
    """Patch a pipeline's transformers, or one transformer, with weights that were stored in 8 bits.

    Every parameter comes from the folder, one at a time, and replaces the transformer's own. Build the transformer
    under ``accelerate.init_empty_weights()`` so that it holds no weights twice. `restore` and saving have no original
    weights to use.

    Args:
        folder: the folder that ``turbo-rcm convert`` wrote, or the file in it. Or a file of other tools, perhaps in its
            own folder, or two for two experts: (high, low). `load_turbodiffusion` reads these, in the formats that it
            names.
        target: a diffusers pipeline or its transformer.
        config: a configuration of the tier that the folder was written for, or its preset. `restorable` is ignored.
        device: the device for a folder's weights. None: the transformer's device, or the CPU if it is on the meta
            device. A file's weights always go there.

    Raises:
        PatchError: the folder is of another version or model, or tensors are missing, unexpected or of another shape,
            or in 8 bits although `keep` names them. The error lists them all, and the model is unchanged. Also as
            `patch`.
        ValueError, TypeError: the config is of a tier that computes nothing in 8 bits, or a device is given for a file.
    """
    config = resolve_config(config)
    if not config.in_8_bits("linears"):
        means = f"is of the {config.tier.name} tier" if isinstance(config, Exact) else "has no 'linears' in quantize"
        raise ValueError(
            f"the weights are stored in 8 bits, but the config {means}; give the preset that they were stored for."
        )
    config = dataclasses.replace(config, restorable=False)
    if not isinstance(folder, (str, Path)) or _is_of_others(Path(folder).expanduser()):
        if device is not None:
            raise ValueError(f"device={str(device)!r} is for a converted folder; leave it out, and move the model.")
        return load_turbodiffusion(folder, target, config)
    models = transformers_of(target)
    check_patchable(models)
    try:
        folders = _folders_for(Path(folder).expanduser(), models)
        stored = {name: _Stored(folders[name], model, config) for name, model in models.items()}
    except ValueError as error:
        raise PatchError(f"cannot load: {error}") from None

    def load(journal: Journal, name: str, model: nn.Module) -> None:
        where = torch.device(device) if device is not None else device_of(next(model.parameters()))
        stored[name].load(journal, model, where)
        if isinstance(config, Sparse):
            use_processors(journal, family_of(model).self_attentions(model), config)

    return apply_patch(target, config, load)


def component_folders(folder: Path) -> dict[str, Path]:
    """Return the folders of transformers by their names in a pipeline; "" for the folder of one alone."""
    if not folder.exists():
        raise ValueError(f"{folder}: no such file or folder; give the folder of a transformer or of a pipeline.")
    if (folder / "config.json").is_file():
        return {"": folder}
    found = {name: folder / name for name in COMPONENTS if (folder / name / "config.json").is_file()}
    if not found:
        raise ValueError(
            f"{folder} holds no transformer: neither a config.json nor {' or '.join(COMPONENTS)}; give the folder of a "
            "transformer or of a pipeline."
        )
    return found


def empty_model(folder: Path) -> nn.Module:
    """Return the transformer of a config.json, with its parameters on the meta device."""
    config = read_config(folder)
    family = family_named(config.get("_class_name"))
    if family is None:
        raise ValueError(f"{folder} holds {with_article(config.get('_class_name'))}; supported: {SUPPORTED}.")
    with init_empty_weights():
        return family.transformer_class.from_config(config)


def read_config(folder: Path, name: str = "config.json") -> dict:
    """Return a folder's config.json, or another JSON file. Raises ValueError if there is none."""
    path = folder / name
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no JSON object; download or convert the model again.")
    return config


def read_vae_config(transformer: Path) -> dict:
    """Return the config of the VAE beside a transformer's folder, or an empty one if there is none."""
    folder = transformer.parent / "vae"
    return read_config(folder) if (folder / "config.json").is_file() else {}


def _is_of_others(source: Path) -> bool:
    return is_published(source) and source.name != FILE


def _folders_for(folder: Path, models: Mapping[str, nn.Module]) -> dict[str, Path]:
    folders = component_folders(folder.parent if folder.name == FILE else folder)
    if len(models) == 1 and len(folders) == 1:
        return dict.fromkeys(models, *folders.values())
    if set(models) != set(folders):
        given, wanted = " and ".join(folders), " and ".join(models)
        remedy = "the folder of one" if len(models) == 1 else "a folder that holds both"
        raise ValueError(f"{folder} holds {given or 'one transformer'}, but the model has {wanted}; give {remedy}.")
    return folders


class _Stored:
    """A folder's weights, checked to fit a model. Raises ValueError with everything that does not fit."""

    def __init__(self, folder: Path, model: nn.Module, config: PatchConfig):
        self._file = folder / FILE
        if not self._file.is_file():
            raise ValueError(f"{folder} has no {FILE}; write it with turbo-rcm convert.")
        kinds, metadata = read_header(self._file)
        version = metadata.get("version")
        if version != VERSION:
            raise ValueError(
                f"{self._file} has format version {version}, but this package reads {VERSION}; convert it again."
            )
        family = family_of(model)
        if family is None:
            raise ValueError(f"{with_article(type(model).__name__)} is not supported: {SUPPORTED}.")
        self._kinds = {name: kind for name, kind in kinds.items() if not is_projection(name)}
        attentions = list(family.self_attentions(model))
        with open_tensors(self._file) as tensors:
            self._projections = used_projections(by_attention(tensors), attentions)
        reason = why_other_tier(self._file, bool(self._projections), attentions, config)
        if reason is not None:
            raise ValueError(reason)
        raise_if(f"{folder} is of another model", _config_differences(read_config(folder), model))
        every = convertible_linears(model, family.linears(model), Quantized())
        in_8_bits = {name for name, kind in self._kinds.items() if kind.dtype in (FP8, INT8)}
        self._linears = {path: every[path] for path in every if path + WEIGHT in in_8_bits}
        raise_if(f"{self._file} does not fit the model", self._differences(model, in_8_bits))
        wrong = [f"{path} is in 8 bits" for path in self._linears if keeps_weights(path, config.keep)]
        raise_if(f"{self._file} does not fit keep, so convert the model again with the same --keep", wrong)

    def _differences(self, model: nn.Module, in_8_bits: set[str]) -> list[str]:
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        for path in self._linears:
            expected |= {path + SCALE: expected[path + WEIGHT][:1], path + NORM: ()}
        wrong = [f"{name} is in 8 bits" for name in sorted(in_8_bits) if name.removesuffix(WEIGHT) not in self._linears]
        given = {name: kind.shape for name, kind in self._kinds.items() if name not in in_8_bits or name in expected}
        return differences(expected, given) + wrong

    def load(self, journal: Journal, model: nn.Module, device: torch.device) -> None:
        """Set all tensors on the model, one after the other."""
        modules = dict(model.named_modules(remove_duplicate=False))
        dtype = self._kinds[f"{family_of(model).first_layer}.weight"].dtype
        with safe_open(self._file, framework="pt", device=str(device)) as file:
            for name, kind in self._kinds.items():
                linear = self._linears.get(name.removesuffix(WEIGHT))
                if linear is not None:
                    # This replaces the freed original weight, in the dtype of the other weights.
                    freed = nn.Parameter(torch.empty(kind.shape, dtype=dtype, device="meta"))
                    journal.set_parameter(linear, "weight", freed)
                    path = name.removesuffix(WEIGHT)
                    weight = (file.get_tensor(path + end) for end in (WEIGHT, SCALE, NORM))
                    put_in_8_bits(journal, linear, QuantizedWeight(*weight))
                elif not name.endswith((SCALE, NORM)):
                    module, own = owner_in(modules, name)
                    value = nn.Parameter(file.get_tensor(name), module._parameters[own].requires_grad)
                    journal.set_parameter(module, own, value)
        add_projections(journal, family_of(model).self_attentions(model), self._projections)
        fill_buffers(model, device)


def _config_differences(stored: dict, model: nn.Module) -> list[str]:
    """Return the differences between a config.json and the model's config. Missing keys have their defaults."""
    full, own = (_with_defaults(config, type(model)) for config in (stored, model.config))
    lines = [f"{key} is {full[key]}, the model's {own[key]}" for key in own if full[key] != own[key]]
    if stored.get("_class_name") != type(model).__name__:
        lines.insert(
            0, f"it is {with_article(stored.get('_class_name'))}, the model {with_article(type(model).__name__)}"
        )
    return lines


def _with_defaults(config: Mapping[str, object], cls: type) -> dict[str, object]:
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    filled = {parameter.name: config.get(parameter.name, parameter.default) for parameter in parameters}
    return json.loads(json.dumps(filled))  # tuples are lists in files


def differences(expected: Mapping[str, tuple], given: Mapping[str, tuple]) -> list[str]:
    missing = [f"{name} is missing" for name in expected if name not in given]
    unexpected = [f"{name} is unexpected" for name in given if name not in expected]
    shapes = [
        f"{name} is {list(given[name])}, not {list(expected[name])}"
        for name in expected
        if name in given and given[name] != expected[name]
    ]
    return missing + unexpected + shapes


def raise_if(what: str, differences: Sequence[str]) -> None:
    if differences:
        raise ValueError(f"{what}: {'; '.join(differences)}.")
