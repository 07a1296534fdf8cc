"""scripts/benchmarks/first_video.py on the tiny case, and its part of the results page."""

import contextlib
import io
import json

import pytest
import torch

from scripts.benchmarks import end_to_end, first_video
from scripts.tools.pages.ops import first_video_table


@pytest.mark.usefixtures("small_encoder")
def test_each_tier_is_timed_in_a_process_of_its_own_with_the_cache_that_one_process_filled(
    tmp_path, monkeypatch, capsys
):
    """Here the children are calls in this process, because only this one has the small encoder."""
    children, encoders, presets = [], [], []

    def run_child(command, cache):
        children.append((command[command.index("--presets") + 1 :], cache))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert first_video.main(command[2:]) == 0
        return json.loads(printed.getvalue().splitlines()[-1])

    patch_text_encoder, patch = end_to_end.patch_text_encoder, end_to_end.patch
    monkeypatch.setattr(first_video, "run_child", run_child)
    monkeypatch.setattr(end_to_end, "patch_text_encoder", lambda pipe: encoders.append(1) or patch_text_encoder(pipe))
    monkeypatch.setattr(end_to_end, "patch", lambda pipe, config: presets.append(config) or patch(pipe, config))
    path = tmp_path / "first-video.json"
    assert first_video.main(["--config", "tiny", "--json", str(path)]) == 0
    tiers = ["exact", "quantized", "sparse"]
    assert [given for given, _ in children] == [tiers, *([tier] for tier in tiers)]
    assert len({cache for _, cache in children}) == 1
    names = [type(config).__name__.lower() for config in presets]
    assert names == [*tiers, *tiers]
    assert len(encoders) == len(presets)
    figures = json.loads(path.read_text())
    sizes = {"height": 32, "width": 48, "frames": 5}
    assert figures["settings"] == {"config": "tiny", **sizes, "steps": 4, "tokens": 512}
    assert figures["environment"]["torch"] == torch.__version__
    assert list(figures["first_videos"]) == tiers
    for one in figures["first_videos"].values():
        assert one["build"] > 0
        assert one["patch"] > 0
        for video in (one["first"], one["second"]):
            stages = [video["text_encoding"], *video["steps"], video["vae_decode"], video["output"]]
            assert len(video["steps"]) == 4
            assert all(seconds > 0 for seconds in stages)
            assert video["total"] > sum(stages)
    assert first_video_table(figures) in capsys.readouterr().out


@pytest.mark.usefixtures("small_encoder")
def test_both_videos_are_the_same_and_nothing_runs_before_the_first(monkeypatch):
    videos, calls, timed_generation = [], [], first_video.timed_generation

    def timed(pipe, **call):
        assert bool(calls) == bool(videos)
        videos.append(timed_generation(pipe, **call))
        return videos[-1]

    prepared_pipeline = end_to_end.prepared_pipeline

    def prepared(*args):
        pipe = prepared_pipeline(*args)
        for model in (pipe.transformer, pipe.text_encoder):
            model.register_forward_pre_hook(lambda *_: calls.append(1))
        return pipe

    monkeypatch.setattr(first_video, "timed_generation", timed)
    monkeypatch.setattr(end_to_end, "prepared_pipeline", prepared)
    first_video.measure("tiny", "exact")
    first, second = videos
    assert first.frames.shape == (1, 5, 32, 48, 3)
    assert torch.equal(first.latents, second.latents)


def test_other_models_are_refused(capsys):
    with pytest.raises(SystemExit):
        first_video.main(["--config", "tiny-ltx2"])
    assert "for Wan's models; --config is tiny-ltx2" in capsys.readouterr().err


def test_the_page_marks_a_first_video_that_takes_longer_than_wanted():
    def video(text, steps, decode, rest):
        return {"text_encoding": text, "steps": steps, "vae_decode": decode, "total": text + sum(steps) + decode + rest}

    second = video(0.25, [0.25] * 4, 0.5, 0.5)
    tiers = {
        "exact": {"build": 4.0, "patch": 0.5, "first": video(0.75, [1.25, 0.25, 0.25, 0.25], 1.5, 1.0)},
        "sparse": {"build": 4.25, "patch": 1.5, "first": video(0.75, [1.5, 0.25, 0.25, 0.25], 1.5, 1.0)},
    }
    settings = {"config": "tiny", "frames": 5, "height": 32, "width": 48, "steps": 4, "tokens": 512}
    run = {"settings": settings, "first_videos": {tier: {**one, "second": second} for tier, one in tiers.items()}}
    table = first_video_table(run)
    assert "tiny, 5×32×48, 4 steps" in table
    assert "| exact | 4.00 | 0.50 | 5.25 | 2.25 | 3.00 | 0.50 | 1.00 | 1.00 | 0.50 |" in table
    assert "| sparse | 4.25 | 1.50 | 5.50 | 2.25 | 3.25 ✗ | 0.50 | 1.25 | 1.00 | 0.50 |" in table
