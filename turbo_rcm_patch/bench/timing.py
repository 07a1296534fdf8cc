"""Stage timings of one pipeline call: text encoding, each denoising step, VAE decoding, output, sound, total.

And the order in which variants are timed."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from .replaced import replaced

T = TypeVar("T")


@dataclass(frozen=True)
class StageTimings:
    """Seconds per stage, and the peak of allocated GPU memory in bytes (None on the CPU).

    output: converting the decoded video to the call's output type, and copying it to the CPU if needed.
    sound: decoding the sound's latents, and making the waveform; 0 without sound.
    total: also includes the time between the stages, such as drawing noise and encoding an input image.
    """

    text_encoding: float
    steps: tuple[float, ...]
    vae_decode: float
    output: float
    total: float
    peak_memory: int | None
    sound: float = 0.0

    @classmethod
    def median(cls, runs: list[StageTimings]) -> StageTimings:
        """Return the median of every stage over runs with equally many steps, and the largest of their memory peaks."""
        return cls(
            text_encoding=statistics.median(run.text_encoding for run in runs),
            steps=tuple(statistics.median(step) for step in zip(*(run.steps for run in runs), strict=True)),
            vae_decode=statistics.median(run.vae_decode for run in runs),
            output=statistics.median(run.output for run in runs),
            total=statistics.median(run.total for run in runs),
            peak_memory=None if runs[0].peak_memory is None else max(run.peak_memory for run in runs),
            sound=statistics.median(run.sound for run in runs),
        )


@dataclass(frozen=True)
class TimedGeneration:
    """A pipeline call's frames, last latents, timings and sound.

    frames: an array [B, F, H, W, 3] in [0, 1], or a tensor [B, F, 3, H, W] in [0, 1] for output_type="pt", or F images
    for each sample for "pil", or None for "latent".
    sound: [B, channels, samples] in [-1, 1], or None for "latent" and for a pipeline without sound.
    """

    frames: np.ndarray | torch.Tensor | list[list[Image.Image]] | None
    latents: torch.Tensor
    timings: StageTimings
    sound: torch.Tensor | None = None


def timed_generation(pipe: DiffusionPipeline, **call) -> TimedGeneration:
    """Run ``pipe(**call)`` and time its stages, on a GPU by CUDA events, which leave launches asynchronous.

    call: any arguments of the pipeline except ``callback_on_step_end``; output_type is "np" (the default, also for a
    pipeline with another one), "pt", "pil" or "latent".
    """
    call = {"output_type": "np", **call}
    device = torch.device(pipe._execution_device)
    clock = _CudaClock(device) if device.type == "cuda" else _CpuClock()
    text_marks, decode_marks, output_marks, sound_marks, step_marks = [], [], [], [], []
    last_latents = None

    def on_step_end(_pipe, _step, _timestep, tensors):
        nonlocal last_latents
        last_latents = tensors["latents"]
        step_marks.append(clock.mark())
        return {}

    with contextlib.ExitStack() as stack:
        stack.enter_context(_marked(pipe, "encode_prompt", text_marks, clock.mark))
        stack.enter_context(_marked(pipe, "progress_bar", step_marks, clock.mark, after=False))  # opened before step 1
        if pipe.vae is not None:
            stack.enter_context(_marked(pipe.vae, "decode", decode_marks, clock.mark))
        if getattr(pipe, "video_processor", None) is not None:
            stack.enter_context(_marked(pipe.video_processor, "postprocess_video", output_marks, clock.mark))
        if getattr(pipe, "vocoder", None) is not None:  # the sound is the audio VAE's work and then the vocoder's
            stack.enter_context(_marked(pipe.audio_vae, "decode", sound_marks, clock.mark, after=False))
            stack.callback(pipe.vocoder.register_forward_hook(lambda *_: sound_marks.append(clock.mark())).remove)
        clock.reset()
        start = clock.mark()
        frames, *more = pipe(**call, callback_on_step_end=on_step_end, return_dict=False)
        end = clock.mark()
    clock.synchronize()

    def seconds_in(marks: list) -> float:
        return sum(map(clock.seconds, marks[::2], marks[1::2]))

    timings = StageTimings(
        text_encoding=seconds_in(text_marks),
        steps=tuple(map(clock.seconds, step_marks, step_marks[1:])),
        vae_decode=seconds_in(decode_marks),
        output=seconds_in(output_marks),
        total=clock.seconds(start, end),
        peak_memory=clock.peak_memory(),
        sound=seconds_in(sound_marks),
    )
    if call.get("output_type") == "latent":
        return TimedGeneration(None, last_latents, timings)
    return TimedGeneration(frames, last_latents, timings, *more)


def _marked(
    owner: object, method: str, marks: list, mark: Callable, after: bool = True
) -> contextlib.AbstractContextManager[None]:
    """A context in which each call of the owner's method appends a mark before it, and if asked also after it."""
    original = getattr(owner, method)

    @functools.wraps(original)
    def marked(*args, **kwargs):
        marks.append(mark())
        result = original(*args, **kwargs)
        if after:
            marks.append(mark())
        return result

    return replaced(owner, method, marked)


class _CpuClock:
    mark = staticmethod(time.perf_counter)

    def reset(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def peak_memory(self) -> None:
        return None


class _CudaClock:
    def __init__(self, device: torch.device):
        self._device = device

    def reset(self) -> None:
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self._device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1e3

    def peak_memory(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


def in_turns(variants: Iterable[T], turns: int) -> Iterator[tuple[int, T]]:
    """Yield every turn's number with each variant: forwards, backwards, and so on.

    So none is always first or always follows the same one. A GPU's clock and its L2 cache depend on what ran before."""
    variants = list(variants)
    for turn in range(turns):
        for variant in reversed(variants) if turn % 2 else variants:
            yield turn, variant
