"""Recognise the shapes of a video by arithmetic, without its prompt, and score them against the caption.

A pixel is a mixture of the background and one palette colour, and belongs to an object where the colour's share is over
one half: straight edges stay in place however blurred they are. An object is the largest connected region of its colour
in every frame. Its area tells the size, its normalised central moments the shape (the nearest of the rendered shapes),
its centroids over time the direction and speed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch.nn.functional import avg_pool2d, max_pool2d

from .grammar import ATTRIBUTES, BACKGROUNDS, COLOURS, DIRECTIONS, SHAPES, SIZES, SPEEDS, MovingShape, Scene
from .render import HEADING, RADIUS, RGB, SPEED, render

SCORED = ("count", *ATTRIBUTES, "background")

_FOREIGN = 0.3  # RGB distance to the nearest mixture; pixels farther away belong to no object
_LEVELS = 64  # per channel, in which pixels are looked up
_CELL = 4  # pixels; regions connect on a grid of such cells, which stray pixels do not fill
_LEAST_AREA = 0.4 * math.pi * RADIUS["small"] ** 2  # smaller regions are specks
_AREA_LIMIT = math.pi * RADIUS["small"] * RADIUS["large"]  # geometric means of the two sizes' areas, the two speeds
_SPEED_LIMIT = math.sqrt(SPEED["slowly"] * SPEED["quickly"])
_STRANGE = 2.0  # distance in moments; shapes farther away are unknown. A blur of 4 pixels makes 1.5
_LEAST_SPEED = SPEED["slowly"] / 2  # slower objects stand still
_MOST_DRIFT = 0.5  # sideways per forward movement; objects that drift more have no direction
_PALE = 0.3  # RGB distance of a median colour to a palette colour; farther ones are not it
_NEARLY_ALWAYS, _MOSTLY = 0.85, 0.75  # shares of the frames in which an object is there, and has its shape
_BACKGROUND, _OTHER = len(COLOURS), len(COLOURS) + 1  # labels of pixels that are of no palette colour


def decode(video: torch.Tensor) -> Scene:
    """Return the scene that a video [3, F, H, W] in [0, 1] shows. It is on any device, in the pixels of ``render``.

    Attributes that are not recognised are None. Examples are a background or shape that changes or is not in the
    grammar, and the direction and speed of an object that stands still, turns, or has a single frame. Any
    number of objects is found, also in colours that the grammar does not have. If several have one colour, the smaller
    ones have no attribute except the colour.
    """
    nearest, background = _background(video)
    labels = _label(video, nearest)
    objects = []
    for label, colour in [*enumerate(COLOURS), (_OTHER, None)]:
        mask = labels == label
        if mask.sum() >= _LEAST_AREA * len(mask) / 2:
            objects += _objects(_if_vivid(colour, video, mask), mask.cpu())
    return Scene(tuple(objects), background)


def score(asked: Scene, shown: Scene) -> dict[str, tuple[int, int]]:
    """Return, for each attribute of SCORED, how many are right and how many the caption names.

    count is the number of objects. Each asked object is compared with a shown one of its colour, if there is one;
    otherwise they are paired so that most attributes agree. An object that is not shown has all attributes wrong.
    """
    candidates = [*shown.objects, *[None] * len(asked.objects)]
    choices = itertools.permutations(candidates, len(asked.objects))
    pairs = max((list(zip(asked.objects, choice, strict=True)) for choice in choices), key=_agreements)
    scores = {"count": (int(len(asked.objects) == len(shown.objects)), 1)}
    for name in ATTRIBUTES:
        named = [pair for pair in pairs if getattr(pair[0], name) is not None]
        scores[name] = (sum(_agree(name, *pair) for pair in named), len(named))
    named = asked.background is not None
    scores["background"] = (int(named and asked.background == shown.background), int(named))
    return {name: scores[name] for name in SCORED}


def _agreements(pairs: Sequence[tuple[MovingShape, MovingShape | None]]) -> tuple[int, int]:
    """Return how many colours agree, then how many attributes."""
    agreeing = [name for pair in pairs for name in ATTRIBUTES if _agree(name, *pair)]
    return agreeing.count("colour"), len(agreeing)


def _agree(name: str, asked: MovingShape, shown: MovingShape | None) -> bool:
    value = getattr(asked, name)
    return value is not None and shown is not None and value == getattr(shown, name)


def _background(video: torch.Tensor) -> tuple[str, str | None]:
    """Return the palette's name of the median colour, and the background's name.

    Objects cover far less than half of the pixels. The background is None if the colour is not a background's, or
    changes between frames.
    """
    # Contiguous, because torch 2.13 leaves the median of an expanded tensor unwritten.
    medians = video[..., ::_CELL, ::_CELL].float().flatten(2).contiguous().median(dim=2).values.T
    palette = torch.tensor(list(RGB.values()), device=video.device)
    distances, nearest = (medians[:, None] - palette).norm(dim=2).min(dim=1)
    name = list(RGB)[int(nearest.mode().values)]
    steady = bool((distances < _PALE).all()) and len(nearest.unique()) == 1
    return name, name if steady and name in BACKGROUNDS else None


def _if_vivid(colour: str | None, video: torch.Tensor, mask: torch.Tensor) -> str | None:
    """Return the colour, if the median of an object's pixels is near it; mixtures with the background are not."""
    if colour is None:
        return None
    median = video[:, mask].float().median(dim=1).values.cpu()
    return colour if (median - torch.tensor(RGB[colour])).norm() < _PALE else None


def _label(video: torch.Tensor, background: str) -> torch.Tensor:
    """Return the index in COLOURS of every pixel's object, _BACKGROUND or _OTHER: uint8 [F, H, W]."""
    red, green, blue = (video.nan_to_num(0).clamp(0, 1) * (_LEVELS - 1)).round().int()
    return _label_of_every_colour(background).to(video.device)[(red * _LEVELS + green) * _LEVELS + blue]


@functools.cache
def _label_of_every_colour(background: str) -> torch.Tensor:
    """Return the label of every RGB colour in _LEVELS levels per channel, uint8 [_LEVELS³]."""
    base = torch.tensor(RGB[background])
    offset = torch.cartesian_prod(*[torch.linspace(0, 1, _LEVELS)] * 3) - base
    distances = torch.full((len(COLOURS), len(offset)), math.inf)
    for index, colour in enumerate(COLOURS):
        if colour != background:
            axis = torch.tensor(RGB[colour]) - base
            share = (offset @ axis / axis.square().sum()).clamp(0, 1)
            distance = (offset - share[:, None] * axis).norm(dim=1)
            distances[index] = torch.where(share > 0.5, distance, math.inf)
    distance, nearest = distances.min(dim=0)
    elsewhere = torch.where(offset.norm(dim=1) < 2 * _FOREIGN, _BACKGROUND, _OTHER)
    return torch.where(distance < _FOREIGN, nearest, elsewhere).to(torch.uint8)


def _objects(colour: str | None, mask: torch.Tensor) -> list[MovingShape]:
    """Return the objects of one colour, from its pixels [F, H, W].

    Only the largest one has attributes, and only if it has a colour and is there in nearly all frames.
    """
    count, mask = _largest_regions(mask)
    if count == 0:
        return []
    frames, areas, centroids, moments = _measure(mask)
    if colour is None or len(frames) < _NEARLY_ALWAYS * len(mask):
        return [MovingShape(colour, None, None)] * count
    shape = _steady_shape(moments)
    direction, speed = _motion(frames, centroids)
    tracked = MovingShape(colour, shape, direction, SIZES[int(areas.median() > _AREA_LIMIT)], speed)
    return [tracked, *[MovingShape(colour, None, None)] * (count - 1)]


def _largest_regions(mask: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return how many regions most frames have, specks aside, and the pixels [F, H, W] of each frame's largest."""
    cells = avg_pool2d(mask.float(), _CELL, ceil_mode=True)
    regions = _connect(cells >= 0.5)
    areas = regions.flatten().bincount(cells.flatten() * _CELL**2, minlength=cells.numel() + 1)[1:]
    areas = areas.unflatten(0, (len(mask), -1))  # a region's number is that of one of its cells
    count = int((areas >= _LEAST_AREA).sum(dim=1).median())
    largest = 1 + areas.argmax(dim=1) + torch.arange(len(mask)) * areas.shape[1]
    chosen = (regions == largest[:, None, None]) & (areas.amax(dim=1) >= _LEAST_AREA)[:, None, None]
    around = max_pool2d(chosen.float(), 3, stride=1, padding=1) > 0  # also the cells that an edge hardly fills
    around = around.repeat_interleave(_CELL, dim=1).repeat_interleave(_CELL, dim=2)
    return count, mask & around[:, : mask.shape[1], : mask.shape[2]]


def _connect(cells: torch.Tensor) -> torch.Tensor:
    """Return a number per connected region of cells [F, h, w], 0 outside: the largest 1-based index of its cells."""
    cells = cells.float()
    regions = cells * torch.arange(1.0, cells.numel() + 1).view_as(cells)  # exact below 2^24 cells
    while True:
        spread = max_pool2d(regions, 3, stride=1, padding=1) * cells
        if torch.equal(spread, regions):
            return regions.long()
        regions = spread


def _measure(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the frames with an object, and its areas [F], centroids [F, 2] (x, y), normalised moments [F, 4] there.

    The moments are central, μ_pq / A^(1 + (p + q)/2): μ20 + μ02, μ03, μ40 + μ04, μ22; so size does not count.
    """
    frame, y, x = mask.nonzero().T
    areas = frame.bincount(minlength=len(mask)).double()

    def mean(values: torch.Tensor) -> torch.Tensor:
        return frame.bincount(values, minlength=len(mask)) / areas

    centroids = torch.stack([mean(x.double()), mean(y.double())], dim=1)
    x, y = (torch.stack([x, y], dim=1) - centroids[frame]).T
    xx, yy = x * x, y * y
    moments = [mean(xx + yy) / areas, mean(yy * y) / areas**1.5]
    moments += [mean(xx * xx + yy * yy) / areas**2, mean(xx * yy) / areas**2]
    frames = areas.nonzero()[:, 0]
    return frames, areas[frames], centroids[frames], torch.stack(moments, dim=1)[frames]


def _steady_shape(moments: torch.Tensor) -> str | None:
    """Return the shape for the median moments over the frames, or None if many frames show another shape."""
    shape = _nearest_shape(moments.median(dim=0).values)
    agreeing = sum(_nearest_shape(one) == shape for one in moments)
    return shape if agreeing >= _MOSTLY * len(moments) else None


def _nearest_shape(moments: torch.Tensor) -> str | None:
    """Return the shape with the nearest moments, or None if all are far.

    Distances are in units of the moments' spread over the rendered shapes.
    """
    names, references = _reference_moments()
    distance, index = ((references - moments) / references.std(dim=0)).norm(dim=1).min(dim=0)
    return names[index] if distance < _STRANGE else None


@functools.cache
def _reference_moments() -> tuple[list[str], torch.Tensor]:
    """Return the names and moments [N, 4] of every shape in every size, measured on rendered videos."""
    objects = [MovingShape(COLOURS[0], shape, DIRECTIONS[0], size, "slowly") for shape in SHAPES for size in SIZES]
    videos = render([Scene((part,), "black") for part in objects], torch.Generator().manual_seed(0))
    moments = [_measure(_label(video, "black") == 0)[-1].median(dim=0).values for video in videos]
    return [part.shape for part in objects], torch.stack(moments)


def _motion(frames: torch.Tensor, centroids: torch.Tensor) -> tuple[str | None, str | None]:
    """Return direction and speed over all frames. Both are None for one frame, or if a third of the frames disagrees.

    With fewer than six frames the parts are halves or the whole, because a direction needs two frames.
    """
    if len(frames) < 2:
        return None, None
    split = torch.arange(len(frames)).tensor_split(min(3, len(frames) // 2))
    whole, *parts = (_heading(_velocity(frames[part], centroids[part])) for part in (slice(None), *split))
    return whole if all(direction == whole[0] for direction, _ in parts) else (None, None)


def _velocity(frames: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Return pixels per frame [2]: the median over all pairs of frames (Theil and Sen's robust slope)."""
    first, second = torch.combinations(torch.arange(len(frames))).T
    return ((centroids[second] - centroids[first]) / (frames[second] - frames[first])[:, None]).median(dim=0).values


def _heading(velocity: torch.Tensor) -> tuple[str | None, str | None]:
    headings = torch.tensor(list(HEADING.values()), dtype=velocity.dtype)
    speed, index = (headings @ velocity).max(dim=0)
    if speed < _LEAST_SPEED:
        return None, None
    drifts = velocity.abs().min() > _MOST_DRIFT * speed
    return None if drifts else list(HEADING)[index], SPEEDS[int(speed > _SPEED_LIMIT)]
