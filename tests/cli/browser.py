"""Chromium, in which tests open the page of `turbo-rcm demo`, and pictures of that page."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
OPTIONS += ("--disable-component-update", "--disable-sync")
COLOURS = 64  # of a picture, so that it stays small
BOTH_SHOWN = "[...document.querySelectorAll('video[src]')].filter(video => video.readyState > 1).length == 2"
AT_ONE_FRAME = "document.querySelectorAll('video').forEach(video => { video.pause(); video.currentTime = 0.5; })"
AT_REST = "[...document.querySelectorAll('video')].every(video => !video.seeking)"
BOXES = """
[...document.querySelectorAll('video[src]')].map(video => video.getBoundingClientRect())
    .map(box => [box.left, box.top + scrollY, box.right, box.bottom + scrollY])
"""


def take(page: Page, output: Path, width: int) -> list[tuple[float, ...]]:
    """Wait for both videos, write a picture of the whole page, and return the videos' places in it.

    width: pixels of the window. A place is left, top, right and bottom.
    """
    page.set_viewport_size({"width": width, "height": 900})
    page.wait_for_function(BOTH_SHOWN, timeout=600_000)
    page.evaluate(AT_ONE_FRAME)
    page.mouse.move(0, 0)
    page.wait_for_function(AT_REST)
    page.screenshot(path=output, full_page=True)
    Image.open(output).quantize(COLOURS).save(output, optimize=True)
    return page.evaluate(BOXES)
