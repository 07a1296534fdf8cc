"""scripts/tools/page_picture.py: the page with two videos, as wide as asked for."""

import numpy as np
import pytest
from PIL import Image

from scripts.tools import page_picture
from turbo_rcm_patch.cli.demo_videos import Answer, DemoVideos
from turbo_rcm_patch.cli.files import write_video

RED, BLUE = (230, 20, 20), (20, 20, 230)


def two_videos(maker, request):
    """An answer with a red and a blue video."""
    files = [maker._folder / f"1-{name}.mp4" for name in ("unpatched", "patched")]
    for file, colour in zip(files, (RED, BLUE), strict=True):
        write_video(file, [np.full((17, 32, 48, 3), colour, np.uint8)], 16)
    return Answer(*files, "times", f"of {request.prompt}", ())


@pytest.mark.skipif(page_picture.CHROMIUM is None, reason="needs Chromium")
def test_both_videos_are_in_the_picture(tmp_path, monkeypatch):
    pytest.importorskip("playwright.sync_api")
    pytest.importorskip("gradio")
    for name in ("GRADIO_ANALYTICS_ENABLED", "GRADIO_TEMP_DIR"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(DemoVideos, "answer", two_videos)
    assert page_picture.main(["--output", str(tmp_path / "page.png"), "--width", "390"]) == 0
    picture = np.asarray(Image.open(tmp_path / "page.png").convert("RGB")).astype(int)
    assert picture.shape[1] == 390
    tops = [np.flatnonzero((abs(picture - colour) < 40).all(2).sum(1) > 200)[0] for colour in (RED, BLUE)]
    assert tops[0] < tops[1]  # on a phone one is below the other
