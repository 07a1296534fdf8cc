"""`turbo-rcm info`."""

import json

import torch

from tests.cli.running import error_of
from turbo_rcm_patch.cli import main


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
    assert "--model: " in error_of(capsys, "info", "--device", "cpu", "--model", tmp_path / "none")
