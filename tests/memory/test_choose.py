"""The choice of what streams: it fits, and moves the least."""

import pytest

from turbo_rcm_patch.memory.choose import AROUND, BLOCKS_AT_ONCE, Placement, choose, smallest
from turbo_rcm_patch.memory.components import Component
from turbo_rcm_patch.memory.stages import Stage

TEXT = Component("text_encoder", 110, blocks=90, largest=4, table=15)
DENOISER = Component("transformer", 140, blocks=136, largest=3, originals=50, passes=4)
VAE = Component("vae", 5)
COMPONENTS = (TEXT, DENOISER, VAE)
STAGES = (
    Stage("text encoding", ("text_encoder",), 2),
    Stage("denoising", ("transformer",), 20),
    Stage("decoding", ("vae",), 60, in_tiles=10),
)


def chosen(budget):
    placement = choose(COMPONENTS, STAGES, budget)
    return None if placement is None else (set(placement.streaming), placement.tiles)


@pytest.mark.parametrize(
    ("needed", "expected"),
    [
        (110 + 140 + 5 + 60, (set(), False)),
        (5 + 140 + 5 + 60, ({"text_encoder"}, False)),  # its blocks cross the bus once, the transformer's four times
        (5 + 4 + 5 + 60, ({"text_encoder", "transformer"}, False)),
        (5 + 4 + 5 + 20 + 3 * (BLOCKS_AT_ONCE + 1), ({"text_encoder", "transformer"}, True)),
    ],
)
def test_the_first_that_fits(needed, expected):
    budget = -(-AROUND * needed // 1)
    assert chosen(budget) == expected
    assert chosen(AROUND * needed - 1) != expected


def few_frames(free):
    """A decoder that takes 30 at least, and 60 at most."""
    return max(30, min(60, free // 10 * 10))


def test_fewer_frames_at_a_time_come_before_tiles():
    stages = (*STAGES[:2], STAGES[2]._replace(within=few_frames))
    stay = 5 + 4 + 5
    for free, decoding, tiles in ((30, 30, False), (47, 47, False), (29, None, True)):
        budget = round(AROUND * (stay + free))
        placement = choose(COMPONENTS, stages, budget)
        assert placement.streaming == {"text_encoder", "transformer"}
        assert (placement.decoding, placement.tiles) == (decoding, tiles)
        assert placement.largest_room(COMPONENTS, stages) <= budget


def test_the_least_may_be_few_frames_at_a_time():
    stages = (*STAGES[:2], STAGES[2]._replace(in_tiles=60, within=few_frames))  # as of a video within a tile
    placement = smallest(COMPONENTS, stages)
    least = placement.largest_room(COMPONENTS, stages)
    assert least == round(AROUND * (5 + 4 + 5 + 30))
    assert choose(COMPONENTS, stages, least) is not None
    assert choose(COMPONENTS, stages, least - 1) is None


def test_no_block_is_there_after_the_last_one():
    stage = STAGES[1]._replace(after_blocks=25)
    placement = Placement(frozenset({"transformer"}), tiles=False)
    stay = 110 + 4 + 5
    assert placement.peak(COMPONENTS, stage) == round(AROUND * (stay + 20 + 3 * BLOCKS_AT_ONCE))
    stage = stage._replace(after_blocks=35)
    assert placement.peak(COMPONENTS, stage) == round(AROUND * (stay + 35))


def test_nothing_fits():
    least = smallest(COMPONENTS, STAGES).largest_room(COMPONENTS, STAGES)
    assert chosen(least) is not None
    assert chosen(least - 1) is None


def test_a_stage_holds_what_stays_and_what_runs():
    placement = Placement(frozenset({"text_encoder", "transformer"}), tiles=False)
    peaks = [placement.peak(COMPONENTS, stage) for stage in STAGES]
    stay = 5 + 4 + 5
    assert peaks == [round(AROUND * (stay + part)) for part in (2 + 4 * BLOCKS_AT_ONCE, 20 + 3 * BLOCKS_AT_ONCE, 60)]
    rooms = [placement.room(COMPONENTS, stage) for stage in STAGES]
    assert rooms == [peaks[0], round(AROUND * (stay + 20 + 3 * BLOCKS_AT_ONCE + 3)), peaks[2]]


def test_the_host_keeps_what_streams_and_the_originals():
    placement = Placement(frozenset({"text_encoder"}), tiles=False)
    assert placement.on_host(COMPONENTS) == (90 + 15 + 50, 90)
