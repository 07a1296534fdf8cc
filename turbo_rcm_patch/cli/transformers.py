"""The transformers that --transformer puts in place of a pipeline's own: folders, also converted, and single files."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from accelerate import init_empty_weights
from diffusers import DiffusionPipeline, GGUFQuantizationConfig
from torch import nn

from ..checkpoints.files import COMPONENTS, keys_in
from ..checkpoints.lazy import PICKLED, open_tensors
from ..checkpoints.recognise import swapped_files
from ..checkpoints.scaled import has_scales
from ..config import PRESETS, Sparse
from ..patching.apply import transformers_of
from ..patching.families import family_named, family_of, weights_in
from ..patching.steps.sparse_linear import is_projection, needs_projections
from ..patching.weights.load import FILE, component_folders, empty_model, read_config
from ..wording import with_article
from .arguments import spelled
from .errors import CommandError, in_the_shell
from .notes import warn

_OF_PIPELINE = ("in_channels", "out_channels", "text_dim")  # what the rest of a pipeline gives and takes


def given_transformers(
    arguments: argparse.Namespace,
    components: Mapping[str, object],
    dtype: torch.dtype,
    of_ours: Collection[Path] = (),
) -> dict[str, nn.Module]:
    """Return the transformers of --transformer and --transformer-2 by their names in the pipeline.

    components: the pipeline's library and class of each component. The transformers of a converted folder and of the
    files ``of_ours`` are empty. `load_converted` and `load_turbodiffusion` fill them. Raises CommandError for an
    unusable file.
    """
    _tell_swapped(arguments, components)
    models = {}
    for name in COMPONENTS:
        path = getattr(arguments, name, None)
        if path is None:
            continue
        if path.is_file():
            models[name] = _of_file(path, arguments, name, components, dtype, empty=path in of_ours)
            continue
        try:
            folders = component_folders(path)
            more = next((part or name for part in folders if _class_in(components, part or name) is None), None)
            if more is not None:
                raise ValueError(f"{path} replaces the pipeline's {more}, but --model {arguments.model} has none.")
            for part, folder in folders.items():
                _check_config(folder, arguments.model, part or name, components)
            models |= {part or name: _of_folder(folder, arguments, name, dtype) for part, folder in folders.items()}
        except (ValueError, OSError) as error:
            raise CommandError(f"{spelled(name)}: {error}") from error
    return models


def converted_folder(arguments: argparse.Namespace) -> Path | None:
    """Return --transformer if `convert` wrote it in 8 bits, or None.

    Raises CommandError if the command cannot run such weights.
    """
    given = {name: path for name in COMPONENTS if (path := getattr(arguments, name, None)) is not None}
    found = next((name for name, path in given.items() if _is_in_8_bits(path)), None)
    if found is None:
        return None
    holds = f"{spelled(found)} {given[found]} holds 8-bit weights"
    if COMPONENTS[1] in given:
        folder = given[found].parent if given[found].name in COMPONENTS else "FOLDER"
        raise CommandError(
            f"{holds}; give the folder that holds both, as transformer and transformer_2: --transformer {folder}, "
            "without --transformer-2."
        )
    _check_runs_patched(arguments, holds)
    if arguments.preset == "exact":
        raise CommandError(f"{holds}; give --preset quantized, or the one of convert.")
    return given[found]


def _is_in_8_bits(path: Path) -> bool:
    """True for a folder that `convert` wrote in 8 bits."""
    return any((folder / FILE).is_file() for folder in (path, *(path / name for name in COMPONENTS)))


def files_of_ours(arguments: argparse.Namespace, components: Mapping[str, object]) -> list[Path]:
    """Return the files of --transformer and --transformer-2 that `load_turbodiffusion` loads, or [].

    They hold weights in 8 bits with scales, or LTX-2 pickled, as TurboT2AV is published. diffusers loads neither.

    Raises CommandError if the command cannot run such weights, or if only one of two transformers has them.
    """
    paths = {spelled(name): getattr(arguments, name, None) for name in COMPONENTS}
    given = {option: path for option, path in paths.items() if path is not None and path.is_file()}
    pickled = [path for path in given.values() if path.suffix in PICKLED]
    if pickled and makes_sound(_class_in(components, COMPONENTS[0])):
        _check_runs_patched(arguments, f"--transformer {pickled[0]} holds pickled weights of LTX-2")
        return pickled
    found = {option: path for option, path in given.items() if _has_scales(option, path)}
    if not found:
        return []
    first = next(iter(found))
    holds = f"{first} {found[first]} holds 8-bit weights"
    in_16_bits = " For other commands store it in 16 bits: turbo-rcm convert FILE FOLDER --preset exact."
    _check_runs_patched(arguments, holds, in_16_bits)
    if len(found) < sum(_class_in(components, name) is not None for name in COMPONENTS):
        raise CommandError(f"{holds}, but the pipeline has two transformers; give such a file for the other one too.")
    return list(found.values())


def _check_runs_patched(arguments: argparse.Namespace, holds: str, advice: str = "") -> None:
    """Raise CommandError unless the command runs patched weights. holds: the weights, in the error."""
    if arguments.command != "generate" or arguments.no_patch:
        raise CommandError(f"{holds}, which run patched alone; it goes with generate, without --no-patch.{advice}")


def makes_sound(class_name: object) -> bool:
    """True for a transformer whose pipelines make video with sound."""
    family = family_named(class_name)
    return family is not None and any(pipeline.has_sound for pipeline in family.pipelines)


def _class_in(components: Mapping[str, object], name: str) -> object:
    """Return the name of a component's class, or None if the pipeline has no such component."""
    _, class_name = components.get(name) or (None, None)
    return class_name


def _has_scales(option: str, path: Path) -> bool:
    if path.suffix.lower() == ".gguf":
        return False
    try:
        with open_tensors(path) as tensors:
            return has_scales(tensors)
    except ValueError as error:
        raise CommandError(f"cannot load {option} {path}: {error}") from error


def _check_config(folder: Path, pipeline: str, name: str, components: Mapping[str, object]) -> None:
    """Raise ValueError for a folder whose transformer cannot take the place of a pipeline's transformer."""
    found, own_class = read_config(folder), _class_in(components, name)
    if found.get("_class_name") != own_class:
        raise ValueError(
            f"{folder} holds {with_article(found.get('_class_name'))}, but the {name} of --model {pipeline} is "
            f"{with_article(own_class)}; give one of that class."
        )
    if (family := family_named(own_class)) is None:
        return  # `empty_model` says so
    try:
        own = family.transformer_class.load_config(str(Path(pipeline).expanduser()), subfolder=name)
    except OSError:  # perhaps a pipeline that was stored without its transformers
        return
    shared = [key for key in _OF_PIPELINE if key in found and key in own]
    wrong = [f"{key} is {found[key]}, not {own[key]}" for key in shared if found[key] != own[key]]
    if wrong:
        raise ValueError(
            f"{folder} does not fit the {name} of --model {pipeline}: {', '.join(wrong)}. Give one made for such a "
            "pipeline."
        )


def _tell_swapped(arguments: argparse.Namespace, components: Mapping[str, object]) -> None:
    """Warn of files whose names say that they are the other expert's."""
    if _class_in(components, COMPONENTS[1]) is None:
        return
    paths = [getattr(arguments, name, None) for name in COMPONENTS]
    for line in swapped_files([path if path is not None and path.is_file() else None for path in paths]):
        warn(arguments, f"{line}, as --transformer and --transformer-2.")


def has_projections(source: Path, model: nn.Module) -> bool:
    """True if a file or a folder holds SLA's projections. LTX-2's count only if they are not zero.

    model: its transformer, perhaps on the meta device.
    """
    if source.is_dir() and not any(map(is_projection, keys_in(source))):
        return False
    needed = needs_projections(family_of(model).self_attentions(model))
    with open_tensors(source) as tensors:
        return any(needed or bool(tensor.load().any()) for name, tensor in tensors.items() if is_projection(name))


def check_own_transformers(pipe: DiffusionPipeline, arguments: argparse.Namespace) -> None:
    """Raise CommandError if a transformer of --model itself has proj_l and would run without it.

    The pipeline is loaded by now. Before that, a model on the hub has no folder to look into.
    """
    for name, model in transformers_of(pipe).items():
        source = Path(model.config.get("_name_or_path") or "")
        if getattr(arguments, name, None) is None and (source / "config.json").is_file():
            _check_attention(f"the {name} of --model {arguments.model}", source, arguments, model)


def _of_folder(folder: Path, arguments: argparse.Namespace, name: str, dtype: torch.dtype) -> nn.Module:
    """Return the transformer of a folder. name: that of the option that gives it."""
    model = empty_model(folder)  # raises ValueError for a class that is not supported
    if (folder / FILE).is_file():
        return model
    _check_attention(f"{spelled(name)} {folder}", folder, arguments, model)
    return type(model).from_pretrained(folder, dtype=dtype)


def _of_file(
    path: Path,
    arguments: argparse.Namespace,
    name: str,
    components: Mapping[str, object],
    dtype: torch.dtype,
    *,
    empty: bool,
) -> nn.Module:
    """Return the transformer of a file. empty: True to leave its parameters on the meta device."""
    class_name, option, pipeline = _class_in(components, name), spelled(name), arguments.model
    family = family_named(class_name)
    if family is None:
        found = "has none" if class_name is None else f"has {with_article(class_name)}"
        raise CommandError(f"{option} {path} replaces the pipeline's {name}, but --model {pipeline} {found}.")
    is_gguf = path.suffix.lower() == ".gguf"
    if is_gguf and find_spec("gguf") is None:
        raise CommandError(f"{option} {path}: GGUF files need the package gguf; install it with: pip install gguf")
    try:
        config = {"config": str(Path(pipeline).expanduser()), "subfolder": name}
        if empty:
            model = _empty(family.transformer_class, dtype, **config)
            _check_attention(f"{option} {path}", path, arguments, model)
        else:
            if not is_gguf:
                _check_plain(path, plain := _empty(family.transformer_class, dtype, **config))
                _check_attention(f"{option} {path}", path, arguments, plain)
            more = {"quantization_config": GGUFQuantizationConfig(compute_dtype=dtype)} if is_gguf else {}
            model = family.transformer_class.from_single_file(str(path), dtype=dtype, **config, **more)
    except NotImplementedError as error:  # a tensor on the meta device cannot be read
        model = with_article(family.transformer_class.__name__)
        raise CommandError(
            f"cannot load {option} {path}: diffusers does not find all weights of {model} in it. turbo-rcm convert "
            "FILE FOLDER --preset exact knows more names, or says what is missing."
        ) from error
    except (ValueError, OSError, ImportError, RuntimeError, KeyError) as error:
        line = next(iter(in_the_shell(error).splitlines()), type(error).__name__)
        raise CommandError(f"cannot load {option} {path}: {line}") from error
    model.register_to_config(_name_or_path=str(path))  # by which its distillation is recognised
    return model


def _empty(transformer_class: type, dtype: torch.dtype, *, config: str, subfolder: str) -> nn.Module:
    """Return a pipeline's transformer with its parameters on the meta device, in a dtype or in fp32 if they must be."""
    with init_empty_weights():
        model = transformer_class.from_config(transformer_class.load_config(config, subfolder=subfolder))
    fp32 = set(model._keep_in_fp32_modules or ())
    for path, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if fp32 & set(path.split(".")) else dtype)
    return model


def _check_plain(path: Path, model: nn.Module) -> None:
    """Raise ValueError for quantised weights and for another model's. diffusers would take integers for weights."""
    with open_tensors(path) as tensors:
        weights_in(path, tensors, model, partial=True)


def _check_attention(what: str, source: Path, arguments: argparse.Namespace, model: nn.Module) -> None:
    """Raise CommandError for weights with proj_l that would run without it. diffusers drops it.

    what: the weights, in the error. source: their file or folder.
    """
    no_patch = getattr(arguments, "no_patch", False)
    if (no_patch or not isinstance(PRESETS[arguments.preset], Sparse)) and has_projections(source, model):
        raise CommandError(
            f"{what} was trained with sparse-linear attention (it has proj_l), which "
            f"{'--no-patch' if no_patch else f'--preset {arguments.preset}'} leaves out; give --preset sparse"
            f"{', without --no-patch' if no_patch else ''}."
        )
