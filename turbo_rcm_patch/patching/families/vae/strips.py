"""Decode a video in strips: each process of a context-parallel transformer decodes some columns or rows of every frame.

A strip is decoded with a margin at each cut. Beyond the margin a convolution sees zeros instead of pixels. So the
margin's outer values are wrong, one pixel more with each convolution of 3×3. The margin is wide enough for the strip
itself to stay right, and is cut where it is no longer needed. Nothing is exchanged within the decoder. The middle block
attends to whole frames, so every process runs it on all of them, at the latents' resolution.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from .classes import RESAMPLE
from .steps import kernel_size

CUT = 2  # latent columns that take about as long to decode as a margin, in both of Wan's VAEs
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a value


class Strip(NamedTuple):
    """Columns or rows of a frame.

    dim: the dimension of an activation [B, T, H, W, C] that is cut. first, last: of the strip, in latent pixels.
    length: of the frame.
    """

    dim: int
    first: int
    last: int
    length: int

    def within(self, scale: int, margin: int) -> tuple[int, int]:
        """Return where the strip and its margins begin and end, in a frame that is `scale` times as large."""
        return max(0, self.first * scale - margin), min(self.length * scale, self.last * scale + margin)


class Cuts(NamedTuple):
    """The parts of its activations that a process keeps.

    after: the part of each module's result, as arguments of `Tensor.narrow`; for an up block, the part of its input
    that the shortcut takes. shares: the parts of a frame that the middle block and each up block take, from 0 to 1.
    """

    after: dict[nn.Module, tuple[int, int, int]]
    shares: tuple[float, ...]


def strips_of(height: int, width: int, count: int) -> list[Strip] | None:
    """Return `count` strips of latents of this size, along the longer side, or None if there are too few pixels.

    A strip in the middle has two margins. It is narrower by CUT than one at the edge, to take as long.
    """
    dim, length = (3, width) if width >= height else (2, height)
    if length < count:
        return None
    more = CUT if length >= count + 2 * CUT else 0
    inner = [more + index * (length - 2 * more) // count for index in range(1, count)]
    return [Strip(dim, *ends, length) for ends in zip([0, *inner], [*inner, length], strict=True)]


def margins_of(decoder: nn.Module) -> dict[nn.Module, int]:
    """Return the pixels beside a strip that must be right after a module: the middle block, and resnets.

    The resnets of the last up block have none: a copy of so few channels takes longer than the pixels that it saves.
    """
    needed, margins = _reach(decoder.conv_out), {}
    for block in reversed(decoder.up_blocks):
        resample = _resample_of(block)
        if resample is not None:
            needed = (needed + _reach(resample.resample[1]) + 1) // 2
        for resnet in reversed(block.resnets):
            if resample is not None:
                margins[resnet] = needed
            needed += _reach(resnet.conv1) + _reach(resnet.conv2)
    margins[decoder.mid_block] = needed
    return margins


def _resample_of(block: nn.Module) -> nn.Module | None:
    return next((module for module in block.modules() if type(module) in RESAMPLE), None)


def _reach(conv: nn.Module) -> int:
    return kernel_size(conv)[2] // 2


def cuts_of(decoder: nn.Module, strip: Strip) -> Cuts:
    """Return what the process that decodes a strip keeps of its activations."""
    margins, after, shares, scale = margins_of(decoder), {}, [1.0], 1

    def cut(held: tuple[int, int], kept: tuple[int, int]) -> tuple[int, int, int]:
        return strip.dim, kept[0] - held[0], kept[1] - kept[0]

    held = strip.within(1, margins[decoder.mid_block])
    after[decoder.mid_block] = cut((0, strip.length), held)
    for block in decoder.up_blocks:
        given = held
        shares.append((given[1] - given[0]) / (strip.length * scale))
        for resnet in block.resnets:
            if resnet in margins:
                kept = strip.within(scale, margins[resnet])
                after[resnet], held = cut(held, kept), kept
        after[block] = cut(given, held)
        if _resample_of(block) is not None:
            held, scale = (2 * held[0], 2 * held[1]), 2 * scale
    after[decoder.conv_out] = cut(held, strip.within(scale, 0))
    return Cuts(after, tuple(shares))


def agreed(z: torch.Tensor, frames: Sequence[int] | None, stages: int, group: dist.ProcessGroup) -> list[int] | str:
    """Return the frames at a time that suit every process, or the reason why each decodes all of the video.

    Every process of the group must call this. The host waits for z.

    frames: those that suit this process (`frames_at_once`), one number for each stage. None: it cannot decode a strip.
    """
    shape = torch.tensor((*z.shape, *(0,) * 5)[:5], device=z.device)
    content = z.view(_BITS[z.itemsize]).sum(dtype=torch.int64)[None] if frames is not None else shape[:1]
    same = torch.cat((shape, content))
    least = torch.cat((torch.tensor(frames or [0] * stages, device=z.device), same, -same))
    dist.all_reduce(least, dist.ReduceOp.MIN, group)
    numbers, smallest, largest = least.split((stages, len(same), len(same)))
    if not numbers.all():
        return "another process does not decode in strips"
    return numbers.tolist() if torch.equal(smallest, -largest) else "different latents"


def gathered(
    parts: Iterable[torch.Tensor], strips: Sequence[Strip], group: dist.ProcessGroup
) -> Iterator[torch.Tensor]:
    """Yield whole frames [B, C, n, H, W] for parts of this process's strip. Every process of the group must do so."""
    mine, dim = strips[dist.get_rank(group)], strips[0].dim + 1
    widest = max(strip.last - strip.first for strip in strips)
    for part in parts:
        scale = part.shape[dim] // (mine.last - mine.first)
        shape = list(part.shape)
        shape[dim] = widest * scale
        padded = part.new_empty(shape)
        padded.narrow(dim, 0, part.shape[dim]).copy_(part)
        del part
        every = padded.new_empty(len(strips) * len(padded), *shape[1:])
        dist.all_gather_into_tensor(every, padded, group)
        kept = (strip.last - strip.first for strip in strips)
        chunks = every.chunk(len(strips))
        yield torch.cat([x.narrow(dim, 0, size * scale) for x, size in zip(chunks, kept, strict=True)], dim)
