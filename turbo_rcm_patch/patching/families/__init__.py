"""The families of models that can be patched, each in a file or folder of its own."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ...checkpoints.lazy import Tensors
from ...checkpoints.lora import looks_like_lora
from ...checkpoints.whole import WholeModel
from ...plain import is_sharded, unsharded_class
from ...wording import with_article
from .anyflow import ANYFLOW, ANYFLOW_FAR
from .chronoedit import CHRONOEDIT
from .family import Blocks, Family, Pipeline, class_path
from .helios import HELIOS
from .ltx2 import LTX2
from .skyreels_v2 import SKYREELS_V2
from .wan import WAN
from .wan_animate import WAN_ANIMATE
from .wan_animate_2 import WAN_ANIMATE_2
from .wan_vace import WAN_VACE

FAMILIES = (
    *(WAN, WAN_VACE, SKYREELS_V2, WAN_ANIMATE, WAN_ANIMATE_2, CHRONOEDIT),
    *(ANYFLOW, ANYFLOW_FAR, HELIOS, LTX2),
)
PIPELINES = tuple(pipeline for family in FAMILIES for pipeline in family.pipelines)
CASES = {name: case for family in FAMILIES for name, case in family.cases.items()}
SIZES = ", ".join(name for name in CASES if not name.startswith("tiny"))  # of published models
SUPPORTED = "; ".join(f"{family.transformer_class.__name__} ({family.models})" for family in FAMILIES)


def family_of(transformer: nn.Module) -> Family | None:
    """Return the family of a transformer by its exact class, sharded or not, or None if no family knows the class."""
    cls = unsharded_class(transformer)
    return next((family for family in FAMILIES if cls is family.transformer_class), None)


def family_named(class_name: object) -> Family | None:
    """Return the family of a transformer by its class's name, as config.json has it, or None if no family knows it."""
    return next((family for family in FAMILIES if family.transformer_class.__name__ == class_name), None)


def model_in(source: Path, tensors: Tensors) -> nn.Module:
    """Return the transformer, on the meta device, that a file with its authors' names holds.

    Raises ValueError for a LoRA, and for a file of another model than those of the families that publish such files.
    """
    _refuse_lora(source, tensors)
    makers = [family for family in FAMILIES if family.from_files is not None]
    fitting = next((family for family in makers if family.names.fit(tensors)), makers[0])
    return fitting.from_files(source, tensors)


def weights_in(source: str | Path, tensors: Tensors, model: nn.Module, *, partial: bool = False) -> WholeModel:
    """Return a file's weights for a model (`WholeModel`). Raises ValueError also for a LoRA and for another family."""
    _refuse_lora(source, tensors)
    names = family_of(model).names
    if not names.fit(tensors):
        other = next((f"weights of {f.names.title}" for f in FAMILIES if f.names.fit(tensors)), "no transformer")
        raise ValueError(
            f"{source} holds {other}, but the {type(model).__name__} takes weights of {names.title}; give a file with "
            "these."
        )
    return WholeModel(source, tensors, model, names, partial=partial)


def _refuse_lora(source: str | Path, tensors: Tensors) -> None:
    if 2 * sum(looks_like_lora([key]) for key in tensors) > len(tensors):  # a vocoder in the file has alphas too
        raise ValueError(
            f"{source} is a LoRA, not a whole model; load it with use_distilled or with pipe.load_lora_weights."
        )


def pipeline_of(pipe: object) -> Pipeline | None:
    """Return what its family states about a pipeline, or None for one whose sampler cannot be replaced."""
    return next((pipeline for pipeline in PIPELINES if isinstance(pipe, pipeline.pipeline_class)), None)


def blocks_like(block: nn.Module) -> Blocks | None:
    """Return what its family states about a block, by its exact class; None for others."""
    cls = unsharded_class(block)
    return next((blocks for family in FAMILIES for blocks in family.blocks if cls is blocks.block_class), None)


def check_supported(name: str, transformer: nn.Module) -> list[str]:
    """Return the reasons, as sentences, why this model cannot be patched. Empty if it can."""
    family = family_of(transformer)
    if family is None:
        compiled = hasattr(transformer, "_orig_mod")
        remedy = (
            "patch the model before compiling it"
            if compiled
            else f"supported: {SUPPORTED}; AutoencoderKLWan and AutoencoderKLQwenImage (VAEs)"
        )
        return [f"{name} is {with_article(class_path(transformer))}; {remedy}."]
    if is_sharded(transformer):
        return [f"{name} is sharded already; patch it first, then shard it (fully_shard)."]
    return family.problems(name, transformer)
