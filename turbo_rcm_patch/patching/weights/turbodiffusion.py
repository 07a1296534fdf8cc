"""The weights of files in their authors' names in a loaded model (load_turbodiffusion): TurboDiffusion's, rCM's and
ComfyUI's. And TurboDiffusion's in models that were made from Wan (merge_turbodiffusion)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ...checkpoints.files import COMPONENTS, Source
from ...checkpoints.lazy import open_tensors
from ...checkpoints.names import modules_of, owner_in
from ...checkpoints.whole import Weight, WholeModel, cast, device_of, fill_buffers, parameters_of
from ...config import Exact, PatchConfig, Sparse, resolve_config
from ..apply import Patch, PatchError, apply_patch, check_patchable, replace_computation, transformers_of
from ..families import family_of, weights_in
from ..journal import Journal
from ..lora.load import has_fused_projections
from ..steps.plan import state_of
from ..steps.sparse_linear import add_projections, used_projections, why_not_replaceable, why_other_tier
from .group_offload import ON_DISK, groups_of, is_on_disk, overwrite
from .linear_8bit import error_of, from_values
from .quantize_linears import (
    capability_of,
    convertible_linears,
    from_file_note,
    has_format,
    is_quantized,
    put_in_8_bits,
)

# For each value of `attention`, the parts of a block that run in 8 bits.
IN_8_BITS = {"sagesla": ("attention", "linears"), "sla": ()}
ATTENTIONS = (*IN_8_BITS, "dense")


def load_turbodiffusion(
    path: Source | Sequence[Source],
    target: object,
    config: PatchConfig | str | None = None,
    *,
    attention: str | None = None,
    topk: float | None = None,
    blocks: Sequence[int] | None = None,
) -> Patch:
    """Load a file with a whole Wan or LTX-2 into a pipeline's transformers, or one transformer, and patch it.

    Args:
        path: a .pth or .safetensors file with a model in its authors' names, or a folder with such a file. Or a folder
            of diffusers' own files with proj_l, of a transformer or a pipeline. For two experts: a pair (high, low), or
            the folder of a pipeline that has both. Files may be in 16 bits, or in 8 bits as TurboDiffusion ("-quant"),
            ComfyUI, Kijai and LightX2V write them (e4m3 or int8, one scale for a weight or for each row).
        target: a diffusers pipeline or its transformer, of the weights' architecture, on any device and of any dtype.
            Weights are read one at a time. On the meta device they take the parameters' places.
        config: a configuration of the tier to patch with, or its preset. None: the one that ``attention`` names.
        attention: "sagesla" (the default) for sparse-linear attention and linears in 8 bits. "sla" for the same in the
            model's dtype. "dense" for weights that were trained without SLA, patched as the preset "exact".
        topk: an option of `Sparse`, with its default. "dense" does not have it.
        blocks: the same.

    TurboT2AV's file for LTX-2 has no proj_l. Its sparse attention then has no linear part, and all tiers take the file.

    In a tier with 8-bit linears, they take the values of e4m3 and int8 files as they are, with the file's scales. Such
    linears have no original weights: `restore` and saving raise an error. Linears that an 8-bit file has in 16 bits
    stay in the model's dtype. 8-bit values that cannot stay as they are (e4m3 on a GPU before sm_89, e5m2, scales of
    blocks) are converted.

    Returns the patch. Its `summary` says what this conversion adds to the error. Its `restore` removes SLA too; the
    loaded weights stay. Install the sampler separately: `use_rcm`, or `use_distilled` with the recipe
    "turbowan" or "turbot2av".

    Raises:
        PatchError: as `patch`. Also if tensors of a file are missing, unexpected or of another shape; the error lists
            them in the file's spelling. Also if a file is of another family of models, is quantised in an unknown
            format, or has damaged scales. Also if a file has SLA's projections and the tier is not "sparse", or the
            other way round. The model is then as before.
        ValueError: for an unknown attention, for a topk or blocks that `Sparse` refuses, with "dense" or with a config.
    """
    config = _config_for(config, attention, topk, blocks)
    models = transformers_of(target)
    check_patchable(models)
    _check_writable("load", models)
    with _opened(path, models) as files, ExitStack() as failing:
        for name, file in files.items():
            attentions = list(family_of(models[name]).self_attentions(models[name]))
            projections = used_projections(file.proj_l, attentions)
            reason = why_other_tier(file.source, bool(projections), attentions, config)
            if reason is not None:
                raise PatchError(f"cannot load: {reason}")
        journals: list[Journal] = []

        def prepare(journal: Journal, name: str, model: nn.Module) -> None:
            written = _Written(model, journal)
            failing.callback(written.undo)
            journals.append(journal)
            _fill(model, files[name], config, written, journal)
            _, block = next(family_of(model).every_block(model))
            state_of(block).shared.from_file = _from_file_note(files[name], model)

        patch = apply_patch(target, config, prepare)
        failing.pop_all()  # nothing is undone any more
    for journal in journals:
        journal.forget_parameters()  # the weights before, which nothing needs any more
    return patch


def _fill(model: nn.Module, file: WholeModel, config: PatchConfig, written: _Written, journal: Journal) -> None:
    """Put a file's weights into a model, and change what the tier changes."""
    family = family_of(model)
    linears = convertible_linears(model, family.linears(model), config)
    placed = {f"{path}.weight": (linear, device_of(linear.weight)) for path, linear in linears.items()}
    unchanged = {name: each for name, each in placed.items() if _takes(each[1], file.weights[name])}
    parameters = parameters_of(model)
    changed = {own: weight for own, weight in file.weights.items() if own not in unchanged}
    written.write((own, cast(weight, parameters[own])) for own, weight in changed.items())
    for name, (linear, device) in unchanged.items():
        freed = nn.Parameter(torch.empty_like(linear.weight, device="meta"), linear.weight.requires_grad)
        written.put_aside(linear.weight)
        journal.set_parameter(linear, "weight", freed)
        put_in_8_bits(journal, linear, from_values(*file.weights[name].load_8_bits(), device))
    if isinstance(config, Sparse):
        attentions = list(family.self_attentions(model))
        add_projections(journal, attentions, used_projections(file.proj_l, attentions))
    # The makers of a file in 8 bits chose which layers stay in 16.
    wide = [path for path in linears if file.quantized and f"{path}.weight" not in file.quantized]
    replace_computation(journal, model, replace(config, keep=(*config.keep, *wide)) if wide else config)


def _takes(device: torch.device, weight: Weight) -> bool:
    """True if linears on a device multiply by a weight's values in 8 bits as the file has them."""
    return weight.format is not None and has_format(weight.format, capability_of(device))


def load_projections(pipe: object) -> None:
    """Give the transformers of a pipeline the projections of SLA in the files that diffusers loaded them from.

    diffusers itself ignores them, because its model has none. Files without them change nothing. Raises PatchError for
    files that do not fit.
    """
    every = transformers_of(pipe)
    sources = {name: model.config.get("_name_or_path") for name, model in every.items()}
    models = {name: model for name, model in every.items() if sources[name] and Path(sources[name]).exists()}
    with _opened([sources[name] for name in models], models) as files:
        for name, model in models.items():
            attentions = list(family_of(model).self_attentions(model))
            add_projections(Journal(), attentions, used_projections(files[name].proj_l, attentions))


def _config_for(
    config: PatchConfig | str | None, attention: str | None, topk: float | None, blocks: Sequence[int] | None
) -> PatchConfig:
    if config is not None:
        if (attention, topk, blocks) != (None, None, None):
            raise ValueError("give either a config or attention, topk and blocks, not both.")
        return resolve_config(config)
    attention = attention or "sagesla"
    if attention not in ATTENTIONS:
        raise ValueError(f"attention={attention!r} is unknown; accepted are {', '.join(ATTENTIONS)}.")
    options = {name: value for name, value in (("topk", topk), ("blocks", blocks)) if value is not None}
    if attention == "dense":
        if options:
            raise ValueError(
                f"attention='dense' does not take {' or '.join(options)}, an option of sparse attention; leave it out."
            )
        return Exact()
    return Sparse(quantize=IN_8_BITS[attention], **options)


@contextmanager
def _opened(path: Source | Sequence[Source], models: dict[str, nn.Module]) -> Iterator[dict[str, WholeModel]]:
    """Return the files for the models by the models' names. Raises PatchError if they do not fit."""
    if not isinstance(path, (str, Path, Sequence)):
        raise TypeError(f"path={path!r}; give the path of a file or a folder, or a pair (high, low) of them.")
    given = [path] if isinstance(path, (str, Path)) else path
    paths = [part for each in given for part in _transformers_in(each)]
    if len(paths) != len(models):
        wanted = "one path" if len(models) == 1 else "two: path=(high, low)"
        listed = f" ({', '.join(map(str, paths))})" if paths != list(given) else ""
        raise PatchError(f"cannot load: {len(paths)} given{listed}, but the model takes {wanted}.")
    with ExitStack() as stack:
        try:
            found = {
                name: weights_in(source, stack.enter_context(open_tensors(source)), model)
                for (name, model), source in zip(models.items(), paths, strict=True)
            }
        except ValueError as error:
            raise PatchError(f"cannot load: {error}") from None
        yield found


def _transformers_in(source: Source) -> list[Source]:
    """Return the folders of a pipeline's transformers, the high-noise one first. Return other sources unchanged."""
    return [folder for name in COMPONENTS if (folder := Path(source).expanduser() / name).is_dir()] or [source]


def _only_transformer(source: Source) -> Source:
    folder, *others = _transformers_in(source)
    if others:
        raise ValueError(f"{source} holds two transformers; give the folder of one.")
    return folder


def _check_writable(verb: str, models: dict[str, nn.Module], *, meta: bool = True) -> None:
    """Raise PatchError if a model's parameters cannot be written, or if the model runs with copies of them.

    meta: True if they may be on the meta device.
    """
    for name, model in models.items():
        if is_on_disk(model):
            raise PatchError(f"cannot {verb} {name}: {ON_DISK}")
        if any(getattr(module, "merged", False) for module in model.modules()):
            raise PatchError(f"cannot {verb} {name}: a LoRA is fused into its weights; call pipe.unfuse_lora() first.")
        if has_fused_projections(model):
            raise PatchError(f"cannot {verb} {name}: its projections are fused; call unfuse_qkv_projections() first.")
        if not meta and any(parameter.is_meta for parameter in model.parameters()):
            raise PatchError(f"cannot {verb} {name}: its weights are on the meta device; load them first.")


class _Written:
    """Writes weights into a model's parameters, and keeps the previous values on the CPU until all are loaded.

    The journal replaces parameters on the meta device, and undoes that.
    """

    def __init__(self, model: nn.Module, journal: Journal):
        self._model, self._journal = model, journal
        self._before: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._aside: list[tuple[nn.Parameter, torch.device]] = []

    def write(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write weights in place, and into offloading's copies of them."""
        modules, parameters, groups = dict(modules_of(self._model)), parameters_of(self._model), groups_of(self._model)
        for name, tensor in weights:
            parameter = parameters[name]
            if parameter.is_meta:
                loaded = nn.Parameter(tensor.clone(), parameter.requires_grad)
                self._journal.set_parameter(*owner_in(modules, name), loaded)
            else:
                self._before.append((parameter, parameter.detach().to("cpu", copy=True)))
                overwrite(groups, parameter, tensor)
        if any(buffer.is_meta for buffer in self._model.buffers()):
            fill_buffers(self._model, next(self._model.parameters()).device)

    def put_aside(self, parameter: nn.Parameter) -> None:
        """Keep a parameter that will be replaced on the CPU."""
        if not (parameter.is_meta or parameter.is_inference()):  # which cannot be moved in place
            self._aside.append((parameter, parameter.device))
            parameter.data = parameter.data.cpu()

    def undo(self) -> None:
        """Restore all values."""
        for parameter, device in reversed(self._aside):
            parameter.data = parameter.data.to(device)
        groups = groups_of(self._model)
        for parameter, before in self._before:
            overwrite(groups, parameter, before)


def _from_file_note(file: WholeModel, model: nn.Module) -> str | None:
    """Return the summary's line on the linears in 8 bits whose weights are from an 8-bit file, or None."""
    quantized = {f"{name}.weight": module for name, module in modules_of(model) if is_quantized(module)}
    linears = [quantized[name] for name in file.quantized if name in quantized]
    converted = [linear for linear in linears if not linear.is_freed]
    errors = [error_of(linear.quantized(), linear.original) for linear in converted]
    return from_file_note(len(linears) - len(converted), errors)


def merge_turbodiffusion(path: Source, base_path: Source, target: nn.Module) -> list[str]:
    """Add the change of TurboDiffusion's training, ``TurboWan − Wan``, to a model made from Wan: Fun, VACE, Move.

    Args:
        path: the weights of TurboWan: one transformer, in a form that `load_turbodiffusion` takes.
        base_path: the same of the Wan that it was trained from.
        target: a loaded transformer that is not patched. Parameters that the two files do not have stay unchanged. Sums
            are computed in fp32 and rounded once. The target also gets SLA's projections, proj_l. Run it with
            ``trp.patch(target, "sparse")``.

    Returns a line for everything left out: parameters of the target that a file lacks, and tensors of a file that do
    not fit the target. A merge cannot be undone; load the target again instead.

    Raises:
        PatchError: the model cannot be patched; or the files cannot be read, or have no common weights for the model;
            or weights have scales of another format than TurboDiffusion's; or the base is TurboWan's. Nothing is
            changed then.
    """
    check_patchable(models := transformers_of(target))
    (name, model), *others = models.items()
    if others:
        raise PatchError("cannot merge: give one transformer of the pipeline, pipe.transformer or pipe.transformer_2.")
    _check_writable("merge into", models, meta=False)
    with ExitStack() as stack:
        try:
            turbo, base = (
                weights_in(source, stack.enter_context(open_tensors(source)), model, partial=True)
                for source in map(_only_transformer, (path, base_path))
            )
        except ValueError as error:
            raise PatchError(f"cannot merge: {error}") from None
        if base.proj_l:
            raise PatchError(
                f"cannot merge: base_path is {base_path}, which has proj_l, as TurboWan has. Give TurboWan's weights "
                "as path, and as base_path those of the Wan that it was trained from."
            )
        shared = [parameter for parameter in turbo.weights if parameter in base.weights]
        if not shared:
            raise PatchError(
                f"cannot merge: {path} and {base_path} have no common weights for a {type(model).__name__}; give files "
                "made for it."
            )
        attentions = list(family_of(model).self_attentions(model))
        if turbo.proj_l and (reason := why_not_replaceable(name, attentions)):
            raise PatchError(f"cannot merge: {reason}")
        written = _Written(model, Journal())
        try:
            written.write(_sums(model, shared, turbo, base))
        except BaseException:
            written.undo()
            raise
        add_projections(Journal(), attentions, used_projections(turbo.proj_l, attentions))
    return [f"{file.source}: {line}" for file in (turbo, base) for line in file.unfit]


def _sums(
    model: nn.Module, names: list[str], turbo: WholeModel, base: WholeModel
) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = parameters_of(model)
    for name in names:
        own = parameters[name].detach()
        difference = turbo.weights[name].load().float() - base.weights[name].load().float()
        yield name, (own.float() + difference.to(own.device)).to(own.dtype)
