"""The page of `turbo-rcm demo` in headless Chromium, and what its server refuses.

This also writes the docs' picture of the page, after a video of the usual size, which takes a minute:

    PAGE_PICTURE=results/page.png pytest tests/cli/test_demo_page.py -k picture
"""

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from tests.cli.browser import CHROMIUM, OPTIONS, take
from turbo_rcm_patch.cli import demo_page as page_of_demo
from turbo_rcm_patch.cli.arguments import parse_arguments
from turbo_rcm_patch.cli.command_checks import check_arguments
from turbo_rcm_patch.cli.demo_videos import EMBEDDED_MODEL, Answer, DemoVideos
from turbo_rcm_patch.cli.files import write_video
from turbo_rcm_patch.shapes.grammar import EXAMPLES

ROOT = Path(__file__).resolve().parents[2]
PICTURE = os.environ.get("PAGE_PICTURE")

pytestmark = pytest.mark.skipif(importlib.util.find_spec("gradio") is None, reason="needs gradio")


def options_of(*more, host="127.0.0.1"):
    """Return the options of `demo` on the CPU, with a free port."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        port = free.getsockname()[1]
    return ["demo", "--port", str(port), "--device", "cpu", *more], port


@contextlib.contextmanager
def opened(arguments, folder):
    """The page, served by this process. Opening it sets two environment variables, which are set back afterwards."""
    with pytest.MonkeyPatch.context() as environment:
        for name in ("GRADIO_ANALYTICS_ENABLED", "GRADIO_TEMP_DIR"):
            environment.setenv(name, "")
        options = parse_arguments(arguments)
        check_arguments(options)
        page = page_of_demo.open_page(options, folder)
        try:
            yield page
        finally:
            page.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The page's address."""
    arguments, port = options_of()
    with opened(arguments, tmp_path_factory.mktemp("videos")):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def page(server):
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as player, tempfile.TemporaryDirectory() as profile:
        browser = player.chromium.launch_persistent_context(profile, executable_path=CHROMIUM, args=OPTIONS)
        yield browser.new_page()
        browser.close()


WATCH_PROGRESS = """
window.seen = [];
const shown = ".progress-text, .progress-level-inner";
new MutationObserver(() => document.querySelectorAll(shown).forEach(e => window.seen.push(e.innerText)))
    .observe(document.body, {subtree: true, childList: true, characterData: true});
"""
PLAYING = "[...document.querySelectorAll('video[src]')].filter(v => v.videoWidth == 48 && v.loop && !v.paused).length"


APART = """
() => {
    const [one, other] = [...document.querySelectorAll("video[src]")];
    const apart = Math.abs(one.currentTime - other.currentTime);
    return Math.min(apart, one.duration - apart);
}
"""


CUT_OFF = """
() => [...document.querySelectorAll("video, input, pre")]
    .filter(part => part.scrollWidth > part.clientWidth + 1 || part.getBoundingClientRect().right > innerWidth)
    .map(part => part.previousElementSibling?.innerText || part.tagName + " " + part.ariaLabel)
"""


def ask(page, height=16):
    for label, size in (("Height", height), ("Width", 48), ("Frames", 5)):
        page.get_by_label(label, exact=True).fill(str(size))
    page.get_by_role("button", name="Generate").click()


def late(seconds):
    """Return a handler that lets a request wait."""

    def load(route):
        time.sleep(seconds)
        route.continue_()

    return load


STAGES = {name: [(stage, 1.0) for stage in ("text encoding", "4 steps", "VAE decode", "output")] for name in "ab"}
RED, BLUE = (230, 20, 20), (20, 20, 230)


def two_long_videos(maker, request):
    """An answer with a red and a blue video of two seconds."""
    files = [maker._folder / f"1-{name}.mp4" for name in ("unpatched", "patched")]
    for file, colour in zip(files, (RED, BLUE), strict=True):
        write_video(file, [np.full((33, 32, 48, 3), colour, np.uint8)], 16)
    return Answer(*files, "times", "summary " * 12, (), "alike", STAGES)


def test_two_visitors(page, server, monkeypatch):
    other, asked = page.context.new_page(), []
    for visitor in (page, other):
        visitor.on("request", lambda request: asked.append(request.url))
        visitor.route("**/gradio_api/run/**", late(0.5))  # the answer that fills the form
        visitor.goto(server)
    page.evaluate(WATCH_PROGRESS)
    ask(page)
    ask(other)  # waits for its turn
    for visitor in (page, other):
        visitor.bring_to_front()  # a hidden tab does not play
        visitor.wait_for_function(f"{PLAYING} == 2", timeout=200_000)
        shown = visitor.inner_text("body")
        assert "No GPU here." in shown
        assert "frames agree to" in shown  # the headline
        assert "WanTransformer3DModel" not in shown
        for title in ("Times and difference", "What is patched"):
            visitor.get_by_text(title).click()
        shown = visitor.inner_text("body")
        for text in ("VAE decode", "without a GPU", "frames: PSNR", "WanTransformer3DModel, 6 blocks"):
            assert text in shown
    seen = page.evaluate("window.seen")
    for name in ("unpatched", "patched"):  # a step this small may pass unseen
        assert re.search(rf"^{name} 1/1 - ", "\n".join(seen), re.MULTILINE)

    ask(other, height=33)
    refusal = other.get_by_role("alert").get_by_text("height 33 is not divisible by 16; try 32.")
    refusal.wait_for(timeout=200_000)
    other.get_by_text(EXAMPLES[1]).click()
    other.wait_for_function(f"document.querySelector('textarea').value == '{EXAMPLES[1]}'")

    for label in FEW_STEP_FIELDS:  # which the tiny model does not take
        assert other.get_by_label(label, exact=True).is_disabled()

    other.route("**/*-patched.mp4", late(0.5))
    with monkeypatch.context() as answers:
        answers.setattr(DemoVideos, "answer", two_long_videos)
        ask(other)
        other.wait_for_function("document.querySelector('video[src]')?.duration > 2", timeout=200_000)
        other.wait_for_timeout(1000)
    assert other.evaluate(APART) < 0.1  # of 2 s

    assert not refusal.is_visible()
    for title in ("Times and difference", "What is patched"):
        other.get_by_text(title).click()
    assert other.evaluate(CUT_OFF) == []
    other.set_viewport_size({"width": 390, "height": 844})
    assert other.evaluate(CUT_OFF) == ["What is patched"]  # a table to scroll: the page itself is not wider
    assert other.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert all(url.startswith((server, "blob:", "data:")) for url in asked)


def coloured_share(path, place):
    """The share of a picture's pixels within a place that are far from grey."""
    left, top, right, bottom = map(int, place)
    colours = np.asarray(Image.open(path).convert("RGB")).astype(int)[top:bottom, left:right]
    return (np.ptp(colours, axis=2) > 100).mean()


def test_a_picture_of_the_page_shows_both_videos(page, server, monkeypatch, tmp_path):
    if PICTURE is None:
        monkeypatch.setattr(DemoVideos, "answer", two_long_videos)
    wide, phone = Path(PICTURE or tmp_path / "wide.png"), tmp_path / "phone.png"
    page.goto(server)
    page.get_by_label("Prompt", exact=True).fill(EXAMPLES[-1])  # a red and a blue shape
    page.get_by_role("button", name="Generate").click()
    places = {wide: take(page, wide, 1100), phone: take(page, phone, 390)}
    for path, both in places.items():
        assert all(coloured_share(path, place) > 0.05 for place in both)
    assert places[wide][0][1] == places[wide][1][1]  # side by side
    assert places[phone][0][3] < places[phone][1][1]  # one below the other


@pytest.mark.parametrize(("label", "value"), [("Frames", 0), ("Seed", -1), ("Height", 0), ("Steps", 9)])
def test_a_number_out_of_range_is_a_sentence_with_its_field(tmp_path, capsys, caplog, label, value):
    """The form lets every number through, so that no field of Gradio's refuses it without a name."""
    maker = DemoVideos(parse_arguments(["demo", "--device", "cpu"]), tmp_path)
    page = page_of_demo.build_page(maker)
    (field,) = (block for block in page.blocks.values() if getattr(block, "label", "") == label)
    labels = ("Prompt", "Model", "Tier", "Steps", "Seed", "Height", "Width", "Frames")
    values = dict(zip(labels, ["a fox", EMBEDDED_MODEL, "exact", 4, 0, 160, 224, 17], strict=True))
    values[label] = field.preprocess(value)
    headline, *others = page_of_demo._answer(maker, [*values.values(), "automatic", "none", None, ""])
    assert re.search(f'role="alert".*>{label.lower()} {value}[ :]', headline)
    assert others == [None, None, ""]
    assert caplog.records == []


def test_only_what_goes_with_a_model_can_be_chosen(tmp_path):
    maker = DemoVideos(parse_arguments(["demo", "--device", "cpu", "--model", "a/b"]), tmp_path)
    page = page_of_demo.build_page(maker)
    (recipes,) = (block.choices for block in page.blocks.values() if getattr(block, "label", "") == "Recipe")
    assert ("rcm", "rcm") in recipes
    assert not [name for name, _ in recipes if "i2v" in name or "flf2v" in name]  # the page takes no image
    fields = [block.label for block in page.blocks.values() if getattr(block, "label", "") in FEW_STEP_FIELDS]
    for model in (EMBEDDED_MODEL, "a/b"):
        *_, guidance, negative, recipe, lora = page_of_demo._of_model(model)
        takes = [field["interactive"] for field in (guidance, negative, recipe, lora)]
        assert takes == [model != EMBEDDED_MODEL] * len(fields)


FEW_STEP_FIELDS = ("Guidance", "Negative prompt", "Recipe", "LoRA")


def test_an_answer_begins_with_what_matters(tmp_path):
    answer = Answer(Path("a"), Path("b"), "times", "blocks", ("a <b>", "c"), "1.2× as fast", STAGES)
    maker = SimpleNamespace(answer=lambda request: answer)
    headline, *videos, details = page_of_demo._answer(
        maker, ["a fox", EMBEDDED_MODEL, "exact", 4, 0, 160, 224, 17, "automatic", "none", None, ""]
    )
    assert headline.index("1.2× as fast") < headline.index("a &lt;b&gt;") < headline.index("c</p>")
    assert videos == ["a", "b"]
    assert details.index("VAE decode") < details.index("times") < details.index("blocks")
    assert details.count("<details>") == 2


def status_of(request):
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_it_reads_no_other_file_and_takes_none(server):
    for path in ("/etc/passwd", str(ROOT / "README.md"), "README.md"):
        assert status_of(f"{server}/gradio_api/file={path}") == 403
    body = b'--b\r\nContent-Disposition: form-data; name="files"; filename="x"\r\n\r\nsome text\r\n--b--\r\n'
    upload = urllib.request.Request(f"{server}/gradio_api/upload", body)
    upload.add_header("Content-Type", "multipart/form-data; boundary=b")
    assert status_of(upload) == 413


def test_only_this_machine_can_ask(server):
    port = int(server.rpartition(":")[2])
    addresses = {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in addresses - {"127.0.0.1"}:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((address, port), timeout=5)
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if line.split()[3] == "0A"]
    assert f"0100007F:{port:04X}" in listening
    assert f"00000000:{port:04X}" not in listening


def test_an_address_of_ipv6_is_served(tmp_path):
    try:
        arguments, port = options_of("--host", "[::1]", host="::1")
    except OSError:
        pytest.skip("needs IPv6")
    with opened(arguments, tmp_path) as page:
        assert page.local_url == f"http://[::1]:{port}/"
        assert status_of(page.local_url) == 200


class Ended(Exception):
    """os._exit was called, with this status."""


def end(status):
    raise Ended(status)


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """A function that serves the page until a signal, half a second after `serve` begins to wait; the exit status.

    before: called in between. The videos must be gone then, and the port free.
    """
    gradio = importlib.import_module("gradio")
    block_thread = gradio.Blocks.block_thread
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(page_of_demo.os, "_exit", end)  # which would end pytest
    for name in ("GRADIO_ANALYTICS_ENABLED", "GRADIO_TEMP_DIR"):
        monkeypatch.setenv(name, "")
    arguments, port = options_of()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it

    def serve(number, before=lambda address: None):
        def interrupted(page):
            (folder,) = tmp_path.iterdir()
            (folder / "1-patched.mp4").touch()
            before(f"http://127.0.0.1:{port}")
            threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
            block_thread(page)

        monkeypatch.setattr(gradio.Blocks, "block_thread", interrupted)
        with pytest.raises(Ended) as error:
            page_of_demo.serve(parse_arguments(arguments))
        assert list(tmp_path.iterdir()) == []
        with socket.socket() as closed:
            assert closed.connect_ex(("127.0.0.1", port)) != 0
        (status,) = error.value.args
        return status, f"open http://127.0.0.1:{port}/ in a browser; end with Ctrl-C\n"

    yield serve
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_it_ends_by_ctrl_c_and_leaves_nothing_behind(ended, capsys):
    status, first_line = ended(signal.SIGINT)
    assert status == 0
    assert capsys.readouterr().out.startswith(first_line)


def start_a_request(address):
    """Have a video made, and return when it was begun."""
    values = ["a red circle moves right", EMBEDDED_MODEL, "exact", 4, 0, 160, 224, 17, "automatic", "none", None, ""]
    body = json.dumps({"data": values, "fn_index": 0, "session_hash": "visitor"}).encode()
    asked = urllib.request.Request(f"{address}/gradio_api/queue/join", body, {"Content-Type": "application/json"})
    assert status_of(asked) == 200
    with urllib.request.urlopen(f"{address}/gradio_api/queue/data?session_hash=visitor", timeout=60) as events:
        assert any(b"process_starts" in line for line in events)


def test_it_ends_while_a_video_is_made(ended, monkeypatch, capsys):
    """SIGTERM comes while a thread of the page makes a video."""
    made = threading.Event()
    monkeypatch.setattr(DemoVideos, "answer", lambda maker, request: made.wait(60))
    monkeypatch.setenv("GRADIO_SHARE", "True")
    status, first_line = ended(signal.SIGTERM, start_a_request)
    made.set()
    assert status == 128 + signal.SIGTERM
    printed = capsys.readouterr().out
    assert printed.startswith(first_line)
    assert "http" not in printed.removeprefix(first_line)  # no link for others
