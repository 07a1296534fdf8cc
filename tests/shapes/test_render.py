"""Rendered videos measured in pixels: where the objects are, how large, and how they move."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import max_pool2d

from tests.shapes.scenes import full_scenes, video_of
from turbo_rcm_patch.shapes import render as module
from turbo_rcm_patch.shapes.grammar import DIRECTIONS, SHAPES, SIZES, SPEEDS, MovingShape, Scene
from turbo_rcm_patch.shapes.render import FRAMES, GRID, HEADING, HEIGHT, RADIUS, RGB, SPEED, WIDTH, circumradius, render


def coverages_of(video, scene):
    """The share [objects, F, H, W] of every object's colour in every pixel of a rendered video."""
    base = torch.tensor(RGB[scene.background])
    axes = torch.tensor([RGB[part.colour] for part in scene.objects]) - base
    return torch.einsum("ck,cfhw->kfhw", torch.linalg.pinv(axes), video - base[:, None, None, None])


def areas_and_centroids(coverage):
    """[F] in pixels, and [F, 2] (x, y)."""
    x, y = torch.arange(WIDTH) + 0.5, torch.arange(HEIGHT) + 0.5
    areas = coverage.sum((1, 2))
    moments = torch.stack([(coverage * x).sum((1, 2)), (coverage * y[:, None]).sum((1, 2))], dim=1)
    return areas, moments / areas[:, None]


def test_shape_range_and_background():
    scenes = full_scenes(3)
    videos = render(scenes, torch.Generator().manual_seed(0))
    assert videos.shape == (3, 3, FRAMES, HEIGHT, WIDTH)
    assert videos.dtype == torch.float32
    assert videos.min() >= 0
    assert videos.max() <= 1
    for scene, video in zip(scenes, videos, strict=True):
        is_background = (video == torch.tensor(RGB[scene.background])[:, None, None, None]).all(dim=0)
        assert 0.8 < is_background.float().mean() < 1


@pytest.mark.parametrize("shape", SHAPES)
def test_area_and_motion_are_as_named(shape):
    for size, (direction, speed) in zip(SIZES * 4, itertools.product(DIRECTIONS, SPEEDS), strict=True):
        scene = Scene((MovingShape("green", shape, direction, size, speed),), "black")
        areas, centroids = areas_and_centroids(coverages_of(video_of(scene), scene)[0])
        assert areas == pytest.approx(math.pi * RADIUS[size] ** 2, rel=0.03)
        steps = centroids.diff(dim=0)
        expected = torch.tensor(HEADING[direction]) * SPEED[speed]
        torch.testing.assert_close(steps, expected.expand_as(steps), atol=0.02, rtol=0)


def test_a_triangle_points_up_and_a_circle_is_round():
    def first_frame(shape):
        scene = Scene((MovingShape("red", shape, "left", "large", "slowly"),), "white")
        return coverages_of(video_of(scene), scene)[0, 0] > 0.5

    rows = first_frame("triangle").sum(dim=1)
    rows = rows[rows > 0]
    assert rows[0] < 5
    assert rows[-1] > 60
    for axis in (0, 1):
        assert first_frame("circle").any(dim=axis).sum() == pytest.approx(2 * RADIUS["large"], abs=1)


def test_objects_keep_their_area_inside_the_frame_and_never_touch():
    scenes = full_scenes(12)
    for scene, video in zip(scenes, render(scenes, torch.Generator().manual_seed(1)), strict=True):
        coverages = coverages_of(video, scene)
        for part, coverage in zip(scene.objects, coverages, strict=True):
            assert areas_and_centroids(coverage)[0] == pytest.approx(math.pi * RADIUS[part.size] ** 2, rel=0.03)
        near = max_pool2d((coverages > 0.01).float(), 5, stride=1, padding=2)  # 2 pixels further on every side
        assert near.sum(dim=0).max() == 1


def test_two_objects_of_any_kinds_find_room(monkeypatch):
    """The frame's corners suffice, whichever random places were drawn."""
    kinds = [MovingShape("red", *kind) for kind in itertools.product(SHAPES, DIRECTIONS, SIZES, SPEEDS)]
    pairs = list(itertools.product(kinds, kinds))
    monkeypatch.setattr(module, "_CANDIDATES", 0)
    starts, steps = module._paths([Scene(pair, "white") for pair in pairs], torch.Generator())
    ends = starts + (FRAMES - 1) * steps
    reaches = torch.tensor([[circumradius(part.shape, RADIUS[part.size]) for part in pair] for pair in pairs])
    for points in (starts, ends):
        assert (points - reaches[..., None] >= -1e-3).all()
        assert (points + reaches[..., None] <= torch.tensor([WIDTH, HEIGHT]) + 1e-3).all()
    apart = starts[:, 0] - starts[:, 1] + torch.arange(FRAMES)[:, None, None] * (steps[:, 0] - steps[:, 1])
    assert (apart.norm(dim=-1) - reaches.sum(dim=1)).min() >= 6


def test_the_generator_decides_the_places_and_samples_do_not_depend_on_how_many_there_are():
    scenes = full_scenes(2)
    first = render(scenes, torch.Generator().manual_seed(5))
    assert torch.equal(render(scenes, torch.Generator().manual_seed(5)), first)
    assert not torch.equal(render(scenes, torch.Generator().manual_seed(6)), first)
    assert torch.equal(render(scenes[:1], torch.Generator().manual_seed(5)), first[:1])
    both = render([scenes[0], scenes[0]], torch.Generator().manual_seed(5))
    assert not torch.equal(both[0], both[1])


def test_objects_lie_on_the_grid_in_every_latent_frame():
    """All of them after the first, which is of one frame, show the same part of every motion."""
    starts, steps = module._paths(full_scenes(32), torch.Generator().manual_seed(0))
    for position in (starts, starts + 4 * steps, starts + 8 * steps):
        assert torch.equal(position % GRID, torch.zeros_like(position))
    assert starts.unique().numel() > 10


@pytest.mark.gpu
def test_a_gpu_renders_the_same():
    scenes = full_scenes(4)
    on_gpu = render(scenes, torch.Generator().manual_seed(0), "cuda")
    torch.testing.assert_close(on_gpu.cpu(), render(scenes, torch.Generator().manual_seed(0)), atol=1e-3, rtol=0)
