"""scripts/tools/contact_sheet.py: the right frames in the right places, and a file small enough for the repository."""

import random

import numpy as np
import torch
from PIL import Image

from scripts.tools import contact_sheet
from turbo_rcm_patch.shapes.grammar import fill_open, is_held_out, parse_caption
from turbo_rcm_patch.shapes.render import render


def test_captions_are_held_out_ones_with_one_and_with_two_objects():
    scenes = [parse_caption(caption) for caption in contact_sheet.CAPTIONS]
    assert all(is_held_out(part.colour, part.shape, part.direction) for scene in scenes for part in scene.objects)
    assert {len(scene.objects) for scene in scenes} == {1, 2}
    assert len({part.colour for scene in scenes for part in scene.objects}) == 6


def test_a_row_for_each_video_and_frames_from_first_to_last():
    brightness = torch.linspace(0, 1, 9).reshape(9, 1, 1, 1)
    rising = brightness.expand(9, 3, 24, 32)
    sheet = np.asarray(contact_sheet.contact_sheet(["up", "down"], [rising, rising.flip(0)]))
    height = len(sheet) // 2
    for row, expected in enumerate([[0, 64, 128, 191, 255], [255, 191, 128, 64, 0]]):
        middle = row * height + height // 2 + 10
        columns = [contact_sheet.COLUMN_WIDTH * (i + 0.5) + contact_sheet.GAP * (i + 1) for i in range(5)]
        shown = [sheet[middle, int(column)].tolist() for column in columns]
        assert shown == [[value] * 3 for value in expected]
        assert sheet[row * height : row * height + 20].min() < 128  # the caption


def test_a_noisy_full_sheet_stays_small(tmp_path):
    scenes = [fill_open(parse_caption(caption), random.Random(0)) for caption in contact_sheet.CAPTIONS]
    videos = render(scenes, torch.Generator().manual_seed(0))[:, :, ::4].transpose(1, 2)
    sheet = contact_sheet.contact_sheet(contact_sheet.CAPTIONS, videos + 0.02 * torch.randn_like(videos))
    sheet.save(tmp_path / "sheet.png", optimize=True)
    assert (tmp_path / "sheet.png").stat().st_size < 300 * 1024


def test_the_command_generates_every_caption(tmp_path, capsys):
    output = tmp_path / "sheet.png"
    assert contact_sheet.main(["--output", str(output), "--size", "32", "48", "5", "--steps", "1"]) == 0
    assert str(output) in capsys.readouterr().out
    rows = len(contact_sheet.CAPTIONS)
    with Image.open(output) as sheet:
        pixels = np.asarray(sheet).astype(float)
    assert len(pixels) % rows == 0
    pictures = [row[30:-10, 10:-10] for row in np.split(pixels, rows)]
    assert all(picture.std() > 1 for picture in pictures)
