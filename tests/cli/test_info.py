"""`turbo-rcm info`."""

import json

import torch

from turbo_rcm_patch.cli import main


def test_info(tmp_path, capsys):
    assert main(["info", "--device", "cpu", "--json", str(tmp_path / "info.json")]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed
    result = json.loads((tmp_path / "info.json").read_text())
    assert "torch reference" in result["kernels"]["self_attention: projection + skip"]
    assert result["environment"]["diffusers"] in printed
