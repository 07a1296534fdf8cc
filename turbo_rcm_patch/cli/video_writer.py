"""An mp4 that is written while its frames are still being decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

import numpy as np
import torch

from ..patching.families.vae.video_output import on_its_way_to_cpu, to_8_bits
from .files import write_video


class VideoWriter:
    """Encodes frames in its own thread. Use it as a context. If the context ends before `finish`, no file is left."""

    def __init__(self, path: Path, fps: int):
        self._path, self._fps, self._frames = path, fps, 0
        self._pieces: SimpleQueue[Callable[[], torch.Tensor] | None] = SimpleQueue()
        self._written: Future[None] | None = None

    def __enter__(self) -> VideoWriter:
        return self

    def send(self, frames: torch.Tensor) -> None:
        """Send the next frames, [n, 3, H, W] in [0, 1], on any device. This does not wait for them."""
        if self._written is None:
            thread = ThreadPoolExecutor(max_workers=1)
            self._written = thread.submit(write_video, self._path, self._as_they_come(), self._fps)
            thread.shutdown(wait=False)
        self._frames += len(frames)
        self._pieces.put(on_its_way_to_cpu(to_8_bits(frames).permute(0, 2, 3, 1).contiguous()))

    def finish(self, frames: int) -> bool:
        """Wait for the file. Return True if it holds the whole video of this many frames, or False if there is no file.

        Raises CommandError if the file cannot be written.
        """
        if self._written is None or self._frames != frames:
            self._give_up()
            return False
        self._pieces.put(None)
        self._written.result()
        return True

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._give_up()

    def _give_up(self) -> None:
        if self._written is not None and not self._written.done():
            self._pieces.put(_unfinished)
            self._written.exception()  # waits until the half file is gone

    def _as_they_come(self) -> Iterator[np.ndarray]:
        while (arrived := self._pieces.get()) is not None:
            yield arrived().numpy()


class _UnfinishedError(Exception):
    """Ends the writing of a video that is not to be kept."""


def _unfinished() -> torch.Tensor:
    raise _UnfinishedError
