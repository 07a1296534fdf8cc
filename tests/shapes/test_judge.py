"""The judge on rendered videos, whose scenes are known: right ones, blurred and noisy ones, and wrong ones."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import conv2d, pad

from tests.shapes.scenes import full_scenes, video_of
from turbo_rcm_patch.shapes.grammar import COLOURS, DIRECTIONS, SHAPES, SIZES, SPEEDS, MovingShape, Scene, parse_caption
from turbo_rcm_patch.shapes.judge import SCORED, decode, score
from turbo_rcm_patch.shapes.render import FRAMES, HEIGHT, RGB, WIDTH, render

CAPTION = "a large red circle moves up slowly while a small blue square moves left quickly, on white"
ASKED = parse_caption(CAPTION)
EVERYTHING = {"count": (1, 1), **dict.fromkeys(SCORED[1:-1], (2, 2)), "background": (1, 1)}


def blurred(video, sigma):
    """Gaussian, over space."""
    offsets = torch.arange(-8.0, 9.0)
    kernel = torch.softmax(-offsets.square() / (2 * sigma**2), dim=0)
    frames = pad(video.flatten(0, 1)[:, None], (8, 8, 8, 8), mode="replicate")
    return conv2d(conv2d(frames, kernel.view(1, 1, 1, -1)), kernel.view(1, 1, -1, 1)).view_as(video)


def score_of(video, asked=ASKED):
    return score(asked, decode(video))


def wrong_in(scores):
    return {name for name, (right, asked) in scores.items() if right < asked}


# A blur of 2 pixels with noise of 0.05 is a PSNR of about 25 dB, below that of the embedded autoencoder.
def test_rendered_scenes_are_read_right():
    sigma, noise, count = 2, 0.05, 8
    right, asked = Counter(), Counter()
    generator = torch.Generator().manual_seed(0)
    scenes = full_scenes(count)
    for scene, video in zip(scenes, render(scenes, generator), strict=True):
        video = blurred(video, sigma) + noise * torch.randn(video.shape, generator=generator)
        for name, counts in score_of(video.clamp(0, 1), scene).items():
            right[name] += counts[0]
            asked[name] += counts[1]
    assert asked["count"] == asked["background"] == count
    assert all(asked[name] > 1.3 * count for name in ("colour", "shape", "direction", "size", "speed"))
    assert sum(right.values()) >= 0.99 * sum(asked.values())
    assert all(right[name] >= 0.99 * asked[name] for name in SCORED), (right, asked)


def test_a_scene_is_read_as_a_whole_in_any_float_dtype():
    shown = decode(video_of(CAPTION))
    assert set(shown.objects) == set(ASKED.objects)
    assert shown.background == "white"
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert set(decode(video_of(CAPTION).to(dtype)).objects) == set(ASKED.objects)


@pytest.mark.gpu
def test_a_gpu_reads_the_same():
    for scene in full_scenes(8):
        assert decode(video_of(scene).cuda()) == decode(video_of(scene))


def test_a_right_video_scores_everything_it_was_asked():
    assert score_of(video_of(CAPTION)) == EVERYTHING


def test_what_the_caption_leaves_open_is_not_scored():
    scores = score_of(video_of(CAPTION), parse_caption("a red circle moves up while a small blue square moves left"))
    assert scores == {
        **dict.fromkeys(("colour", "shape", "direction"), (2, 2)),
        **{"count": (1, 1), "size": (1, 1), "speed": (0, 0), "background": (0, 0)},
    }
    assert list(scores) == list(SCORED)


def altered(index, **attributes):
    """The scene with some attributes of one object replaced."""
    objects = list(ASKED.objects)
    objects[index] = replace(objects[index], **attributes)
    return replace(ASKED, objects=tuple(objects))


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("attribute", ["colour", "shape", "direction", "size", "speed"])
def test_one_wrong_attribute_is_one_point(index, attribute):
    values = {"colour": COLOURS, "shape": SHAPES, "direction": DIRECTIONS, "size": SIZES, "speed": SPEEDS}[attribute]
    taken = {getattr(part, attribute) for part in ASKED.objects}
    free = [value for value in values if value not in taken] or [getattr(ASKED.objects[1 - index], attribute)]
    scores = score_of(video_of(altered(index, **{attribute: free[0]})))
    assert scores == {**EVERYTHING, attribute: (1, 2)}


def test_wrong_background():
    assert score_of(video_of(replace(ASKED, background="gray"))) == {**EVERYTHING, "background": (0, 1)}


def test_swapped_colours():
    """Objects are matched by colour: everything that the two do not share is wrong."""
    first, second = ASKED.objects
    swapped = (replace(first, colour=second.colour), replace(second, colour=first.colour))
    scores = score_of(video_of(replace(ASKED, objects=swapped)))
    assert scores == {**EVERYTHING, **dict.fromkeys(("shape", "direction", "size", "speed"), (0, 2))}


def test_mirrored_and_reversed_motion():
    video = video_of(CAPTION)
    assert score_of(video.flip(-1)) == {**EVERYTHING, "direction": (1, 2)}
    assert score_of(video.flip(1)) == {**EVERYTHING, "direction": (0, 2)}


def test_a_static_video_has_neither_direction_nor_speed():
    shown = decode(video_of(CAPTION)[:, :1].expand(-1, FRAMES, -1, -1))
    assert {(part.direction, part.speed) for part in shown.objects} == {(None, None)}
    assert score(ASKED, shown) == {**EVERYTHING, "direction": (0, 2), "speed": (0, 2)}


@pytest.mark.parametrize("frames", range(1, 8))
def test_a_short_video_is_read_too_and_one_frame_has_no_motion(frames):
    still = {"direction": (0, 2), "speed": (0, 2)} if frames == 1 else {}
    assert score_of(video_of(CAPTION)[:, :frames]) == {**EVERYTHING, **still}


def test_diagonal_motion_has_no_direction():
    video = video_of("a small red circle moves right quickly, on white")
    frames = [frame.roll(4 * index, dims=1) for index, frame in enumerate(video.unbind(1))]
    (shown,) = decode(torch.stack(frames, dim=1)).objects
    assert (shown.shape, shown.direction) == ("circle", None)


@pytest.mark.parametrize("fill", [1.0, 0.0, 0.3, float("nan")])
def test_a_video_of_nothing_has_no_objects(fill):
    scores = score_of(torch.full((3, FRAMES, HEIGHT, WIDTH), fill))
    assert wrong_in(scores) >= set(SCORED) - {"background"}
    assert all(right == 0 for name, (right, _) in scores.items() if name != "background")
    assert scores["background"] == (int(fill == 1.0), 1)


def test_noise_has_nothing_right():
    noise = torch.rand(3, FRAMES, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(0))
    assert sum(right for right, _ in score_of(noise).values()) == 0


def test_a_coloured_background_is_none_and_hides_its_own_colour():
    red = torch.tensor(RGB["red"])[:, None, None, None].expand(-1, FRAMES, HEIGHT, WIDTH)
    assert decode(red) == Scene((), None)


@pytest.mark.parametrize("shade", [(0.8, 0.8, 0.8), (1.0, 0.7, 0.7), (0.65, 0.85, 1.0)])
def test_a_background_of_another_shade_is_not_the_nearest(shade):
    video = video_of(CAPTION)
    background = (video == 1).all(dim=0)
    assert decode(torch.where(background, torch.tensor(shade)[:, None, None, None], video)).background is None


def test_a_background_that_changes_is_wrong():
    other = video_of(replace(ASKED, background="black"))
    video = torch.cat([video_of(CAPTION)[:, :9], other[:, 9:]], dim=1)
    assert score_of(video)["background"] == (0, 1)


def test_objects_that_vanish_half_way_are_wrong():
    video = video_of(CAPTION).clone()
    video[:, 9:] = 1
    assert score_of(video)["shape"] == score_of(video)["direction"] == (0, 2)


def test_objects_that_change_their_shape_have_none():
    shapes = [replace(part, shape=other.shape) for part, other in zip(ASKED.objects, ASKED.objects[::-1], strict=True)]
    video = torch.cat([video_of(CAPTION)[:, :9], video_of(replace(ASKED, objects=tuple(shapes)))[:, 9:]], dim=1)
    assert score_of(video)["shape"] == (0, 2)


@pytest.mark.parametrize(
    "frames",
    [[*range(13), *range(11, 7, -1)], [*range(13), *[12] * 4], [*[0] * 8, *range(9)], [0, 1, 2, 1], [0, 1, 2, 2, 1]],
)
def test_motion_that_turns_or_rests_for_a_part_has_no_direction(frames):
    assert score_of(video_of(CAPTION)[:, frames])["direction"] == (0, 2)


def test_pale_objects_are_not_of_their_colour():
    video = video_of(CAPTION)
    pale = 0.55 * video + 0.45 * torch.ones(3, 1, 1, 1)
    assert score_of(pale)["colour"] == (0, 2)


def test_a_missing_object_has_all_its_attributes_wrong():
    scores = score_of(video_of(replace(ASKED, objects=ASKED.objects[:1])))
    assert scores == {"count": (0, 1), **dict.fromkeys(SCORED[1:-1], (1, 2)), "background": (1, 1)}


def test_an_extra_object_is_a_wrong_count_only():
    one = parse_caption("a large red circle moves up slowly, on white")
    scores = score_of(video_of(CAPTION), one)
    assert scores == {"count": (0, 1), **dict.fromkeys(SCORED[1:], (1, 1))}


def with_disc(video, colour, x, y, radius):
    """The video with a disc on top that stands still."""
    columns, rows = torch.arange(WIDTH), torch.arange(HEIGHT)[:, None]
    inside = (columns - x) ** 2 + (rows - y) ** 2 < radius**2
    return torch.where(inside, torch.tensor(RGB[colour])[:, None, None, None], video)


@pytest.mark.parametrize("colour", ["green", "red", "black", "gray"])
def test_a_third_object_is_a_wrong_count_also_in_a_colour_that_is_there(colour):
    video = with_disc(video_of(CAPTION), colour, *free_place(CAPTION), 14)
    shown = decode(video)
    assert len(shown.objects) == 3
    assert score(ASKED, shown) == {**EVERYTHING, "count": (0, 1)}


def test_specks_change_nothing():
    x, y = free_place(CAPTION)
    video = with_disc(video_of(CAPTION), "green", x, y, 6)
    assert score_of(with_disc(video, "red", x, y + 14, 4)) == EVERYTHING


def test_what_is_there_in_a_few_frames_only_is_no_object():
    video = video_of(CAPTION).clone()
    video[:, :4] = with_disc(video, "green", *free_place(CAPTION), 14)[:, :4]
    assert score_of(video) == EVERYTHING


def free_place(caption):
    """x and y with nothing within 30 pixels in any frame of ``video_of(caption)``."""
    used = (video_of(caption) != 1).any(dim=0).any(dim=0).float()  # on white
    near = torch.nn.functional.max_pool2d(used[None], 61, stride=1, padding=30)[0]
    near[:30], near[-30:], near[:, :30], near[:, -30:] = 1, 1, 1, 1
    y, x = (near == 0).nonzero()[0].tolist()
    return x, y


def test_a_bar_is_no_shape():
    video = torch.ones(3, FRAMES, HEIGHT, WIDTH)
    for frame in range(FRAMES):
        video[:, frame, 90:100, 50 + 2 * frame : 150 + 2 * frame] = torch.tensor(RGB["red"])[:, None, None]
    assert decode(video) == Scene((MovingShape("red", None, "right", "small", "slowly"),), "white")


def test_the_video_of_other_colours_is_wrong():
    pairs = [pair for pair in itertools.pairwise(full_scenes(7)) if len(set(map(colours_of, pair))) == 2]
    assert len(pairs) > 3
    for shown, asked in pairs:
        assert wrong_in(score_of(video_of(shown), asked)) & {"count", "colour"}


def colours_of(scene):
    return frozenset(part.colour for part in scene.objects)
