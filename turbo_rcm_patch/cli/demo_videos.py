"""Make the videos that the page of `turbo-rcm demo` shows: one video, unpatched and patched, for each request."""

from __future__ import annotations

import argparse
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..bench.compare import Comparison, compare
from ..bench.report import comparison_table
from ..bench.variants import PATCHED, UNPATCHED
from ..wording import counted
from .arguments import CONFIG_OPTIONS
from .demo_answer import Stages, headline_of, stages_of
from .errors import CommandError, user_errors
from .files import write_video
from .generation_checks import check_generation
from .pipelines import (
    choose_config,
    choose_device,
    frames_per_second,
    is_sparse,
    load_sampler,
    warn_of_prompts,
    warn_of_size,
)
from .sampling import default_steps, guidance

EMBEDDED_MODEL = "the tiny model included"
LONGEST_PROMPT = 1000  # characters
KEPT = 3600  # seconds that a video is kept
OUT_OF_MEMORY = "out of memory; ask for fewer or smaller frames, or start the page with --offload on a GPU."
FIELDS = "model|preset|steps|seed|height|width|frames|recipe|lora|guidance|negative-prompt"  # fields of the page
MAX_PIXELS = {"cuda": 81 * 480 * 832, "cpu": 17 * 160 * 224}  # in all frames of a video, unless --max-pixels is given


@dataclass(frozen=True)
class Request:
    """The values of the page's form.

    model: EMBEDDED_MODEL, or a model that the page was started with. lora: one of the LoRAs that the page was started
    with, or None. steps, guidance: None for the model's own.
    """

    prompt: str
    model: str
    preset: str
    steps: int | None
    seed: int
    height: int
    width: int
    frames: int
    recipe: str | None = None
    lora: str | None = None
    guidance: float | None = None
    negative_prompt: str = ""


@dataclass(frozen=True)
class Answer:
    """Two mp4 files, a table of times and differences, the patch's summary, and notes, for example on the recipe.

    headline: the speed-up and the distance of the frames, in one line. stages: the names and seconds of each video.
    """

    unpatched: Path
    patched: Path
    table: str
    summary: str
    notes: tuple[str, ...]
    headline: str
    stages: dict[str, Stages]


class DemoVideos:
    """Makes the videos of requests, one request at a time. The model of the latest request stays loaded.

    started: the options of `turbo-rcm demo`. folder: where the videos are written.
    """

    def __init__(self, started: argparse.Namespace, folder: Path):
        self._started, self._folder = started, folder
        self._lock, self._loaded, self._count = threading.Lock(), None, 0
        device = choose_device(started)
        # On a GPU the first video waits for kernels to be compiled. In two measured runs each variant is first once.
        self._runs = {"warmups": 1, "repeats": 2} if device.type == "cuda" else {"warmups": 0, "repeats": 1}
        self.models = [*(started.model or []), EMBEDDED_MODEL]
        self.loras = {f"{file}:{scale:g}": (file, scale) for file, scale in started.lora or ()}
        self.has_gpu = device.type == "cuda"
        self.max_pixels = started.max_pixels or MAX_PIXELS[device.type]

    def answer(self, request: Request) -> Answer:
        """Make the video unpatched and patched. Raises CommandError, with a sentence for the user, if this fails."""
        try:
            return self._answer(request)
        except CommandError as error:
            raise CommandError(_of_the_page(str(error))) from error

    def _answer(self, request: Request) -> Answer:
        arguments = self._checked(request)
        with self._lock, user_errors(OUT_OF_MEMORY):
            try:
                pipe, call = self._load(arguments)
                call = {**call, "prompt": arguments.prompt, "output_type": "np"}
                options = {"with_compile": False, **self._runs}
                comparison = compare(pipe, call, seed=arguments.seed, config=choose_config(arguments), **options)
            except ValueError as error:
                raise CommandError(str(error)) from error
            return self._written(comparison, frames_per_second(pipe), tuple(map(_of_the_page, arguments.notes)))

    def _checked(self, request: Request) -> argparse.Namespace:
        """Return the request as options of `generate`. Raises CommandError for an invalid request."""
        _check_known("model", request.model, self.models)
        _check_known("LoRA", request.lora, [None, *self.loras])
        if not request.prompt.strip():
            raise CommandError("There is no prompt; write what the video shall show.")
        if len(request.prompt) > LONGEST_PROMPT:
            raise CommandError(f"The prompt has {len(request.prompt)} characters; give at most {LONGEST_PROMPT}.")
        asked = {
            **vars(request),
            "model": None if request.model == EMBEDDED_MODEL else request.model,
            "lora": self.loras.get(request.lora),
            "negative_prompt": request.negative_prompt.strip() or None,
        }
        unasked = dict.fromkeys(("image", "sigma_max", "lora_2", "guidance_2", *CONFIG_OPTIONS))
        arguments = argparse.Namespace(**{**vars(self._started), **asked, **unasked, "notes": []})
        check_generation(arguments)
        pixels = request.height * request.width * request.frames
        if pixels > self.max_pixels:
            raise CommandError(
                f"{counted(request.frames, 'frame')} of {request.height}x{request.width}: {pixels} pixels in all, and "
                f"this page makes at most {self.max_pixels}; ask for fewer or smaller frames, or start it with another "
                "--max-pixels."
            )
        return arguments

    def _load(self, arguments: argparse.Namespace) -> tuple[object, dict[str, object]]:
        """Return the pipeline and the arguments of its call. Sets ``arguments.notes`` to the notes on both."""
        is_guided = arguments.guidance is not None
        wanted = arguments.model, arguments.lora, arguments.recipe, is_guided, is_sparse(arguments)
        if not self._has(wanted, arguments.steps):
            self._loaded = None  # there may be no memory for both
            asked = arguments.steps
            self._loaded = wanted, load_sampler(arguments)[0], arguments.notes, asked
        _, pipe, notes, _ = self._loaded
        arguments.notes = [*notes]
        warn_of_size(arguments, arguments.height, arguments.width, arguments.frames)
        warn_of_prompts(arguments, [arguments.prompt])
        size = {"height": arguments.height, "width": arguments.width, "num_frames": arguments.frames}
        steps = default_steps(pipe) if arguments.steps is None else arguments.steps
        return pipe, {**size, "num_inference_steps": steps, **guidance(pipe, arguments)}

    def _has(self, wanted: tuple, steps: int | None) -> bool:
        """True if the wanted model is loaded. A recipe's times are laid out when its sampler is installed."""
        if self._loaded is None or self._loaded[0] != wanted:
            return False
        _, pipe, _, asked = self._loaded
        return asked == steps or not pipe.scheduler.config.get("sigmas")

    def _written(self, comparison: Comparison, fps: int, notes: tuple[str, ...]) -> Answer:
        videos = {variant.name: variant.video for variant in comparison.variants}
        self._count += 1
        for old in self._folder.glob("*.mp4"):
            if time.time() - old.stat().st_mtime > KEPT:
                old.unlink()
        paths = {name: self._folder / f"{self._count}-{name}.mp4" for name in (UNPATCHED, PATCHED)}
        for name, path in paths.items():
            write_video(path, [np.round(255 * videos[name]).astype(np.uint8)], fps)
        return Answer(
            *paths.values(),
            comparison_table(comparison),
            comparison.patch_summary,
            notes,
            headline_of(comparison),
            stages_of(comparison),
        )


def _of_the_page(message: str) -> str:
    """Return a command's message with the page's field names instead of options; options of `demo` itself stay."""
    return re.sub(rf"--({FIELDS})(?![\w-])", lambda found: found[1].replace("-", " "), message)


def _check_known(what: str, name: str | None, known: Sequence[str | None]) -> None:
    if name not in known:
        raise CommandError(f"The {what} {name!r} is none that this page was started with.")
