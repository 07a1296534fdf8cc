"""The page of `turbo-rcm demo`, in Gradio: a form, two videos, a table. It is served to this machine alone by default.

The page loads nothing from elsewhere and reports nothing. It reads only the files that it was started with.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ..config import PRESETS
from ..embedded import FRAMES, HEIGHT, WIDTH
from ..recipes import recipes_for
from ..shapes.grammar import EXAMPLES
from .arguments import OWN_SAMPLER
from .demo_answer import as_bars, as_error, as_headline, folded
from .demo_videos import EMBEDDED_MODEL, LONGEST_PROMPT, DemoVideos, Request
from .errors import CommandError

if TYPE_CHECKING:
    import gradio

logger = logging.getLogger(__name__)

WAITING = 8  # requests in the queue; more are told to come back
NONE = "none"  # in the list of LoRAs
AUTOMATIC = "automatic"  # in the list of recipes: recognised by the model's name and files
# Each video starts when it has been loaded; side by side they are compared, so both start again when both have been.
PLAY_TOGETHER = """
async () => {
    const videos = [...document.querySelectorAll("video")];
    const isLoaded = video => video.readyState >= HTMLMediaElement.HAVE_ENOUGH_DATA
        || new Promise((done, failed) => {
            video.addEventListener("canplaythrough", done, {once: true});
            video.addEventListener("error", failed, {once: true});
        });
    await Promise.all(videos.map(isLoaded));
    videos.forEach(video => { video.currentTime = 0; video.play(); });
}
"""
# The browser loads nothing from elsewhere, whatever Gradio's page names.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; media-src 'self' blob:; font-src 'self' data:; worker-src 'self' blob:"
)


def serve(arguments: argparse.Namespace) -> NoReturn:
    """Serve the page until the process is interrupted or terminated, then remove the videos and exit.

    Raises CommandError if the address cannot be used.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        page = open_page(arguments, Path(folder))
        print(f"open {page.local_url} in a browser; end with Ctrl-C", flush=True)
        try:
            page.block_thread()
        except SystemExit as terminated:
            code = terminated.code
        finally:
            page.close()
    sys.stdout.flush()
    os._exit(code)  # else Python aborts when a thread still makes a video


def open_page(arguments: argparse.Namespace, folder: Path) -> gradio.Blocks:
    """Start serving, and return. folder: for the videos.

    Raises CommandError if the address cannot be used.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # Gradio reads these two when it is imported
    os.environ["GRADIO_TEMP_DIR"] = str(folder)
    import gradio
    from starlette.middleware import Middleware

    host = arguments.host.strip("[]")  # IPv6 addresses stand in brackets in a URL
    page = build_page(DemoVideos(arguments, folder))
    page.queue(max_size=WAITING, default_concurrency_limit=1)
    try:
        page.launch(
            server_name=f"[{host}]" if ":" in host else host,
            server_port=arguments.port,
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            ssr_mode=False,
            max_file_size=1,  # byte: there is nothing to upload
            footer_links=[],
            theme=gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"]),
            app_kwargs={"middleware": [Middleware(_Policy)]},
        )
    except OSError as error:
        raise CommandError(f"--host {arguments.host} --port {arguments.port}: {error}; choose another port.") from error
    return page


def build_page(maker: DemoVideos) -> gradio.Blocks:
    """Return the page: the form, and the videos and tables that it fills."""
    import gradio as gr

    with gr.Blocks(title="turbo-rcm", analytics_enabled=False) as page:
        # Before the form is filled in, Gradio sends 0 for an empty number, so nothing can be asked for until then.
        waits = {"interactive": False}
        gr.Markdown("# turbo-rcm\nThe same video twice: as diffusers makes it, and with the patch.")
        if not maker.has_gpu:
            gr.Markdown(NO_GPU)
        with gr.Row():
            prompt = gr.Textbox(EXAMPLES[0], label="Prompt", max_length=LONGEST_PROMPT, scale=3, min_width=240, **waits)
            model = gr.Dropdown(maker.models, value=maker.models[0], label="Model", scale=2, min_width=240)
            preset = gr.Dropdown(list(PRESETS), value="exact", label="Tier", info=TIER)
        examples = gr.Dataset(components=[prompt], samples=[[text] for text in EXAMPLES], label="Examples")
        with gr.Row():
            steps = gr.Number(None, label="Steps", precision=0, placeholder=OWN, min_width=FITS_OWN)
            seed = gr.Number(0, label="Seed", precision=0)
            sizes = [gr.Number(size, label=label, precision=0) for label, size in _sizes(maker).items()]
        with gr.Row():
            guidance = gr.Number(None, label="Guidance", placeholder=OWN, min_width=FITS_OWN)
            negative = gr.Textbox("", label="Negative prompt", max_length=LONGEST_PROMPT)
            recipes = [AUTOMATIC, OWN_SAMPLER, *recipes_for(sound=False, image=False)]
            recipe = gr.Dropdown(recipes, value=AUTOMATIC, label="Recipe", info=RECIPE)
            lora = gr.Dropdown([NONE, *maker.loras], value=NONE, label="LoRA", info=LORA)
        button = gr.Button("Generate", variant="primary", **waits)
        headline = gr.HTML()
        with gr.Row():
            shown = {"autoplay": True, "loop": True, "interactive": False, "min_width": 280}
            videos = [gr.Video(label=label, **shown) for label in LABELS]
        details = gr.HTML()
        form = [prompt, model, preset, steps, seed, *sizes, recipe, lora, guidance, negative]

        def generate(progress=gr.Progress(track_tqdm=True), *values):  # noqa: B008 (Gradio looks for it there)
            return _answer(maker, values)

        outputs = [headline, *videos, details]
        asked = [button.click, prompt.submit]
        answered = gr.on(asked, generate, form, outputs, api_visibility="private", show_progress_on=videos)
        answered.success(js=PLAY_TOGETHER)
        quietly = {"api_visibility": "private", "queue": False, "show_progress": "hidden"}
        filled_in = [prompt, button, steps, guidance, negative, recipe, lora]
        examples.click(lambda sample: sample[0], examples, prompt, **quietly)
        gr.on([model.input, page.load], _of_model, model, filled_in, **quietly)
    return page


LABELS = ("Unpatched", "Patched")
NO_GPU = "**No GPU here.** PyTorch's operations take the kernels' place, so the times say nothing about the kernels."
TIER = "the arithmetic: exact, 8 bits, or sparse attention"
RECIPE = "how a few-step model was distilled"
LORA = "adapters that the page was started with"
OWN = "the model's own"  # in an empty field
FITS_OWN = 180  # pixels of a field that shows this
REQUIRED = ("Prompt", "Model", "Tier", "", "Seed", "Height", "Width", "Frames")  # the form's first fields; steps not


def _sizes(maker: DemoVideos) -> dict[str, int]:
    """Return the form's defaults: the tiny model's own size, or what a GPU's models are made for."""
    first = maker.models[0] == EMBEDDED_MODEL
    return dict(zip(("Height", "Width", "Frames"), (HEIGHT, WIDTH, FRAMES) if first else (480, 832, 81), strict=True))


def _of_model(model: str) -> list[dict]:
    """Return the fields' values when a model is chosen, after which videos can be asked for.

    The tiny model takes neither guidance, a recipe nor a LoRA."""
    import gradio as gr

    fields = {"interactive": model != EMBEDDED_MODEL}
    values = {"guidance": None, "negative": "", "recipe": AUTOMATIC, "lora": NONE}
    ready = gr.update(interactive=True)
    return [
        ready,
        ready,
        gr.update(value=None),  # steps
        *(gr.update(value=value, **fields) for value in values.values()),
    ]


def _answer(maker: DemoVideos, values: tuple) -> tuple[str, str | None, str | None, str]:
    """Return the headline, the two videos and the details as Gradio shows them.

    A refusal takes the headline's place, and there are no videos.
    """
    *most, recipe, lora, guidance, negative = values
    empty = [label for label, value in zip(REQUIRED, most, strict=True) if label and value is None]
    if empty:
        return as_error(f"{' and '.join(empty)}: fill in a number."), None, None, ""
    chosen = (None if recipe == AUTOMATIC else recipe), (None if lora == NONE else lora)
    request = Request(*most, *chosen, guidance, negative)
    try:
        answer = maker.answer(request)
    except CommandError as error:
        return as_error(str(error)), None, None, ""
    except Exception as error:
        logger.exception("a request failed: %s", request)
        return as_error(f"This failed: {type(error).__name__}. The terminal says more."), None, None, ""
    details = (
        as_bars(answer.stages),
        folded("Times and difference", answer.table, "white-space: pre-wrap; font-size: min(1em, 2.8vw)"),
        folded("What is patched", answer.summary, "overflow-x: auto"),
    )
    headline = as_headline(answer.headline, answer.notes)
    return headline, str(answer.unpatched), str(answer.patched), "".join(details)


class _Policy:
    """Adds POLICY to every answer: ASGI middleware, which does not hold back streams."""

    def __init__(self, app):
        self._app = app

    async def __call__(self, scope, receive, send):
        async def send_with_policy(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"content-security-policy", POLICY.encode())]
            await send(message)

        await self._app(scope, receive, send_with_policy)
