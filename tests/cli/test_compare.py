"""`turbo-rcm compare`."""

import json
from types import SimpleNamespace

import imageio.v3 as iio
import numpy as np
import pytest
import torch
from PIL import Image

from tests.cli.running import CAPTION, TINY, error_of
from tests.tiny_wan import tiny_wan_pipeline
from turbo_rcm_patch.cli import main
from turbo_rcm_patch.cli.arguments import parse_arguments
from turbo_rcm_patch.cli.command_checks import check_arguments
from turbo_rcm_patch.cli.side_by_side import STRIP, strip_height, under_names, write_side_by_side

OUTPUTS_OF_COMPARE = {"--json": ".json", "--plot": ".png", "--video": ".mp4"}


def test_compare_writes_json_plot_and_video(tmp_path, capsys):
    outputs = {option: tmp_path / f"compare{suffix}" for option, suffix in OUTPUTS_OF_COMPARE.items()}
    options = [text for option, path in outputs.items() for text in (option, str(path))]
    assert main(["compare", CAPTION, *TINY, "--repeats", "1", *options]) == 0
    printed = capsys.readouterr().out
    assert ("speed-up of" in printed) == torch.cuda.is_available()
    assert ("without a GPU times say nothing" in printed) != torch.cuda.is_available()
    result = json.loads(outputs["--json"].read_text())
    assert [variant["name"] for variant in result["variants"]] == ["unpatched", "patched"]
    assert result["variants"][1]["latents"]["relative_l2"] <= 1e-5
    assert len(result["variants"][1]["timings"]["steps"]) == 2
    assert result["settings"]["prompt"] == CAPTION
    assert result["settings"]["seed"] == 0
    assert result["environment"]["torch"] == torch.__version__
    assert iio.imread(outputs["--video"]).shape == (5, STRIP + 32, 144, 3)
    assert outputs["--plot"].read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("suffix", [".gif", ".webp", ".png"])
def test_an_animated_picture_has_every_frame_and_a_png_three(suffix, tmp_path):
    picture = tmp_path / f"compare{suffix}"
    check_arguments(parse_arguments(["compare", CAPTION, *TINY, "--video", str(picture)]))
    videos = np.random.default_rng(0).random((2, 5, 32, 48, 3))
    variants = [SimpleNamespace(name=name, video=video) for name, video in zip("ab", videos, strict=True)]
    comparison = SimpleNamespace(variants=variants, difference=lambda: (videos[1], 4))
    assert write_side_by_side(picture, comparison, 16) == f"wrote {picture}: a, b, and b minus a, times 4"
    if suffix == ".png":
        frames = iio.imread(picture).reshape(3, STRIP + 32, 3 * 48, 3)[:, STRIP:]
        expected = np.concatenate([*videos, videos[1]], axis=2)[[0, 2, 4]]
        assert (frames == np.round(255 * expected)).all()
    else:
        with Image.open(picture) as image:
            assert (image.size, image.n_frames, image.info["loop"]) == ((3 * 48, STRIP + 32), 5, 0)
    assert list(tmp_path.iterdir()) == [picture]


def test_nan_is_white(tmp_path):
    video = np.full((5, 32, 48, 3), 0.5)
    video[0, 0, 0] = np.nan
    comparison = SimpleNamespace(variants=[SimpleNamespace(name="a", video=video)], difference=lambda: (video, 1))
    write_side_by_side(tmp_path / "compare.png", comparison, 16)
    frame = iio.imread(tmp_path / "compare.png")[STRIP:]
    assert (frame[0, :2, 0].tolist(), frame[0, 48, 0]) == ([255, 128], 255)


def test_the_videos_play_at_the_given_rate(tmp_path):
    video = np.random.default_rng(0).random((5, 32, 48, 3))
    comparison = SimpleNamespace(variants=[SimpleNamespace(name="a", video=video)], difference=lambda: (video, 1))
    for suffix in (".mp4", ".gif"):
        write_side_by_side(tmp_path / f"compare{suffix}", comparison, 24)
    assert iio.immeta(tmp_path / "compare.mp4")["fps"] == 24
    with Image.open(tmp_path / "compare.gif") as image:
        assert image.info["duration"] == 40  # milliseconds, which a .gif has in tens


def test_compare_takes_the_rate_of_the_model(tmp_path):
    tiny_wan_pipeline("ti2v").save_pretrained(tmp_path / "ti2v")
    video = tmp_path / "compare.mp4"
    options = ["--model", str(tmp_path / "ti2v"), "--no-compile", "--repeats", "1", "--video", str(video)]
    assert main(["compare", CAPTION, *TINY, *options]) == 0
    assert iio.immeta(video)["fps"] == 24


def test_each_video_is_under_its_name():
    videos = np.zeros((2, 320, 600, 3), np.uint8)
    frames = under_names(videos, ["a", "b"])
    assert frames.shape == (2, STRIP + 320, 600, 3)
    assert (frames[:, STRIP:] == videos).all()
    of_a, of_b = np.split(frames[:, :STRIP], 2, axis=2)
    assert all((name < 64).any() and (name > 200).any() for name in (of_a, of_b))
    assert (of_a != of_b).any()
    assert [strip_height(height) for height in (160, 480, 720)] == [16, 32, 48]


@pytest.mark.usefixtures("cpu_as_a_gpu", "everything_streams")
def test_compare_with_vram_finds_the_same(saved_models, tmp_path, capsys):
    options = [CAPTION, *TINY[:-2], "--repeats", "1", "--model", str(saved_models / "t2v"), "--preset", "quantized"]
    found = {}
    for name, vram in (("plain", []), ("fitted", ["--vram", "10GB"])):
        path = tmp_path / f"{name}.json"
        assert main(["compare", *options, "--json", str(path), *vram]) == 0
        found[name] = json.loads(path.read_text())["variants"]
    printed = capsys.readouterr().out
    assert "torch.compile is left out" in printed
    assert "its blocks stream" in printed
    assert "denoising, unpatched" in printed
    assert "original weights for restore()" not in printed  # what compares must restore
    for plain, fitted in zip(found["plain"], found["fitted"], strict=True):
        for what in ("name", "latents", "frames", "weights"):
            assert plain[what] == fitted[what]


@pytest.mark.usefixtures("cpu_as_a_gpu")
def test_compare_says_what_does_not_fit(capsys):
    message = error_of(capsys, "compare", CAPTION, *TINY[:-2], "--vram", "610 MB")
    assert "--vram 610 MB: 48x32, 5 frames take at least" in message


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["exact", "quantized"])
def test_compare_stays_within_vram(preset, tmp_path):
    path = tmp_path / "compare.json"
    options = ["--height", "480", "--width", "832", "--frames", "17", "--preset", preset, "--repeats", "1"]
    assert main(["compare", CAPTION, *options, "--vram", "6GB", "--json", str(path)]) == 0
    variants = json.loads(path.read_text())["variants"]
    assert max(variant["timings"]["peak_memory"] for variant in variants) <= 5.4e9  # less what CUDA takes
