"""Events that tell when frames of a video are decoded, so that the first ones can leave the GPU early."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary


class Mark(NamedTuple):
    """The first frames of a video are written once an event has happened.

    version, address: the video's when the event was recorded.
    """

    frames: int
    event: torch.cuda.Event
    version: int
    address: int


_MARKS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # as attributes, torch.save would fail at the events


def mark_finished(video: torch.Tensor, frames: int) -> None:
    """Note that the current stream has written the first frames of a video [B, C, F, H, W], if it is on a GPU."""
    is_counted = not video.is_inference()  # inference tensors have no version
    if video.is_cuda and is_counted and not torch.cuda.is_current_stream_capturing():
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(video.device))
        _MARKS.setdefault(video, []).append(Mark(frames, event, video._version, video.data_ptr()))


def marks_of(video: torch.Tensor) -> list[Mark]:
    """Return the marks of a whole video, with growing numbers of frames. There are none if it was written to since.

    What PyTorch does not count goes unnoticed: writes to ``video.data``, by other packages, and by collectives.
    """
    marks = _MARKS.get(video, [])
    if not marks:
        return []
    last = marks[-1]
    # A new ``video.data`` has other memory, and the same version.
    is_same = (last.version, last.address) == (video._version, video.data_ptr())
    return marks if is_same and last.frames == video.shape[2] else []
