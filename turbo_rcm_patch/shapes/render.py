"""Scenes drawn as videos, in plain torch on any device. Objects start on a grid, stay inside the frame, never touch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .grammar import SHAPES, Scene

HEIGHT, WIDTH, FRAMES = 160, 224, 17

RGB = {
    "red": (0.88, 0.12, 0.14),
    "green": (0.10, 0.65, 0.20),
    "blue": (0.12, 0.25, 0.90),
    "yellow": (0.97, 0.90, 0.10),
    "purple": (0.60, 0.15, 0.75),
    "orange": (0.98, 0.55, 0.05),
    "white": (1.0, 1.0, 1.0),
    "black": (0.0, 0.0, 0.0),
    "gray": (0.5, 0.5, 0.5),
}
RADIUS = {"small": 14.0, "large": 24.0}  # in pixels, of the disc with the same area as the object
SPEED = {"slowly": 2.0, "quickly": 4.0}  # pixels a frame: one or two of Wan's latent cells per latent frame
HEADING = {"up": (0.0, -1.0), "down": (0.0, 1.0), "left": (-1.0, 0.0), "right": (1.0, 0.0)}  # x to the right, y down
# Pixels between possible starts, the side of a latent cell. With the speeds above, an object lies in its cells as it
# did a latent frame before. So the small model need not learn what each fraction of a cell looks like.
GRID = 8

_CANDIDATES = 128  # random pairs of starting points tried per video, before pairs of the frame's corners
_GAP = 6.0  # pixels between two objects, at least


def half_width(shape: str, radius: float) -> float:
    """Return the shape's characteristic length in pixels for an area of π·radius².

    It is a circle's radius, half a square's side, a triangle's inradius, or half the width of a cross's arm.
    """
    return (
        radius
        * {
            "circle": 1.0,
            "square": math.sqrt(math.pi) / 2,
            "triangle": math.sqrt(math.pi / (3 * math.sqrt(3))),
            "cross": math.sqrt(math.pi / 20),
        }[shape]
    )


def circumradius(shape: str, radius: float) -> float:
    """Return the pixels from the centroid to the farthest point."""
    return half_width(shape, radius) * {"circle": 1.0, "square": math.sqrt(2), "triangle": 2.0, "cross": 10**0.5}[shape]


def render(scenes: Sequence[Scene], generator: torch.Generator, device: str | torch.device = "cpu") -> torch.Tensor:
    """Return videos [B, 3, FRAMES, HEIGHT, WIDTH] in [0, 1], fp32, of scenes without open attributes.

    generator: a CPU generator; it draws where the objects are.
    """
    starts, steps = _paths(scenes, generator)
    background = torch.tensor([RGB[scene.background] for scene in scenes], device=device)
    video = background[:, :, None, None, None].expand(-1, -1, FRAMES, HEIGHT, WIDTH).clone()
    for index in range(max(len(scene.objects) for scene in scenes)):
        members = [i for i, scene in enumerate(scenes) if index < len(scene.objects)]
        objects = [scenes[i].objects[index] for i in members]
        coverage = _coverage(objects, starts[members, index].to(device), steps[members, index].to(device))
        colour = torch.tensor([RGB[part.colour] for part in objects], device=device)[:, :, None, None, None]
        video[members] = torch.lerp(video[members], colour.expand_as(video[members]), coverage[:, None])
    return video


def _paths(scenes: Sequence[Scene], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return centroids in the first frame and steps per frame, both [B, 2, 2] in pixels (x, y)."""
    reach, steps = torch.zeros(len(scenes), 2), torch.zeros(len(scenes), 2, 2)
    for i, scene in enumerate(scenes):
        for j, part in enumerate(scene.objects):
            reach[i, j] = circumradius(part.shape, RADIUS[part.size])
            steps[i, j] = torch.tensor(HEADING[part.direction]) * SPEED[part.speed]
    travel = steps * (FRAMES - 1)
    low = ((reach[..., None] + (-travel).clamp(min=0)) / GRID).ceil()
    high = ((torch.tensor([WIDTH, HEIGHT]) - reach[..., None] - travel.clamp(min=0)) / GRID).floor()
    uniform = torch.rand(len(scenes), _CANDIDATES, 2, 2, generator=generator)
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 4).view(-1, 2, 2).expand(len(scenes), -1, -1, -1)
    chosen = (torch.cat([uniform, corners], dim=1) * (high - low + 1)[:, None]).floor()
    starts = GRID * torch.minimum(low[:, None] + chosen, high[:, None])
    times = torch.arange(FRAMES)[:, None]
    apart = (starts[:, :, 0] - starts[:, :, 1])[:, :, None] + times * (steps[:, 0] - steps[:, 1])[:, None, None]
    gap = apart.norm(dim=-1).amin(dim=2) - reach.sum(dim=1, keepdim=True)
    alone = torch.tensor([len(scene.objects) == 1 for scene in scenes])
    fits = (gap >= _GAP) | alone[:, None]
    best = fits.float().argmax(dim=1)  # the first pair of paths that keeps the gap; some pair of corners always does
    return starts[torch.arange(len(scenes)), best], steps


def _coverage(objects: Sequence, start: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Return the share of each pixel that an object covers, [B, FRAMES, HEIGHT, WIDTH]."""
    times = torch.arange(FRAMES, device=start.device)
    centre = start[:, None] + times[:, None] * step[:, None]  # [B, FRAMES, 2]
    x = torch.arange(WIDTH, device=start.device) + 0.5 - centre[..., 0, None]
    y = torch.arange(HEIGHT, device=start.device) + 0.5 - centre[..., 1, None]
    x, y = x[:, :, None, :], y[:, :, :, None]
    coverage = torch.empty(len(objects), FRAMES, HEIGHT, WIDTH, device=start.device)
    for shape in SHAPES:
        members = [i for i, part in enumerate(objects) if part.shape == shape]
        if members:
            sizes = [half_width(shape, RADIUS[objects[i].size]) for i in members]
            a = torch.tensor(sizes, device=start.device)[:, None, None, None]
            coverage[members] = (0.5 - _distance(shape, x[members], y[members], a)).clamp(0, 1)
    return coverage


def _distance(shape: str, x: torch.Tensor, y: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Return the signed distance in pixels from the edge (exact near it), negative inside. a: ``half_width``."""
    if shape == "circle":
        return torch.hypot(x, y) - a
    if shape == "square":
        return torch.maximum(x.abs(), y.abs()) - a
    if shape == "triangle":  # one tip up
        slanted = math.sqrt(3) / 2 * x.abs() - 0.5 * y
        return torch.maximum(slanted, y.expand_as(slanted)) - a
    x, y = x.abs(), y.abs()
    across, along = torch.minimum(x, y), torch.maximum(x, y)
    return torch.maximum(across - a, along - 3 * a)
