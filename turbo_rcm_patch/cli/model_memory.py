"""The GPU memory of a model, which `info --model` shows: what each tier takes, or the plan for a card with --vram."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from torch import nn

from ..checkpoints.files import HUB_ID
from ..memory import DoesNotFit
from ..memory.needs import VIDEOS, models_by_preset, needs, needs_table
from ..memory.plan import budget_of, plan_for
from ..memory.stages import Video
from ..patching.families import CASES, family_of
from .errors import CommandError, why_not_loaded
from .sizes import size_rules

CONFIGS = ("model_index.json", "config.json", "*/config.json")  # of a pipeline or a transformer on the hub


def memory_of_model(arguments: argparse.Namespace) -> tuple[list[dict[str, object]], list[str]]:
    """Return the memory of --model as data for JSON, and as paragraphs. Raises CommandError for an unusable model."""
    source, dtype = arguments.model, getattr(torch, arguments.dtype or "bfloat16")
    configs = _configs_of(source)
    try:
        presets = list(models_by_preset(configs, dtype, arguments.preset, arguments.text_encoder is not None))
    except ValueError as error:
        raise CommandError(f"--model: {error}") from error
    videos = _videos(arguments, presets[0][1].models)
    if arguments.vram is None:
        found = needs(presets, videos)
        return [asdict(need) for need in found], [f"{source} on a GPU:\n{needs_table(found)}"]
    budget, data, lines = budget_of(arguments.vram), [], []
    for (name, patched), video in product(presets, videos):
        try:
            plan = plan_for(patched, video, budget)
            data.append({"tier": name, **plan.to_dict()})
        except DoesNotFit as error:
            plan = f"{error}"
            data.append({"tier": name, "video": video, "error": plan})
        lines.append(f"{source}, {name}, on a GPU with {arguments.vram}:\n{plan}")
    return data, lines


def _configs_of(source: str) -> str:
    """Return a size or a folder as it is, and of a hub id the folder to which its configs were downloaded."""
    if source in CASES or Path(source).exists() or source.count("/") != 1 or not HUB_ID.match(source):
        return source
    try:
        return snapshot_download(source, allow_patterns=list(CONFIGS))
    except (OSError, ValueError) as error:  # the hub's errors are of both kinds
        raise CommandError(f"--model {source}: {why_not_loaded(error)}") from error


def _videos(arguments: argparse.Namespace, models: Mapping[str, nn.Module]) -> Sequence[Video]:
    """Return the size that the options give, or the usual ones. Raises CommandError for one the model does not have."""
    given = arguments.height, arguments.width, arguments.frames
    transformer = next(model for model in models.values() if family_of(model) is not None)
    rules = size_rules(models["vae"].config if "vae" in models else {}, transformer.config)
    rules.check(*given)
    usual = [Video(v.height - v.height % rules.height, v.width - v.width % rules.width, v.frames) for v in VIDEOS]
    if given == (None, None, None):
        return usual if arguments.vram is None else usual[:1]
    return [Video(*(default if value is None else value for value, default in zip(given, usual[0], strict=True)))]
