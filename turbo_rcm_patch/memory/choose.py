"""Choose which models stay on the GPU and which stream, so that the least crosses the bus and every stage fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from .components import Component
from .stages import Stage

BLOCKS_AT_ONCE = 2  # of a streaming model on the GPU: the one that runs, and the next one, which arrives meanwhile
AROUND = 1.05  # memory of torch's allocator over that of the tensors


@dataclass(frozen=True)
class Placement:
    """A place for each model: all of it stays on the GPU, or its blocks stream there.

    streaming: the names of the models whose blocks stream. tiles: True if the VAE works in tiles. decoding: the bytes
    within which the decoder takes as many frames at a time as fit. None: as many as are fastest.
    """

    streaming: frozenset[str]
    tiles: bool
    decoding: int | None = None

    def on_gpu(self, component: Component) -> int:
        """Return the bytes of a model that stay on the GPU between calls."""
        return component.outside if component.name in self.streaming else component.weights

    def peak(self, components: Iterable[Component], stage: Stage) -> int:
        """Return the largest memory of a stage's tensors in bytes, as torch counts what is allocated."""
        return self._memory(components, stage, waiting=0)

    def room(self, components: Iterable[Component], stage: Stage) -> int:
        """Return the bytes that a stage needs: its peak, and the last block, whose memory waits for its kernels.

        An encoder's kernels are done before the next block arrives.
        """
        return self._memory(components, stage, waiting=1)

    def _memory(self, components: Iterable[Component], stage: Stage, waiting: int) -> int:
        moving = max(
            (
                (BLOCKS_AT_ONCE + (waiting if c.passes > 1 else 0)) * c.largest
                for c in components
                if c.name in stage.runs and c.name in self.streaming
            ),
            default=0,
        )
        beside = max(moving + self._computing(stage), stage.after_blocks)
        return round(AROUND * (sum(map(self.on_gpu, components)) + beside))

    def _computing(self, stage: Stage) -> int:
        if self.tiles and stage.in_tiles is not None:
            return stage.in_tiles
        if self.decoding is not None and stage.within is not None:
            return stage.within(self.decoding)
        return stage.computing

    def largest_room(self, components: Sequence[Component], stages: Iterable[Stage]) -> int:
        """Return the bytes that all stages need."""
        return max(self.room(components, stage) for stage in stages)

    def on_host(self, components: Iterable[Component]) -> tuple[int, int]:
        """Return the bytes on the host, and those of them that are pinned, which is what streams."""
        streaming = [component for component in components if component.name in self.streaming]
        pinned = sum(component.blocks for component in streaming)
        tables = sum(component.table for component in streaming)
        return pinned + tables + sum(component.originals for component in components), pinned


def choose(
    components: Sequence[Component],
    stages: Sequence[Stage],
    budget: int,
    as_they_are: Sequence[Component] | None = None,
) -> Placement | None:
    """Return the placement within a budget in bytes that moves least in a generation. None: nothing fits.

    as_they_are: the models before the patch stores 8 bits, if they move to the GPU so. None: it has stored them.

    A decoder with fewer frames at a time is slower, so it comes after streaming. Tiles come last: they take far longer,
    and their seams are blended.
    """
    moved = components if as_they_are is None else as_they_are
    whole = [p for p in placements(components) if AROUND * sum(map(p.on_gpu, moved)) <= budget]
    few = [replace(p, decoding=round(budget / AROUND) - sum(map(p.on_gpu, components))) for p in whole]
    for group in (whole, few, [replace(p, tiles=True) for p in whole]):
        fitting = [p for p in group if p.largest_room(components, stages) <= budget]
        if fitting:
            # The bytes that cross the bus in a generation.
            return min(fitting, key=lambda p: sum(c.passes * c.blocks for c in components if c.name in p.streaming))
    return None


def smallest(components: Sequence[Component], stages: Sequence[Stage]) -> Placement:
    """Return the placement with the least memory."""
    ways = ({}, {"decoding": 0}, {"tiles": True})  # of the VAE: whole, few frames at a time, in tiles
    each = (replace(p, **way) for p in placements(components) for way in ways)
    return min(each, key=lambda placement: placement.largest_room(components, stages))


def placements(components: Sequence[Component]) -> Iterator[Placement]:
    """Yield all placements. Every model may stay on the GPU; those with blocks may stream."""
    names = [component.name for component in components if component.blocks]
    for streams in product((False, True), repeat=len(names)):
        chosen = (name for name, does in zip(names, streams, strict=True) if does)
        yield Placement(frozenset(chosen), tiles=False)
