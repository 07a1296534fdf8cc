"""`turbo-rcm evaluate`."""

import contextlib
import json

import pytest
import torch

from tests.cli.running import error_of
from turbo_rcm_patch import cli, embedded
from turbo_rcm_patch.cli import commands, main
from turbo_rcm_patch.cli.arguments import parse_arguments
from turbo_rcm_patch.cli.errors import CommandError
from turbo_rcm_patch.config import PRESETS

EVALUATE = ["evaluate", "--height", "16", "--width", "16", "--frames", "1", "--device", "cpu", "-n", "2"]


def test_evaluate_prints_a_table_and_progress_and_writes_json(tmp_path, capsys):
    output = tmp_path / "evaluation.json"
    options = ["--steps", "1,2", "--dtype", "bfloat16", "--seed", "3", "--json", str(output)]
    assert main([*EVALUATE, "--batch-size", "1", *options]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].startswith("variant")
    assert len(lines) == 1 + 2 * 3
    progress = [line for line in printed.err.splitlines() if line.startswith("turbo-rcm evaluate: ")]
    assert len(progress) == 3 + 2 * 2  # after that it loads, a warning of the size and what is to come
    assert progress[-1] == "turbo-rcm evaluate: 2 steps: 2 of 2 captions in 3 variants"
    result = json.loads(output.read_text())
    assert [(one["variant"], one["steps"]) for one in result["results"][:3]] == [
        *(("unpatched", 1), ("exact", 1), ("unpatched fp32", 1)),
    ]
    expected = {"model": "embedded", "preset": "exact", "dtype": "bfloat16", "n": 2, "steps": [1, 2], "seed": 3}
    expected |= {"batch_size": 1, "height": 16, "width": 16, "num_frames": 1, "guidance_scale": 1.0, "sigma_max": 80.0}
    assert result["settings"] == expected


@pytest.mark.usefixtures("cpu_as_a_gpu", "everything_streams")
def test_evaluate_with_vram_finds_the_same(tmp_path, capsys):
    found, output = [], tmp_path / "evaluation.json"
    without_device = [text for text in EVALUATE if text not in ("--device", "cpu")]
    for vram in ([], ["--vram", "10GB"]):
        options = ["-n", "1", "--steps", "1", "--dtype", "bfloat16", "--preset", "sparse", "--json", str(output), *vram]
        assert main([*without_device, *options]) == 0
        found.append(json.loads(output.read_text())["results"])
    printed = capsys.readouterr().out
    assert printed.count("its blocks stream") >= 2 * 3  # three pipelines of two such models
    assert "decoding, unpatched, 16 at a time" in printed
    assert found[0] == found[1]


@pytest.mark.usefixtures("cpu_as_a_gpu")
def test_evaluate_says_what_does_not_fit_before_it_generates(capsys, monkeypatch):
    monkeypatch.setattr(commands, "evaluate", lambda *args, **options: pytest.fail("it generates"))
    without_device = [text for text in EVALUATE if text not in ("--device", "cpu")]
    assert main([*without_device, "--vram", "610 MB"]) == 2
    assert "--vram 610 MB: 16x16, 1 frames take at least" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.gpu
def test_evaluate_stays_within_vram(tmp_path):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert main(["evaluate", "-n", "16", "--steps", "1", "--preset", "sparse", "--vram", "6GB"]) == 0
    assert torch.cuda.max_memory_allocated() - before <= 5.4e9  # less what CUDA takes


@pytest.mark.parametrize("model", [[], ["--model"]])
def test_evaluate_takes_the_size_of_the_embedded_model(stop_at, saved_models, model):
    evaluate = stop_at("evaluate")
    assert main(["evaluate", "--device", "cpu", *model, *([str(saved_models / "t2v")] if model else [])]) == 2
    size = {"height": embedded.HEIGHT, "width": embedded.WIDTH, "num_frames": embedded.FRAMES}
    (_, call), options = evaluate.call_args
    assert call == {**size, "guidance_scale": 5.0 if model else 1.0}
    assert options | {"n": 256, "steps": (1, 2, 4), "batch_size": 16, "configs": {"exact": PRESETS["exact"]}} == options


def test_evaluate_refuses_an_image_to_video_model_and_a_low_sigma_max(capsys, saved_models):
    message = error_of(capsys, "evaluate", "--model", saved_models / "i2v")
    assert "makes videos from an image; evaluate takes text-to-video models" in message
    assert "--sigma-max 2.0: with 2 steps" in error_of(capsys, *EVALUATE, "--steps", "1,2", "--sigma-max", "2")


def test_evaluate_tells_what_it_does_and_makes_fewer_videos_at_a_time_if_they_are_large(stop_at, capsys):
    """Ctrl-C waits for the running operation, whose time grows with the videos made together."""
    evaluate = stop_at("evaluate")
    for size in (["--height", "480", "--width", "832"], ["--height", "16"], ["--batch-size", "3"]):
        assert main(["evaluate", "--device", "cpu", "-n", "2", *size]) == 2
    assert [options["batch_size"] for _, options in evaluate.call_args_list] == [1, 16, 3]
    _, first, second, *_ = capsys.readouterr().err.splitlines()
    assert "warning: the embedded model has learned videos of 160x224 pixels and 17 frames only; at 480x832" in first
    assert second == "turbo-rcm evaluate: 2 captions in 1, 2 and 4 steps, 1 video at a time"


def test_evaluate_says_something_before_it_imports_anything_large(monkeypatch, capsys):
    @contextlib.contextmanager
    def stop(verbose):
        raise CommandError("stopped")
        yield

    monkeypatch.setattr(cli, "without_other_warnings", stop)
    assert main(["evaluate", "--device", "cpu"]) == 2
    assert capsys.readouterr().err.splitlines()[0] == "turbo-rcm evaluate: loading PyTorch, diffusers and the model"


def test_steps_of_evaluate_count_once():
    assert parse_arguments(["evaluate", "--steps", "4,1,4"]).steps == (4, 1)


@pytest.mark.parametrize("steps", ["few", "1,,2", ""])
def test_steps_of_evaluate_that_do_not_parse(capsys, steps):
    with pytest.raises(SystemExit) as exit_:
        main(["evaluate", "--steps", steps])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert f"argument --steps: {steps!r} is not a list such as 1,2,4" in error
    assert len(error.splitlines()) == 1
