"""Take the README's picture of the page of `turbo-rcm demo`, after it has made one video of the tiny model.

python scripts/tools/page_picture.py                             # docs/page.png
python scripts/tools/page_picture.py --width 390 --output x.png  # as on a phone

Needs Chromium, and the packages of the extras `demo` and `test`.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from turbo_rcm_patch.cli.arguments import parse_arguments
from turbo_rcm_patch.cli.demo_page import open_page

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
OPTIONS += ("--disable-component-update", "--disable-sync")
COLOURS = 64  # of the picture, so that it stays small
PROMPT = "a large red circle moves up slowly while a small blue square moves left, on white"
BOTH_SHOWN = "[...document.querySelectorAll('video[src]')].filter(video => video.readyState > 1).length == 2"
AT_ONE_FRAME = "document.querySelectorAll('video').forEach(video => { video.pause(); video.currentTime = 0.5; })"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/page.png")
    parser.add_argument("--width", type=int, default=1100, help="pixels of the window (default 1100)")
    options = parser.parse_args(argv)
    if CHROMIUM is None:
        parser.error("there is no Chromium here; install it, for example by apt-get install chromium.")
    from playwright.sync_api import sync_playwright

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as player:
        served = open_page(parse_arguments(["demo", "--port", port]), Path(folder))
        browser = player.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        page = browser.new_page(viewport={"width": options.width, "height": 900})
        page.goto(served.local_url)
        page.get_by_label("Prompt", exact=True).fill(PROMPT)
        page.get_by_role("button", name="Generate").click()
        take(page, options.output)
        browser.close()
        served.close()
    print(f"wrote {options.output}: {options.output.stat().st_size / 1024:.0f} KiB")
    return 0


def take(page: Page, output: Path) -> None:
    """Wait for both videos, and write a picture of the whole page."""
    page.wait_for_function(BOTH_SHOWN, timeout=600_000)
    page.evaluate(AT_ONE_FRAME)
    page.mouse.move(0, 0)
    page.wait_for_timeout(1000)
    page.screenshot(path=output, full_page=True)
    Image.open(output).quantize(COLOURS).save(output, optimize=True)


if __name__ == "__main__":
    raise SystemExit(main())
