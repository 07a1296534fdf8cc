"""use_distilled: load a whole few-step LoRA, sample as its checkpoint was distilled, and undo both."""

from __future__ import annotations

import logging
import math
import numbers
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from diffusers import DiffusionPipeline
from torch import nn

from ...checkpoints.files import Source, find_files, keys_of_model, read_tensors
from ...checkpoints.lazy import SUFFIXES
from ...checkpoints.lora import Lora, looks_like_lora, read_lora
from ...checkpoints.recognise import (
    PERHAPS_GATES,
    Recognised,
    by_name,
    checkpoint_by_keys,
    ignored_parts,
    lora_claims,
    odd_names,
    own_name,
)
from ...recipes import RECIPES, Recipe, find_recipe, recipe_names
from ...scheduler import FewStepScheduler, scheduler_of
from ..apply import transformers_of
from ..families import pipeline_of
from ..lora.load import LoadedLora, check_loadable
from ..steps.sparse_linear import is_projection
from .handle import FewStepHandle, check_experts, check_pipeline, train_timesteps
from .use_rcm import rcm_scheduler

logger = logging.getLogger(__name__)

_ACCEPTED = (
    f"Accepted are LoRA files ({', '.join(SUFFIXES)}), folders and hub ids. Give how a LoRA was distilled as recipe=, "
    f"one of {recipe_names()}."
)


class NotRecognised(ValueError):
    """Neither names nor files tell how the loaded model was distilled, and no recipe is given."""


def use_distilled(
    pipe: DiffusionPipeline,
    source: Source | Sequence[Source | None] | None = None,
    recipe: str | Recipe | None = None,
    scale: float | Sequence[float] = 1.0,
    *,
    steps: int | None = None,
    classifier_free_guidance: bool = False,
) -> DistilledHandle:
    """Load a LoRA if one is given, and let ``pipe(...)`` sample in the few steps of its distillation.

    pipe: a WanPipeline, WanImageToVideoPipeline, WanVideoToVideoPipeline or WanVACEPipeline, patched or not, or a
        modular Wan pipeline. A modular one rounds timesteps to its prompt's dtype and gives the sampler fp32, whatever
        the recipe says.
    source: a LoRA file, a folder, or the id of a hub repository, also with a path in it ("org/name/folder"). For the
        two transformers of Wan 2.2 give a pair (high, low), or a folder with both files. (None, low) loads a LoRA for
        one expert only, and both experts take the recipe's steps. None: the pipeline itself is distilled. A LoRA's
        alpha is read from tensors of its file, the file's header or PEFT's adapter_config.json beside it. LoKr and LoHa
        are added to the weights, as differences are, and the CPU keeps those weights' old values for ``restore()``.
        Load them before a patch that puts linears into 8 bits.
    recipe: the name of one of `RECIPES`, or your own Recipe. None: recognised by the names and contents of the files,
        or of the loaded checkpoint (``transformer.config._name_or_path``).
    scale: the strength of the LoRA's matrices and of its differences (of biases, norms, modulation, patch embedding),
        or a pair (high, low) for two transformers. Differences are written into the parameters. So later changes to
        PEFT's layers (``set_adapters``, ``disable_lora``, ``fuse_lora`` with a scale, hot swaps) affect only the
        matrices. After ``disable_lora`` the next call warns about this. If a LoRA is loaded later, diffusers makes it
        the only active one, and the next call warns and says how to keep both. ``restore()`` removes matrices and
        differences.
    steps: more steps than the recipe's, such as 6 or 8 for lightx2v and Lightning, at its authors' spacing. None: the
        recipe's own number. Other recipes have no such spacing: give a Recipe with sigmas of your own.
    classifier_free_guidance: True if guidance_scale counts. By default a value above 1 is taken as 1, with one warning,
        and a modular pipeline's guiders are disabled.

    Afterwards ``pipe.scheduler.timesteps`` are the recipe's, and a call with another num_inference_steps is an error.
    Only the call's ``generator`` decides the noise. The log and ``str(handle)`` tell the chosen sampler, how many
    matrices have no alpha, and the unused keys of the files. For a loaded model they also tell the keys that diffusers
    left out, if its files are on disk.

    Returns a handle with ``restore()``, which also works in a ``with`` statement.

    After an error nothing is changed. Raises:
        TypeError: the type of the pipeline, source or scale is not supported.
        ValueError: the recipe is unknown, or files are not recognised or do not fit the model.
        ImportError: peft is missing.
        RuntimeError: a few-step sampler is installed already, another LoRA is fused or switched off, projections are
            fused, or layerwise casting is on.
    """
    check_pipeline(pipe, "use_distilled")
    chosen = None if recipe is None else find_recipe(recipe)
    models = {name: getattr(model, "_orig_mod", model) for name, model in transformers_of(pipe).items()}
    scales = dict(zip(models, _scales(scale, len(models)), strict=True))
    files = {} if source is None else _read(source, models)
    for name, file in files.items():
        check_loadable(models[name], name, file.lora)
    if files:
        first, *_ = models.values()
        each = [files.get(name, _File(None, None)) for name in models]
        notes = odd_names([file.path for file in each], [file.lora for file in each], first)
        notes += [f"{name}: no LoRA, so its steps are not distilled" for name in models if name not in files]
    else:
        dense = [name for name, model in models.items() if not any(map(is_projection, dict(model.named_parameters())))]
        keys = [_keys_of(name, models[name]) for name in dense]
        notes = [note for found in keys for note in ignored_parts(found)]
    sampling = _sampling(pipe, chosen, files, models, notes, steps)
    check_experts(pipe, sampling.scheduler.timesteps[:1].tolist(), sampling.boundary_ratio)
    if sampling.recipe == "fastwan" and not files and not all(keys):  # diffusers drops them with a line in its log
        notes.append(PERHAPS_GATES)
    return DistilledHandle(pipe, sampling, classifier_free_guidance, files, models, scales, notes)


def _scales(scale: object, experts: int) -> list[float]:
    """Return the strength for each of 1 or 2 experts. Raises TypeError or ValueError for what is not that."""
    accepted = "a number, 1 for the LoRA as it was trained" + (", or a pair (high, low) of numbers" * (experts == 2))
    pair = isinstance(scale, Sequence) and not isinstance(scale, str)
    scales = list(scale) if pair else [scale] * experts
    if not all(isinstance(one, numbers.Real) for one in scales):
        raise TypeError(f"scale={scale!r}; give {accepted}.")
    if len(scales) != experts or not all(map(math.isfinite, scales)):
        raise ValueError(f"scale={scale!r}; give {accepted.replace('a number', 'a finite number')}.")
    return scales


class _File(NamedTuple):
    """A LoRA file, and its contents for its transformer. None stands for an expert without a LoRA."""

    path: Path | None
    lora: Lora | None


_Files = dict[str, _File]  # by the transformer's name in the pipeline
_Models = dict[str, nn.Module]


class _Sampling(NamedTuple):
    """The chosen sampler: its scheduler, the recipe's name, how it was recognised, and the boundary_ratio."""

    scheduler: FewStepScheduler
    recipe: str
    evidence: str
    boundary_ratio: float | None


class DistilledHandle(FewStepHandle):
    """The changes of ``use_distilled`` to a pipeline. ``restore()`` undoes them, ``str(handle)`` describes them.

    Attributes:
        pipe, scheduler: the pipeline, and the scheduler that it samples with.
        unused: keys of the files that are not on the models, and why, by transformer.
    """

    def __init__(
        self,
        pipe: DiffusionPipeline,
        sampling: _Sampling,
        classifier_free_guidance: bool,
        files: _Files,
        models: _Models,
        scales: dict[str, float],
        notes: list[str],
    ):
        self._loaded: dict[str, LoadedLora] = {}
        self._told: set[str] = set()  # the warnings of changes that were logged
        try:
            for name, file in files.items():
                self._loaded[name] = LoadedLora(pipe, models[name], file.lora, scales[name])
        except BaseException:
            self._unload()
            raise
        self._own_boundary = pipe.config.get("boundary_ratio")
        self._boundary = sampling.boundary_ratio
        if self._boundary != self._own_boundary:
            pipe.register_to_config(boundary_ratio=self._boundary)
        super().__init__(pipe, sampling.scheduler, classifier_free_guidance, "use_distilled")
        self._lines = [self._sampling(sampling), *notes, *self._files(files, scales)]
        level = logging.WARNING if notes or self.unused else logging.INFO
        logger.log(level, "use_distilled: %s", self)

    @property
    def unused(self) -> dict[str, dict[str, str]]:
        """Return the unused keys of the files with the reasons, by transformer."""
        return {name: loaded.unused for name, loaded in self._loaded.items() if loaded.unused}

    def restore(self) -> None:
        """Unload the LoRAs, and restore scheduler, prepare_latents and boundary. Weights are bitwise as before.

        If you unloaded a LoRA yourself, the rest is undone. Raises RuntimeError, without a change, if called twice, if
        the LoRA or projections are fused, or if the scheduler or prepare_latents was replaced.
        """
        self._check_restorable()
        for loaded in self._loaded.values():
            loaded.check_undoable()
        super().restore()
        if self._boundary != self._own_boundary:
            self.pipe.register_to_config(boundary_ratio=self._own_boundary)
        self._unload()

    def prepare_latents(self, pipe: DiffusionPipeline, of_block: Callable | None, *args, **kwargs):
        """Warn of changes to the LoRA since, then prepare the latents."""
        for name, loaded in self._loaded.items():
            change = self._change_of(loaded)
            if change is not None and (warning := f"{name}: {change}") not in self._told:
                logger.warning(warning)
                self._told.add(warning)
        return super().prepare_latents(pipe, of_block, *args, **kwargs)

    def _change_of(self, loaded: LoadedLora) -> str | None:
        """Return a warning if a loaded LoRA does not count as it was loaded, or None.

        The user switched it off, made others active without it, or fused projections.
        """
        if loaded.is_left_out():
            return (
                "projections were fused after the LoRA was loaded, and fused projections leave out its matrices; call "
                "unfuse_qkv_projections()."
            )
        if others := loaded.replaced_by():
            return (
                f"the LoRA {loaded.adapter} is not active beside {', '.join(others)}, so the few steps run without its "
                f"matrices; call pipe.set_adapters({[*others, loaded.adapter]})."
            )
        if loaded.differences and not loaded.is_as_loaded():
            return (
                f"the LoRA was switched off or given another weight, but its {loaded.differences} differences of "
                "biases, norms and the like stay in the model at the scale they were loaded with. Call restore() to "
                "remove them, then use_distilled with scale= to load them at another scale."
            )
        return None

    def _unload(self) -> None:
        for loaded in reversed(self._loaded.values()):
            loaded.undo()

    def __str__(self) -> str:
        return "\n".join(self._lines)

    def _sampling(self, sampling: _Sampling) -> str:
        scheduler = self.scheduler
        timesteps = ", ".join(f"{t:.4g}" if t < 1000 else "1000" for t in scheduler.timesteps.tolist())
        guidance = "guidance_scale of the call" if self._classifier_free_guidance else "guidance_scale 1"
        boundary = "" if self._boundary is None else f", the experts change at {1000 * self._boundary:g}"
        return (
            f"{sampling.recipe} ({sampling.evidence}): {len(scheduler.timesteps)} steps ({scheduler.solver}) at "
            f"timesteps {timesteps}, {guidance}{boundary}"
        )

    def _files(self, files: _Files, scales: dict[str, float]) -> list[str]:
        lines = []
        for name, (path, lora) in files.items():
            differences = self._loaded[name].differences - len(lora.products)
            lines.append(
                f"{name}: {path.name}, {_matrices(lora)}{_assumed(lora)}{differences} differences, "
                f"scale {scales[name]:g}"
            )
            lines += [f"  not used: {key} ({reason})" for key, reason in self._loaded[name].unused.items()]
        return lines


def _matrices(lora: Lora) -> str:
    """Return the words that say what a LoRA changes by matrices."""
    kinds = Counter(product.kind for product in lora.products.values())
    products = "".join(f"{count} weights by a {kind}, " for kind, count in kinds.items())
    ranks = ", ".join(map(str, lora.ranks))
    return products if products and not ranks else f"{len(lora.pairs)} linears of rank {ranks or '-'}, {products}"


def _assumed(lora: Lora) -> str:
    """Return the words that say for which of a LoRA's matrices a strength is assumed, because no alpha is given."""
    if not lora.assumed:
        return ""
    some = f"{lora.assumed} of them without alpha" if lora.has_alpha else "no alpha"
    return f"{some} (alpha = rank assumed), "


def _read(source: Source | Sequence[Source | None], models: _Models) -> _Files:
    files = {}
    try:
        paths = find_files(source, len(models))
        contents = [None if path is None else read_tensors(path) for path in paths]
    except ValueError as error:
        raise ValueError(f"{str(error).rstrip('.')}. {_ACCEPTED}") from None
    for path, content, (name, model) in zip(paths, contents, models.items(), strict=True):
        if content is None:
            continue
        tensors, metadata = content
        if not looks_like_lora(tensors):
            raise ValueError(
                f"{path} is not a LoRA: it holds tensors such as {next(iter(tensors))}. If it is a whole model, load "
                f"it as a diffusers pipeline and call use_distilled without source. {_ACCEPTED}"
            )
        try:
            files[name] = _File(path, read_lora(tensors, model, metadata))
        except ValueError as error:
            raise ValueError(f"{path}: {str(error).rstrip('.')}. {_ACCEPTED}") from None
    return files


def _keys_of(name: str, model: nn.Module) -> set[str]:
    """Return the names of the tensors in a transformer's files, or an empty set if the files are not found."""
    return keys_of_model(_name_of(model), name)


def _sampling(
    pipe: DiffusionPipeline,
    chosen: Recipe | None,
    files: _Files,
    models: _Models,
    notes: list[str],
    number: int | None,
) -> _Sampling:
    own = pipe.config.get("boundary_ratio")
    if chosen is None and not files and isinstance(pipe.scheduler, FewStepScheduler):
        scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
        scheduler.set_timesteps(len(scheduler.config.sigmas) if scheduler.config.sigmas else RECIPES["rcm"].steps)
        if number is not None:
            scheduler.set_timesteps(number)  # raises ValueError for others than it takes
        return _Sampling(scheduler, scheduler.config.get("recipe", "rcm"), "the pipeline's own", own)
    if chosen is RECIPES["rcm"]:  # exactly what use_rcm does, a saved RCMScheduler's options included
        chosen.in_steps(chosen.steps if number is None else number)
        if pipeline_of(pipe).starts_from == "image":
            notes.append("for image to video rCM was published with recipe='rcm-i2v'")
        scheduler = rcm_scheduler(pipe)
        scheduler.set_timesteps(len(scheduler.config.sigmas) if scheduler.config.sigmas else chosen.steps)
        return _Sampling(scheduler, chosen.name, "as asked for", own)
    evidence = "as asked for"
    if chosen is None:
        found = _recognise_files(files, models) if files else _recognise_loaded(models)
        if found is None:
            first, *_ = models.values()
            raise NotRecognised(
                f"neither the name nor the files of the loaded model ({_name_of(first) or 'it has no name'}) tell how "
                f"it was distilled; give a LoRA as source, or recipe=, one of {recipe_names()}."
            )
        chosen, evidence = RECIPES[found.recipe], found.evidence
        if found.alone:
            notes.append(f"recognised only by {found.alone}; if it is not {chosen.name}, give recipe=")
    recipe = _variant(chosen, pipe, bool(files))
    boundary = _boundary(recipe, own) if len(models) == 2 else own
    recipe = recipe if number is None else recipe.in_steps(number)
    last = train_timesteps(pipe)
    scheduler = scheduler_of(recipe, last, None if boundary is None else boundary * last)
    return _Sampling(scheduler, recipe.name, evidence, boundary)


def _recognise_files(files: _Files, models: _Models) -> Recognised:
    found = [lora_claims(file.path, file.lora, models[name], len(models)) for name, file in files.items()]
    known = {claim.recipe for claims in found for claim in claims}
    if len(known) != 1 or [] in found:
        names = ", ".join(file.path.name for file in files.values())
        what = f"look like {' and '.join(sorted(known))}" if len(known) > 1 else "cannot be recognised"
        raise ValueError(f"{names}: {what}; give how it was distilled as recipe=, one of {recipe_names()}.")
    first = [claims[0] for claims in found]
    return next((claim for claim in first if claim.alone), first[0])


def _recognise_loaded(models: _Models) -> Recognised | None:
    """Recognise the loaded models by their names and files. Raises ValueError if these contradict each other."""
    for name, model in models.items():
        found = [by_name(own_name(_name_of(model))), checkpoint_by_keys(_keys_of(name, model))]
        told = [recognised for recognised in found if recognised is not None]
        if len({recognised.recipe for recognised in told}) > 1:
            raise ValueError(
                f"the loaded model could be {told[0].recipe} ({told[0].evidence}) or {told[1].recipe} "
                f"({told[1].evidence}); give how it was distilled as recipe=, one of {recipe_names()}."
            )
        if told:
            return told[0]
    return None


def _name_of(model: nn.Module) -> str:
    return str(model.config.get("_name_or_path") or "")


def _variant(recipe: Recipe, pipe: DiffusionPipeline, has_lora: bool) -> Recipe:
    """Return a recipe's variant for image to video, or for a LoRA, if its authors have one, else the recipe."""
    if recipe in (RECIPES["rcm"], RECIPES["turbowan"]) and pipeline_of(pipe).starts_from == "image":
        return RECIPES[f"{recipe.name}-i2v"]
    return RECIPES["causvid-lora"] if recipe is RECIPES["causvid"] and has_lora else recipe


def _boundary(recipe: Recipe, own: float | None) -> float | None:
    """Return the recipe's boundary, or the pipeline's own where both give the steps to the same experts."""
    if recipe.boundary is None:
        return own
    times = scheduler_of(recipe).sigmas[:-1]
    same = own is not None and (times >= own).tolist() == (times >= recipe.boundary).tolist()
    return own if same else recipe.boundary
