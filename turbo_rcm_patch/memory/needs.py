"""The GPU memory that a model takes in each tier, from its configs alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..amounts import enough_in_gb, in_gb
from ..config import PRESETS, Sparse, without_originals
from ..patching.families import family_of
from ..patching.steps.sparse_linear import why_not_replaceable
from ..patching.text_encoder import patch_text_encoder
from ..tables import table
from .choose import Placement, smallest
from .components import Component, components_of
from .empty_models import empty_models, facts_of_source, with_empty_projections
from .plan import CONTEXT
from .sound import has_sound
from .stages import Patched, Video, capability_of, stages_of, why_not_counted, why_unknown

VIDEOS = (Video(480, 832, 81), Video(720, 1280, 81))


@dataclass(frozen=True)
class Need:
    """The GPU memory for one size of video in one tier, in bytes, with CUDA's own.

    components: the models and their weights. resident: if all of them stay on the GPU. least: if blocks stream, and the
    VAE decodes few frames at a time or works in tiles, where that takes less.
    """

    tier: str
    video: Video
    components: tuple[Component, ...]
    resident: int
    least: int


def models_by_preset(
    source: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    preset: str | None = None,
    text_encoder_in_8_bits: bool = False,
) -> Iterator[tuple[str, Patched]]:
    """Yield the presets that a model can have, or only the given one, with the models that `empty_models` makes.

    The configurations free the weights that 8 bits replace. Raises ValueError as `empty_models`, for a model whose
    memory is not known, and for a given preset that the model or this machine's GPU cannot have. Raises PatchError for
    a text encoder that cannot be stored in 8 bits.
    """
    models = empty_models(source, dtype)
    if text_encoder_in_8_bits:
        patch_text_encoder(models.get("text_encoder"), in_8_bits=True)
    transformers = {name: model for name, model in models.items() if family_of(model) is not None}
    if (reason := next(filter(None, map(why_unknown, transformers.values())), None)) is not None:
        raise ValueError(f"{source} holds {reason}.")
    reasons = (why_not_replaceable(name, family_of(m).self_attentions(m)) for name, m in transformers.items())
    why_not_sparse = next(filter(None, reasons), None)
    facts = {
        **facts_of_source(source),
        "samples": 2 if has_sound(models) else 1,  # perhaps with guidance
        "capability": capability_of(torch.device("cuda")) if torch.cuda.is_available() else None,
    }
    for name in PRESETS if preset is None else (preset,):
        config = without_originals(PRESETS[name])
        patched = Patched(models, config, **facts)
        is_sparse = isinstance(config, Sparse)
        reason = (why_not_sparse if is_sparse else None) or why_not_counted(patched)
        if is_sparse and reason is None:
            sparse = {part: with_empty_projections(model) for part, model in transformers.items()}
            patched = patched._replace(models={**models, **sparse})
        if reason is None:
            yield name, patched
        elif preset is not None:
            raise ValueError(reason)


def needs(presets: Iterable[tuple[str, Patched]], videos: Sequence[Video] = VIDEOS) -> list[Need]:
    """Return the memory that videos of these sizes take in each preset."""
    return [_need(name, patched, video) for name, patched in presets for video in videos]


def _need(name: str, patched: Patched, video: Video) -> Need:
    components, stages = components_of(patched.models, patched.config), list(stages_of(patched, video))
    all_stay = Placement(frozenset(), tiles=False)
    resident, least = (
        CONTEXT + placement.largest_room(components, stages) for placement in (all_stay, smallest(components, stages))
    )
    return Need(name, video, tuple(components), resident, least)


def needs_table(found: Sequence[Need]) -> str:
    """Return the figures in GB, as text."""
    header = ("tier", "weights, GB", "video", "all on the GPU, GB", "at least, GB")
    rows = [
        (
            need.tier,
            in_gb(sum(component.weights for component in need.components)),
            str(need.video),
            enough_in_gb(need.resident),
            enough_in_gb(need.least),
        )
        for need in found
    ]
    return table([header, *rows])
