"""Helpers of the commands' tests: a small run, and the line that a failing command prints."""

import json

from turbo_rcm_patch.cli import main

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
CAPTION = "a red circle moves right"
TINY = ["--height", "32", "--width", "48", "--frames", "5", "--steps", "2", "--device", "cpu"]


def error_of(capsys, *argv):
    """The one line that a failing command prints."""
    assert main(list(map(str, argv))) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("turbo-rcm") and "warning" not in line]
    assert len(lines) == 1
    assert "Traceback" not in captured.err
    return lines[0]


def index_in(folder, class_name="WanPipeline", experts=1):
    """Write the index of a pipeline, which is all that most checks read. Return its folder."""
    transformers = {name: ["diffusers", "a class"] for name in ("transformer", "transformer_2")[:experts]}
    folder.mkdir(exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": class_name, **transformers}))
    return folder
