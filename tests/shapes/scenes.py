"""Rendered scenes of the tests."""

import functools
import random

import torch

from turbo_rcm_patch.shapes.grammar import draw_scene, fill_open, parse_caption
from turbo_rcm_patch.shapes.render import render


def full_scenes(count, seed=0):
    """Scenes without open attributes, held-out ones and others in turn."""
    generator = random.Random(seed)
    return [fill_open(draw_scene(generator, held_out=bool(i % 2)), generator) for i in range(count)]


@functools.lru_cache(maxsize=8)
def video_of(scene, seed=0):
    """The video [3, F, H, W] of a scene or of a caption that leaves nothing open. Clone it before you change it."""
    scene = parse_caption(scene) if isinstance(scene, str) else scene
    return render([scene], torch.Generator().manual_seed(seed))[0]
