"""Captions of the closed language, and which of their triples are held out."""

import itertools
import random

import pytest

from turbo_rcm_patch.shapes.grammar import (
    BACKGROUNDS,
    COLOURS,
    DIRECTIONS,
    EXAMPLES,
    SHAPES,
    SIZES,
    SPEEDS,
    MovingShape,
    Scene,
    draw_scene,
    fill_open,
    is_held_out,
    parse_caption,
)

TRIPLES = list(itertools.product(COLOURS, SHAPES, DIRECTIONS))


def triples_of(scene):
    return [(part.colour, part.shape, part.direction) for part in scene.objects]


def draw_many(count, *, held_out, seed=0):
    generator = random.Random(seed)
    return [draw_scene(generator, held_out=held_out) for _ in range(count)]


def test_every_object_and_background_round_trips():
    objects = itertools.product(COLOURS, SHAPES, DIRECTIONS, (None, *SIZES), (None, *SPEEDS))
    for values, background in itertools.product(objects, (None, *BACKGROUNDS)):
        scene = Scene((MovingShape(*values),), background)
        assert parse_caption(str(scene)) == scene


def test_every_pair_of_objects_round_trips():
    generator = random.Random(0)
    sizes, speeds, backgrounds = (None, *SIZES), (None, *SPEEDS), (None, *BACKGROUNDS)
    for first, second in itertools.permutations(TRIPLES, 2):
        if first[0] == second[0]:
            continue
        objects = [MovingShape(*t, generator.choice(sizes), generator.choice(speeds)) for t in (first, second)]
        scene = Scene(tuple(objects), generator.choice(backgrounds))
        assert parse_caption(str(scene)) == scene


def test_captions_read_as_written():
    large = MovingShape("orange", "cross", "left", "large", "quickly")
    plain = MovingShape("orange", "circle", "up")
    assert str(Scene((large,))) == "a large orange cross moves left quickly"
    assert str(Scene((plain, MovingShape("red", "square", "down", None, "slowly")), "gray")) == (
        "an orange circle moves up while a red square moves down slowly, on gray"
    )
    assert parse_caption("An orange circle moves UP.") == Scene((plain,))
    assert parse_caption("  a large orange  cross moves left quickly on black ") == Scene((large,), "black")


def test_examples_are_captions():
    scenes = [parse_caption(example) for example in EXAMPLES]
    assert [str(scene) for scene in scenes] == list(EXAMPLES)
    assert {len(scene.objects) for scene in scenes} == {1, 2}


@pytest.mark.parametrize(
    "caption",
    [
        "",
        "a red fox moves right",
        "a pink circle moves right",
        "a red circle jumps right",
        "a red circle",
        "red circle moves right",
        "a red circle moves right fast",
        "a huge red circle moves right",
        "a red circle large moves right",
        "a red circle moves right, on pink",
        "a red circle moves right, on white, on black",
        "on white",
        "a red circle moves right and a blue square moves left",
        "a red circle moves right while",
        "a red circle moves right while a red square moves left",
        "a red circle moves right while a blue square moves left while a green cross moves up",
        "the video shows: a red circle moves right",
    ],
)
def test_other_captions_are_rejected(caption):
    assert parse_caption(caption) is None


def test_a_quarter_of_the_triples_is_held_out_and_every_pair_of_values_is_in_training():
    training = {triple for triple in TRIPLES if not is_held_out(*triple)}
    assert len(training) == 3 / 4 * len(TRIPLES)
    for values in ((COLOURS, SHAPES), (COLOURS, DIRECTIONS), (SHAPES, DIRECTIONS)):
        for pair in itertools.product(*values):
            assert any(set(pair) <= set(triple) for triple in training), pair


def test_drawn_scenes_keep_to_their_side():
    training, held_out = draw_many(600, held_out=False), draw_many(600, held_out=True)
    assert {t for scene in training for t in triples_of(scene)} == {t for t in TRIPLES if not is_held_out(*t)}
    assert {t for scene in held_out for t in triples_of(scene)} == {t for t in TRIPLES if is_held_out(*t)}


def test_drawn_scenes_have_one_or_two_colours_and_leave_some_words_out():
    scenes = draw_many(400, held_out=False)
    for scene in scenes:
        assert len({part.colour for part in scene.objects}) == len(scene.objects)
        assert parse_caption(str(scene)) == scene
    objects = [part for scene in scenes for part in scene.objects]
    assert 0.4 < sum(len(scene.objects) == 2 for scene in scenes) / len(scenes) < 0.6
    for values in ([p.size for p in objects], [p.speed for p in objects], [scene.background for scene in scenes]):
        assert 0.08 < values.count(None) / len(values) < 0.22
    assert {part.size for part in objects} == {None, *SIZES}
    assert {part.speed for part in objects} == {None, *SPEEDS}
    assert {scene.background for scene in scenes} == {None, *BACKGROUNDS}


def test_the_seed_decides_the_scenes():
    assert draw_many(20, held_out=True, seed=3) == draw_many(20, held_out=True, seed=3)
    assert draw_many(20, held_out=True, seed=3) != draw_many(20, held_out=True, seed=4)


def test_filling_keeps_what_is_named_and_leaves_nothing_open():
    generator = random.Random(1)
    for scene in draw_many(100, held_out=False):
        filled = fill_open(scene, generator)
        assert filled.background in ({scene.background} if scene.background else set(BACKGROUNDS))
        for part, full in zip(scene.objects, filled.objects, strict=True):
            assert (full.colour, full.shape, full.direction) == (part.colour, part.shape, part.direction)
            assert full.size in ({part.size} if part.size else set(SIZES))
            assert full.speed in ({part.speed} if part.speed else set(SPEEDS))
    opened = Scene((MovingShape("red", "circle", "up"),))
    assert len({fill_open(opened, generator) for _ in range(100)}) == len(SIZES) * len(SPEEDS) * len(BACKGROUNDS)
