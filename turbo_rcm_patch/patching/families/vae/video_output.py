"""Convert a decoded video to "np" or "pil" on the video's device, and copy it to the CPU in pieces.

diffusers denormalises in the VAE's dtype and copies to pageable memory. There it moves the channels last, converts to
fp32 and, for PIL, rounds x · 255. Here the same arithmetic runs on the video's device. So "pil" copies 8 bits instead
of the VAE's 16 or 32. A piece is copied through pinned memory while the CPU works on the piece before it, and while the
GPU decodes the frames after it. A few threads make PIL's images, which takes longer than the copy. diffusers still
handles "pt", which it leaves on the device, and everything that this file does not know.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from diffusers.video_processor import VideoProcessor
from PIL import Image

from ....config import PatchConfig
from ....plain import function_bound_to, is_original
from ...copying import reduce_ex
from ...journal import Journal, bind
from .finished import Mark, marks_of

PATCHED = "postprocess_video"
# diffusers' methods between the decoded video and what a pipeline returns.
READ = ("postprocess", "_denormalize_conditionally", "denormalize", "pt_to_numpy", "numpy_to_pil")
PIECE_BYTES = 16 * 2**20
THREADS = 4  # that make PIL's images
NOTE = 'video output: "np" and "pil" converted where the VAE decodes, and from a GPU copied through pinned memory'


def patch_video_output(journal: Journal, target: object, config: PatchConfig) -> None:
    """Bind `postprocess_video` on a pipeline's video processor, once where several pipelines share it.

    One that is not diffusers' own is left alone (`video_output_note` says so), and so are all with ``vae=False``.
    """
    processor = getattr(target, "video_processor", None)
    if config.vae and processor is not None and _why_not_ours(processor, (PATCHED, *READ)) is None:
        journal.set(processor, "__reduce_ex__", bind(reduce_ex, processor))
        journal.set(processor, PATCHED, bind(postprocess_video, processor))


def video_output_note(target: object, config: PatchConfig) -> str | None:
    """Return a line for the summary on what converts the video, with the reason if it is diffusers, or None."""
    processor = getattr(target, "video_processor", None)
    if processor is None:
        return None
    if _is_patched(processor):
        reason = _why_not_ours(processor, READ)
    else:
        reason = _why_not_ours(processor, (PATCHED, *READ)) or ("vae=False" if not config.vae else "not patched")
    return NOTE if reason is None else f"video output: diffusers' own: {reason}"


def _is_patched(processor: object) -> bool:
    return function_bound_to(processor, vars(processor).get(PATCHED)) is postprocess_video


def _why_not_ours(processor: object, methods: tuple[str, ...]) -> str | None:
    """Return why the conversion may differ from diffusers' (another class, or a replaced method), or None."""
    cls = type(processor)
    if cls is not VideoProcessor:
        return f"{cls.__module__.split('.')[0]} {cls.__name__}"
    replaced = (name for name in methods if name in vars(processor) or not is_original(getattr(cls, name), cls))
    return next((f"replaced {name}" for name in replaced), None)


def postprocess_video(
    processor: VideoProcessor, video: torch.Tensor, output_type: str = "np", **kwargs: object
) -> np.ndarray | torch.Tensor | list[list[Image.Image]]:
    """Replace the processor's method: convert a video [B, C, F, H, W], a float tensor in [-1, 1].

    "np" gives an fp32 array [B, F, H, W, C] in [0, 1], "pil" a list of F images for each sample. All values equal the
    method's. The array's memory is contiguous in this order; the method leaves the channels before the rows.
    """
    if output_type not in ("np", "pil") or kwargs or not _is_decoded(video) or _why_not_ours(processor, READ):
        return VideoProcessor.postprocess_video(processor, video, output_type, **kwargs)

    def convert(images: torch.Tensor) -> torch.Tensor:
        denormalized = processor._denormalize_conditionally(images)
        return to_8_bits(denormalized) if output_type == "pil" else denormalized

    marks = marks_of(video)

    def pieces_of(sample: torch.Tensor) -> Iterator[torch.Tensor]:
        return pieces_on_cpu(sample.transpose(0, 1), convert, marks)

    if output_type == "pil":
        with ThreadPoolExecutor(THREADS) as pool:
            return [_images(pieces_of(sample), pool) for sample in video]
    B, C, F, H, W = video.shape
    arrays = np.empty((B, F, H, W, C), np.float32)
    for sample, array in zip(video, arrays, strict=True):
        rest = torch.from_numpy(array)
        for piece in pieces_of(sample):
            rest[: len(piece)].copy_(piece)
            rest = rest[len(piece) :]
    return arrays


def _is_decoded(video: object) -> bool:
    if not isinstance(video, torch.Tensor) or video.dim() != 5 or video.requires_grad:
        return False
    return video.is_floating_point() and video.numel() > 0


def _images(pieces: Iterable[torch.Tensor], pool: ThreadPoolExecutor) -> list[Image.Image]:
    """Return the images of all pieces. Those of a piece are finished before the next piece may take its memory."""
    return [image for piece in pieces for image in pool.map(_image, piece.numpy())]


def _image(frame: np.ndarray) -> Image.Image:
    """Return a frame [H, W, C] as an image with pixels of its own."""
    H, W, C = frame.shape
    if C != 3:
        return Image.fromarray(frame[..., 0] if C == 1 else frame).copy()
    # fromarray would first fill the image with zeros, which holds the GIL. The copy itself releases it.
    image = Image.new("RGB", (W, H), None)
    image.frombytes(frame)
    return image


def to_8_bits(images: torch.Tensor) -> torch.Tensor:
    """Return values in [0, 1] as uint8, rounded to the nearest in fp32 as diffusers rounds for PIL."""
    return (images.float() * 255).round().to(torch.uint8)


def pieces_on_cpu(
    frames: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor], marks: Sequence[Mark] = ()
) -> Iterator[torch.Tensor]:
    """Yield ``convert`` of frames [F, C, H, W], a few at a time, as [n, H, W, C] on the CPU.

    From a GPU they come through pinned memory. A piece is valid until the next is requested. The next is copied
    meanwhile. marks: the video's `marks_of`. With them a piece waits for its own frames alone, on a stream of its own.
    """
    count = max(1, PIECE_BYTES // (frames[0].numel() * frames.element_size()))
    parts = frames.split(count)
    pieces = (convert(part).permute(0, 2, 3, 1).contiguous() for part in (_finished(parts, marks) if marks else parts))
    if not frames.is_cuda:
        return (piece.cpu() for piece in pieces)
    return _through_pinned_memory(pieces, _stream_of_copies(frames.device.index) if marks else None)


@functools.cache
def _stream_of_copies(device: int) -> torch.cuda.Stream:
    """Return a GPU's stream for copies. A stream for each video would leave memory in PyTorch's cache for each.

    PyTorch hands streams out from a pool for each priority. Graphs are captured on streams of normal priority, so that
    none gets this one.
    """
    return torch.cuda.Stream(device, priority=-1)


def _finished(parts: Iterable[torch.Tensor], marks: Sequence[Mark]) -> Iterator[torch.Tensor]:
    """Yield the parts of a video's frames. Let the current stream wait until each is decoded."""
    done = 0
    for part in parts:
        done += len(part)
        next(mark.event for mark in marks if mark.frames >= done).wait()
        yield part


def _through_pinned_memory(
    pieces: Iterator[torch.Tensor], stream: torch.cuda.Stream | None = None
) -> Iterator[torch.Tensor]:
    """Yield pieces on the CPU. stream: makes and copies them, in place of the current one."""
    stages: list[_Stage] = []
    try:
        for index in itertools.count():
            with torch.cuda.stream(stream):
                piece = next(pieces, None)
                if piece is None:
                    break
                if index < 2:
                    stages.append(_Stage(piece))
                stages[index % 2].fill(piece)
            if index > 0:
                yield stages[(index - 1) % 2].content()
        yield stages[(index - 1) % 2].content()
    finally:  # whoever stops early may free the video
        if stream is not None:
            torch.cuda.current_stream(stream.device).wait_stream(stream)


class _Stage:
    """Pinned memory for a piece on its way from a GPU. No piece is larger than the first."""

    def __init__(self, piece: torch.Tensor):
        self._memory = torch.empty(piece.shape, dtype=piece.dtype, device="cpu", pin_memory=True)
        self._filled = torch.cuda.Event()

    def fill(self, piece: torch.Tensor) -> None:
        self._content = self._memory[: len(piece)]
        self._content.copy_(piece, non_blocking=True)
        self._filled.record(torch.cuda.current_stream(piece.device))

    def content(self) -> torch.Tensor:
        self._filled.synchronize()
        return self._content
