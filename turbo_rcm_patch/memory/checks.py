"""The checks of `fit` before it plans: the pipeline, its configuration, the size of the video, and the GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from numbers import Real
from weakref import WeakSet

import torch
from torch import nn

from ..amounts import in_gb, parse_amount
from ..checkpoints.files import COMPONENTS
from ..config import PatchConfig, resolve_config
from ..latents import compression
from ..patching.families import family_of
from ..patching.families.vae import is_vae, vae_state
from ..patching.steps.plan import is_patched, state_of
from ..wording import counted, with_article
from .sound import has_sound
from .stages import Video, why_unknown

PLANNED: WeakSet[nn.Module] = WeakSet()  # the models whose places a plan has chosen


def models_of(pipe: object) -> dict[str, nn.Module]:
    """Return a pipeline's models by name, each once. Raises ValueError for something that cannot be planned."""
    found, kind = getattr(pipe, "components", None), type(pipe).__name__
    if isinstance(pipe, nn.Module) or not isinstance(found, dict) or not hasattr(pipe, "config"):
        raise ValueError(f"{kind} is no diffusers pipeline; give the pipeline with its VAE.")
    names = {model: name for name, model in reversed(found.items()) if isinstance(model, nn.Module)}
    models = {name: model for model, name in reversed(names.items())}
    if (compiled := next((name for name, model in models.items() if hasattr(model, "_orig_mod")), None)) is not None:
        raise ValueError(f"{compiled} is compiled; set pipe.{compiled} to pipe.{compiled}._orig_mod, then call fit.")
    transformers = [model for name, model in models.items() if name in COMPONENTS]
    for part, there in (("transformer", bool(transformers)), ("VAE", "vae" in models)):
        if not there:
            raise ValueError(f"{kind} has no {part}; load it with its {part}.")
    if (reason := next(filter(None, map(why_unknown, transformers)), None)) is not None:
        raise ValueError(f"{kind} has {reason}.")
    if not is_vae(models["vae"]) and not has_sound(models):
        raise ValueError(f"{kind} has {with_article(type(models['vae']).__name__)}, whose memory is not known.")
    return models


def config_of(models: Mapping[str, nn.Module], config: PatchConfig | str | None) -> PatchConfig:
    """Return the configuration that the transformers are patched with, or else the given one.

    It has ``vae=False`` if the transformers were patched without the VAE.
    """
    known = ((family, model) for model in models.values() if (family := family_of(model)) is not None)
    blocks = (block for family, model in known for _, block in family.every_block(model) if is_patched(block))
    patched = next((state_of(block).shared.config for block in blocks), None)
    if patched is None:
        return resolve_config("exact" if config is None else config)
    if config is not None and resolve_config(config) != patched:
        raise ValueError(f"config={config!r}, but the pipeline is patched with {patched!r}; leave config out.")
    return patched if vae_state(models["vae"]) is not None else replace(patched, vae=False)


def check_size(models: Mapping[str, nn.Module], video: Video) -> None:
    """Raise ValueError for a size that the VAE does not have."""
    edge, step = edge_of_a_token(models), frames_of_a_latent(models)
    for name, size in (("height", video.height), ("width", video.width)):
        if type(size) is not int or size <= 0 or size % edge:
            raise ValueError(f"{name}={size!r}; give a multiple of {edge}, such as {_fitting(size, edge)}.")
    if type(video.frames) is not int or video.frames <= 0 or (video.frames - 1) % step:
        raise ValueError(f"num_frames={video.frames!r}; give {step}k+1, such as {_fitting(video.frames, step) + 1}.")


def _fitting(size: object, step: int) -> int:
    """Return the largest multiple of a step up to a size, at least one step. A size that is no number counts as 80."""
    is_number = isinstance(size, Real) and not isinstance(size, bool) and math.isfinite(size)
    return max(step, (int(size) if is_number else 80) // step * step)


def edge_of_a_token(models: Mapping[str, nn.Module]) -> int:
    """Return the pixels along height and width that a token stands for."""
    patch = next(model.config.patch_size for model in models.values() if family_of(model) is not None)
    return compression(models["vae"].config)[0] * (patch if isinstance(patch, int) else patch[-1])


def frames_of_a_latent(models: Mapping[str, nn.Module]) -> int:
    """Return the frames of a video for each latent frame after the first."""
    return compression(getattr(models.get("vae"), "config", {}))[1]


def check_movable(models: Mapping[str, nn.Module]) -> None:
    """Raise ValueError for models without weights, on several devices, offloaded, or placed by another plan."""
    for name, model in models.items():
        if model in PLANNED:
            raise ValueError(
                f"{name} is in a plan of fit already; call undo() of that plan first, or load the pipeline anew."
            )
        if any(map(is_hooked, model.modules())):
            raise ValueError(
                f"{name} is offloaded or hooked already; undo that, for example with pipe.remove_all_hooks() after "
                "enable_model_cpu_offload(), or load it anew, and then call fit. Enable caches after that."
            )
        devices = {parameter.device for parameter in model.parameters()}
        if torch.device("meta") in devices:
            raise ValueError(f"{name} has weights on the meta device, without values; load them first.")
        if len(devices) > 1:
            raise ValueError(f"{name} lies on several devices; move it to one of them first.")


def is_hooked(module: nn.Module) -> bool:
    """True if hooks of accelerate or diffusers may move a module's weights."""
    registry = vars(module).get("_diffusers_hook")
    return "_hf_hook" in vars(module) or (registry is not None and bool(registry.hooks))


def check_card(vram: str | int | None, device: torch.device) -> None:
    """Raise ValueError for a device that is no CUDA or ROCm GPU, and for a GPU that is missing or smaller than vram.

    The CPU is accepted, for tests.
    """
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise ValueError(f"device={str(device)!r}; give a GPU, such as 'cuda' or 'cuda:1'.")
    if (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ValueError(f"device={str(device)!r}, but PyTorch finds {counted(count, 'CUDA GPU')}; check the driver.")
    total = torch.cuda.get_device_properties(device).total_memory
    if vram is not None and parse_amount(vram) > total:
        raise ValueError(f"vram={vram!r}, but {device} has {in_gb(total)} GB; give at most that, or None.")
