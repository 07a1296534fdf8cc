"""The handle of `use_distilled`: it loads the LoRA files, installs the sampler, describes both, and undoes both."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from diffusers import DiffusionPipeline
from torch import nn

from ...checkpoints.lora import Lora
from ...scheduler import FewStepScheduler
from ..lora.load import LoadedLora
from .handle import FewStepHandle

logger = logging.getLogger(__name__)


class File(NamedTuple):
    """A LoRA file, and its contents for its transformer."""

    path: Path
    lora: Lora


Files = dict[str, File]  # by the transformer's name in the pipeline
Models = dict[str, nn.Module]


class Sampling(NamedTuple):
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
        sampling: Sampling,
        classifier_free_guidance: bool,
        files: Files,
        models: Models,
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
        """Warn if a LoRA was switched off or replaced since it was loaded, then prepare the latents."""
        for name, loaded in self._loaded.items():
            change = self._change_of(loaded)
            if change is not None and (warning := f"{name}: {change}") not in self._told:
                logger.warning(warning)
                self._told.add(warning)
        return super().prepare_latents(pipe, of_block, *args, **kwargs)

    def _change_of(self, loaded: LoadedLora) -> str | None:
        """Return a warning if a loaded LoRA does not count as it was loaded, or None.

        The user switched it off, or made others active without it.
        """
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

    def _sampling(self, sampling: Sampling) -> str:
        scheduler = self.scheduler
        timesteps = ", ".join(f"{t:.4g}" if t < 1000 else "1000" for t in scheduler.timesteps.tolist())
        guidance = "guidance_scale of the call" if self._classifier_free_guidance else "guidance_scale 1"
        boundary = "" if self._boundary is None else f", the experts change at {1000 * self._boundary:g}"
        return (
            f"{sampling.recipe} ({sampling.evidence}): {len(scheduler.timesteps)} steps ({scheduler.solver}) at "
            f"timesteps {timesteps}, {guidance}{boundary}"
        )

    def _files(self, files: Files, scales: dict[str, float]) -> list[str]:
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
