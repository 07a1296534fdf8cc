"""Models on the meta device, from configs alone: they have the sizes of their weights, but no weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import diffusers
import torch
import transformers
from diffusers import ModelMixin
from diffusers.pipelines import ltx2
from torch import nn

from ..checkpoints.files import COMPONENTS
from ..patching.families import CASES, SIZES, family_of
from ..patching.families.family import Case
from ..patching.steps.sparse_linear import PROJ_L
from ..patching.text_encoder import patch_text_encoder
from ..patching.weights.load import component_folders, empty_model, read_config
from ..patching.weights.quantize_linears import quantized_linears
from ..wording import with_article


def empty_models(source: str | Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, nn.Module]:
    """Return the models of a pipeline's or a transformer's folder, or of one of CASES by name.

    A folder of such a name comes first. They have their names in the pipeline. A transformer's folder comes with the
    VAE beside it, if there is one.

    Raises ValueError for a folder that is missing or holds no supported transformer.
    """
    case, folder = _case_of(source), Path(source)
    if case is not None:
        models = _of_case(case)
    elif folder.is_dir():
        models = _of_folder(folder)
    else:
        raise ValueError(
            f"{source}: no such folder; give the folder of a diffusers pipeline or transformer, or a size: {SIZES}."
        )
    return {name: cast_as_loaded(model, dtype) for name, model in models.items()}


def facts_of_source(source: str | Path) -> dict[str, bool]:
    """Return `facts_of_class` for the pipeline that `empty_models` takes the models of."""
    if (case := _case_of(source)) is not None:
        class_names = " ".join(base.__name__ for base in case.pipeline_class.__mro__)
        return facts_of_class(class_names, case.pipeline_options)
    index = _index(Path(source))
    return facts_of_class(str(index.get("_class_name")), index)


def _case_of(source: str | Path) -> Case | None:
    """Return the size of this name, or None if there is none, or a folder of this name."""
    return None if Path(source).is_dir() else CASES.get(str(source))


def facts_of_class(class_names: str, config: Mapping[str, object]) -> dict[str, bool]:
    """Return what pipelines of these classes and this config tell of a step, as arguments of `Patched`.

    class_names: of a pipeline and its base classes, with spaces between them.

    Each token has its own timestep in TI2V-5B's pipelines, those with diffusion forcing, and LTX-2's, except the one
    from text alone.
    """
    given_frames = "LTX2" in class_names and "LTX2Pipeline" not in class_names.split()
    expands = bool(config.get("expand_timesteps")) or "DiffusionForcing" in class_names or given_frames
    return {"own_timesteps": expands, "from_video": "VideoToVideo" in class_names}


def with_empty_projections(transformer: nn.Module) -> nn.Module:
    """Return a copy of a transformer on the meta device with the projections that sparse-linear attention needs."""
    transformer = copy.deepcopy(transformer)
    for _, attn, form in family_of(transformer).self_attentions(transformer):
        if not form.needs_projection:
            continue
        like, size = attn.to_out[0].weight, attn.inner_dim // attn.heads
        setattr(attn, PROJ_L, nn.Linear(size, size, device="meta", dtype=like.dtype))
    return transformer


def with_text_encoder_in_8_bits(models: Mapping[str, nn.Module]) -> dict[str, nn.Module] | None:
    """Return the models with an empty text encoder in 8 bits. None: there is none that could be so, or it is so."""
    encoder = models.get("text_encoder")
    if type(encoder) is not transformers.UMT5EncoderModel or quantized_linears(encoder):
        return None
    with torch.device("meta"):
        empty = cast_as_loaded(transformers.UMT5EncoderModel(encoder.config), encoder.dtype)
    patch_text_encoder(empty, in_8_bits=True)
    return {**models, "text_encoder": empty}


def cast_as_loaded(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast in place as ``from_pretrained(dtype=...)`` does, for inference: modules kept in fp32 stay fp32.

    diffusers keeps some so in every dtype, transformers only beside fp16.
    """
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    if not isinstance(model, ModelMixin) and dtype != torch.float16:
        kept = ()
    for name, parameter in model.named_parameters():
        if not any(part in kept for part in name.split(".")):
            parameter.data = parameter.data.to(dtype)
    return model.eval()


def _of_case(case: Case) -> dict[str, nn.Module]:
    with torch.device("meta"):
        encoders = {name: model_class(config) for name, (model_class, config) in case.encoders.items()}
        others = {name: model_class(**options) for name, (model_class, options) in case.others.items()}
        return {
            **encoders,
            **others,
            **{name: case.transformer_class(**case.transformer) for name in case.transformer_names},
            "vae": case.vae_class(**case.vae),
        }


def _of_folder(folder: Path) -> dict[str, nn.Module]:
    found = component_folders(folder)
    models = {name or COMPONENTS[0]: empty_model(path) for name, path in found.items()}
    if "" in found:
        return models | _others(folder.parent, {"vae": None})
    return models | _others(folder, {name: value for name, value in _index(folder).items() if name not in models})


def _index(folder: Path) -> dict[str, object]:
    return read_config(folder, "model_index.json") if (folder / "model_index.json").is_file() else {}


def _others(folder: Path, classes: Mapping[str, object]) -> dict[str, nn.Module]:
    """Return the models beside the transformers in a pipeline's folder: those with a config.json.

    classes: for each name the library and class, as model_index.json has them. diffusers' own models say their class
    themselves. Raises ValueError for a model that is named there and has no config.
    """
    models = {}
    for name, kind in classes.items():
        path, named = folder / name, str(kind[1]) if isinstance(kind, list) and len(kind) == 2 else ""
        if (path / "config.json").is_file():
            models[name] = _empty(path, named)
        elif _model_class(named) is not None:
            raise ValueError(
                f"{folder} has no {name}/config.json, but its model_index.json names {with_article(named)}."
            )
    return models


def _model_class(name: str) -> type[nn.Module] | None:
    """Return the class of models of this name in the libraries, or None if they have none."""
    found = (getattr(library, name, None) for library in (diffusers, transformers, ltx2))
    return next((each for each in found if isinstance(each, type) and issubclass(each, nn.Module)), None)


def _empty(path: Path, named: str) -> nn.Module:
    config = read_config(path)
    class_name = str(config.get("_class_name") or named or "unknown class")
    model_class = _model_class(class_name)
    if model_class is None:
        raise ValueError(f"{path} holds {with_article(class_name)}, which neither diffusers nor transformers has.")
    with torch.device("meta"):  # under accelerate's init_empty_weights tied weights would count twice
        if issubclass(model_class, ModelMixin):
            return model_class.from_config(config)
        return model_class(model_class.config_class.from_pretrained(path))
