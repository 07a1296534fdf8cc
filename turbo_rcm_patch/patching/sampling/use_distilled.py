"""use_distilled: load a whole few-step LoRA, sample as its checkpoint was distilled, and undo both."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

from diffusers import DiffusionPipeline
from torch import nn

from ...checkpoints.files import Source, find_files, keys_of_model, read_tensors
from ...checkpoints.lazy import SUFFIXES
from ...checkpoints.lora import looks_like_lora, read_lora
from ...checkpoints.recognise import (
    PERHAPS_GATES,
    Recognised,
    by_name,
    checkpoint_by_keys,
    ignored_parts,
    lora_claims,
    own_name,
    swapped_files,
)
from ...recipes import RECIPES, SOUND_RECIPES, Recipe, find_recipe, recipe_names, recipes_for
from ...scheduler import FewStepScheduler, scheduler_of
from ..apply import transformers_of
from ..families import family_of, pipeline_of
from ..lora.load import check_loadable
from ..steps.sparse_linear import is_projection
from .distilled_handle import DistilledHandle, File, Files, Models, Sampling
from .handle import check_experts, check_pipeline, train_timesteps


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

    Args:
        pipe: a WanPipeline, WanImageToVideoPipeline, WanVideoToVideoPipeline, WanVACEPipeline, LTX2Pipeline or
            LTX2ImageToVideoPipeline, patched or not, or a modular Wan pipeline. A modular one rounds timesteps to its
            prompt's dtype and gives the sampler fp32, whatever the recipe says.
        source: a LoRA file, a folder, or the id of a hub repository, also with a path in it ("org/name/folder"). For
            the two transformers of Wan 2.2 give a pair (high, low), or a folder with both files. (None, low) loads a
            LoRA for one expert only, and both experts take the recipe's steps. None: the pipeline itself is distilled.
            A LoRA's alpha is read from tensors of its file, the file's header or PEFT's adapter_config.json beside it.
            LoKr and LoHa are added to the weights, as differences are, and the CPU keeps those weights' old values for
            ``restore()``. Load them before a patch that puts linears into 8 bits.
        recipe: the name of one of `RECIPES`, or your own Recipe. None: recognised by the names and contents of the
            files, or of the loaded checkpoint (``transformer.config._name_or_path``).
        scale: the strength of the LoRA's matrices and of its differences (of biases, norms, modulation, patch
            embedding), or a pair (high, low) for two transformers. Differences are written into the parameters. So
            later changes to PEFT's layers (``set_adapters``, ``disable_lora``, ``fuse_lora`` with a scale, hot swaps)
            affect only the matrices. After ``disable_lora`` the next call warns about this. If a LoRA is loaded later,
            diffusers makes it the only active one, and the next call warns and says how to keep both. ``restore()``
            removes matrices and differences.
        steps: more steps than the recipe's, such as 6 or 8 for lightx2v and Lightning, at its authors' spacing. None:
            the recipe's own number. Other recipes have no such spacing: give a Recipe with sigmas of your own.
        classifier_free_guidance: True if guidance_scale counts. By default a value above 1 is taken as 1, with one
            warning, and a modular pipeline's guiders are disabled. LTX-2's guidance of all kinds is off by default.

    Afterwards ``pipe.scheduler.timesteps`` are the recipe's, and a call with another num_inference_steps is an error.
    Only the call's ``generator`` decides the noise. The log and ``str(handle)`` tell the chosen sampler, how many
    matrices have no alpha, and the unused keys of the files. For a loaded model they also tell the keys that diffusers
    left out, if its files are on disk.

    Returns a handle with ``restore()``, which also works in a ``with`` statement.

    After an error nothing is changed.

    Raises:
        TypeError: the type of the pipeline, source or scale is not supported.
        ValueError: the recipe is unknown, or files are not recognised or do not fit the model.
        ImportError: peft is missing.
        RuntimeError: a few-step sampler is installed already, another LoRA is fused or switched off, projections are
            fused, or layerwise casting is on.
    """
    check_pipeline(pipe, "use_distilled")
    chosen = None if recipe is None else find_recipe(recipe)
    _check_recipe(pipe, chosen)
    models = {name: getattr(model, "_orig_mod", model) for name, model in transformers_of(pipe).items()}
    scales = dict(zip(models, _scales(scale, len(models)), strict=True))
    files = {} if source is None else _read(pipe, source, models)
    for name, file in files.items():
        check_loadable(models[name], name, file.lora)
    if files:
        paths = [files[name].path if name in files else None for name in models]
        notes = swapped_files(paths) if len(paths) == 2 else []
        notes += [f"{name}: no LoRA, so its steps are not distilled" for name in models if name not in files]
    else:
        dense = [name for name, model in models.items() if not any(map(is_projection, dict(model.named_parameters())))]
        keys = [keys_of_model(_name_of(models[name]), name) for name in dense]
        notes = [note for found in keys for note in ignored_parts(found)]
    sampling = _sampling(pipe, chosen, files, models, notes, steps)
    check_experts(pipe, sampling.scheduler.timesteps[:1].tolist(), sampling.boundary_ratio)
    if pipeline_of(pipe).has_sound and sampling.scheduler.sigmas[0] != 1:
        first = float(sampling.scheduler.sigmas[0])
        raise ValueError(
            f"recipe {sampling.recipe!r} begins at sigma {first:g}, but {type(pipe).__name__} begins with noise alone; "
            "give 1 as the first of its sigmas."
        )
    if sampling.recipe == "fastwan" and not files and not all(keys):  # diffusers drops them with a line in its log
        notes.append(PERHAPS_GATES)
    return DistilledHandle(pipe, sampling, classifier_free_guidance, files, models, scales, notes)


def _check_recipe(pipe: DiffusionPipeline, recipe: Recipe | None) -> None:
    """Raise ValueError for a published recipe of another family, and for one of images if the pipeline takes none."""
    taken = _taken_by(pipe)
    if recipe is None or RECIPES.get(recipe.name) is not recipe or recipe.name in recipes_for(**taken):
        return
    raise ValueError(
        f"recipe={recipe.name!r} is not for {type(pipe).__name__}; accepted are {recipe_names(**taken)}, or a Recipe "
        "of your own."
    )


def _taken_by(pipe: DiffusionPipeline) -> dict[str, bool]:
    """Return the options of `recipes_for` that give the recipes for a pipeline.

    VACE and video to video may get an image among their frames, and a modular pipeline by its blocks, of any class.
    """
    stated = pipeline_of(pipe)
    return {"sound": stated.has_sound, "image": stated.starts_from != "text" or stated.is_modular}


def _scales(scale: object, experts: int) -> list[float]:
    """Return the strength for each of 1 or 2 experts. Raises TypeError or ValueError for what is not that."""
    accepted = "a number, 1 for the LoRA as it was trained" + (", or a pair (high, low) of numbers" * (experts == 2))
    pair = isinstance(scale, Sequence) and not isinstance(scale, str)
    scales = list(scale) if pair else [scale] * experts
    if not all(isinstance(one, numbers.Real) and not isinstance(one, bool) for one in scales):
        raise TypeError(f"scale={scale!r}; give {accepted}.")
    if len(scales) != experts or not all(map(math.isfinite, scales)):
        raise ValueError(f"scale={scale!r}; give {accepted.replace('a number', 'a finite number')}.")
    return scales


def _read(pipe: DiffusionPipeline, source: Source | Sequence[Source | None], models: Models) -> Files:
    files = {}
    accepted = (
        f"Accepted are LoRA files ({', '.join(SUFFIXES)}), folders and hub ids. recipe= says how one was distilled: "
        f"{recipe_names(**_taken_by(pipe))}."
    )
    try:
        paths = find_files(source, len(models))
        contents = [None if path is None else read_tensors(path) for path in paths]
    except ValueError as error:
        if isinstance(source, str) and source in RECIPES:
            accepted = f"For the recipe of this name give recipe={source!r} in place of it. {accepted}"
        raise ValueError(f"{str(error).rstrip('.')}. {accepted}") from None
    for path, content, (name, model) in zip(paths, contents, models.items(), strict=True):
        if content is None:
            continue
        tensors, metadata = content
        if not looks_like_lora(tensors):
            raise ValueError(
                f"{path} is not a LoRA: it holds tensors such as {next(iter(tensors))}. If it is a whole model, load "
                f"it as a diffusers pipeline and call use_distilled without source. {accepted}"
            )
        try:
            files[name] = File(path, read_lora(tensors, model, metadata, names=family_of(model).names))
        except ValueError as error:
            raise ValueError(f"{path}: {str(error).rstrip('.')}. {accepted}") from None
    return files


def _sampling(
    pipe: DiffusionPipeline,
    chosen: Recipe | None,
    files: Files,
    models: Models,
    notes: list[str],
    number: int | None,
) -> Sampling:
    own = pipe.config.get("boundary_ratio")
    if chosen is None and not files and isinstance(pipe.scheduler, FewStepScheduler):
        scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
        scheduler.set_timesteps(len(scheduler.config.sigmas) if scheduler.config.sigmas else RECIPES["rcm"].steps)
        if number is not None:
            scheduler.set_timesteps(number)  # raises ValueError for others than it takes
        return Sampling(scheduler, scheduler.config.get("recipe", "rcm"), "the pipeline's own", own)
    evidence = "as asked for"
    if chosen is None:
        taken = _taken_by(pipe)
        found = _recognise_files(files, models, taken) if files else _recognise_loaded(models, taken)
        if found is None or (found.recipe in SOUND_RECIPES) != taken["sound"]:
            first, *_ = models.values()
            raise NotRecognised(
                f"neither the name nor the files of the loaded model ({_name_of(first) or 'it has no name'}) tell how "
                f"it was distilled; give a LoRA as source, or recipe=, one of {recipe_names(**taken)}."
            )
        chosen, evidence = RECIPES[found.recipe], found.evidence
        if found.alone:
            notes.append(f"recognised only by {found.alone}; if it is not {chosen.name}, name the recipe")
    recipe = _variant(chosen, pipe, bool(files))
    boundary = _boundary(recipe, own) if len(models) == 2 else own
    recipe = recipe if number is None else recipe.in_steps(number)
    last = train_timesteps(pipe)
    scheduler = scheduler_of(recipe, last, None if boundary is None else boundary * last)
    return Sampling(scheduler, recipe.name, evidence, boundary)


def _recognise_files(files: Files, models: Models, taken: dict[str, bool]) -> Recognised:
    """Recognise LoRA files. Raises ValueError if that fails. taken: of `_taken_by`."""
    found = []
    for name, file in files.items():
        linears_of = family_of(models[name]).linears_in_loras
        every = None if linears_of is None else linears_of(models[name])
        found.append([] if every is None else lora_claims(file.path, file.lora, every, len(models)))
    known = {claim.recipe for claims in found for claim in claims}
    if len(known) != 1 or [] in found:
        names = ", ".join(file.path.name for file in files.values())
        what = f"look like {' and '.join(sorted(known))}" if len(known) > 1 else "cannot be recognised"
        raise ValueError(f"{names}: {what}; give how it was distilled as recipe=, one of {recipe_names(**taken)}.")
    first = [claims[0] for claims in found]
    return next((claim for claim in first if claim.alone), first[0])


def _recognise_loaded(models: Models, taken: dict[str, bool]) -> Recognised | None:
    """Recognise the loaded models by their names and files. Raises ValueError if these contradict each other.

    taken: of `_taken_by`.
    """
    for name, model in models.items():
        found = [by_name(own_name(_name_of(model))), checkpoint_by_keys(keys_of_model(_name_of(model), name))]
        told = [recognised for recognised in found if recognised is not None]
        if len({recognised.recipe for recognised in told}) > 1:
            raise ValueError(
                f"the loaded model could be {told[0].recipe} ({told[0].evidence}) or {told[1].recipe} "
                f"({told[1].evidence}); give how it was distilled as recipe=, one of {recipe_names(**taken)}."
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
