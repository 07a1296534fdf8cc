"""The README's text: its length, its links, and that its code runs."""

import json
import re
from functools import partial
from pathlib import Path

import diffusers
import imageio.v3 as iio
import pytest
import torch
from diffusers import WanPipeline
from PIL import Image

import turbo_rcm_patch as trp
from scripts.tools.pages.cards import DIFFUSERS
from tests import lora_files
from tests.tiny_ltx2 import tiny_ltx2_pipeline
from tests.tiny_wan import tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch.memory.components import components_of
from turbo_rcm_patch.memory.empty_models import empty_models
from turbo_rcm_patch.memory.needs import VIDEOS, models_by_preset, needs
from turbo_rcm_patch.memory.plan import budget_of, plan_for
from turbo_rcm_patch.memory.stages import denoising_bytes
from turbo_rcm_patch.patching.families import family_of
from turbo_rcm_patch.patching.families.vae.chunks import decoding_bytes, unpatched_decoding_bytes
from turbo_rcm_patch.patching.summary import current_plan

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
CODE = (ROOT / "docs/code.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_it_is_read_in_three_minutes():
    assert len(README.splitlines()) <= 150


def test_the_first_screen_has_a_small_chart_and_a_short_animation():
    first = README.split("## Install")[0]
    chart, animation = re.findall(r"!\[.*\]\((.*)\)", first)
    with Image.open(ROOT / chart) as image:
        assert image.width <= 700
        assert image.height <= 500
    assert (ROOT / animation).stat().st_size <= 2e6
    with Image.open(ROOT / animation) as image:
        assert image.n_frames > 1
    assert "tiny model" in first


def test_the_demo_is_named():
    assert "`python examples/demo.py`" in CODE


def test_headings_that_other_files_name_are_there():
    text = (ROOT / "pyproject.toml").read_text().replace("\n# ", " ")
    named = re.findall(r'see "([^"]+)" in the README', text)
    assert named
    assert [heading for heading in named if f"\n## {heading}\n" not in README] == []


def test_the_memory_is_what_is_planned():
    words, steps = " ".join((ROOT / "docs/memory.md").read_text().split()), {}
    for name in ("wan2.1-1.3b", "wan2.2-5b", "wan2.1-14b"):
        ((_, exact),) = models_by_preset(name, preset="exact")
        size = name.split("-")[1].upper()
        weights = {c.name: c.weights for c in components_of(exact.models, exact.config)}
        assert f"{weights['transformer'] / 1e9:.0f} GB for {size}" in words
        assert f"the text encoder, {weights['text_encoder'] / 1e9:.0f} GB" in words
        if size == "14B":
            assert f"loading 14B in bf16 first takes {sum(weights.values()) / 1e9:.0f} GB" in README
        steps[size] = [max(denoising_bytes("transformer", exact, video)) for video in VIDEOS]
    (need,) = needs(models_by_preset("wan2.1-1.3b", preset="exact"), VIDEOS[:1])
    assert f"take {need.resident / 1e9:.0f} GB of the card (calculated)" in README
    at_480p, at_720p = steps["1.3B"][0], steps["14B"][1]
    assert f"about {at_480p / 1e9:.0f} GB for 1.3B at 480p and {at_720p / 1e9:.0f} GB for 14B at 720p" in words


def test_what_a_vae_that_is_not_patched_takes_more():
    words, vae = " ".join((ROOT / "docs/memory.md").read_text().split()), empty_models("wan2.1-14b")["vae"]
    more = [unpatched_decoding_bytes(vae, *video) - decoding_bytes(vae, *video) for video in VIDEOS]
    at_480p, at_720p = (f"{size / 1e9:.1f} GB more" for size in more)
    assert f"81 frames take {at_480p} at 480p and {at_720p} at 720p" in words


def test_diffusers_own_offloading_is_slower_or_does_not_fit():
    runs = json.loads((ROOT / "results/nvidia-h200.json").read_text())["runs"]
    rivals = [name for name in runs if name.endswith(DIFFUSERS)]
    assert len(rivals) == 6
    for name in rivals:
        ours = {row["card"]: row["seconds"] for row in runs[name.removesuffix(DIFFUSERS)]["cards"]}
        assert all(row["seconds"] is None or row["seconds"] > ours[row["card"]] for row in runs[name]["cards"])


NAMES = {
    "text_encoder": "the text encoder",
    "transformer": "the transformer",
    "transformer_2": "the second transformer",
}


@pytest.mark.parametrize(
    ("name", "title"),
    [("1.3b", "2.1 1.3B"), ("5b", "2.2 TI2V-5B"), ("14b", "2.1 14B"), ("a14b", "2.2 A14B")],
)
def test_what_streams_on_24_gb_is_what_is_planned(name, title):
    page = (ROOT / "docs/memory.md").read_text()
    told = []
    for preset in ("exact", "quantized"):
        ((_, patched),) = models_by_preset(f"wan{title[:3]}-{name}", preset=preset)
        placement = plan_for(patched, VIDEOS[0], budget_of("24GB")).placement
        assert placement.decoding is None
        assert not placement.tiles
        named = [NAMES[name] for name in sorted(placement.streaming)]
        verb = "streams" if len(named) == 1 else "stream"
        told.append(f"{' and '.join(named)} {verb}" if named else "all stays on the GPU")
    assert f"| Wan {title} | {told[0]} | {told[1]} |" in page
    told = "With 24 GB all of 1.3B or TI2V-5B stays in 8 bits; for 14B the text encoder streams"
    assert told in " ".join(README.split())


@pytest.fixture
def tiny_videos(monkeypatch, tmp_path):
    """WanPipeline.from_pretrained gives tiny pipelines, whose calls make tiny videos; the LoRA files are there."""
    call = WanPipeline.__call__

    def small(self, *arguments, num_inference_steps=2, **options):
        options |= {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": num_inference_steps}
        return call(self, *arguments, **options)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(WanPipeline, "__call__", small)
    monkeypatch.setattr(WanPipeline, "to", lambda self, device: self)
    monkeypatch.setattr(trp, "fit", partial(trp.fit, device="cpu"))
    monkeypatch.setattr(WanPipeline, "from_pretrained", lambda *arguments, **options: tiny_wan_pipeline("t2v"))
    for name in re.findall(r"\"([\w.]+\.safetensors)\"", README):
        rank = 32 if "causvid" in name else 64
        make = lora_files.lightning if name.startswith(("high", "low")) else lora_files.lightx2v
        make(tiny_wan_pipeline("t2v").transformer, rank).save(tmp_path / name)


@pytest.mark.usefixtures("tiny_videos")
def test_the_first_code_saves_a_video(tmp_path):
    *_, loaded, patched, saved = BLOCKS[0].splitlines()
    assert all(word in line for word, line in (("pipe =", loaded), ("trp.patch", patched), ("fox.mp4", saved)))
    names = {}
    exec(BLOCKS[0], names)
    assert iio.imread(tmp_path / "fox.mp4").shape == (5, 32, 32, 3)
    names["patch"].restore()


@pytest.mark.usefixtures("tiny_videos")
@pytest.mark.parametrize("block", BLOCKS[1:])
def test_code_runs_after_the_first(block):
    names = {"diffusers": diffusers, "torch": torch, "trp": trp, "pipe": tiny_wan_pipeline("t2v")}
    exec(block, names)
    video = names["video"] if "video" in names else names["pipe"]("a fox").frames[0]
    assert len(video) == 5


ROWS = [row for row in README.splitlines() if "`trp.use_" in row and row.startswith("|")]


@pytest.mark.usefixtures("tiny_videos")
@pytest.mark.parametrize("row", ROWS)
def test_every_line_of_the_table_of_checkpoints_runs(row):
    *_, steps, _ = (cell.strip() for cell in row.split("|"))
    lines = re.findall(r"`(trp\.use_[^`]*)`", row)
    counts = [re.findall(r"\d+", part)[-1] for part in steps.split(",")]
    for line, count in zip(lines, counts * len(lines) if len(counts) == 1 else counts, strict=False):
        variant = next((variant for word, variant in (("high", "wan22"), ("i2v", "i2v")) if word in line), "t2v")
        pipe = tiny_ltx2_pipeline() if "turbot2av" in line else tiny_wan_pipeline(variant)
        with eval(line, {"trp": trp, "pipe": pipe}) as handle:
            pipe.scheduler.set_timesteps(int(count))
            assert pipe.scheduler is handle.scheduler
            with pytest.raises(ValueError, match="num_inference_steps=30"):
                pipe.scheduler.set_timesteps(30)


def test_the_table_names_every_kind_of_checkpoint():
    assert len(ROWS) == 6
    for name in ("rCM", "TurboWan", "FastWan", "lightx2v", "Lightning", "CausVid", "TurboT2AV"):
        assert any(name in row for row in ROWS)


def _steps_of_the_walk(tier):
    """Return the sub-layer and the steps that the page on the code names for a tier."""
    (row,) = re.findall(rf"^\| {tier} \| `(\w+)` \| (.*) \| `\w+/` \|$", CODE, re.MULTILINE)
    return row[0], re.findall(r"`(_?[a-z]\w+)`", row[1])


def _function_of(run):
    while not hasattr(run, "__name__"):
        run = run.args[0] if run.func.__name__ == "_as_quantized" else run.func
    return run.__name__


@pytest.mark.parametrize("tier", trp.PRESETS)
def test_the_walk_names_the_steps_of_every_tier(tier):
    model = tiny_wan_transformer(dtype=torch.bfloat16).requires_grad_(False)
    options = {"min_tokens": 0} if tier == "block_sparse" else {}
    if tier == "sparse":
        for block in model.blocks:
            block.attn1.proj_l = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    trp.patch(model, type(trp.PRESETS[tier])(implementation="triton", **options))
    (blocks,) = family_of(model).blocks
    sub_layer = current_plan(model, blocks, model.blocks[0], model.device).self_attention
    ran = dict.fromkeys(_function_of(step.run) for _, steps in sub_layer.rows() for step in steps)
    named_layer, named = _steps_of_the_walk(tier)
    if tier == "sparse":  # the walk says how it differs from the exact tier
        assert named == ["_qkv", "_linear_skip", "attend"]
        named = [name.replace("_attention", "attend") for name in _steps_of_the_walk("exact")[1]]
    if tier == "block_sparse":
        assert named == ["_attend"]
        named = [name.replace("_attention", "_attend") for name in _steps_of_the_walk("quantized")[1]]
    assert (type(sub_layer).__name__, list(ran)) == (named_layer, named)
