"""The closed language of the embedded model: captions of one or two coloured shapes that move over a plain background.

    caption    = object ["while" object] [", on" background]
    object     = "a" [size] colour shape "moves" direction [speed]

A size, speed or background that a caption leaves out is anyone's choice. The two objects differ in colour. A quarter of
all triples of colour, shape and direction is held out: training shows every two of their values together, but never
such a triple.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, fields, replace

COLOURS = ("red", "green", "blue", "yellow", "purple", "orange")
SHAPES = ("circle", "square", "triangle", "cross")
DIRECTIONS = ("up", "down", "left", "right")
SIZES = ("small", "large")
SPEEDS = ("slowly", "quickly")
BACKGROUNDS = ("white", "black", "gray")

EXAMPLES = (
    "a red circle moves right",
    "a large blue square moves up slowly, on white",
    "a small yellow triangle moves left quickly, on black",
    "a large red circle moves up slowly while a small blue square moves left, on white",
)

_OMITTED = 0.15  # how often a caption leaves out each of size, speed and background

_OBJECT = (
    rf"an? (?:(?P<size>{'|'.join(SIZES)}) )?(?P<colour>{'|'.join(COLOURS)}) (?P<shape>{'|'.join(SHAPES)})"
    rf" moves (?P<direction>{'|'.join(DIRECTIONS)})(?: (?P<speed>{'|'.join(SPEEDS)}))?"
)
_CAPTION = re.compile(rf"(?P<objects>.+?)(?: on (?P<background>{'|'.join(BACKGROUNDS)}))?")


@dataclass(frozen=True)
class MovingShape:
    """One object. None: the caption leaves it open (size, speed), or the judge cannot tell."""

    colour: str | None
    shape: str | None
    direction: str | None
    size: str | None = None
    speed: str | None = None

    def __str__(self) -> str:
        words = ("an" if self.size is None and self.colour == "orange" else "a", self.size, self.colour, self.shape)
        return " ".join(word for word in (*words, "moves", self.direction, self.speed) if word)


ATTRIBUTES = tuple(field.name for field in fields(MovingShape))


@dataclass(frozen=True)
class Scene:
    """One or two objects and their background (None: open). ``str`` is its caption."""

    objects: tuple[MovingShape, ...]
    background: str | None = None

    def __str__(self) -> str:
        caption = " while ".join(map(str, self.objects))
        return caption if self.background is None else f"{caption}, on {self.background}"


def parse_caption(caption: str) -> Scene | None:
    """Return the scene that a caption names, or None for one outside the grammar. Case and punctuation do not count."""
    words = " ".join(re.sub(r"[^\w\s]", " ", caption.lower()).split())
    match = _CAPTION.fullmatch(words)
    objects = [re.fullmatch(_OBJECT, part) for part in match["objects"].split(" while ")] if match else [None]
    if None in objects or len(objects) > 2 or len({part["colour"] for part in objects}) != len(objects):
        return None
    return Scene(tuple(MovingShape(**part.groupdict()) for part in objects), match["background"])


def is_held_out(colour: str, shape: str, direction: str) -> bool:
    """True if training never shows this triple. Each colour and shape miss one direction of four."""
    return (COLOURS.index(colour) + SHAPES.index(shape) + DIRECTIONS.index(direction)) % 4 == 0


def draw_scene(generator: random.Random, *, held_out: bool) -> Scene:
    """Return a random scene, with only held-out triples or with none of them."""
    colours = generator.sample(COLOURS, generator.choice((1, 2)))
    objects = tuple(_draw_object(generator, colour, held_out) for colour in colours)
    return Scene(objects, _draw_or_omit(generator, BACKGROUNDS))


def fill_open(scene: Scene, generator: random.Random) -> Scene:
    """Return the scene with every open size, speed and background drawn at random."""
    objects = tuple(
        replace(part, size=part.size or generator.choice(SIZES), speed=part.speed or generator.choice(SPEEDS))
        for part in scene.objects
    )
    return Scene(objects, scene.background or generator.choice(BACKGROUNDS))


def _draw_object(generator: random.Random, colour: str, held_out: bool) -> MovingShape:
    pairs = [(s, d) for s in SHAPES for d in DIRECTIONS if is_held_out(colour, s, d) == held_out]
    size, speed = _draw_or_omit(generator, SIZES), _draw_or_omit(generator, SPEEDS)
    return MovingShape(colour, *generator.choice(pairs), size, speed)


def _draw_or_omit(generator: random.Random, values: tuple[str, ...]) -> str | None:
    return None if generator.random() < _OMITTED else generator.choice(values)
