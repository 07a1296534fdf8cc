"""The answers and refusals of `turbo-rcm demo`, without its page."""

import os
from dataclasses import replace
from types import SimpleNamespace

import imageio.v3 as iio
import pytest

from tests.cli.running import CAPTION
from tests.tiny_wan import tiny_wan_pipeline
from turbo_rcm_patch.cli import demo_videos
from turbo_rcm_patch.cli.arguments import parse_arguments
from turbo_rcm_patch.cli.demo_videos import EMBEDDED_MODEL, DemoVideos, Request
from turbo_rcm_patch.cli.errors import CommandError

SMALL = Request(CAPTION, EMBEDDED_MODEL, "exact", 1, 3, 16, 32, 5)


@pytest.fixture
def maker(tmp_path):
    return DemoVideos(parse_arguments(["demo", "--device", "cpu"]), tmp_path)


@pytest.fixture
def without_videos(monkeypatch):
    """Answers have notes alone: the model is loaded, and no video made."""
    monkeypatch.setattr("turbo_rcm_patch.cli.demo_videos.compare", lambda *_, **__: None)
    monkeypatch.setattr(DemoVideos, "_written", lambda self, comparison, fps, notes: SimpleNamespace(notes=notes))


def test_an_answer_has_both_videos_and_what_they_took(maker):
    answer = maker.answer(SMALL)
    assert iio.imread(answer.unpatched).shape == iio.imread(answer.patched).shape == (5, 16, 32, 3)
    for text in ("unpatched", "patched", "step 1", "VAE decode", "frames: PSNR"):
        assert text in answer.table
    assert "WanTransformer3DModel" in answer.summary
    loaded = maker._loaded[1]
    os.utime(answer.unpatched, (0, 0))
    again = maker.answer(replace(SMALL, steps=2))
    assert "step 2" in again.table
    assert again.unpatched != answer.unpatched
    assert not answer.unpatched.exists()  # which was old
    assert answer.patched.exists()
    assert maker._loaded[1] is loaded


def test_videos_play_at_the_rate_of_their_model(tmp_path):
    tiny_wan_pipeline("ti2v").save_pretrained(tmp_path / "ti2v")
    model = str(tmp_path / "ti2v")
    maker = DemoVideos(parse_arguments(["demo", "--device", "cpu", "--model", model]), tmp_path)
    for name, fps in ((EMBEDDED_MODEL, 16), (model, 24)):
        answer = maker.answer(replace(SMALL, model=name))
        assert iio.immeta(answer.unpatched)["fps"] == iio.immeta(answer.patched)["fps"] == fps


@pytest.mark.usefixtures("without_videos")
def test_what_a_command_says_is_in_the_answer(maker):
    """Every answer has the notes, although the model is loaded only for the first request."""
    for caption, size in ((CAPTION, 16), ("a red fox leaps", 16), ("a red fox leaps", 32)):
        of_size, *of_prompt = maker.answer(replace(SMALL, prompt=caption, height=size)).notes
        assert f"at {size}x32 and 5 frames shapes and motion get worse" in of_size
        assert [note.partition(";")[0] for note in of_prompt] == (
            []
            if caption == CAPTION
            else [f"the embedded model has learned captions of moving shapes only, unlike {caption!r}"]
        )


@pytest.mark.usefixtures("without_videos")
def test_how_a_model_is_sampled_is_in_the_answer(tmp_path, saved_models, monkeypatch):
    """Empty fields stand for the model's own values, whatever the request before had."""
    calls = []
    monkeypatch.setattr(demo_videos, "compare", lambda pipe, call, **_: calls.append(call))
    model = str(saved_models / "t2v")
    maker = DemoVideos(parse_arguments(["demo", "--device", "cpu", "--model", model]), tmp_path)
    asked = replace(SMALL, prompt="a fox", model=model)
    for guidance, negative in ((None, ""), (2.0, "blurred")):
        (own,) = maker.answer(replace(asked, steps=1, guidance=guidance, negative_prompt=negative)).notes
        assert "sampled by its own UniPCMultistepScheduler, by default in 50 steps with guidance 5" in own
        assert "If it is distilled, give recipe: rcm," in own
        assert calls[-1]["guidance_scale"] == (guidance or 5.0)
        assert calls[-1].get("negative_prompt") == (negative or None)
    for steps in (6, 4):
        (recipe,) = maker.answer(replace(asked, recipe="lightning", steps=steps)).notes
        assert f"lightning (as asked for): {steps} steps" in recipe
    (recipe,) = maker.answer(replace(asked, recipe="fastwan", steps=None)).notes
    assert "fastwan (as asked for): 3 steps (lcm) at timesteps 1000, 757, 522" in recipe
    assert (calls[-1]["num_inference_steps"], calls[-1]["guidance_scale"]) == (3, 1.0)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "ask for fewer or smaller frames, or start the page with --offload on a GPU"),
        (ValueError("--frames 5 and --lora-2 x"), "^frames 5 and --lora-2 x"),  # which is none of its fields
    ],
)
def test_errors_speak_of_what_the_page_has(maker, monkeypatch, error, message):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("turbo_rcm_patch.cli.demo_videos.compare", fail)
    with pytest.raises(CommandError, match=message) as raised:
        maker.answer(SMALL)
    assert "--frames" not in str(raised.value)


@pytest.mark.usefixtures("without_videos")
def test_the_sparse_tier_has_weights_of_its_own(maker):
    for preset, has_projections in (("exact", False), ("sparse", True)):
        maker.answer(replace(SMALL, preset=preset))
        assert hasattr(maker._loaded[1].transformer.blocks[0].attn1, "proj_l") == has_projections


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": " "}, "There is no prompt"),
        ({"prompt": "a" * 1001}, "The prompt has 1001 characters; give at most 1000"),
        ({"model": "/etc"}, "The model '/etc' is none that this page was started with"),
        ({"lora": "/etc/passwd"}, "The LoRA '/etc/passwd' is none that this page was started with"),
        ({"preset": "quick"}, "preset: preset 'quick' is unknown"),
        ({"height": 33}, "height 33 is not divisible by 16; try 32."),
        ({"frames": 6}, "frames 6 is not 4k\\+1; try 5"),
        ({"steps": 9}, "steps 9: the sampler takes 1 to 4 steps"),
        ({"seed": -1}, "seed -1 is out of range"),
        ({"guidance": 3.0}, "guidance goes with model"),
        ({"negative_prompt": "blurred"}, "negative prompt goes with model"),
        ({"recipe": "fastwan"}, "lora and recipe go with model; the embedded model is sampled as rCM"),
        ({"height": 160, "width": 224, "frames": 21}, ": 752640 pixels in all, and this page makes at most 609280"),
    ],
)
def test_what_cannot_be_made_is_a_sentence_before_anything_is_loaded(maker, change, message):
    with pytest.raises(CommandError, match=f"^{message}" if "pixels" not in message else message):
        maker.answer(replace(SMALL, **change))
    assert maker._loaded is None


def test_it_offers_what_it_was_started_with(tmp_path, saved_models):
    (tmp_path / "x.safetensors").touch()
    lora, model = f"{tmp_path}/x.safetensors", str(saved_models / "t2v")
    loras = ["--lora", f"{lora}:0.5", "--lora", lora]
    given = ["demo", "--device", "cpu", "--model", model, *loras, "--max-pixels", "9"]
    maker = DemoVideos(parse_arguments(given), tmp_path)
    assert maker.models == [model, EMBEDDED_MODEL]
    assert maker.loras == {f"{lora}:0.5": (lora, 0.5), f"{lora}:1": (lora, 1.0)}
    with pytest.raises(CommandError, match="at most 9;"):
        maker.answer(SMALL)
