"""`fit`: decide where a pipeline's models lie so that a generation fits into a GPU's memory, and put them there."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from numbers import Integral

import torch
from torch import nn

from ..amounts import enough_in_gb, in_gb, parse_amount
from ..config import Exact, PatchConfig, Quantized
from ..patching.families.vae.chunks import LIMIT, free_memory
from ..patching.sampling.handle import may_guide
from ..tables import table
from .checks import PLANNED, check_card, check_movable, check_size, config_of, frames_of_a_latent, models_of
from .choose import Placement, choose, smallest
from .components import Component, components_both_ways, components_of
from .empty_models import facts_of_class, with_text_encoder_in_8_bits
from .host import DoesNotFit, check_host
from .sound import has_sound
from .stages import Patched, Stage, Video, capability_of, graphs_bytes, stages_of, why_not_counted
from .streaming import stop_streaming, stream

CONTEXT = 600 * 10**6  # bytes that CUDA's context and the kernels' code take beside torch's allocator
MARGIN = 0.95  # of the memory that is free on the card, if no amount is given


@dataclass(eq=False, repr=False)
class MemoryPlan:
    """The places of a pipeline's models, and the memory that they take. Print it to see a table.

    Attributes:
        components: the models and their bytes.
        stages: the stages of a generation.
        placement: which models stream, and how the VAE decodes.
        budget: bytes of the GPU that the plan may use.
        video: the size that it is for.
        hints: True if `print` also tells what would take less memory.
    """

    components: Sequence[Component]
    stages: Sequence[Stage]
    placement: Placement
    budget: int
    video: Video
    hints: bool = True
    _undo: list[tuple] = field(default_factory=list, init=False)

    @property
    def peaks(self) -> dict[str, int]:
        """The predicted peak memory of each stage in bytes, without CUDA's own."""
        peaks: dict[str, int] = {}
        for stage in self.stages:
            peaks[stage.name] = max(peaks.get(stage.name, 0), self.placement.peak(self.components, stage))
        return peaks

    def to_dict(self) -> dict[str, object]:
        """Return the plan for ``json.dump``, in bytes."""
        return {
            "video": self.video,
            "budget": self.budget,
            "components": [asdict(component) for component in self.components],
            "streaming": sorted(self.placement.streaming),
            "tiles": self.placement.tiles,
            "decoding": self.placement.decoding,
            "peaks": self.peaks,
        }

    def __str__(self) -> str:
        rows = [("model", "where", "on the GPU, GB", "on the host, GB", "pinned, GB")]
        rows += [self._row(component) for component in self.components]
        host, pinned = self.placement.on_host(self.components)
        rows.append(("in all", "", *map(in_gb, (sum(map(self.placement.on_gpu, self.components)), host, pinned))))
        peaks = [("stage", "peak, GB"), *((name, in_gb(peak)) for name, peak in self.peaks.items())]
        lines = [f"{self.video}, within {in_gb(self.budget)} GB beside CUDA's own {in_gb(CONTEXT)} GB", table(rows), ""]
        lines.append(table(peaks))
        if any(component.name == "vae" for component in self.components):
            lines.append(f"the VAE works {_vae_mode(self.placement)}")
        if self.hints:
            lines += self._hints()
        return "\n".join(lines)

    def _hints(self) -> Iterator[str]:
        """Yield what would take less memory."""
        if originals := sum(component.originals for component in self.components):
            yield (
                f"the host keeps {in_gb(originals)} GB of original weights for restore(); restorable=False in the "
                "configuration, such as trp.Quantized(restorable=False), frees them"
            )
        for c in self.components:
            if c.name in self.placement.streaming and c.table and not c.in_8_bits:  # a text encoder in 16 bits or more
                yield (
                    f"{c.name}: {in_gb(c.blocks)} GB stream for each prompt; in 8 bits it would be about half, with "
                    "slightly other embeddings: trp.patch_text_encoder(pipe, in_8_bits=True) before fit, or "
                    "--text-encoder 8bit"
                )

    def _row(self, component: Component) -> tuple[str, ...]:
        streams = component.name in self.placement.streaming
        host, pinned = self.placement.on_host([component])
        where = "its blocks stream" if streams else "stays on the GPU"
        if streams and component.table:
            where += ", its token embeddings stay on the host"
        if component.in_8_bits:
            where = f"in 8 bits, {where}"
        return component.name, where, *map(in_gb, (self.placement.on_gpu(component), host, pinned))

    def undo(self) -> None:
        """Put all models back where they were, without offloading. Does nothing the second time."""
        while self._undo:
            function, *arguments = self._undo[-1]
            function(*arguments)
            self._undo.pop()  # only now, so that a second call goes on where this one failed


def fit(
    pipe: object,
    vram: str | int | None = None,
    *,
    height: int,
    width: int,
    num_frames: int,
    config: PatchConfig | str | None = None,
    device: torch.device | str = "cuda",
) -> MemoryPlan:
    """Put a pipeline's models where a generation of this size fits into a GPU's memory, and return the plan.

    Each model stays on the GPU, or its blocks stream there by diffusers' group offloading while it runs. The plan is
    the one that moves least. Its figures are those of the patched pipeline. Call it before or after `patch`. After
    one that stores 8 bits is better: weights move as they are, so that before it more of them may have to stream.

    Args:
        pipe: a diffusers pipeline of a supported family, with its models on the CPU or the GPU.
        vram: the card's memory, such as "8 GB" or a number of bytes. None: what is free on the card now, less 5 %.
        height: of the video, in pixels.
        width: of the video, in pixels.
        num_frames: of the video, or of a longer one that is given. Wan-Animate: of a segment. VACE: add 4 for each
            reference image beyond one.
        config: the configuration or preset that `patch` will get, if the pipeline is not patched yet. None: "exact".
        device: the GPU.

    Raises:
        DoesNotFit: no plan fits; the error names what is missing, and a setting that fits.
        ValueError, TypeError: the amount of memory, the size or the pipeline is not one that can be planned.
    """
    return fit_with(pipe, vram, Video(*map(_plain, (height, width, num_frames))), config, device)


def _plain(size: object) -> object:
    """Return Python's integer for NumPy's."""
    return int(size) if isinstance(size, Integral) and not isinstance(size, bool) else size


def fit_with(
    pipe: object,
    vram: str | int | None,
    video: Video,
    config: PatchConfig | str | None,
    device: torch.device | str,
    beside: Callable[[Patched, Video], Iterator[Stage]] | None = None,
    both_ways: bool = False,
) -> MemoryPlan:
    """Do what `fit` does, for a command that does more than generate. beside, both_ways: as in `Patched`."""
    device, models = _device(device), models_of(pipe)
    check_card(vram, device)
    facts = {**_facts_of(pipe, models), "capability": capability_of(device)}
    patched = Patched(models, config_of(models, config), beside=beside, both_ways=both_ways, **facts)
    check_size(models, video)
    check_movable(models)
    if (reason := why_not_counted(patched)) is not None:
        raise ValueError(f"fit cannot plan {reason}")
    as_they_are = components_of(models, Exact())
    plan = plan_for(patched, video, _free(models, device) if vram is None else budget_of(vram), as_they_are)
    in_tiles = replace(plan.placement, tiles=True, decoding=None)
    if models["vae"].use_tiling and in_tiles.largest_room(plan.components, plan.stages) <= plan.budget:
        plan.placement = in_tiles  # the user's choice; else the video lies within a tile
    originals = sum(component.originals for component in plan.components) if both_ways else 0
    check_host(plan.placement, as_they_are, models, originals)
    try:
        for undo in _place(plan, models, device):
            plan._undo.append(undo)
    except BaseException:
        plan.undo()
        raise
    return plan


def _facts_of(pipe: object, models: Mapping[str, nn.Module]) -> dict[str, object]:
    """Return the facts of a step that the pipeline tells, as arguments of `Patched`."""
    names = " ".join(kind.__name__ for kind in type(pipe).__mro__)
    guided = has_sound(models) and may_guide(pipe)
    return {**facts_of_class(names, pipe.config), "samples": 1 + guided}


def _vae_mode(placement: Placement) -> str:
    if placement.decoding is None:
        return "in tiles" if placement.tiles else "on whole frames"
    return f"on whole frames, as many at a time as {in_gb(placement.decoding)} GB hold"


def plan_for(patched: Patched, video: Video, budget: int, as_they_are: Sequence[Component] | None = None) -> MemoryPlan:
    """Return the plan of a pipeline. budget: bytes that torch may allocate. as_they_are: as for `choose`.

    Raises DoesNotFit.
    """
    components, stages = _components(patched), list(stages_of(patched, video))
    placement = choose(components, stages, budget, as_they_are)
    if placement is None:
        raise DoesNotFit(_why_not(patched, video, budget, components, stages))
    return MemoryPlan(components, stages, placement, budget, video, hints=patched.beside is None)


def _components(patched: Patched) -> list[Component]:
    """Return the bytes of each model. CUDA graphs count as the text encoder's, because they stay between calls."""
    found = (components_both_ways if patched.both_ways else components_of)(patched.models, patched.config)
    held = graphs_bytes(patched.models)
    return [replace(c, weights=c.weights + held) if c.name == "text_encoder" else c for c in found]


def _device(device: torch.device | str) -> torch.device:
    """Return a device by its name. "cuda" is the GPU that it means now. Raises ValueError for what is no device."""
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device={device!r}; give a GPU, such as 'cuda' or 'cuda:1'.") from None
    is_current = device.type == "cuda" and device.index is None and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if is_current else device


def budget_of(vram: str | int) -> int:
    """Return the bytes of a card's memory that torch may allocate. Raises ValueError or TypeError as `parse_amount`."""
    return parse_amount(vram) - CONTEXT


def _free(models: Mapping[str, nn.Module], device: torch.device) -> int:
    """Return the bytes of a GPU that these models may take: what is free, and what they take there now, less 5 %."""
    if device.type != "cuda":
        raise ValueError(f"vram=None means the memory that is free on a GPU, not on {device}; give an amount.")
    tensors = (tensor for model in models.values() for tensor in (*model.parameters(), *model.buffers()))
    here = {id(tensor): tensor.nbytes for tensor in tensors if tensor.device == device}
    return round(MARGIN * (free_memory(device) + sum(here.values())))


def _place(plan: MemoryPlan, models: Mapping[str, nn.Module], device: torch.device) -> Iterator[tuple]:
    """Put the models in their places. Yields how to undo each change before it is made."""
    vae, streaming = models["vae"], plan.placement.streaming
    for model in models.values():
        yield PLANNED.discard, model
        PLANNED.add(model)
    if plan.placement.tiles and not vae.use_tiling:
        yield (vae.disable_tiling,)
        vae.enable_tiling()
    if plan.placement.decoding is not None:
        yield vars(vae).pop, LIMIT, None
        setattr(vae, LIMIT, plan.placement.decoding)
    for name in sorted(models, key=lambda name: name not in streaming):  # what streams leaves the GPU first
        model, before = models[name], next(models[name].parameters()).device
        yield model.to, before
        if name in streaming:
            yield stop_streaming, model
            stream(model, device)
        else:
            model.to(device)


def _why_not(
    patched: Patched, video: Video, budget: int, components: Sequence[Component], stages: Sequence[Stage]
) -> str:
    """Return what is missing, and the settings nearest to these that fit."""
    placement = smallest(components, stages)
    worst = max(stages, key=lambda stage: placement.room(components, stage))
    needed = placement.room(components, worst)
    return (
        f"{video} take at least {enough_in_gb(needed + CONTEXT)} GB ({worst.name}, with CUDA's own {in_gb(CONTEXT)}), "
        f"and {in_gb(budget + CONTEXT)} GB are given. {_what_fits(patched, video, budget)}"
    )


def _what_fits(patched: Patched, video: Video, budget: int) -> str:
    """Return a sentence about the setting that fits and is nearest: in 8 bits, then smaller, then shorter."""
    tiers, sizes = [((), patched)], [((), video)]
    quantized = patched._replace(config=Quantized(restorable=False))
    if not patched.config.in_8_bits("linears") and why_not_counted(quantized) is None:
        tiers.append((("the preset 'quantized'",), quantized))
    if patched.beside is None and (models := with_text_encoder_in_8_bits(patched.models)) is not None:
        words = "the text encoder in 8 bits (trp.patch_text_encoder(pipe, in_8_bits=True) or --text-encoder 8bit)"
        tiers += [((*tier, words), of._replace(models=models)) for tier, of in tiers]
    with_sound = has_sound(patched.models)
    short, why = (512, " (which diffusers decodes in tiles, unlike 480)") if with_sound else (480, "")
    height, width = (short, 832) if video.height <= video.width else (832, short)
    if height * width < video.height * video.width or (with_sound and 480 in (video.height, video.width)):
        sizes.append(((f"height={height}, width={width}{why}",), Video(height, width, video.frames)))
    settings = [(tier + size, models, of) for (size, of), (tier, models) in product(sizes, tiers)]
    for words, models, of in settings[1:]:
        if _fits(models, of, budget):
            return f"It fits with {' and '.join(words)}."
    for words, models, of in settings:
        if (frames := _most_frames(models, of, budget)) is not None:
            return f"It fits with {' and '.join((*words, f'num_frames={frames}'))}."
    _, _, smallest_size = settings[-1]
    return f"Not even one frame of {smallest_size.width}x{smallest_size.height} fits."


def _most_frames(patched: Patched, video: Video, budget: int) -> int | None:
    """Return the most frames that fit at a size, below those of a video. None: not even one fits."""
    fewer = range(1, video.frames, frames_of_a_latent(patched.models))
    count = bisect(fewer, False, key=lambda frames: not _fits(patched, video._replace(frames=frames), budget))
    return fewer[count - 1] if count else None


def _fits(patched: Patched, video: Video, budget: int) -> bool:
    return choose(_components(patched), list(stages_of(patched, video)), budget) is not None
