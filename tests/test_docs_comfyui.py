"""The lines on ComfyUI's files in docs/checkpoints.md run, with tiny files of both experts."""

import re
import shlex
from functools import partial
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import save_file

import turbo_rcm_patch as trp
from tests import lora_files
from tests.cli.running import TINY
from tests.official_names import official_state_dict, with_scales
from tests.tiny_wan import tiny_wan_pipeline
from turbo_rcm_patch.cli import main

PAGE = (Path(__file__).resolve().parent.parent / "docs/checkpoints.md").read_text()
SECTION = PAGE.split("## ComfyUI's files")[1].split("\n## ")[0].replace("\\\n", "")
LINES = re.findall(r"^turbo-rcm (.*)", SECTION, re.MULTILINE)
(CODE,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
MODEL = "Wan-AI/Wan2.2-T2V-A14B-Diffusers"


@pytest.fixture
def pipe(tmp_path, monkeypatch):
    """A tiny pipeline saved as MODEL, with files of its two transformers and LoRAs beside it."""
    monkeypatch.chdir(tmp_path)
    pipe = tiny_wan_pipeline("wan22", ffn_dim=64)
    pipe.save_pretrained(MODEL)
    for name, transformer in (("high", pipe.transformer), ("low", pipe.transformer_2)):
        weights = with_scales(official_state_dict(transformer))
        save_file({key: one.contiguous() for key, one in weights.items()}, f"{name}_fp8_scaled.safetensors")
        lora_files.lightning(transformer).save(tmp_path / f"{name}_lora.safetensors")
    return pipe


def test_the_line_of_generate(pipe, capsys):
    (line,) = [line for line in LINES if line.startswith("generate")]
    arguments = shlex.split(line.replace("--vram 24GB ", ""))  # which needs a GPU
    assert main([*arguments, *TINY[: TINY.index("--steps")], "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("if it is not lightning, name the recipe\n") == 1
    assert "use_distilled" not in printed.err
    assert Path("fox.mp4").exists()


def test_the_code_after_convert(pipe, monkeypatch):
    Path("a14b").mkdir()
    for line in LINES:
        if line.startswith("convert"):
            assert main([*shlex.split(line), "--device", "cpu"]) == 0
    size = {"height": 32, "width": 48, "num_frames": 5}
    call = WanPipeline.__call__
    monkeypatch.setattr(WanPipeline, "__call__", lambda self, *given, **more: call(self, *given, **more | size))
    monkeypatch.setattr(trp, "fit", partial(trp.fit, device="cpu"))
    names = {}
    exec(CODE, names)
    assert len(names["video"]) == 5
    assert names["pipe"].transformer.scale_shift_table.dtype == torch.float32  # as diffusers keeps it
