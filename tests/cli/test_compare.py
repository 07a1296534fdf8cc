"""`turbo-rcm compare`."""

import json

import imageio.v3 as iio
import numpy as np
import torch

from tests.cli.running import CAPTION, TINY
from turbo_rcm_patch.cli import main

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
    assert iio.imread(outputs["--video"]).shape == (5, 32, 144, 3)
    assert outputs["--plot"].read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 3


def test_compare_writes_three_frames_and_their_difference_as_a_picture(tmp_path, capsys):
    picture = tmp_path / "compare.png"
    assert main(["compare", CAPTION, *TINY, "--repeats", "1", "--video", str(picture)]) == 0
    assert f"wrote {picture}: unpatched, patched, and patched minus unpatched, times " in capsys.readouterr().out
    pixels = iio.imread(picture)
    assert pixels.shape == (3 * 32, 3 * 48, 3)
    unpatched, patched, difference = np.split(pixels.astype(int), 3, axis=1)
    assert np.abs(patched - unpatched).max() <= 1
    assert difference.max() > 127  # amplified
    assert np.ptp(unpatched[:32]) > 0
