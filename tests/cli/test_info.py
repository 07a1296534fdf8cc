"""`turbo-rcm info`."""

import json

import pytest
import torch
from accelerate import init_empty_weights

from turbo_rcm_patch.bench.fits import fits
from turbo_rcm_patch.cli import commands, main
from turbo_rcm_patch.patching.families import CASES


def test_info(tmp_path, capsys):
    assert main(["info", "--device", "cpu", "--json", str(tmp_path / "info.json")]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed
    result = json.loads((tmp_path / "info.json").read_text())
    assert "torch reference" in result["kernels"]["self_attention: projection + skip"]
    assert result["environment"]["diffusers"] in printed


def test_info_tells_what_fits(saved_models, tmp_path, capsys):
    arguments = ["info", "--device", "cpu", "--model", str(saved_models / "t2v"), "--json", str(tmp_path / "info.json")]
    assert main(arguments) == 0
    assert "step at 1280x720, 81 frames" in capsys.readouterr().out
    memory = json.loads((tmp_path / "info.json").read_text())["memory"]
    assert [fit["tier"] for fit in memory] == ["exact", "quantized", "sparse"]
    assert memory[1]["weights"] < memory[0]["weights"]
    assert memory[0]["steps"][0][:3] == memory[0]["peaks"][0][:3] == [480, 832, 81]
    assert memory[0]["peaks"][0][3] > memory[0]["weights"] + memory[0]["steps"][0][3]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nofolder", "no such folder; give the folder of a diffusers pipeline or transformer, or a size: wan2.1-1.3b,"),
        (".", "holds no transformer: neither a config.json nor transformer or transformer_2"),
    ],
)
def test_a_model_that_is_not_there_is_said_before_anything_else(tmp_path, monkeypatch, capsys, model, message):
    monkeypatch.chdir(tmp_path)
    assert main(["info", "--device", "cpu", "--model", model]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err


def test_a_known_size_can_be_asked_about_before_a_download(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "transformer"
    folder.mkdir()
    case = CASES["wan2.1-14b"]
    with init_empty_weights():
        case.transformer_class(**case.transformer).save_config(folder)
    assert fits("wan2.1-14b") == fits(folder)
    found = []
    monkeypatch.setattr(commands, "fits_table", lambda fits: found.append(fits) or "")
    assert main(["info", "--device", "cpu", "--model", "wan2.1-14b"]) == 0
    assert found == [fits(folder)]
    assert "wan2.1-14b on a GPU:" in capsys.readouterr().out
