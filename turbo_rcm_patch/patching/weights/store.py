"""Storing a model's transformers for a tier, tensor by tensor: in 8 bits (load.py), or as diffusers' own files.

The source is a diffusers folder, or one file with a whole model in its authors' names: TurboDiffusion's, rCM's or
ComfyUI's. Weights that such a file has in 8 bits keep their values where the tier's linears can use them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from ...checkpoints.files import is_published
from ...checkpoints.lazy import LazyTensor, Tensors, open_tensors
from ...checkpoints.whole import Weight
from ...config import Exact, PatchConfig, Sparse
from ...kernels.quantized import QuantizedWeight
from ...wording import counted
from ..families import family_of, model_in, weights_in
from ..steps.sparse_linear import (
    PROJ_L,
    attention_of,
    by_attention,
    is_projection,
    used_projections,
    why_not_replaceable,
    why_other_tier,
)
from .linear_8bit import convert, error_of, from_values
from .load import FILE, NORM, SCALE, VERSION, WEIGHT, component_folders, differences, empty_model, raise_if, read_config
from .quantize_linears import convertible_linears, format_for, from_file_note, has_format
from .tensor_files import Kind, write_tensors

DIFFUSERS_FILE = "diffusion_pytorch_model.safetensors"


def convert_model(
    source: Path,
    target: Path,
    config: PatchConfig,
    *,
    capability: tuple[int, int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Store a model's transformers for the tier of a configuration, holding one tensor at a time.

    Args:
        source: the folder of a transformer or of a pipeline, as diffusers saves them. Or a .pth or .safetensors file
            with a whole Wan transformer in its authors' names (checkpoints/whole.py), or a folder with such a file.
        target: a folder that does not exist yet, or is empty. It appears when all is written. For the exact tier it
            holds diffusers' own files, for the others the files that `load_converted` loads.
        config: only its tier and `keep` count.
        capability: the compute capability of the GPUs that will run it, which decides the 8-bit formats. None: sm_89 or
            newer.
        dtype: the dtype of all other weights. Linears are rounded to it before they are quantised. Weights that
            diffusers keeps in fp32 stay in fp32.
        device: the device that quantises, or None for the CPU.
        report: called with a line for each transformer. If the source has weights in 8 bits already, the line tells how
            many keep their values, and the error that our 8 bits add to the others. Linears that such a source has in
            16 bits stay in ``dtype``.

    Raises ValueError, before anything is written, if the source holds no such model, or weights of another tier
    (trained with sparse-linear attention or not, or of a model that cannot have it).
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not empty; give a new folder.")
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with ExitStack() as stack:
        models = _open(source, stack)
        for model in models.values():
            _check_tier(model, config)
        jobs = {name: _Job(model, config, capability, dtype) for name, model in models.items()}
        try:
            for name, job in jobs.items():
                job.write(partial / name, device or torch.device("cpu"))
                report(str(job))
            if target.exists():
                target.rmdir()
            partial.replace(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


class _Model(NamedTuple):
    """A transformer in files, with its parameters on the meta device.

    tensors: those in the files, by name, with SLA's projections. quantized: the weights that the files have in 8 bits.
    """

    title: str
    model: nn.Module
    config: Mapping[str, object]
    tensors: Tensors
    quantized: Mapping[str, Weight]


def _open(source: Path, stack: ExitStack) -> dict[str, _Model]:
    """Return the transformers in a source by their names in a pipeline; "" for one alone."""
    if is_published(source):
        return {"": _of_file(source, stack)}
    return {name: _of_folder(folder, stack) for name, folder in component_folders(source).items()}


def _of_folder(folder: Path, stack: ExitStack) -> _Model:
    model = empty_model(folder)
    own = (folder / f"{DIFFUSERS_FILE}.index.json", folder / DIFFUSERS_FILE)  # in the order in which diffusers looks
    source = next((file for file in own if file.is_file()), folder)
    if source is folder and (folder / FILE).is_file():
        raise ValueError(f"{folder} is converted already: it holds {FILE}. Give the folder of the original model.")
    tensors = stack.enter_context(open_tensors(source))
    used = used_projections(by_attention(tensors), family_of(model).self_attentions(model))
    tensors = {name: t for name, t in tensors.items() if not is_projection(name) or attention_of(name) in used}
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    given = {name: tensor.shape for name, tensor in tensors.items() if not is_projection(name)}
    raise_if(f"{folder} does not fit its config.json", differences(expected, given))
    return _Model(str(folder), model, read_config(folder), tensors, {})


def _of_file(source: Path, stack: ExitStack) -> _Model:
    tensors = stack.enter_context(open_tensors(source))
    model = model_in(source, tensors)
    whole = weights_in(source, tensors, model)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    weights = {name: LazyTensor(shapes[name], weight.load) for name, weight in whole.weights.items()}
    for path in used_projections(whole.proj_l, family_of(model).self_attentions(model)):
        weights |= {f"{path}.{PROJ_L}.{part}": tensor for part, tensor in whole.proj_l[path].items()}
    config = {"_class_name": type(model).__name__, **model.config}
    return _Model(str(source), model, config, weights, {name: whole.weights[name] for name in whole.quantized})


def _check_tier(model: _Model, config: PatchConfig) -> None:
    if isinstance(config, Exact):
        return
    attentions = list(family_of(model.model).self_attentions(model.model))
    reason = why_other_tier(model.title, any(map(is_projection, model.tensors)), attentions, config)
    if reason is None and isinstance(config, Sparse):
        reason = why_not_replaceable(model.title, attentions)
    if reason is not None:
        raise ValueError(reason)


class _Job:
    """One transformer on its way into a folder."""

    def __init__(self, model: _Model, config: PatchConfig, capability: tuple[int, int] | None, dtype: torch.dtype):
        self._model, self._capability, self._dtype = model, capability, dtype
        self._fp32 = set(getattr(model.model, "_keep_in_fp32_modules", None) or ())
        self._linears = set()
        family = family_of(model.model)
        self._rows_known = family.rows_known
        family.check_keep(model.model, config)
        if config.in_8_bits("linears"):
            self._linears = set(convertible_linears(model.model, family.linears(model.model), config))
        if model.quantized:  # the file's makers chose which layers stay in 16 bits
            self._linears = {path for path in self._linears if path + WEIGHT in model.quantized}
        self._kinds = self._describe()
        self._added_errors: list[float] = []
        self._unchanged = sum(self._from_file(path) is not None for path in self._linears)

    def __str__(self) -> str:
        size = sum(kind.nbytes for kind in self._kinds.values())
        line = f"{self._model.title}: {counted(len(self._linears), 'linear')} in 8 bits, {size / 2**30:.2f} GiB in all"
        return "; ".join(filter(None, [line, from_file_note(self._unchanged, self._added_errors)]))

    def write(self, folder: Path, device: torch.device) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self._model.config, indent=2) + "\n", encoding="utf-8")
        if self._linears:
            write_tensors(
                folder / FILE, self._kinds, self._read(device), {"format": "turbo_rcm_patch", "version": VERSION}
            )
        else:
            write_tensors(folder / DIFFUSERS_FILE, self._kinds, self._read(device), {"format": "pt"})

    def _describe(self) -> dict[str, Kind]:
        """Return the dtype and shape of every tensor that will be written, by its name."""
        kinds = {}
        for name, tensor in self._model.tensors.items():
            path = self._linear(name)
            if path is None:
                kinds[name] = Kind(self._stored(name), tensor.shape)
            else:
                kept = self._from_file(path)
                format = self._format_of(path) if kept is None else kept.format
                parts = (format, tensor.shape), (torch.float32, tensor.shape[:1]), (torch.float32, ())
                kinds |= {path + end: Kind(*part) for end, part in zip((WEIGHT, SCALE, NORM), parts, strict=True)}
        return kinds

    def _read(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors in the order of `_describe`."""
        for name, lazy in self._model.tensors.items():
            path = self._linear(name)
            if path is None:
                yield name, lazy.load().to(self._stored(name))
            else:
                weight = self._weight(name, path, device)
                yield from zip((path + end for end in (WEIGHT, SCALE, NORM)), weight, strict=True)

    def _weight(self, name: str, path: str, device: torch.device) -> QuantizedWeight:
        """Return a linear's weight in 8 bits."""
        kept = self._from_file(path)
        if kept is not None:
            return from_values(*kept.load_8_bits(), device)
        tensor = self._model.tensors[name].load().to(self._stored(name))
        weight = convert(tensor.to(device), self._format_of(path), device)
        if name in self._model.quantized:
            self._added_errors.append(error_of(weight, tensor))
        return weight

    def _format_of(self, path: str) -> torch.dtype:
        return format_for(self._capability, rows_known=path.endswith(self._rows_known))

    def _from_file(self, path: str) -> Weight | None:
        """Return the file's weight if a linear takes its values in 8 bits as they are, or None."""
        weight = self._model.quantized.get(path + WEIGHT)
        usable = weight is not None and weight.format is not None and has_format(weight.format, self._capability)
        return weight if usable else None

    def _linear(self, name: str) -> str | None:
        path = name.removesuffix(WEIGHT)
        return path if name.endswith(WEIGHT) and path in self._linears else None

    def _stored(self, name: str) -> torch.dtype:
        return torch.float32 if self._fp32 & set(name.split(".")) else self._dtype
